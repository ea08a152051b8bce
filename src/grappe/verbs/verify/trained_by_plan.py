"""Trains a few steps of an instrumented task under a plan, through the engine interface; compares with a reference."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from grappe import engines
from grappe.checkpoint.initial import built
from grappe.data.batch import Batch, rows_of_slices
from grappe.data.loader import training_loader
from grappe.engines.base import Engine, EngineSetup
from grappe.errors.user_line import place_in
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World, joined
from grappe.plan import Plan
from grappe.private_api.torch import tree_flatten, tree_leaves, tree_unflatten
from grappe.rows.context import NOW
from grappe.rows.exchange import apart, resized
from grappe.rows.layout import Placement
from grappe.rows.messages import own_part
from grappe.rows.tensor import Rows, from_local, full, local_rows
from grappe.step.loss import StepResult
from grappe.verbs.verify.instrument import NOTHING, Instrumentation, SampleRecorder, instrumented
from grappe.verbs.verify.random_ops import RandomOps
from grappe.verbs.verify.trained_by_hand import TrialStep, gap


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """The input of a trial's processes."""

    task: Any
    """A TaskReference."""
    plan: Plan
    data: Path
    steps: int
    reference: Path
    """The folder of the reference's weights after each step."""
    instrumentation: Instrumentation = NOTHING
    draws: bool = False
    """Whether the model draws random numbers, which are then recorded."""
    whole_too: bool = False
    """Whether each function of cut tensors, under domain=, is compared with the same of whole ones."""


def worker(request: TrialRequest, process: ProcessRank, rendezvous_folder: Path) -> tuple[TrialStep, ...] | None:
    """Runs one process of a trial; process 0 returns its steps. Collective."""
    plan, off = request.plan, request.instrumentation.without_randomness
    samples, records = SampleRecorder(), list[dict[str, Any]]()
    task = instrumented(request.task.resolve(), request.instrumentation, samples)
    with joined(plan, process, rendezvous_folder) as world:
        loader = training_loader(task, task.data("train", request.data), plan, world)
        total = max(request.steps, task.epochs * loader.order.steps_per_epoch)
        setup = EngineSetup(
            task=task, plan=plan, world=world, weights=built(task), total_steps=total, sample_inputs=loader.example()
        )
        recording = off or (request.draws and not plan.compile)
        random_ops, beside = RandomOps(off=off), _BesideTheWhole()

        def unrecorded() -> Iterator[Batch]:
            """Yields the batches, without recording the random numbers of loading and augmentation."""
            batches = loader.batches(0, request.steps)
            while True:
                with random_ops.paused():
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch

        def after(result: StepResult) -> bool:
            """Records a step. Collective, as exporting is."""
            batch = result.batch
            if task.whole_batch_loss:  # which may get the samples of all slices
                ids = samples.take([batch.samples])
                ids = [ids[row] for row in rows_of_slices(plan, batch.samples)[world.data_rank] if ids]
            else:
                ids = samples.take([micro.rows for micro in batch.microbatches])
            loss = result.sums.read()[0] / float(batch.count)
            file = request.reference / f"step-{len(records):03d}.safetensors"
            gaps, bits = _compared(engine, None if world.rank else file, loss)
            records.append(
                {
                    "epoch": batch.epoch,
                    "ids": ids,
                    "count": float(batch.count),
                    "loss": loss,
                    "norm": None if result.norm is None else float(result.norm),
                    "gaps": gaps,
                    "bits": bits,
                    "draws": random_ops.take(),
                    "wrong_rule": beside.wrong_rule,
                }
            )
            return False

        with engines.running(setup) as engine, contextlib.ExitStack() as modes:
            if recording:
                modes.enter_context(random_ops)
            if request.whole_too:
                modes.enter_context(beside)
            engine.train(unrecorded(), after)
        slices = _by_slice(world, [(record.pop("ids"), record.pop("draws")) for record in records])
    if world.rank:
        return None
    return tuple(
        TrialStep(
            **record,
            total=total,
            slices=tuple(tuple(steps[number][0]) for steps in slices),
            draws=tuple(steps[number][1] for steps in slices),
        )
        for number, record in enumerate(records)
    )


class _BesideTheWhole(TorchFunctionMode):
    """Calls each function of cut tensors with the whole ones too, and compares results and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong_rule = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if not self.wrong_rule and name not in _OF_AUTOGRAD and any(map(_is_cut, tree_leaves((args, kwargs)))):
            drawn = torch.get_rng_state()
            outcomes = []
            for in_parts in (True, False):
                outcomes.append(_outcome(func, args, kwargs, in_parts=in_parts))
                torch.set_rng_state(drawn)
            for of_results, parts, wholes in zip((True, False), *outcomes, strict=True):
                gap = _largest_gap(wholes, parts)
                if gap > OTHER and not self.wrong_rule:
                    other = "other results" if of_results else "other gradients"
                    where = place_in(traceback.extract_stack())
                    self.wrong_rule = f"{name} of parts has {other} than of the whole ({gap:.1g}): {where}"
        return func(*args, **kwargs)


OTHER = 1e-3
"""Of the largest number: rounding makes a hundredth of it in fp32."""
_OF_AUTOGRAD = (
    "__get__", "__set__", "backward", "detach_", "requires_grad_", "retain_grad", "register_hook", "empty_like",
    "new_empty",
)  # fmt: skip
"""Functions that are of a tensor itself, or give no numbers."""


def _placement(value: Any) -> Placement | None:
    at = value._cell.layout.placement if type(value) is Rows else None
    return at if type(at) is Placement else None


def _is_cut(value: Any) -> bool:
    return _placement(value) is not None


def _outcome(func: Any, args: Any, kwargs: Any, *, in_parts: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Returns a function's results and gradients, of copies: of parts, or of whole tensors. Collective."""
    leaves, nesting = tree_flatten((args, kwargs))
    copies, arguments = list[Tensor](), [*leaves]
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            at, own = _placement(leaf), local_rows(leaf).detach().clone()
            copy = full(leaf).detach().clone() if at is None else from_local(own, at) if in_parts else _joined(own, at)
            copies.append(copy.requires_grad_(leaf.requires_grad))
            arguments[place] = copy.clone()  # which may be changed in place
    args, kwargs = tree_unflatten(arguments, nesting)
    results = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
    roots = [each for each in results if each.requires_grad]
    if not roots:
        return results, []
    seeds = [
        torch.linspace(-1, 1, each.numel(), dtype=each.dtype, device=each.device).view(each.shape) for each in roots
    ]
    copies = [copy for copy in copies if copy.requires_grad]
    arrived = torch.autograd.grad(roots, copies, seeds, allow_unused=True)
    return results, [torch.zeros_like(a) if b is None else b for a, b in zip(copies, arrived, strict=True)]


def _joined(own: Tensor, at: Placement) -> Tensor:
    """Returns the whole tensor by a way of its own: that of the rules may be at fault. Collective."""
    rows, dim = apart(own, at)
    parts = list[Tensor]()
    for rank, size in enumerate(at.sizes):
        parts.append(rows.contiguous() if rank == NOW.context.rank else rows.new_empty(resized(rows.shape, dim, size)))
        dist.broadcast(parts[-1], group=NOW.context.group, group_src=rank)
    made = torch.cat(parts, dim)
    return made if at.outer == 1 else made.flatten(dim - 1, dim)


@torch.no_grad()
def _largest_gap(wholes: Sequence[Any], parts: Sequence[Any]) -> float:
    """Returns the largest difference in any process, as a share of the largest number. Collective."""
    gap, largest = torch.zeros(()), torch.zeros(())
    for of_whole, part in zip(wholes, parts, strict=True):
        at = _placement(part)
        a = (of_whole if at is None else own_part(of_whole, at)).detach().float()
        b = (full(part) if at is None else local_rows(part)).detach().float()
        apart_by = (a - b).abs().where((a != b) & ~(a.isnan() & b.isnan()), 0)
        gap = torch.maximum(gap, apart_by.nan_to_num(torch.inf).amax().cpu())
        largest = torch.maximum(largest, of_whole.detach().float().nan_to_num(0, 0, 0).abs().amax().cpu())
    share = gap / largest.clamp(min=1e-30)
    dist.all_reduce(share, op=dist.ReduceOp.MAX, group=NOW.context.group)
    return float(share)


@torch.no_grad()
def _compared(engine: Engine, file: Path | None, loss: float) -> tuple[dict[str, float], str]:
    """Computes the weights' gaps from a file's weights, and a hash of weights and loss. Collective, as exporting is."""
    gaps: dict[str, float] = {}
    bits = hashlib.sha256(repr(loss).encode())
    if file is None or not file.exists():
        for _ in engine.export():
            pass
        return {}, ""
    with safe_open(file, framework="pt") as reference:
        for name, exported in engine.export():
            tensor = exported.detach().cpu()
            gaps[name] = gap(reference.get_tensor(name), tensor)
            bits.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return gaps, bits.hexdigest()


def _by_slice(world: World, own: Sequence[tuple[list[int], str]]) -> list[Sequence[tuple[list[int], str]]]:
    """Gathers the steps' samples and draws of each data slice, which one process of it has recorded. Collective."""
    # Only a pipeline's last stage calls the loss, among the processes that share a slice.
    recorded = sum(len(ids) for ids, _ in own)
    everyone = world.gather((world.data_rank, -recorded, world.rank, own))
    best: dict[int, Any] = {}
    for record in sorted(everyone, key=lambda record: record[:3]):
        best.setdefault(record[0], record[3])
    return list(best.values())
