"""Study: the folder of a search: what is searched, the journal of its trials, and each trial's run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from grappe.checkpoint.commit import LARGEST_LIST, read_json, write_json
from grappe.contrib.tune.journal import Journal
from grappe.contrib.tune.space import SearchDefinition, Trial
from grappe.errors import RunError, UsageError
from grappe.fields import from_json
from grappe.launch import files
from grappe.table import Table, Tabular

FILE = "study.json"
KIND = "tune"
EARLIER = ("optuna.jsonl", "trials")
"""Entries that only the folders of studies of earlier versions have."""
ADOPTED = ("fixed_fields", "trials", "parallel", "threads")
"""Fields that a study keeps when it is continued, whatever --parallel and the machine are now."""


class Study(Tabular):
    """A search's folder, which one coordinator writes at a time.

    Attributes:
        folder: with study.json, trials.jsonl (what the trials came to) and the trials' runs, trial-0000 and so on.
        search: what is searched.
    """

    def __init__(self, folder: Path, search: SearchDefinition) -> None:
        self.folder, self.search = folder, search

    @property
    def trials(self) -> list[Trial]:
        """The trials so far, by number.

        Raises:
            RunError: the journal is damaged.
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
    return min(complete, key=lambda trial: sign * (trial.value or 0.0), default=None)


def open_study(folder: Path) -> Study:
    """Opens a study to look at it.

    Raises:
        RunError: the folder is no study.
    """
    file = folder / FILE
    files.refuse_link(file)
    if not file.is_file():
        raise RunError(f"{folder} is not a study (no {FILE}). grappe tune TASK … --study {folder} makes one")
    if any(files.kind(folder / name) for name in EARLIER):
        raise RunError(
            f"{folder} is a study of an earlier version of grappe: its runs stay as they are; give another --study"
        )
    content = read_json(file, largest=LARGEST_LIST)
    kind = content.pop("kind", None)
    try:
        search = from_json(SearchDefinition, content)
    except (ValueError, UsageError) as error:
        raise RunError(f"{file} is damaged, or not of this version of grappe ({error})") from error
    if kind != KIND or not content.keys() <= {field.name for field in dataclasses.fields(SearchDefinition)}:
        raise RunError(f"{file} is damaged, or not of this version of grappe")
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
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}: give another with --study") from error
    there, now = _as_given(study.search), _as_given(search)
    for name in there | now:
        # A field that the task did not have then was what its default is now.
        new = name in search.fields and name not in there and name not in search.fixed_fields
        if there.get(name) != now.get(name) and not new:
            before, after = (words.get(name, f"no {name}") for words in (there, now))
            raise UsageError(
                f"the study {study.folder} has {before}, and this command {after}: give what the study has, or another "
                "--study"
            )
    return study


def _as_given(search: SearchDefinition) -> dict[str, str]:
    """The parts of a search as a user writes them, by name."""
    words = {name: f"{name}={value}" for name, value in sorted({**search.space, **search.fields}.items())}
    options = {name: value for name, value in vars(search).items() if name not in (*ADOPTED, "space", "fields")}
    switch = "--maximize" if options.pop("maximize") else "--minimize"
    words |= {"the task": f"the task {options.pop('task')}", "--minimize": switch}
    options = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    return words | {name: f"{name} {value}" for name, value in options.items() if value not in (None, "")}
