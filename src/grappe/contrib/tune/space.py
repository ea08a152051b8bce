"""Space: the fields that a search varies, each a range or a list of values; the search's options, and its trials."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal, get_args

from cyclopts import Parameter

from grappe.errors import UsageError, nearest
from grappe.fields import at_least, convert, field_name, hints, text_of
from grappe.plan import Plan

DIGITS = 6
"""Significant digits of a value that is drawn, so that it can be read and pasted."""
LARGEST = 2**53
"""Whole number up to which a float is exact."""
LOG = ":log"
PLAN = "plan"
"""Name under which plans are searched, as if it were a field."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers from `low` to `high`, both included."""

    low: float
    high: float
    log: bool = False
    """Whether values are drawn by ratio: as many from 0.01 to 0.1 as from 0.1 to 1."""
    integer: bool = False

    def __str__(self) -> str:
        return f"{self.text(self.low)}..{self.text(self.high)}{LOG if self.log else ''}"

    def text(self, value: float) -> str:
        """The text of a number, as a user would write it: rounded, but never out of the range."""
        if self.integer:
            return str(int(value))
        return repr(min(self.high, max(self.low, float(f"{value:.{DIGITS}g}"))))

    def value(self, text: str) -> float:
        """The number that a trial has as text; ValueError: it is none of these."""
        number = int(text) if self.integer else float(text)
        if not self.low <= number <= self.high:
            raise ValueError(f"{text} is not in {self}")
        return number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """A list of values, as texts."""

    texts: tuple[str, ...]

    def __str__(self) -> str:
        return "|".join(self.texts)

    def value(self, text: str) -> str:
        """The text of a trial; ValueError: it is none of these."""
        if text not in self.texts:
            raise ValueError(f"{text} is not in {self}")
        return text


Axis = Range | Choices
Space = Mapping[str, Axis]


def read_space(cls: type, texts: Mapping[str, str]) -> tuple[dict[str, Axis], dict[str, str]]:
    """Reads `{"lr": "0.01..1:log", "width": "32,64", "epochs": "3"}`: what is searched, and what stays as it is given.

    Args:
        cls: the task's class, whose fields these are.

    Raises:
        UsageError: there is no such field, or its range or values are wrong; the message names the field.
    """
    of_task = hints(cls)
    kinds = {PLAN: str, **of_task}
    space: dict[str, Axis] = {}
    fixed: dict[str, str] = {}
    for typed, text in texts.items():
        name = field_name(typed, kinds)
        if name not in kinds:
            raise UsageError(f"task {cls.__name__} has no '{typed}': {nearest(typed, kinds)}")
        axis = _axis(name, text, kinds[name])
        if name == PLAN and PLAN not in of_task:
            if not isinstance(axis, Choices):
                raise UsageError(f"plan={text}: one plan for all trials is given with --plan; several are plan=A|B")
            for plan in axis.texts:
                Plan.parse(plan)
        elif name == PLAN and axis is not None:
            raise UsageError(f"plan={text}: plan is what a search calls the plan, so this field cannot be searched")
        if axis is None:
            fixed[name] = text
        else:
            space[name] = axis
    if not space:
        raise UsageError("nothing is searched: give a range, lr=0.01..1:log, or values, batch_size=32,64,128")
    return space, fixed


def of_texts(texts: Mapping[str, str]) -> dict[str, Axis]:
    """Reads a space that a study has written: `{"lr": "0.01..1.0:log"}`. A range of whole numbers has no point in it.

    Raises:
        UsageError: an axis is damaged.
    """
    space: dict[str, Axis] = {}
    for name, text in texts.items():
        ends = text.removesuffix(LOG).split("..")
        if len(ends) == 2 and "|" not in text:
            space[name] = _range(name, text, integer=all(end.lstrip("-").isdecimal() for end in ends))
        else:
            space[name] = Choices(texts=tuple(text.split("|")))
    return space


def as_texts(space: Mapping[str, str | Sequence[Any]]) -> dict[str, str]:
    """The text form of a space in Python: `{"lr": "0.01..1:log", "width": [32, 64]}`.

    Raises:
        UsageError: a value cannot be written as text.
    """
    written = {}
    for name, values in space.items():
        texts = [values] if isinstance(values, str) else [text_of(value) for value in values]
        if not isinstance(values, str) and any("|" in text or not text for text in texts):
            raise UsageError(f"{name}: a value that is searched can neither be empty nor contain |: {texts}")
        written[name] = "|".join(texts)
    return written


def _axis(name: str, text: str, kind: Any) -> Axis | None:
    kinds = get_args(kind) or (kind,)
    if ".." in text and (int in kinds or float in kinds):
        return _range(name, text, integer=float not in kinds)
    # A text may have commas of its own, as a plan has.
    texts = [part.strip() for part in text.split("," if "|" not in text and str not in kinds else "|")]
    if len(texts) == 1:
        return None
    for part in texts:
        try:
            convert(kind, part)
        except ValueError as error:
            raise UsageError(f"{name}={text}: {part or 'an empty value'} is not {error}") from error
    if len(set(texts)) < len(texts):
        raise UsageError(f"{name}={text}: a value is given twice")
    return Choices(texts=tuple(texts))


def _range(name: str, text: str, *, integer: bool) -> Range:
    numbers, colon, rest = text.partition(":")
    if colon and rest != LOG.removeprefix(":"):
        raise UsageError(f"{name}={text}: after the range there can only be {LOG}")
    ends = []
    for part in numbers.split(".."):
        try:
            ends.append(convert(int if integer else float, part.strip()))
        except ValueError as error:
            raise UsageError(f"{name}={text}: {part or 'an empty end'} is not {error}") from error
    if integer and any(abs(end) > LARGEST for end in ends):
        raise UsageError(f"{name}: the ends of a range of whole numbers are at most {LARGEST:,}")
    if len(ends) != 2 or not all(map(math.isfinite, ends)):
        raise UsageError(f"{name}={text}: a range has two finite ends, {name}=LOW..HIGH")
    low, high = ends
    if low >= high:
        raise UsageError(f"{name}={text}: the range is upside down: {name}=LOW..HIGH, with the lower end first")
    if colon and low <= 0:
        raise UsageError(f"{name}={text}: a logarithmic range is above 0: raise its lower end, or leave {LOG} out")
    return Range(low=low, high=high, log=bool(colon), integer=integer)


# ---- A search ----------------------------------------------------------------------------------------------

TRIALS = 20
"""Number of trials of a search that has no end of its own, as a grid has."""
SamplerName = Literal["tpe", "random", "grid"]
RUNGS = 3
MOST = {"halving": 1_000, "rungs": 20}
"""The largest values of these options: beyond, no study is so large."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The user's options of a search; needs no torch.

    `grappe tune` has an option for each field, with the docstring under the field as its help.
    """

    trials: int | None = None
    """Trials in all. Default: 20; of a grid all."""
    parallel: int = 1
    """Trials that are trained at a time; as jobs: in the queue."""
    metric: str = "loss"
    """The objective, at a training's last evaluation: loss, or a metric of the task."""
    maximize: Annotated[bool | None, Parameter(negative="--minimize")] = None
    """Whether a larger metric is better. Default: no for the loss, yes for others."""
    sampler: SamplerName = "tpe"
    """tpe: by what earlier trials came to (Optuna's); random; grid: all combinations."""
    halving: int | None = None
    """Successive halving (ASHA): 3 trains all trials in part, then the best third further, and so on."""
    rungs: int | None = None
    """Number of times that trainings are compared, their end included. Default: 3, with --halving."""
    seed: int = 0
    """Seed of the sampler; the task's own seed is a field."""

    def __post_init__(self) -> None:
        at_least(self, 1, "trials", "parallel")
        at_least(self, 2, "halving", "rungs")
        for name, most in MOST.items():
            if (getattr(self, name) or 0) > most:
                raise UsageError(f"--{name}: at most {most}")
        if self.rungs is not None and self.halving is None:
            raise UsageError(f"--rungs={self.rungs}: rungs are of successive halving: give --halving 3 as well")
        if self.maximize is None and self.metric != "loss":
            raise UsageError(f"--metric {self.metric}: add --maximize or --minimize")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchDefinition(SearchOptions):
    """Definition of a search: trials' fields are a function of it, and of the results of earlier trials.

    `trials` and `parallel` are those with which the study was made.
    """

    trials: int = TRIALS
    maximize: bool = False
    task: str
    fields: Mapping[str, Any]
    """The task's fields that are not searched."""
    fixed_fields: Mapping[str, str]
    """Those of them that differ from their defaults, as texts."""
    space: Mapping[str, str]
    """The searched fields, as texts."""
    plan: str
    threads: int | None
    """CPU threads of each process of a trial; None: the plan says."""
    steps: int | None = None
    patience: int | None = None
    evaluate_every: int | None = None

    @property
    def parts(self) -> list[Fraction]:
        """The part of a training that each rung ends at."""
        return [Fraction(1, (self.halving or 1) ** left) for left in reversed(range(self.rungs or 1))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a study."""

    number: int
    fields: dict[str, str]
    """The searched fields, as texts."""
    state: Literal["open", "paused", "complete", "failed"] = "open"
    """open: to be trained, or being trained; paused: stopped early, at a rung; complete: it has an objective;
    failed: it has none, and `reason` says why."""
    value: float | None = None
    """The objective: the metric at the training's last evaluation."""
    step: int | None = None
    """The step of that evaluation; of a trial that has none, its last rung's step."""
    rungs: tuple[float, ...] = ()
    """The metric at each rung so far, the last one's included."""
    reason: str = ""
