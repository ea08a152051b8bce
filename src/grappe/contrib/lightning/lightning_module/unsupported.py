"""Unsupported features of a LightningModule and its data: each is detected by its effect, and refused by name.

A module's steps are tried on a few samples: what they return and log, and whether those are means over rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torchmetrics
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from grappe.contrib.lightning.lightning_module.steps import (
    TEST,
    TRAINING,
    VALIDATION,
    ModuleSteps,
    Scoring,
    defines,
    loss_in,
)
from grappe.errors import TaskError, nearest

CARRIED = frozenset({
    "forward", "training_step", "validation_step", "test_step", "configure_optimizers", "configure_model",
    "configure_sharded_model", "train_dataloader", "val_dataloader", "test_dataloader", "setup", "prepare_data",
})  # fmt: skip
OUTSIDE = frozenset({"predict_step", "predict_dataloader"})
"""Not called by Lightning's training or test either; to be called on grappe.load(run, task).module."""
REMOVED = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
    "training_step_end": "training_step",
    "validation_step_end": "validation_step",
    "test_step_end": "test_step",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "tbptt_split_batch": "training_step",
}
"""Hooks of Lightning 1, and what took their place in Lightning 2, which does not call them either."""
ROWS = 7  # odd, so that a sum is not taken for a mean
CLOSE = 1e-4
WHY = {
    "configure_callbacks": "Lightning's callbacks are not run; evaluation, checkpoints and patience are grappe's own",
    "drop_last": "grappe keeps the last, short batch and weighs it by its size; set drop_last=False",
}


class Refusals:
    """Collects unsupported features, except those that the user knowingly leaves out."""

    def __init__(self, name: str, without: Collection[str]) -> None:
        self._name, self._without = name, without
        self._found: list[str] = []
        self._features: set[str] = set()

    def add(self, what: str, why: str = "it is not carried over", *, needed: bool = False) -> None:
        """Refuses `what`, unless the user leaves it out; what is needed cannot be left out."""
        if not self.leaves_out(what) or needed:
            self._found.append(f"{what} ({WHY.get(what, why)})")

    def leaves_out(self, what: str) -> bool:
        """Returns whether the user leaves out `what`, which is there."""
        self._features.add(what)
        return what in self._without

    def check(self) -> None:
        """Raises TaskError if an unsupported feature was found."""
        if self._found:
            raise TaskError(
                f"{self._name} cannot be made a task as it is: {'; '.join(self._found)}. Do without it, leave it "
                "out knowingly with from_lightning(…, without=[its name]), or use Lightning's own Trainer"
            )

    def check_without(self, logged: Collection[str]) -> None:
        """Raises TaskError if the user leaves out something that is not there: a mistyped name, say."""
        for name in self._without:
            if name not in self._features and name not in logged:
                raise TaskError(
                    f"from_lightning({self._name}, without=[{name!r}]): there is no such feature to leave out: "
                    f"{nearest(name, sorted({*self._features, *logged}))}"
                )


def overridden(owner: Any, base: type, refusals: Refusals) -> None:
    """Refuses every hook of Lightning that the user's class defines and that grappe never calls."""
    for kind in type(owner).__mro__:
        if kind is base:
            return
        for name in vars(kind):
            if name in REMOVED:
                why = f"Lightning 2 has no such hook, it became {REMOVED[name]}"
                refusals.add(name, f"{why}; what a step logs is averaged over all samples by itself")
            torchs = isinstance(owner, nn.Module) and hasattr(nn.Module, name)
            hook = callable(getattr(base, name, None)) and not torchs
            if hook and not name.startswith("_") and name not in CARRIED | OUTSIDE:
                refusals.add(name, "this hook is not called")


def loader(data: Any, what: str, training: bool, refusals: Refusals) -> DataLoader | None:
    """Returns a DataLoader that grappe can replace by its own; None, and a refusal, if it cannot."""
    if isinstance(data, list | tuple) and len(data) == 1:
        data = data[0]
    if not isinstance(data, DataLoader):
        refusals.add(what, f"it gives {type(data).__name__}, and not one torch DataLoader", needed=training)
        return None
    if isinstance(data.dataset, IterableDataset):
        refusals.add(what, "its IterableDataset cannot be shuffled, cut or resumed exactly", needed=training)
        return None
    sampler = data.sampler
    is_plain = type(sampler) is SequentialSampler
    if type(sampler) is RandomSampler:
        is_plain = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    if data.batch_size is None or type(data.batch_sampler) is not torch.utils.data.BatchSampler:
        refusals.add("batch_sampler", f"{what} has one of its own; grappe makes the batches")
    elif not is_plain:
        refusals.add("sampler", f"{what} draws its samples with {type(sampler).__name__}")
    if training and data.drop_last:
        refusals.add("drop_last")
    return data


def optimizers(configured: Any, refusals: Refusals) -> tuple[Optimizer, dict[str, Any] | None] | None:
    """Returns the optimizer, and its schedule {"scheduler", "interval", "monitor"}; None, and a refusal, if several."""
    schedule = None
    if isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], list | tuple):
        ones, schedules = configured
        configured = ones[0] if len(ones) == 1 else list(ones)
        schedule = schedules[0] if len(schedules) == 1 else (list(schedules) or None)
    if isinstance(configured, list | tuple) and len(configured) == 1:
        configured = configured[0]
    if isinstance(configured, dict):
        schedule = configured.get("lr_scheduler")
        configured = configured.get("optimizer")
    if not isinstance(configured, Optimizer):
        refusals.add("configure_optimizers", "it gives something else than one optimizer", needed=True)
        return None
    if schedule is None or refusals.leaves_out("lr_scheduler"):
        return configured, None
    if not isinstance(schedule, dict):
        schedule = {"scheduler": schedule}
    schedule = {"scheduler": None, "interval": "epoch", "monitor": None, **schedule}
    if not hasattr(schedule["scheduler"], "step"):
        refusals.add("lr_scheduler", f"{type(schedule['scheduler']).__name__} is no schedule")
    if schedule.get("frequency", 1) != 1:
        refusals.add("frequency", "of the schedule: every step or every epoch is carried over")
    if isinstance(schedule["scheduler"], ReduceLROnPlateau) and schedule["interval"] != "epoch":
        refusals.add("interval", "of ReduceLROnPlateau: each evaluation steps it")
    return configured, schedule


def monitored(
    made: tuple[Optimizer, dict[str, Any] | None] | None, validation: Scoring | None, refusals: Refusals
) -> str:
    """Returns the score of an evaluation that a ReduceLROnPlateau is given, by the task's name for it."""
    schedule = made[1] if made is not None else None
    if schedule is None or not isinstance(schedule["scheduler"], ReduceLROnPlateau):
        return "loss"
    name, logged = schedule["monitor"], () if validation is None else validation.logged
    if name in logged:
        return name
    own_loss = None if validation is None else validation.loss
    if name is None or name != own_loss:
        names = _words([*filter(None, [own_loss]), *logged])
        refusals.add("lr_scheduler", f"ReduceLROnPlateau monitors {name}, and validation_step logs {names}")
    return "loss"


def mean_over_rows(steps: ModuleSteps, samples: list[Any], collate: Any) -> Iterator[tuple[str, str, str]]:
    """Yields (step, name, reason) of the values that are not means over their batch.

    A batch's value must be the mean of its two halves' values, weighted by size. Dropout is off during this test.
    """
    cut, size = len(samples) // 2, len(samples)
    for step in (TRAINING, VALIDATION, *([TEST] if TEST in steps.scorings else [])):
        full = _values(steps, collate(samples), step)
        other_seed = _values(steps, collate(samples), step, seed=1)
        next_batch = _values(steps, collate(samples), step, index=1)
        first = _values(steps, collate(samples[:cut]), step)
        second = _values(steps, collate(samples[cut:]), step)
        for name, value in full.items():
            halves = (first[name] * cut + second[name] * (size - cut)) / size
            if not value.equal(other_seed[name]):
                yield step, name, "it draws its own random numbers, which do not belong to a sample"
            elif not value.equal(next_batch[name]):
                yield step, name, "it depends on batch_idx, which differs here"
            elif not torch.isclose(value, halves.to(value.dtype), rtol=CLOSE, atol=1e-6):
                values = f"{value.item():.6g} over {size} samples, {halves.item():.6g} from their halves"
                yield step, name, f"it is not the mean over its batch: {values}"


def _values(steps: ModuleSteps, batch: Any, step: str, index: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """Returns the loss, under its step's name, and the logged values, under their own names."""
    torch.manual_seed(seed)
    loss, logged = steps.step(batch, step, index=index)
    scoring = steps.scorings.get(step)
    if scoring is None:
        return {TRAINING: loss}
    missing = torch.nan if step == TRAINING else None
    return {step: loss, **{name: logged.read(name, missing) for name in scoring.logged}}


SPLIT = re.compile(r"^(train|training|val|valid|validation|test)(?=[_/])")


class Tried(NamedTuple):
    """Result of trying a module's steps."""

    scorings: Mapping[str, Scoring]
    """Scoring of each step: training_step scores for a missing validation_step, that one for a missing test_step."""
    left_out: tuple[str, ...]
    """Names that the user leaves out, and that are there."""
    unkept: tuple[str, ...]
    """Values that training_step logs and no curve has, with the reason."""


def tried(module: Any, train: Any, refusals: Refusals, without: Collection[str]) -> Tried:
    """Returns what is kept of each step, what is left out, and what is not kept.

    Values that are no means over rows are refused; of those that training_step logs, not kept. A step that logs nothing
    and returns no loss reports nothing under Lightning's Trainer: None, and training_step scores in its place.
    """
    samples = [train.dataset[index] for index in range(min(len(train.dataset), ROWS))]
    plain, batch = ModuleSteps(module).eval(), train.collate_fn(samples)
    left_out: set[str] = set()
    scorings: dict[str, Scoring] = {}
    with torch.no_grad():
        for step in (VALIDATION, TEST):
            if step in without and defines(module, step):
                left_out.add(step)
            elif defines(module, step) and (scoring := _scoring(plain, batch, step, refusals, without, left_out)):
                scorings[step] = scoring
        if (test := scorings.pop(TEST, None)) and (aligned := _aligned(test, scorings.get(VALIDATION), refusals)):
            scorings[TEST] = aligned
        loss = loss_in(plain.run(batch, TRAINING))
        logged = {name: value for name, value in plain.logged.values.items() if not _is_loss(value, loss)}
        left_out |= logged.keys() & set(without)
        unkept = {name: "it is not one number" for name, value in logged.items() if not _is_number(value)}
        names = tuple(name for name in logged if name not in {*unkept, *without})
        steps = ModuleSteps(module, {**scorings, TRAINING: Scoring(TRAINING, names, None)}).eval()
        for step, name, why in mean_over_rows(steps, samples, train.collate_fn):
            if step == TRAINING and name != TRAINING:
                unkept[name] = why
            else:
                refusals.add(name, why)
    scorings[TRAINING] = Scoring(TRAINING, tuple(name for name in names if name not in unkept), None)
    reasons = tuple(f"{name} ({why})" for name, why in unkept.items() if name not in without)
    return Tried(scorings, tuple(left_out), reasons)


def _scoring(
    plain: ModuleSteps, batch: Any, step: str, refusals: Refusals, without: Collection[str], left_out: set[str]
) -> Scoring | None:
    result = plain.run(batch, step)
    names = [name for name in plain.logged.values if name not in without]
    left_out |= {name for name in plain.logged.values if name in without}
    if loss_in(result) is not None:
        return Scoring(step, tuple(names), None)
    if not names:
        return None
    losses = [name for name in names if "loss" in name.lower()]
    if len(losses) != 1:
        refusals.add(step, "it neither returns its loss nor logs just one '…loss…'")
        return None
    return Scoring(step, tuple(name for name in names if name != losses[0]), losses[0])


def _aligned(test: Scoring, validation: Scoring | None, refusals: Refusals) -> Scoring | None:
    """Returns test_step's values in the order of validation_step's, whose names they have but for val_ and test_."""
    logged = validation.logged if validation is not None else ()
    tests, theirs = {SPLIT.sub("", name): name for name in test.logged}, [SPLIT.sub("", name) for name in logged]
    if set(tests) != set(theirs):
        refusals.add(
            TEST,
            f"it logs {_words(test.logged)}, and validation_step {_words(logged)}: "
            "the metrics of both must have the same names, but for val_ and test_",
        )
        return None
    return test._replace(logged=tuple(tests[name] for name in theirs))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, torchmetrics.Metric | int | float)


def _is_loss(value: Any, loss: Tensor | None) -> bool:
    if loss is None or not isinstance(value, Tensor | float):
        return False
    return bool(torch.isclose(torch.as_tensor(value).to(loss), loss.detach()).all())


def _words(names: Collection[str]) -> str:
    return ", ".join(names) or "nothing"
