"""Trains a few steps of an instrumented task under a plan, through the engine interface; compares with a reference."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from grappe.data.batch import Batch, rows_of_slices
from grappe.data.loader import training_loader
from grappe.engines.base import Engine
from grappe.errors.user_line import place_in
from grappe.launch.world import World
from grappe.private_api.torch import tree_flatten, tree_leaves, tree_unflatten
from grappe.rows.context import NOW
from grappe.rows.exchange import apart, resized
from grappe.rows.layout import Placement
from grappe.rows.messages import own_part
from grappe.rows.tensor import Rows, from_local, full, local_rows
from grappe.step.loss import StepResult
from grappe.training.short_run import TaskProcess
from grappe.verbs.verify.instrument import Instrumentation, SampleRecorder, instrumented
from grappe.verbs.verify.random_ops import RandomOps
from grappe.verbs.verify.trained_by_hand import TrialStep, gap


def trial(
    instrumentation: Instrumentation, steps: int, reference: Path, draws: bool, whole_too: bool, process: TaskProcess
) -> tuple[TrialStep, ...]:
    """Runs one process of a trial; process 0 returns the steps of all. Collective.

    Args:
        reference: the folder of the reference's weights after each step.
        draws: whether the model draws random numbers, which are then recorded.
        whole_too: whether each function of cut tensors, under domain=, is compared with the same of whole ones.
    """
    plan, world, off = process.plan, process.world, instrumentation.without_randomness
    samples, records = SampleRecorder(), list[TrialStep]()
    task = instrumented(process.task, instrumentation, samples)
    loader = training_loader(task, task.data("train", process.data), plan, world)
    total = max(steps, task.epochs * loader.order.steps_per_epoch)
    recording = off or (draws and not plan.compile)
    random_ops, beside = RandomOps(off=off), _BesideTheWhole()

    batches = loader.batches(0, steps)

    def loaded() -> Batch | None:
        """Loads a batch, without recording the random numbers of loading and augmentation."""
        with random_ops.paused():
            return next(batches, None)

    def after(result: StepResult) -> bool:
        """Records a step. Collective, as exporting is."""
        batch = result.batch
        if task.whole_batch_loss:  # which may get the samples of all slices
            ids = samples.take([batch.samples])
            ids = [ids[row] for row in rows_of_slices(plan, batch.samples)[world.data_rank] if ids]
        else:
            ids = samples.take([micro.rows for micro in batch.microbatches])
        loss = result.sums.read()[0] / float(batch.count)
        file = reference / f"step-{len(records):03d}.safetensors"
        gaps, bits = _compared(engine, None if world.rank else file, loss)
        records.append(
            TrialStep(
                epoch=batch.epoch,
                total=total,
                slices=(tuple(ids),),
                count=float(batch.count),
                loss=loss,
                norm=None if result.norm is None else float(result.norm),
                gaps=gaps,
                draws=(random_ops.take(),),
                bits=bits,
                wrong_rule=beside.wrong_rule,
            )
        )
        return False

    with process.engine(task, loader, total) as engine, contextlib.ExitStack() as modes:
        if recording:
            modes.enter_context(random_ops)
        if whole_too:
            modes.enter_context(beside)
        engine.train(iter(loaded, None), after)
    return _of_all_slices(world, records)


class _BesideTheWhole(TorchFunctionMode):
    """Calls each function of cut tensors with the whole ones too, and compares results and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong_rule = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if not self.wrong_rule and name not in _OF_AUTOGRAD and any(map(_placement, tree_leaves((args, kwargs)))):
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
"""Tolerance relative to the largest number: rounding makes a hundredth of it in fp32."""
_OF_AUTOGRAD = (
    "__get__", "__set__", "backward", "detach_", "requires_grad_", "retain_grad", "register_hook", "empty_like",
    "new_empty",
)  # fmt: skip
"""Functions that are of a tensor itself, or give no numbers."""


def _placement(value: Any) -> Placement | None:
    at = value._cell.layout.placement if type(value) is Rows else None
    return at if type(at) is Placement else None


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
        for _ in engine.train_state.export():
            pass
        return {}, ""
    with safe_open(file, framework="pt") as reference:
        for name, exported in engine.train_state.export():
            tensor = exported.detach().cpu()
            gaps[name] = gap(reference.get_tensor(name), tensor)
            bits.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return gaps, bits.hexdigest()


def _of_all_slices(world: World, own: Sequence[TrialStep]) -> tuple[TrialStep, ...]:
    """Returns this process's steps with the samples and draws of all data slices. Collective."""
    # Only a pipeline's last stage calls the loss, among the processes that share a slice.
    recorded = sum(len(step.slices[0]) for step in own)
    slices: dict[int, Sequence[TrialStep]] = {}
    gathered = world.gather((world.data_rank, -recorded, world.rank, own))
    for data_rank, _, _, steps in sorted(gathered, key=lambda each: each[:3]):
        slices.setdefault(data_rank, steps)
    return tuple(
        dataclasses.replace(
            own[number],
            slices=tuple(steps[number].slices[0] for steps in slices.values()),
            draws=tuple(steps[number].draws[0] for steps in slices.values()),
        )
        for number in range(len(own))
    )
