"""Study: the folder of a search: what is searched, a record of each trial, and each trial's run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from grappe.checkpoint.commit import LARGEST_LIST, read_json, write_json
from grappe.errors import RunError, UsageError, disk_advice
from grappe.fields import hints
from grappe.launch import files
from grappe.launch.files import IN_PART
from grappe.verbs.tune.sampler import Name

FILE = "study.json"
TRIALS = "trials"
KIND = "tune"
ADOPTED = ("given", "lag", "threads")  # of a study that goes on: whatever --parallel and the machine are now

State = Literal["open", "paused", "complete", "failed"]
STATES = get_args(State)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Definition of a search: trials' fields are a function of it, and of the trials told before."""

    task: str
    fields: Mapping[str, Any]
    """The task's other fields."""
    given: Mapping[str, str]
    """Those of them that differ from their defaults, as texts."""
    space: Mapping[str, str]
    """The searched fields, as texts."""
    plan: str
    metric: str
    maximize: bool
    sampler: Name
    seed: int
    lag: int
    """Trial n is drawn when the trials up to n - lag have ended, whatever the later ones have come to."""
    threads: int | None
    """CPU threads of each process of a trial; None: the plan says."""
    steps: int | None = None
    patience: int | None = None
    evaluate_every: int | None = None
    halving: int | None = None
    """Successive halving: of as many trials at a rung, one goes on. None: all trials are trained whole."""
    rungs: int = 1
    """Number of times that a training stops to be compared, its end included."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a study."""

    number: int
    fields: dict[str, str]
    """The searched fields, as texts."""
    state: State = "open"
    """open: to be trained, or being trained; paused: stopped at a checkpoint, at a rung; complete: it has an objective;
    failed: it has none, and `reason` says why."""
    value: float | None = None
    """The objective: the metric at the training's last evaluation."""
    step: int | None = None
    """Of that evaluation; of a paused trial, of its last rung's."""
    rungs: tuple[float, ...] = ()
    """The metric at each rung so far, the last one's included."""
    reason: str = ""


class Study:
    """A search's folder, which one coordinator writes at a time.

    Attributes:
        folder: with study.json, `trials` (a record of each trial) and the trials' runs, trial-0000 and so on.
        search: what is searched.
    """

    def __init__(self, folder: Path, search: Search) -> None:
        self.folder, self.search = folder, search

    @property
    def trials(self) -> list[Trial]:
        """The trials so far, by number."""
        with contextlib.suppress(OSError):
            numbers = [name.removesuffix(".json") for name in files.names(self.folder / TRIALS)]
            found = [self.read(int(one)) for one in numbers if one.isascii() and one.isdecimal()]
            return sorted((one for one in found if one is not None), key=lambda one: one.number)
        return []

    @property
    def best(self) -> Trial | None:
        """The complete trial with the best objective; of equal ones the first. None: there is none."""
        return best_of(self.search, self.trials)

    def run_folder(self, number: int) -> Path:
        """The folder of a trial's run."""
        return run_folder(self.folder, number)

    def read(self, number: int) -> Trial | None:
        """A trial's record; None: there is none, or it cannot be read: the trial is then drawn again, the same."""
        try:
            found = read_json(self._file(number), IN_PART, largest=LARGEST_LIST)
        except RunError:
            return None
        return _trial(number, found, self.search)

    def write(self, trial: Trial) -> None:
        """Writes a trial's record, in one step.

        Raises:
            RunError: the disk is full, or may not be written.
        """
        try:
            write_json(self._file(trial.number), dataclasses.asdict(trial), IN_PART)
        except OSError as error:
            raise RunError(
                f"{self.folder} cannot be written: {error.strerror}: {disk_advice(error)}; then start the same command "
                "again"
            ) from error

    def _file(self, number: int) -> Path:
        return self.folder / TRIALS / f"{number:04d}.json"


def run_folder(study: Path, number: int) -> Path:
    """The folder of a trial's run, in the study's."""
    return study / f"trial-{number:04d}"


def best_of(search: Search, trials: Sequence[Trial]) -> Trial | None:
    """The complete trial with the best objective; of equal ones the first. None: there is none."""
    sign = -1.0 if search.maximize else 1.0
    done = [one for one in trials if one.value is not None]
    return min(done, key=lambda one: (sign * (one.value or 0.0), one.number), default=None)


def open_study(folder: Path) -> Study:
    """Opens a study to look at it.

    Raises:
        RunError: the folder is no study.
    """
    files.refuse_link(folder / FILE)
    if not (folder / FILE).is_file():
        raise RunError(
            f"{folder} is no study: it has no {FILE}. grappe tune TASK … --study {folder} makes one"
        )
    found = read_json(folder / FILE, largest=LARGEST_LIST)
    names = {field.name for field in dataclasses.fields(Search)}
    needed = {field.name for field in dataclasses.fields(Search) if field.default is dataclasses.MISSING}
    wrong = found.pop("kind", None) != KIND or not needed <= found.keys() <= names
    if wrong or not all(_is_of(kind, found[name]) for name, kind in hints(Search).items() if name in found):
        raise RunError(f"{folder / FILE} is damaged, or not of this version of grappe")
    return Study(folder, Search(**found))


def _is_of(kind: Any, value: Any) -> bool:
    """Returns whether a value of study.json has the type of its field."""
    if get_origin(kind) in (Union, UnionType):
        return any(_is_of(one, value) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is Mapping:
        of_texts = get_args(kind)[1] is str
        return isinstance(value, dict) and all(isinstance(one, str) for one in value.values() if of_texts)
    return type(value) is kind


def make_study(folder: Path, search: Search) -> Study:
    """Makes a study, or opens the one in `folder` to go on with it.

    Raises:
        UsageError: there is a study that searches something else; the message names the first difference.
        RunError: the folder holds something else, or cannot be written.
    """
    try:
        if not files.kind(folder / FILE):
            _make(folder, search)
        study = open_study(folder)
        _refuse_another(study, search)
        files.make_folder(folder / TRIALS)
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}: give another with --study") from error
    return study


def _make(folder: Path, search: Search) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    others = [name for name in files.names(folder) if not name.startswith(f".{FILE}.")]
    if others:
        raise RunError(f"{folder} holds {others[0]} and is no study: give an empty folder, or a new one")
    write_json(folder / FILE, {"kind": KIND, **dataclasses.asdict(search)})


def _refuse_another(study: Study, search: Search) -> None:
    there, here = study.search, search
    for word, before, now in (("searches", there.space, here.space), ("has", there.fields, here.fields)):
        for name in sorted({*before, *now}):
            # A field that the task did not have then was what its default is now.
            new = now is here.fields and name not in before and name not in here.given
            if before.get(name) != now.get(name) and not new:
                raise UsageError(
                    f"the study {study.folder} {word} {_shown(name, before)}, and this command {_shown(name, now)}: "
                    "give what the study has, or another --study"
                )
    asked = dataclasses.asdict(here)
    for name, value in dataclasses.asdict(there).items():
        if name not in (*ADOPTED, "fields") and value != asked[name]:
            raise UsageError(
                f"the study {study.folder} has {_option(name, value)}, and this command {_option(name, asked[name])}: "
                "give what the study has, or another --study"
            )


def _shown(name: str, values: Mapping[str, Any]) -> str:
    return f"{name}={values[name]}" if name in values else f"no {name}"


def _option(name: str, value: Any) -> str:
    if name == "maximize":
        return "--maximize" if value else "--minimize"
    if name == "task":
        return f"the task {value}"
    option = f"--{name.replace('_', '-')}"
    return f"{option} {value}" if value not in (None, "") else f"no {option}"


def _trial(number: int, found: Mapping[str, Any], search: Search) -> Trial | None:
    fields: Any = found.get("fields")
    state: Any = found.get("state")
    value: Any = found.get("value")
    if not isinstance(fields, dict) or fields.keys() != search.space.keys():
        return None
    if not all(isinstance(one, str) for one in fields.values()) or state not in STATES:
        return None
    if _is_number(value) != (state == "complete"):
        return None
    rungs = found.get("rungs", [value] if state == "complete" else [])
    if (
        not isinstance(rungs, list)
        or not all(map(_is_number, rungs))
        or not _fits(state, rungs, search.rungs)
    ):
        return None
    step = found.get("step")
    return Trial(
        number=number,
        fields=fields,
        state=state,
        value=float(value) if state == "complete" else None,
        step=step if isinstance(step, int) else None,
        rungs=tuple(map(float, rungs)),
        reason=str(found.get("reason") or ""),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _fits(state: str, rungs: list[Any], most: int) -> bool:
    """Returns whether a trial of this state can have been told so many rungs."""
    if state == "complete":
        return len(rungs) == most
    return len(rungs) < most and (state != "paused" or bool(rungs))
