"""Some steps of a training on several processes, the first among them, computed once more as one process has them."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grappe.checkpoint.weights import InMemory
from grappe.data import loader
from grappe.data.batch import Batch
from grappe.data.seeded import generators_kept
from grappe.data.whole_batch_draws import OWN_DRAWS, SAME_DRAWS
from grappe.engines.base import Engine, EngineSetup
from grappe.engines.native import ExactGradients, WholeGradients, WholeModel
from grappe.engines.shared.carried import CarriedState
from grappe.errors.user_code import sentence
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api.torch import local_shape_and_offset, local_tensor
from grappe.profiling import memory
from grappe.profiling.phases import UPDATE
from grappe.step.loss import StepResult
from grappe.step.observers import NamedParameters
from grappe.step.precision import LossScale
from grappe.task import Task
from grappe.training.options import Options

TOLERANCE = {"fp64": 1e-8, "fp32": 1e-3, "tf32": 1e-2, "bf16": 0.04, "fp16": 0.04}
"""Relative distance of a loss and of gradients up to which a step is one process's: sums in another order round so."""
SMALL = 1e-3
"""Part of the whole gradient's norm below which a parameter's gradient may be rounding: a bias before a norm's."""
SHARES = ((1000, 0.02), (math.inf, 0.005))
"""Steps, and the part of their time that checking may take."""
Figures = dict[tuple[str, tuple[int, ...]], tuple[float, float]]
"""Norm and probe (a sum with fixed weights) of a part of a gradient, by the parameter's name and the part's offset."""


def can_be_checked(options: Options, plan: Plan, world: World, batches: loader.BatchLoader) -> bool:
    """Returns whether one of several processes can take a step alone, of samples that it reads again, and is to."""
    able = world.size > 1 and batches.stream is None and plan.domain == 1 and not plan.offload.startswith("nvme:")
    return able and not (options.no_check or options.steps_only)


class CheckedSteps:
    """Compares a step's loss and gradients with those that process 0 computes of the whole batch. Collective.

    The first step of a start is checked, then one at a random place of each span of steps that allows for its cost.

    Args:
        name: of the task, as the user wrote it.
        resident: bytes of this process before the model was made.
        example: inputs of one or two samples, on the CPU.
    """

    def __init__(
        self,
        task: Task,
        plan: Plan,
        world: World,
        batches: loader.BatchLoader,
        carried: CarriedState,
        *,
        name: str,
        resident: int,
        example: Any,
    ) -> None:
        self._task, self._plan, self._world, self._carried = task, plan, world, carried
        self._dataset, self._order = batches.dataset, batches.order
        self._name, self._resident, self._example = name, resident, example
        self._first = True
        self._named: NamedParameters = ()
        self._figures: Figures | None = None
        self._weights: dict[str, Tensor] | None = None
        self._next: int | None = None
        self.distances: dict[int, float] = {}
        """Relative distance from one process's, by checked step; on process 0."""

    @property
    def steps(self) -> int:
        """Returns the number of this plan's steps in the time of one process's, at most."""
        return self._world.size * self._plan.microbatches

    def on_optimizer(self, optimizer: Any, named: NamedParameters) -> None:
        """Takes this process's trained parameters from the engine."""
        self._named = named

    def on_phase(self, phase: int) -> None:
        """Reads the gradients where they are complete, before they are clipped; those of fp16 have a scale."""
        if phase != UPDATE or self._weights is None or self._plan.precision == "fp16":
            return
        if self._figures is None:  # an optimizer that calls a closure has several gradients a step
            self._figures = figures(self._named)

    def before(self, batch: Batch, engine: Engine) -> None:
        """Keeps the weights on process 0 before a step that is checked. Collective."""
        if self._next is None:
            self._next = batch.step
        if batch.step != self._next:
            return
        if any(self._world.gather(bool(self._carried.changed()))):  # one process's hidden states are not known
            self._next = -1
            return
        exported = engine.export()
        self._weights = {name: tensor.clone() for name, tensor in exported if not self._world.rank}

    def after(self, result: StepResult) -> str:
        """Compares the step that `before` announced; returns a finding on process 0, "" for none. Collective."""
        if self._weights is None:
            return ""
        weights, own = self._weights, self._figures
        self._weights = self._figures = None
        step = result.batch.step
        self._next = step + 1 if result.skipped else self._drawn(step)
        everyone = self._world.gather(own or {})
        finding = ""
        if not (result.skipped or self._world.rank):
            joined = {key: value for each in everyone for key, value in each.items()}
            finding = self._compared(step, result.sums.read()[0] / float(result.batch.count), joined, weights)
            self._first = False
        self._world.barrier()
        return finding

    def _drawn(self, step: int) -> int:
        """Returns the next step to check: at random in the span of steps whose time allows for it."""
        share = next(share for until, share in SHARES if step < until)
        span = math.ceil((self._world.data_size + 1) / share)
        return step + random.Random(f"{self._task.seed} {step}").randint(1, span)

    def _compared(self, step: int, loss: float, ours: Figures, weights: dict[str, Tensor]) -> str:
        """Returns the finding on a step; "" for a later one that is one process's."""
        which = "its first step" if self._first else f"step {step + 1}"
        needed = self._needed(weights)
        left = memory.free()
        too_large = f"not checked: one process might lack the memory for {which}" if self._first else ""
        if left is not None and needed > left / 2:
            return too_large
        try:
            with self._apart():
                expected, of_one = self._of_one_process(step, weights)
        except torch.OutOfMemoryError:
            return too_large
        except Exception as error:
            return f"{which} could not be computed as one process does: {sentence(error)}"
        if not (math.isfinite(loss) and math.isfinite(expected)):
            return ""  # which ends the training, with the samples
        gaps = {"the loss": abs(loss - expected) / max(abs(expected), 1e-12)}
        if ours:
            gaps |= {f"the gradient of {name}": gap for name, gap in distances(ours, of_one).items()}
        what = max(gaps, key=lambda name: gaps[name] if math.isfinite(gaps[name]) else math.inf)
        largest, tolerance = max(self.distances.values(), default=0.0), TOLERANCE[self._plan.precision]
        self.distances[step] = gap = gaps[what]
        if gap <= tolerance:
            of = "first step" if ours else "first loss"
            exact = f"checked: one process's {of}, to the bit"
            return "" if not self._first else f"checked: one process's {of}, to {gap:.0e}" if gap else exact
        if tolerance < largest > gap / 10:
            return ""  # said of an earlier step
        return (
            f"{which} is not one process's: {what} differs by {gap:.1g}. grappe verify "
            f"{self._name} --plan {self._plan} looks for the cause"
        )

    def _needed(self, weights: dict[str, Tensor]) -> int:
        """Estimates the bytes of a step on one process from what this one's had at most."""
        of_step = max(0, sum(memory.peak(torch.device("cpu")).values()) - self._resident)
        own = sum(tensor.nbytes for tensor in weights.values())
        return 3 * own + of_step * self.steps

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Context that leaves the training's random states, notes and peaks as they were."""
        draws = OWN_DRAWS.copy(), SAME_DRAWS.copy()
        device = self._world.device
        fork = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with memory.not_counted(device), generators_kept(), fork:
            try:
                yield
            finally:
                for kept, before in zip((OWN_DRAWS, SAME_DRAWS), draws, strict=True):
                    kept.clear()
                    kept.update(before)

    def _of_one_process(self, step: int, weights: dict[str, Tensor]) -> tuple[float, Figures]:
        """Computes the loss and the gradients of the whole batch as one process does, on a model of its own."""
        kept = {name: getattr(self._plan, name) for name in ("precision", "exact", "dropout", "recompute", "device")}
        plan, task = Plan(**kept, workers=0), copy.deepcopy(self._task)
        world = World(process=ProcessRank(), device=self._world.device)
        batches = loader.BatchLoader(task, self._dataset, self._order, plan, world, training=True)
        batch = next(batches.rehearsed(step, apart=True))
        setup = EngineSetup(
            task=task, plan=plan, world=world, weights=InMemory(weights), total_steps=1, sample_inputs=self._example
        )
        model = WholeModel(setup)
        model.module.train()
        make = ExactGradients if plan.exact else WholeGradients
        sums = make(setup, model, LossScale("fp32")).gradients(batch)
        return sums.read()[0] / float(batch.count), figures(model.named)


@torch.no_grad()
def figures(named: NamedParameters) -> Figures:
    """Computes norm and probe of each parameter's gradient, of a sharded one of this process's part."""
    keys, values = [], []
    for name, parameter in named:
        gradient = parameter.grad
        if gradient is None:
            continue
        offset = (0,) * gradient.dim()
        if isinstance(gradient, DTensor):
            _, offset = local_shape_and_offset(gradient)
            gradient = local_tensor(gradient)
        gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
        gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        part = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        norm = torch.linalg.vector_norm(part, dtype=torch.float64)
        for size, first in zip(part.shape, (*offset, 0), strict=False):
            places = torch.arange(first, first + size, dtype=part.dtype, device=part.device)
            part = torch.tensordot(torch.cos(0.7 + 1.3 * places), part, dims=1)
        keys.append((name, tuple(offset)))
        values.append(torch.stack((norm, part.to(torch.float64))))
    if not keys:
        return {}
    return dict(zip(keys, map(tuple, torch.stack(values).tolist()), strict=True))


def distances(ours: Figures, expected: Figures) -> dict[str, float]:
    """Computes the relative distance of each parameter's gradient from the expected one, by name."""
    sums: list[dict[str, list[float]]] = []
    for each in (ours, expected):
        by_name: dict[str, list[float]] = {}
        for (name, _), (norm, probe) in each.items():
            square, total = by_name.get(name, (0.0, 0.0))
            by_name[name] = [square + norm**2, total + probe]
        sums.append(by_name)
    own, theirs = sums
    least = SMALL * math.sqrt(sum(square for square, _ in theirs.values())) or 1e-30
    gaps = {}
    for name in own.keys() | theirs.keys():
        (a, p), (b, q) = (each.get(name, [0.0, 0.0]) for each in (own, theirs))
        gaps[name] = max(abs(math.sqrt(a) - math.sqrt(b)), abs(p - q)) / (math.sqrt(b) + least)
    return gaps
