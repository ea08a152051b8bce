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
from grappe.domain.cut import RULES, Cut, Domain, local, name_of
from grappe.domain.exchange import separated
from grappe.engines.base import Engine, EngineSetup
from grappe.errors.user_line import place_in
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World, joined
from grappe.plan import Plan
from grappe.private_api.torch import tree_flatten, tree_leaves, tree_unflatten
from grappe.step.loss import StepResult
from grappe.verbs.verify.instrument import NOTHING, Instrumentation, SampleRecorder, instrumented
from grappe.verbs.verify.random_ops import RandomOps
from grappe.verbs.verify.trained_by_hand import gap


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialStep:
    """One step under the plan."""

    epoch: int
    total: int
    """The total number of steps, for the schedule: at least as many as the trial has."""
    slices: tuple[tuple[int, ...], ...]
    """Ids of the samples that reached the loss, by data slice."""
    count: float
    loss: float
    norm: float | None
    skipped: bool
    gaps: dict[str, float]
    """By tensor, |a - b| / |a| in norms, a the reference's."""
    draws: tuple[str, ...]
    """Hash of the model's draws, by data slice; "" if there were few or none."""
    bits: str
    """A hash of all weights and buffers after the step, and of the loss."""
    wrong_rule: str = ""
    """The first function of cut tensors that gave other numbers than the whole's, with the user's line."""


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
        random_ops = RandomOps(off=off) if recording else None
        beside = _BesideTheWhole() if request.whole_too else None

        def unrecorded() -> Iterator[Batch]:
            """Yields the batches, without recording the random numbers of loading and augmentation."""
            batches = loader.batches(0, request.steps)
            while True:
                with random_ops.paused() if random_ops else contextlib.nullcontext():
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
                    "skipped": result.skipped,
                    "gaps": gaps,
                    "bits": bits,
                    "draws": random_ops.take() if random_ops else "",
                    "wrong_rule": beside.wrong_rule if beside else "",
                }
            )
            return False

        no_mode = contextlib.nullcontext()
        with engines.running(setup) as engine, random_ops or no_mode, beside or no_mode:
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
        kwargs = kwargs or {}
        cuts = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Cut)]
        if cuts and not self.wrong_rule and func in RULES and func is not torch.empty_like:
            domain, drawn = cuts[0].at.domain, torch.get_rng_state()
            outcomes = []
            for in_parts in (True, False):
                outcomes.append(_outcome(func, args, kwargs, domain, in_parts=in_parts))
                torch.set_rng_state(drawn)
            for of_results, parts, wholes in zip((True, False), *outcomes, strict=True):
                gap = _largest_gap(wholes, parts, domain)
                if gap > OTHER and not self.wrong_rule:
                    other = "other results" if of_results else "other gradients"
                    where = place_in(traceback.extract_stack())
                    self.wrong_rule = f"{name_of(func)} of parts has {other} than of the whole ({gap:.1g}): {where}"
        return func(*args, **kwargs)


OTHER = 1e-3
"""Of the largest number: rounding makes a hundredth of it in fp32."""


def _outcome(func: Any, args: Any, kwargs: Any, domain: Domain, *, in_parts: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Returns a function's results and gradients, of copies: of parts, or of whole tensors. Collective."""
    leaves, nesting = tree_flatten((args, kwargs))
    places = {place: leaf.at for place, leaf in enumerate(leaves) if in_parts and isinstance(leaf, Cut)}
    copies, arguments = dict[int, Tensor](), [*leaves]
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            tensor = _joined(leaf) if isinstance(leaf, Cut) and not in_parts else local(leaf)
            copies[place] = tensor.detach().clone().requires_grad_(local(leaf).requires_grad)
            argument = copies[place].clone()  # which may be changed in place
            arguments[place] = Cut(argument, places[place]) if place in places else argument
    args, kwargs = tree_unflatten(arguments, nesting)
    results = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
    roots = [each for each in results if local(each).requires_grad]
    leaves_with = {place: copy for place, copy in copies.items() if copy.requires_grad}
    if not roots:
        return results, []
    seeds = []
    for root in roots:
        seed = torch.linspace(-1, 1, root.numel(), dtype=root.dtype, device=root.device).view(root.shape)
        if in_parts:  # which are summed
            seed = root.at.part_of(seed, root.at.dim) if isinstance(root, Cut) else seed / domain.size
        seeds.append(seed)
    arrived = torch.autograd.grad([local(root) for root in roots], [*leaves_with.values()], seeds, allow_unused=True)
    gradients = list[Tensor]()
    for (place, copy), gradient in zip(leaves_with.items(), arrived, strict=True):
        full = torch.zeros_like(copy) if gradient is None else gradient
        if in_parts and place not in places:
            dist.all_reduce(full, group=domain.group)
        gradients.append(Cut(full, places[place]) if place in places else full)
    return results, gradients


def _joined(cut: Cut) -> Tensor:
    """Returns the whole tensor by a way of its own: that of the rules may be at fault. Collective."""
    at, apart = cut.at, separated(cut)
    parts = list[Tensor]()
    for rank, size in enumerate(at.sizes):
        shape = [*apart.local.shape]
        shape[apart.at.dim] = size
        parts.append(apart.local.detach().contiguous() if rank == at.domain.rank else apart.local.new_empty(shape))
        dist.broadcast(parts[-1], group=at.domain.group, group_src=rank)
    return torch.cat(parts, apart.at.dim).view(cut.shape)


@torch.no_grad()
def _largest_gap(wholes: Sequence[Any], parts: Sequence[Any], domain: Domain) -> float:
    """Returns the largest difference in any process, as a share of the largest number. Collective."""
    gap, largest = torch.zeros(()), torch.zeros(())
    for full, part in zip(wholes, parts, strict=True):
        of_whole = part.at.part_of(full, part.at.dim) if isinstance(part, Cut) else full
        a, b = of_whole.detach().float(), local(part).detach().float()
        apart = (a - b).abs().where((a != b) & ~(a.isnan() & b.isnan()), 0)
        gap = torch.maximum(gap, apart.nan_to_num(torch.inf).amax().cpu())
        largest = torch.maximum(largest, full.detach().float().nan_to_num(0, 0, 0).abs().amax().cpu())
    share = gap / largest.clamp(min=1e-30)
    dist.all_reduce(share, op=dist.ReduceOp.MAX, group=domain.group)
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
