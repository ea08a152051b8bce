"""grappe verify --against: holds a task to the script that it was ported from, and names the first difference.

The script runs as it is, in this process. At each of its optimizer steps the task's model, which begins with the
script's weights, takes a step of its own with the script's batches and random state, by the task's loss, clip,
optimizer and schedule; then losses, gradients, rates, weights and buffers are compared.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from grappe.contrib.script import ported
from grappe.contrib.script.launch import run_as_main
from grappe.data.collate import augment
from grappe.data.datasets import prepare
from grappe.data.draw import sample_keys
from grappe.errors import UsageError
from grappe.launch.rank import ProcessRank
from grappe.launch.signals import end_as_programs_do
from grappe.launch.start import start
from grappe.plan import Plan
from grappe.private_api.torch import tree_map
from grappe.step.closure import needs_closure
from grappe.step.loss import loss_of
from grappe.step.precision import in_double
from grappe.step.task_contract import model_of, optimizer_of, schedule_of
from grappe.task import Task, overrides
from grappe.training.interception import Begin, StepHandler, alive, copied, intercepted, rows_of
from grappe.training.random_state import random_state, set_random_state
from grappe.training.request import data_folder
from grappe.training.short_run import CALLED
from grappe.training.task_reference import TaskReference
from grappe.verbs.verify.trained_by_hand import gap

STEPS = 8
LOSS, TENSOR, RATE = 1e-5, 1e-4, 1e-6
"""Up to these relative differences losses, a tensor's gradient or weights, and learning rates are the same."""
ROUNDING, SMALL = 1e-6, 1e-3
"""Parts of the whole gradient's norm: below the first a tensor's gradient is only rounding; differences are relative to
the second at least."""
LEAST_NUMBERS = 64
"""Numbers of a tensor from which its standard deviation tells how it was drawn."""
IMPLEMENTATION = {"params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable", "param_names"}
"""Keys of a parameter group that are no setting of the rule, or are compared by themselves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """The first difference between what a task and its script learn, or that there is none."""

    step: int
    """The last step that was compared, from 1; 0: none, as the models differ."""
    tensors: int
    """Tensors of the model that were compared."""
    largest: float
    """The largest relative difference of a weight or buffer after the last step that is the same."""
    difference: str = ""
    """The first thing that differs, with its cause; "": nothing does."""
    notes: Sequence[str] = ()

    @property
    def learns_the_same(self) -> bool:
        """Returns whether nothing differs."""
        return not self.difference


class ComparisonOver(BaseException):
    """Ends the script: enough is known."""


class _Backward(NamedTuple):
    """A backward of the script, and what it was computed from."""

    batch: tuple[Any, Any]
    """Inputs and targets."""
    loader: DataLoader[Any] | None
    random: Mapping[str, Tensor]
    loss: float


@contextlib.contextmanager
def drawing_from(state: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which the generators have another state; they have their own again after it."""
    before = random_state()
    set_random_state(state)
    try:
        yield
    finally:
        set_random_state(before)


def verify_against(
    task: Task | type[Task] | str,
    script: Path | str,
    arguments: Sequence[str] = (),
    *,
    fields: Mapping[str, object] | None = None,
    data: Path | str | None = None,
    steps: int = STEPS,
    note: Callable[[str], None] = lambda line: None,
) -> Agreement:
    """Compares a task with the script that it was ported from, which runs as it is, on one process.

    Args:
        arguments: the script's own.
        steps: optimizer steps to compare, at most as many as the script takes.
        note: callback, called with a short description of what is compared.

    Raises:
        UsageError: there is no such script, or it takes no step that can be compared.
    """
    script = Path(script)
    if not script.is_file():
        raise UsageError(f"{script}: no such file: give the Python script that the task was ported from")
    if steps < 1:
        raise UsageError(f"--steps={steps}: it must be at least 1")
    work = functools.partial(compare, TaskReference.of(task, fields), data_folder(data), script, arguments, steps)
    note(f"{script} and the task, for {steps} steps")
    return start(CALLED, work, Plan())


def compare(
    reference: TaskReference,
    data: Path,
    script: Path,
    arguments: Sequence[str],
    steps: int,
    process: ProcessRank,
    rendezvous_folder: Path,
) -> Agreement:
    """Runs the script up to the first difference, at most for the steps that are asked for.

    Raises:
        UsageError: the script takes no step that can be compared.
    """
    task = reference.resolve()
    prepare(task, data)
    comparison = Comparison(task, task.data("train", data), steps)
    with (
        intercepted(comparison),
        register_module_parameter_registration_hook(comparison.registered),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(ComparisonOver, SystemExit),
    ):
        end_as_programs_do([signal.SIGTERM])
        run_as_main(script, arguments)
    if comparison.agreement is not None:
        return comparison.agreement
    if not comparison.step:
        raise UsageError(
            f"{script} took no optimizer step with a batch of a torch.utils.data.DataLoader: there is nothing "
            "to compare. Did it need arguments? They follow the script"
        )
    return comparison.so_far()


class Comparison(StepHandler):
    """Handler of the script's steps, each of which the task's model takes too."""

    def __init__(self, task: Task, dataset: Any, steps: int) -> None:
        self._task, self._dataset, self._steps = task, dataset, steps
        self._batch: tuple[Any, DataLoader[Any] | None, Mapping[str, Tensor]] | None = None
        self._backwards: list[_Backward] = []
        self._first_random: Mapping[str, Tensor] | None = None
        self._first_buffers: dict[int, Tensor] = {}
        self._optimizers: list[Optimizer] = []
        self._waiting: list[Optimizer] = []
        """The script's optimizers that have not stepped since its backward."""
        self._augments = overrides(task, "augment")
        self._in_task = False
        self._began = False
        """Whether the script's step that comes next is compared."""
        self._rates: dict[str, float] = {}
        self._rounding: set[str] = set()
        """Tensors whose gradient is only rounding, as of a bias before batch normalisation: rules scale it up."""
        self._parameters: ported.Pairs = {}
        self._buffers: ported.Pairs = {}
        self.step = 0
        self.notes: list[str] = []
        self.largest = 0.0
        self.agreement: Agreement | None = None

    def registered(self, *_: Any) -> None:
        """Notes the random state before the script's first parameter is drawn."""
        self._first_random = self._first_random or random_state()

    def batches(self, loader: DataLoader[Any], begin: Begin) -> Iterator[Any]:
        """Yields a loader's batches, and notes each with the random state in which the script gets it."""
        for batch in begin():
            if not self.step and not self._backwards:  # before a forward writes running statistics
                buffers = (buffer for module in alive(nn.Module) for buffer in module.buffers(recurse=False))
                self._first_buffers = {id(buffer): buffer.detach().clone() for buffer in buffers}
            self._batch = (copied(batch), loader, random_state())
            yield batch

    def backward(self, loss: Tensor, run: Callable[[float], None]) -> None:
        """Runs a backward, and notes its loss."""
        run(1.0)
        if self._batch is not None and not self._in_task:
            batch, loader, random = self._batch
            with drawing_from(random_state()):
                pair = ported.as_pair(batch, self._task, self._dataset)
            self._backwards.append(_Backward(pair, loader, random, float(loss.detach().sum())))

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Lets the task take each step of an optimizer too."""
        if not self._in_task:
            self._optimizers.append(optimizer)
            optimizer.register_step_pre_hook(lambda *_: self._before(optimizer))
            optimizer.register_step_post_hook(lambda *_: self._after())

    @contextlib.contextmanager
    def _tasks_own(self) -> Iterator[None]:
        """Context of what the task does, which is no step of the script."""
        self._in_task = True
        try:
            yield
        finally:
            self._in_task = False

    def _before(self, optimizer: Optimizer) -> None:
        if not self._backwards:
            if needs_closure(optimizer):
                raise UsageError("the script's optimizer calls a closure, of which verify --against sees no gradient")
            if optimizer in self._waiting:
                self._waiting.remove(optimizer)
            elif self.step:
                raise UsageError("the script steps an optimizer twice after a backward, and a task steps once")
            return
        if self._waiting:
            raise UsageError(
                "the script steps several optimizers in turns, and a task has one: verify --against cannot compare them"
            )
        with torch.enable_grad(), self._tasks_own():
            if not self.step:
                self._begin()
            else:
                self._compare_tensors("weights", "between two steps: the script changes it after the optimizer's step")
            self.step += 1
            self._compare_rates()
            self._compare_losses()
            self._compare_gradients()
        self._backwards.clear()
        self._waiting = [each for each in self._optimizers if each is not optimizer]
        self._began = True

    def _begin(self) -> None:
        """Makes the task's model with the script's weights, once it is known that both have the same tensors."""
        self._script = ported.tensors_of(*self._optimizers)
        first = self._backwards[0]
        with drawing_from(self._first_random or first.random):
            self._model = model_of(self._task)
        device = next(iter(self._script.parameters.values())).device
        self._model.to(device).train()
        own = dict(self._model.named_parameters())
        self._parameters, left = ported.paired(own, self._script.parameters, {})
        unpaired = {name: own[name] for name in own if name not in self._parameters}
        if unpaired or left:
            self._differ(
                f"parameters: {ported.listed('the task has', unpaired)}; {ported.listed('the script has', left)}"
            )
        for name, tensors in self._parameters.items():
            self._compare_first(name, *tensors)
        self._buffers, _ = ported.paired(dict(self._model.named_buffers()), self._script.buffers, self._first_buffers)
        with torch.no_grad():
            for script, tensor in (*self._parameters.values(), *self._buffers.values()):
                tensor.copy_(self._first_buffers.get(id(script), script))
        named = [(name, parameter) for name, parameter in own.items() if parameter.requires_grad]
        self._optimizer = optimizer_of(self._task, named)
        per_epoch = -(-len(self._dataset) // self._task.batch_size)
        self._schedule = schedule_of(self._task, self._optimizer, self._task.epochs * per_epoch)
        self._compare_data(per_epoch)
        self._compare_settings()

    def _compare_first(self, name: str, drawn: Tensor, parameter: Tensor) -> None:
        """Compares how a tensor is drawn at first: a port begins elsewhere if it is drawn otherwise."""
        script, own = drawn.detach().float(), parameter.detach().float()
        same_constant = bool((own == own.flatten()[:1]).all()) == bool((script == script.flatten()[:1]).all())
        if torch.equal(own, script) or (own.numel() < LEAST_NUMBERS and same_constant):
            return
        a, b = float(script.std()), float(own.std())
        if not same_constant or max(a, b) > 1.25 * min(a, b):
            self._differ(
                f"initial weights: {name} has the mean {float(script.mean()):.3g} and the deviation {a:.3g} in the "
                f"script, {float(own.mean()):.3g} and {b:.3g} in the task"
            )

    def _compare_data(self, per_epoch: int) -> None:
        first = self._backwards[0]
        rows = [rows_of(each.batch) or 0 for each in self._backwards]
        if sum(rows) and sum(rows) != self._task.batch_size:
            self._differ(f"batch size: {sum(rows)} samples a step in the script, {self._task.batch_size} in the task")
        if len(rows) > 1:
            self.notes.append(f"the script adds up {len(rows)} batches a step: as microbatches={len(rows)} does")
        inputs = ported.inputs_of(first.batch)
        unseen, statistics = ported.unseen_samples(self._task, self._dataset, inputs)
        if unseen:
            script = ported.statistics_of(inputs)
            if script.shape != statistics.shape:
                self._differ(
                    f"data: a sample is {list(script.shape)} in the script, {list(statistics.shape)} in the task"
                )
            wide = max(script.deviation, statistics.deviation)
            if (
                abs(script.mean - statistics.mean) > wide / 4
                or min(script.deviation, statistics.deviation) < wide * 0.75
            ):
                self._differ(f"data: {script} in the script, {statistics} in the task: normalised otherwise, perhaps")
            self.notes.append(
                f"{unseen} of the {len(inputs)} samples of the script's first batch are none of the task's "
                "training samples: augmented, of another split, or others"
            )
        with contextlib.suppress(TypeError):
            theirs = -(-len(first.loader or ()) // len(rows))
            if theirs and theirs != per_epoch:
                self.notes.append(f"an epoch has {theirs} steps in the script, {per_epoch} in the task")

    def _compare_settings(self) -> None:
        """Compares the rule and its settings for each tensor."""
        own = type(self._optimizer).__name__
        for script in (type(each).__name__ for each in self._optimizers):
            if script != own:
                self._differ(f"optimizer: {script} in the script, {own} in the task")
        for name, a, b in self._groups():
            if not a or not b:
                who, other = ("script", "task") if a else ("task", "script")
                self._differ(f"trained: {name} is trained by the {who}, and not by the {other}")
            for key in a.keys() & b.keys() - IMPLEMENTATION:
                if not isinstance(a[key], Tensor) and a[key] != b[key]:
                    self._differ(
                        f"optimizer's settings: {key}={a[key]} in the script, {b[key]} in the task, for {name}"
                    )

    def _compare_rates(self) -> None:
        for name, script, own in self._groups():
            a, b = float(script["lr"]), float(own["lr"])
            if abs(a - b) > RATE * max(abs(a), abs(b)):
                was = self._rates.get(name)
                moved = "" if was is None else f", and {was:.6g} in both the step before: the schedule's rhythm"
                self._differ(f"learning rate: {a:.6g} in the script, {b:.6g} in the task{moved}, for {name}")
            self._rates[name] = a

    def _groups(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Yields each trained tensor's name, and its group in the script's optimizers and in the task's."""
        script, own = (
            {
                id(each): group
                for optimizer in optimizers
                for group in optimizer.param_groups
                for each in group["params"]
            }
            for optimizers in (self._optimizers, [self._optimizer])
        )
        for name, (theirs, parameter) in self._parameters.items():
            groups = script.get(id(theirs), {}), own.get(id(parameter), {})
            if any(groups):
                yield name, *groups

    def _compare_losses(self) -> None:
        """Computes the task's losses and gradients; compares the losses."""
        self._optimizer.zero_grad()
        count = len(self._backwards)
        for each in self._backwards:
            total = self._loss(self._model, each)
            (total / count).backward()
            own, script = float(total.detach()), each.loss
            if _close(own, script) or (count > 1 and _close(own, script * count)):
                continue
            self._differ(f"loss: {script:.6g} in the script, {own:.6g} in the task: {self._why(each, own)}")

    def _why(self, each: _Backward, own: float) -> str:
        """Returns the cause of a loss that differs."""
        training = {module.training for module in self._script.modules}
        if training == {False}:
            return "mode: the script's model is in evaluation mode, without dropout and with running statistics"
        if self._augments:
            self._augments = False
            without = float(self._loss(self._model, each).detach())
            self._augments = True
            if _close(without, each.loss):
                return "augmentation: without the task's augment() it is the same"
        rates = [ported.dropout_rates(models) for models in (self._script.modules, [self._model])]
        if all(rates) and rates[0] != rates[1]:
            return f"model: dropout of {rates[0]} in the script, of {rates[1]} in the task"
        root = self._script.root
        if root is not None:
            state = copy.deepcopy(dict(root.named_buffers()))
            try:
                by_script = float(self._loss(root, each).detach())
            except Exception:  # another signature
                by_script = own
            with torch.no_grad():
                for name, buffer in root.named_buffers():
                    buffer.copy_(state[name])
            if _close(by_script, each.loss):
                return "model: with the script's own model it is the same: layers or their order"
        rows = rows_of(each.batch) or 0
        ratio = each.loss / own if own else float("nan")
        if rows and _close(ratio, rows):
            return f"loss's scale: a sum over the {rows} rows in the script, a mean in the task"
        return f"another loss, or its scale: {ratio:.6g} times the task's"

    def _loss(self, model: nn.Module, each: _Backward) -> Tensor:
        """Computes the task's loss of a batch of the script, as one process would train on it."""
        task, device = self._task, next(model.parameters()).device
        inputs, targets = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, each.batch)
        with drawing_from(each.random):
            if self._augments:
                keys = torch.from_numpy(sample_keys(task.seed, 0, np.arange(rows_of(each.batch) or 0))).to(device)
                inputs, targets = augment(task, inputs, targets, keys)
            losses = loss_of(task, task.forward(model, inputs), targets)
            counts = task.counts(targets)
        if isinstance(counts, Mapping):
            return torch.stack(
                [(losses.named[name] * count).sum() / count.sum() for name, count in counts.items()]
            ).sum()
        return losses.values.mean() if counts is None else (losses.values * counts).sum() / counts.sum()

    def _compare_gradients(self) -> None:
        """Compares the gradients at the optimizer, clipped or not; leaves the task's as its optimizer gets them."""
        a, b = dict[str, Tensor](), dict[str, Tensor]()
        for name, (script, own) in self._parameters.items():
            if (script.grad is None) != (own.grad is None):
                who = "script" if own.grad is None else "task"
                self._differ(f"gradient: {name} has one in the {who} alone: detached, frozen, or not used by the loss")
            if script.grad is not None and own.grad is not None:
                a[name], b[name] = in_double(script.grad), in_double(own.grad).clone()
        clipped = 1.0
        if self._task.clip is not None:
            clipped = min(1.0, self._task.clip / (_norm(b) + 1e-6))
            for _, own in self._parameters.values():
                if own.grad is not None:
                    own.grad.mul_(clipped)
        size = _norm(a)
        self._rounding |= {name for name, each in a.items() if 0.0 < float(each.norm()) < ROUNDING * size}

        def distance(name: str, gradient: Tensor) -> float:
            return float((a[name] - gradient).norm()) / (max(float(a[name].norm()), SMALL * size) or 1.0)

        apart = {name: distance(name, each * clipped) for name, each in b.items()}
        worst = max(apart, key=apart.__getitem__, default="")
        if not worst or apart[worst] <= TENSOR:
            return
        own_size = _norm(b)
        factor = sum(float((a[name] * b[name]).sum()) for name in a) / own_size**2 if own_size else 1.0
        scaled = max(distance(name, each * factor) for name, each in b.items()) <= TENSOR
        most = max(float(each.abs().max()) for each in a.values())
        if scaled and _close(factor, 1.0):
            why = f"clipping: to the norm {self._task.clip:g} in the task, not in the script"
        elif scaled and factor < 1.0:
            why = f"clipping: to the norm {_norm(a):.4g} in the script, {self._clip()} in the task"
        elif scaled:
            why = f"loss's scale: {factor:.6g} times"
        elif max(distance(name, each.clamp(-most, most)) for name, each in b.items()) <= TENSOR:
            why = f"clipping: each value to {most:.4g} in the script, {self._clip()} in the task"
        else:
            why = "the losses are the same, so the graph differs: a detach, or a part of the loss without a gradient"
        self._differ(f"gradient of {worst}, {apart[worst]:.1e} apart: {why}")

    def _clip(self) -> str:
        return "not" if self._task.clip is None else f"to the norm {self._task.clip:g}"

    def _after(self) -> None:
        if not self._began or self._waiting:
            return
        self._began = False
        with self._tasks_own():
            self._optimizer.step()
            if self._schedule is not None:
                self._schedule.step()
            if overrides(self._task, "after_step"):
                with torch.no_grad():
                    self._task.after_step(self._model)
        self._compare_tensors("weights", "though gradients and settings are the same: another rule")
        self._compare_tensors("buffer", "as a layer keeps its statistics otherwise: its momentum, say")
        if self.step == self._steps:
            self.agreement = self.so_far()
            raise ComparisonOver

    def _compare_tensors(self, kind: str, why: str) -> None:
        pairs = self._buffers if kind == "buffer" else self._parameters
        for name in [each for each in pairs if each not in self._rounding]:
            script, own = pairs[name]
            apart = gap(script.detach(), own.detach())
            if apart > TENSOR:
                self._differ(f"{kind}: {name} after the step, {apart:.1e} apart, {why}")
            self.largest = max(self.largest, apart)

    def so_far(self, difference: str = "") -> Agreement:
        """Returns what was found so far."""
        rounding = sorted(self._rounding)
        judged = [f"not judged, as its gradient is only rounding: {', '.join(rounding[:5])}"] if rounding else []
        return Agreement(
            step=self.step,
            tensors=len(self._parameters) + len(self._buffers),
            largest=self.largest,
            difference=difference,
            notes=(*self.notes, *judged),
        )

    def _differ(self, difference: str) -> NoReturn:
        self.agreement = self.so_far(difference)
        raise ComparisonOver


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= LOSS * max(abs(a), abs(b))


def _norm(gradients: Mapping[str, Tensor]) -> float:
    return sum(float(each.square().sum()) for each in gradients.values()) ** 0.5
