"""Study: the folder of a search: what is searched, the journal of its trials, and each trial's run."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from grappe.checkpoint.commit import LARGEST_LIST, read_json, write_json
from grappe.errors import RunError, UsageError
from grappe.fields import from_json
from grappe.launch import files
from grappe.table import Table, Tabular
from grappe.verbs.tune.journal import Journal, find_optuna
from grappe.verbs.tune.space import SearchDefinition, Trial

FILE = "study.json"
KIND = "tune"
FEWEST_COMPLETE = 8
"""Complete trials, below which nothing can be said about the importance of fields."""
ADOPTED = ("fixed_fields", "parallel", "threads")
"""Fields that a study keeps when it is continued, whatever --parallel and the machine are now."""


class Study(Tabular):
    """A search's folder, which one coordinator writes at a time.

    Attributes:
        folder: with study.json, optuna.jsonl (what the trials came to) and the trials' runs, trial-0000 and so on.
        search: what is searched.
    """

    def __init__(self, folder: Path, search: SearchDefinition) -> None:
        self.folder, self.search = folder, search

    @property
    def trials(self) -> list[Trial]:
        """The trials so far, by number.

        Raises:
            RunError: the journal is damaged.
            UsageError: Optuna is not installed.
        """
        return Journal(self.folder, self.search).trials

    @property
    def best(self) -> Trial | None:
        """The complete trial with the best objective; of equal ones the first. None: there is none."""
        return best_of(self.search, self.trials)

    def table(self) -> Table:
        """Returns a row for each trial: its state, the objective, the step, and the searched fields as texts."""
        return Table(
            {"trial": trial.number, "state": trial.state, self.search.metric: trial.value, "step": trial.step}
            | {name: trial.fields[name] for name in self.search.space}
            | ({"reason": trial.reason} if trial.reason else {})
            for trial in self.trials
        )

    def __repr__(self) -> str:
        return f"Study({str(self.folder)!r})"

    def run_folder(self, number: int) -> Path:
        """The folder of a trial's run."""
        return run_folder(self.folder, number)


def run_folder(study: Path, number: int) -> Path:
    """The folder of a trial's run, in the study's."""
    return study / f"trial-{number:04d}"


def best_of(search: SearchDefinition, trials: Sequence[Trial]) -> Trial | None:
    """The complete trial with the best objective; of equal ones the first. None: there is none."""
    sign = -1.0 if search.maximize else 1.0
    complete = [trial for trial in trials if trial.value is not None]
    return min(complete, key=lambda trial: (sign * (trial.value or 0.0), trial.number), default=None)


def open_study(folder: Path) -> Study:
    """Opens a study to look at it.

    Raises:
        RunError: the folder is no study.
    """
    file = folder / FILE
    files.refuse_link(file)
    if not file.is_file():
        raise RunError(f"{folder} is not a study (no {FILE}). grappe tune TASK … --study {folder} makes one")
    content = read_json(file, largest=LARGEST_LIST)
    kind = content.pop("kind", None)
    try:
        search = from_json(SearchDefinition, content)
    except ValueError as error:
        raise RunError(f"{file} is damaged, or not of this version of grappe ({error})") from error
    if kind != KIND or not content.keys() <= {field.name for field in dataclasses.fields(SearchDefinition)}:
        raise RunError(f"{file} is damaged, or not of this version of grappe")
    if files.kind(folder / "trials"):
        raise RunError(
            f"{folder} is a study of an earlier version of grappe: its runs stay as they are; give another --study"
        )
    return Study(folder, search)


def make_study(folder: Path, search: SearchDefinition) -> Study:
    """Makes a study, or opens the one in `folder` to go on with it.

    Raises:
        UsageError: there is a study that searches something else; the message names the first difference.
        RunError: the folder holds something else, or cannot be written.
    """
    try:
        if not files.kind(folder / FILE):
            folder.mkdir(parents=True, exist_ok=True)
            others = [name for name in files.names(folder) if not name.startswith(f".{FILE}.")]
            if others:
                raise RunError(f"{folder} holds {others[0]} and is not a study: give an empty or a new folder")
            write_json(folder / FILE, {"kind": KIND, **dataclasses.asdict(search)})
        study = open_study(folder)
        _refuse_other_search(study, search)
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}: give another with --study") from error
    return study


def _refuse_other_search(study: Study, search: SearchDefinition) -> None:
    """Raises UsageError at the first difference between the study's search and this command's."""
    there = study.search

    def refuse(verb: str, before: str, now: str) -> NoReturn:
        raise UsageError(
            f"the study {study.folder} {verb} {before}, and this command {now}: give what the study has, or another "
            "--study"
        )

    def option(name: str, value: Any) -> str:
        if name == "maximize":
            return "--maximize" if value else "--minimize"
        if name == "task":
            return f"the task {value}"
        words = f"--{name.replace('_', '-')}"
        return f"{words} {value}" if value not in (None, "") else f"no {words}"

    for verb, before, now in (("searches", there.space, search.space), ("has", there.fields, search.fields)):
        for name in sorted({*before, *now}):
            # A field that the task did not have then was what its default is now.
            new = now is search.fields and name not in before and name not in search.fixed_fields
            if before.get(name) != now.get(name) and not new:
                refuse(verb, *(f"{name}={of[name]}" if name in of else f"no {name}" for of in (before, now)))
    values = dataclasses.asdict(search)
    for name, value in dataclasses.asdict(there).items():
        if name not in (*ADOPTED, "fields") and value != values[name]:
            refuse("has", option(name, value), option(name, values[name]))


def importance(study: Study) -> dict[str, float]:
    """The share of each field in being a good trial; {} of too few trials.

    By PED-ANOVA (Watanabe et al. 2023).
    """
    journal = Journal(study.folder, study.search)
    complete = sum(trial.state == "complete" for trial in journal.trials)
    if complete < FEWEST_COMPLETE or len(study.search.space) < 2:
        return {}
    importances = find_optuna().importance
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the evaluator is new
        shares = importances.get_param_importances(journal.study, evaluator=importances.PedAnovaImportanceEvaluator())
    return {name: float(shares.get(name, 0.0)) for name in study.search.space}
