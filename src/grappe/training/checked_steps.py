"""Some steps of a training on several processes, the first among them, computed once more as one process has them."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grappe.checkpoint.weights import InMemory
from grappe.data import loader
from grappe.data.batch import Batch
from grappe.data.collate import row_shapes
from grappe.data.seeded import generators_kept
from grappe.data.whole_batch_draws import OWN_DRAWS, SAME_DRAWS
from grappe.domain.batches import WITHOUT
from grappe.engines.base import Engine, EngineSetup
from grappe.engines.native import ExactGradients, WholeGradients, WholeModel
from grappe.engines.shared.carried import CarriedState, has_rows
from grappe.engines.shared.microbatch import remarks_on_draws
from grappe.errors.user_code import sentence
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.parallel.attributes import Attributes, Place, attributes, copied, is_state, put_attributes
from grappe.plan import Plan
from grappe.private_api.torch import (
    BatchNormBase,
    TorchDispatchMode,
    is_dtensor,
    local_shape_and_offset,
    local_tensor,
    tree_leaves,
    tree_map,
)
from grappe.profiling import memory
from grappe.profiling.phases import BACKWARD, UPDATE
from grappe.rows.context import NOW, RowsContext
from grappe.rows.layout import Placement
from grappe.rows.own import with_own_rows
from grappe.rows.plans import activate
from grappe.rows.tensor import Rows, are_rows, from_local, usual_rows
from grappe.step.loss import StepResult
from grappe.step.observers import NamedParameters
from grappe.step.precision import LossScale
from grappe.task import Task
from grappe.training.options import Options

TOLERANCE = {"fp64": 1e-8, "fp32": 3e-4, "tf32": 1e-2, "bf16": 0.04, "fp16": 0.04}
"""Relative distance of a loss and of gradients up to which a step is one process's: sums in another order round so."""
ROUNDINGS = 5
"""Factor of the distance of one process's gradient in bf16 from that in fp32, up to which a difference is rounding."""
SMALL = 1e-3
"""Part of the whole gradient's norm below which a parameter's gradient may be rounding: a bias before a norm's."""
QUICK_SECONDS = 0.5  # of checks in all, up to which steps 1, 2, 4, 8, ... of a start are checked
SHARES = ((1000, 0.02), (math.inf, 0.005))
"""Steps, and the part of their time that checking may take."""
NEVER = sys.maxsize
Figures = dict[tuple[str, tuple[int, ...]], tuple[float, float]]
"""Norm and probe (a sum with fixed weights) of a part of a gradient, by the parameter's name and the part's offset."""


def can_be_checked(options: Options, plan: Plan, batches: loader.BatchLoader) -> bool:
    """Returns whether one of several processes can take a step alone, of samples that it reads again, and is to."""
    able = plan.parts > 1 and batches.stream is None and not plan.offload.startswith("nvme:")
    return able and not (options.no_check or options.steps_only)


class CheckedSteps:
    """Compares a step's loss and gradients with those that process 0 computes of the whole batch. Collective.

    The first step of a start is checked, then steps 2, 4, 8, ... while that is quick, then one at a random place of
    each span of steps that allows for its cost.

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
        self._before = task
        """The task as it is before a step that is checked: its methods may count."""
        self._dataset, self._order = batches.dataset, batches.order
        self._name, self._resident, self._example = name, resident, example
        self._checked, self._first = 0, True
        self._optimizer: Optimizer | None = None
        self._named: NamedParameters = ()
        self._figures: Figures | None = None
        self._state: Figures = {}
        self._settings: list[Settings] = []
        """The optimizer's settings before the step under way, and after the loss of each of its microbatches."""
        self._settings_said = False
        self._weights: dict[str, Tensor] | None = None
        self._attributes: Attributes = {}
        """Attributes of process 0's model that are not what `model()` made, before a step that is checked."""
        self._shapes: Shapes = set()
        self._start, self._next = 0, -1
        self._began, self._spent = 0.0, 0.0
        """Beginning of the running check, and seconds of all."""
        self.steps = world.size * plan.microbatches
        """Number of this plan's steps in the time of one process's, at most."""
        self.distances: dict[int, float] = {}
        """Relative distance from one process's, by checked step; on process 0."""

    @property
    def _whose(self) -> str:
        """Returns the words for the step with which this plan's is compared."""
        return "one process's" if self._world.size > 1 else "the whole batch's"

    def is_due(self, step: int) -> bool:
        """Returns whether a step is to be checked; alike on all processes."""
        return step == self._next or self._next < 0

    @property
    def is_running(self) -> bool:
        """Returns whether the step under way is checked."""
        return self._weights is not None

    def on_optimizer(self, optimizer: Optimizer, named: NamedParameters) -> None:
        """Takes this process's optimizer and trained parameters from the engine."""
        self._optimizer, self._named = optimizer, named

    def on_phase(self, phase: int) -> None:
        """Reads the gradients where they are complete, before they are clipped, and what forward and loss have set."""
        if phase == BACKWARD and self._weights is not None and self._optimizer is not None:
            self._settings.append(settings(self._optimizer))
        if phase != UPDATE or self._weights is None or self._figures is not None:
            return  # an optimizer that calls a closure has several gradients a step
        self._figures = {} if self._plan.precision == "fp16" else figures(self._named)  # of fp16 they have a scale
        model, carried = self._carried.model, self._carried
        self._state = {} if model is None else state_figures(model, carried.rows, carried.unread)

    def before(self, batch: Batch, engine: Engine) -> None:
        """Keeps the weights on process 0 before a step that is due. Collective."""
        if self._next < 0:
            self._start = self._next = batch.step
        self._began = time.perf_counter()
        changed = self._carried.changed()
        leaves = tree_leaves(changed)
        hidden = any(isinstance(leaf, Tensor) and not is_state(leaf) for leaf in leaves)
        hidden = hidden or any(has_rows(value, self._carried.rows) for value in changed.values())
        if any(self._world.gather(hidden)):  # one process's hidden states are not known
            self._next = NEVER
            return
        self._attributes = {} if self._world.rank else copied(changed)
        self._shapes = shapes_of(batch)
        with contextlib.suppress(Exception):  # of a task that cannot be copied
            self._before = self._task if self._world.rank else copy.deepcopy(self._task)
        self._settings = [settings(self._optimizer)] if self._optimizer is not None else []
        exported = engine.train_state.export()
        self._weights = {name: tensor.clone() for name, tensor in exported if not self._world.rank}

    def after(self, result: StepResult) -> str:
        """Compares the step that `before` announced; returns a finding on process 0, "" for none. Collective."""
        assert self._weights is not None, "only a step that `before` has announced is compared"
        weights, own, state = self._weights, self._figures, self._state
        self._weights = self._figures = None
        step = result.batch.step
        self._first = not self._checked
        self._checked += not result.skipped
        everyone = self._world.gather((own or {}, state, self._shapes, self._settings))
        finding = ""
        if not (result.skipped or self._world.rank):
            joined = {key: value for each, *_ in everyone for key, value in each.items()}
            self._shapes = set().union(*(shapes for _, _, shapes, _ in everyone))
            loss = result.sums.read()[0] / float(result.batch.count)
            finding = self._compared(step, loss, joined, [states for _, states, *_ in everyone], weights)
            # Stages of a pipeline have other groups.
            own_or_all = everyone[:1] if self._plan.pipeline > 1 else everyone
            finding = self._set_by_parts(step, [each for *_, each in own_or_all]) or finding
        self._spent += time.perf_counter() - self._began
        # The second step, too: it shows what the first one has left elsewhere, in a closure or the optimizer.
        self._next = self._world.share(step + 1 if result.skipped or self._first else self._drawn(step))
        return finding

    def _set_by_parts(self, step: int, everyone: Sequence[list[Settings]]) -> str:
        """Returns a finding if forward or loss set the optimizer's numbers by the samples of a part of the batch."""
        values: dict[str, list[float]] = {}
        changed = set[str]()
        for before, *after in filter(None, everyone):  # a stage may have no optimizer
            for name, value in itertools.chain.from_iterable(each.items() for each in after):
                values.setdefault(name, []).append(value)
                if before.get(name) != value:
                    changed.add(name)
        odd = next((name for name in sorted(changed) if len(set(values[name])) > 1), None)
        if odd is None or self._settings_said:
            return ""
        self._settings_said = True
        shown = ", ".join(f"{value:.4g}" for value in dict.fromkeys(values[odd]))
        return (
            f"step {step + 1} is not {self._whose}: forward() or loss() sets the optimizer's {odd} by the samples of a "
            f"part of the batch ({shown}). Let schedule() set it, or Plateau, by the validation loss"
        )

    def _drawn(self, step: int) -> int:
        """Returns the next step to check: at random in the span of steps whose time allows for it.

        While checks are quick, as in a short training of a small model, it is twice as far from the start.
        """
        if self._spent < QUICK_SECONDS:
            return 2 * step - self._start + 1
        share = next(share for until, share in SHARES if step < until)
        span = math.ceil((self._world.data_size + 1) / share)
        return step + random.Random(f"{self._task.seed} {step}").randint(1, span)

    def _compared(
        self, step: int, loss: float, ours: Figures, states: list[Figures], weights: dict[str, Tensor]
    ) -> str:
        """Returns the finding on a step; "" for a later one that is one process's."""
        which, whose = "its first step" if self._first else f"step {step + 1}", self._whose
        # The bytes of a step on one process, from what this one's had at most.
        of_step = max(0, sum(memory.peak(torch.device("cpu")).values()) - self._resident)
        needed = 3 * sum(tensor.nbytes for tensor in weights.values()) + of_step * self.steps
        left = memory.free()
        too_large = f"not checked: one process might lack the memory for {which}" if self._first else ""
        if left is not None and needed > left / 2:
            return too_large
        try:
            with self._apart():
                expected, of_one, state, advice = self._of_one_process(step, weights)
        except torch.OutOfMemoryError:
            return too_large
        except Exception as error:
            return f"{which} could not be computed as one process does: {sentence(error)}"
        if not (math.isfinite(loss) and math.isfinite(expected)):
            return ""  # which ends the training, with the samples
        gaps = {"the loss": abs(loss - expected) / max(abs(expected), 1e-12)}
        if ours:
            gaps |= gradient_distances(ours, of_one)
        largest, tolerance = max(self.distances.values(), default=0.0), TOLERANCE[self._plan.precision]
        rounds = self._plan.precision == "bf16"
        if rounds or all(gap <= tolerance for gap in gaps.values()):
            for each in states:
                gaps |= {name: max(gap, gaps.get(name, 0.0)) for name, gap in state_distances(each, state).items()}
        if rounds and max(gaps.values()) > tolerance:
            # Without the memory for fp32 the difference is said, though it may be rounding.
            with contextlib.suppress(torch.OutOfMemoryError), self._apart():
                _, in_full, state_in_full, _ = self._of_one_process(step, weights, precision="fp32")
                for kind in (gradient_distances(of_one, in_full), state_distances(state, state_in_full)):
                    gaps |= {name: min(gaps[name], tolerance) for name in rounded(gaps, kind)}
        what = max(gaps, key=lambda name: gaps[name] if math.isfinite(gaps[name]) else math.inf)
        self.distances[step] = gap = gaps[what]
        if gap <= tolerance:
            difference = f"{gap:.0e}" if gap else "the bit"
            of_loss = f"checked: {whose} first loss, to {difference}"
            return "" if not self._first else f"checked: {whose} first step, to {difference}" if ours else of_loss
        if tolerance < largest > gap / 10:
            return ""  # said of an earlier step
        with self._apart():
            return f"{which} is not {whose}: {what} differs by {gap:.1g}. {advice()}"

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

    def _of_one_process(
        self, step: int, weights: dict[str, Tensor], precision: str | None = None
    ) -> tuple[float, Figures, Figures, Callable[[], str]]:
        """Computes the loss and the gradients of the whole batch as one process does, on a model of its own.

        Args:
            precision: None: the plan's.

        Returns:
            The loss; figures of gradients and of buffers and attributes; a function that names what differs in parts
            of this batch.
        """
        kept: dict[str, Any] = {name: getattr(self._plan, name) for name in ("exact", "dropout", "recompute", "device")}
        kept["precision"] = precision or self._plan.precision
        plan, task = Plan(**kept, workers=0), self._before
        world = World(process=ProcessRank(), device=self._world.device)
        batches = loader.BatchLoader(task, self._dataset, self._order, plan, world, training=True)
        batch = next(batches.rehearsed(step, apart=True))
        setup = EngineSetup(
            task=task, plan=plan, world=world, weights=InMemory(weights), total_steps=1, sample_inputs=self._example
        )
        model = WholeModel(setup)
        model.module.train()
        put_attributes(model.module, attributes(model.module) | self._attributes)
        make = ExactGradients if plan.exact else WholeGradients
        sums = make(setup, model, LossScale("fp32")).gradients(batch)
        state = state_figures(model.module, batch.samples, self._carried.unread)
        advice = functools.partial(self._advice, model.module, batch)
        return sums.read()[0] / float(batch.count), figures(model.named), state, advice

    def _advice(self, model: nn.Module, everything: Batch) -> str:
        """Names what differs in a part of this batch, as far as it is known, and the plan that has no parts."""
        plan, causes, task, micro = self._plan, [], self._task, everything.microbatches[0]

        def compute(batch: Any) -> None:
            made = with_own_rows(task.forward, (model, batch[0]), {})
            if not task.whole_batch_loss:  # which gets every row
                task.loss(made, batch[1])

        if plan.cut != "batch" and (by_line := functions_over_rows(compute, (micro.inputs, micro.targets))):
            lines = [f"{line} ({name})" for line, name in by_line.items()]
            causes.append(f"{', '.join(lines[:LINES])}: computed over several samples, of this plan's part of a batch")
        if plan.statistics and any(isinstance(each, BatchNormBase) and each.training for each in model.modules()):
            causes.append(f"batch normalisation has the statistics of {plan.statistics}")
        if len(self._shapes) > len(shapes_of(everything)):
            lengths = ", ".join(sorted(" x ".join(map(str, shape)) for shape in self._shapes if shape))
            causes.append(f"collate() pads each part of a batch to its own length ({lengths}), and dropout differs")
        causes += remarks_on_draws(plan, self._world.device)
        why = "; ".join(causes) or f"grappe verify {self._name} --plan {plan} looks for the cause"
        if plan.processes == 1:
            return f"{why}. Without {'exact' if plan.exact else 'microbatches'}= each function gets the whole batch"
        if plan.engine != "native" or plan.changed_keys() & {*WITHOUT, "domain"}:
            return why
        return f"{why}. With --plan domain={plan.processes},cut=batch each function gets the whole batch"


# ---- Causes ------------------------------------------------------------------------------------------------

Shapes = set[tuple[int, ...]]
"""Shapes of a batch's tensors, without their rows."""
LINES = 4
TIMES_ROWS = frozenset(("mm", "addmm", "_cdist_forward"))
"""Operators that relate rows to rows where two arguments have them."""
ALONE = frozenset(("_ctc_loss", "_cudnn_ctc_loss"))
"""Operators without a rule for rows that compute each by itself all the same."""


class FunctionsOverRows(TorchDispatchMode):
    """Lists functions that compute something of several rows of a batch, by the user's line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ends, name = [], func.overloadpacket.__name__
        for each in tree_leaves((args, kwargs)):
            if type(each) is Rows:
                placement = each._cell.layout.placement
                ends += [each.dim() - placement.dim] if type(placement) is Placement else []
        made = func(*args, **(kwargs or {}))
        if ends and name not in ALONE:
            first = next((each for each in tree_leaves(made) if isinstance(each, Tensor)), None)
            is_apart = type(first) is Rows and type(first._cell.layout.placement) is Placement
            crossed = torch.Tag.pointwise in func.tags and len(set(ends)) > 1
            related = name in TIMES_ROWS and len(ends) > 1
            if (not is_apart or crossed or related) and (line := NOW.context.line()) != "backward":
                self.lines.setdefault(line, name.strip("_"))
        return made


def shapes_of(batch: Batch) -> Shapes:
    """Returns the shapes, without their rows, of tensors that have a row for each sample."""
    return set().union(*(row_shapes((micro.inputs, micro.targets), micro.size) for micro in batch.microbatches))


@torch.no_grad()
def functions_over_rows(compute: Callable[[Any], Any], samples: Any) -> dict[str, str]:
    """Lists the user's lines that compute over several rows of a batch, "model.py:31", each with its function, "std".

    Args:
        compute: called with the samples, of which other processes seem to have half of the rows.
    """
    from grappe.rows import functions  # noqa: F401  # it fills the table of functions that have rules

    rows = usual_rows(samples)
    own = rows - rows // 2

    def placed(leaf: Any) -> Any:
        is_split = rows > 1 and are_rows(leaf, 0, rows)
        return from_local(leaf[:own], Placement(0, (own, rows - own))) if is_split else leaf

    with activate(RowsContext(size=2, pretended=True)), FunctionsOverRows() as mode, contextlib.suppress(Exception):
        compute(tree_map(placed, samples))
    return mode.lines


# ---- The optimizer's settings ------------------------------------------------------------------------------

Settings = dict[str, float]
"""Numbers of the optimizer's groups: "lr", or "lr of group 1"."""


def settings(optimizer: Optimizer) -> Settings:
    """Returns the numbers of an optimizer's groups."""
    several = len(optimizer.param_groups) > 1
    return {
        f"{name} of group {number}" if several else name: value
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if type(value) in (int, float)
    }


# ---- Figures -----------------------------------------------------------------------------------------------


def figures(named: NamedParameters) -> Figures:
    """Computes norm and probe of each parameter's gradient, of a sharded one of this process's part."""
    parts: list[tuple[str, tuple[int, ...], Tensor]] = []
    for name, parameter in named:
        gradient = parameter.grad
        if is_dtensor(gradient):
            _, offset = local_shape_and_offset(gradient)
            parts.append((name, tuple(offset), local_tensor(gradient)))
        elif gradient is not None:
            parts.append((name, (0,) * gradient.dim(), gradient))
    return _figures(parts)


def state_figures(model: nn.Module, rows: int, unread: Collection[Place]) -> Figures:
    """Computes norm and probe of each buffer, and of tensors and numbers in the attributes of a model.

    Args:
        rows: of the last microbatch: attributes that have as many are activations, or hidden states.
        unread: attributes that a forward sets before it reads them.
    """
    named = [(f"the buffer {name}", buffer) for name, buffer in model.named_buffers()]
    for place, value in attributes(model).items():
        if place in unread or has_rows(value, rows):
            continue
        for number, leaf in enumerate(tree_leaves(value)):
            kept = torch.tensor(leaf) if type(leaf) in (int, float) else leaf
            if is_state(kept):
                named.append((f"the attribute {'.'.join(filter(None, place))}{f'[{number}]' if number else ''}", kept))
    return _figures([(name, (0,) * each.dim(), each) for name, each in named if type(each) is Tensor])


@torch.no_grad()
def _figures(parts: list[tuple[str, tuple[int, ...], Tensor]]) -> Figures:
    keys, values = [], []
    for name, offset, tensor in parts:
        dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
        dense = torch.view_as_real(dense) if dense.is_complex() else dense
        probe = dense = dense.to(torch.promote_types(dense.dtype, torch.float32))
        for size, first in zip(dense.shape, (*offset, 0), strict=False):
            places = torch.arange(first, first + size, dtype=dense.dtype, device=dense.device)
            probe = torch.tensordot(torch.cos(0.7 + 1.3 * places), probe, dims=1)
        keys.append((name, offset))
        norm = torch.linalg.vector_norm(dense, dtype=torch.float64)
        values.append(torch.stack((norm, probe.to(torch.float64))))
    devices = {each.device for each in values}
    values = values if len(devices) < 2 else [each.cpu() for each in values]
    return dict(zip(keys, map(tuple, torch.stack(values).tolist()), strict=True)) if keys else {}


def state_distances(ours: Figures, expected: Figures) -> dict[str, float]:
    """Computes the relative distance of each buffer and attribute from the expected one, by name."""
    gaps = {}
    for key in ours.keys() & expected.keys():
        (a, p), (b, q) = ours[key], expected[key]
        gaps[key[0]] = max(abs(a - b), abs(p - q)) / (b + SMALL)
    return gaps


def rounded(gaps: dict[str, float], roundings: dict[str, float]) -> list[str]:
    """Lists the names whose distance is what half precision rounds there, or in the root mean square of all names."""
    usual = math.hypot(*roundings.values()) / math.sqrt(max(1, len(roundings)))
    return [name for name in gaps.keys() & roundings if gaps[name] <= ROUNDINGS * max(roundings[name], usual)]


def gradient_distances(ours: Figures, expected: Figures) -> dict[str, float]:
    """Computes the relative distance of each parameter's gradient from the expected one, by "the gradient of NAME"."""
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
        gaps[f"the gradient of {name}"] = max(abs(math.sqrt(a) - math.sqrt(b)), abs(p - q)) / (math.sqrt(b) + least)
    return gaps
