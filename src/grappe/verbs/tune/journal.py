"""Journal of a study: Optuna's study as JSON lines; draws trials' fields, and ends those that are not promoted."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

from grappe.checkpoint.commit import write_all
from grappe.errors import RunError, UsageError, disk_advice
from grappe.fields import from_json
from grappe.launch import files
from grappe.verbs.tune.space import Axis, Choices, SearchDefinition, Space, Trial, of_texts

FILE = "optuna.jsonl"
NAME = "grappe"
"""Optuna's name of the study in its file."""
LARGEST = 1 << 28
"""Bytes of a file that is read: a trial takes about 2,000."""
STARTUP = 10
"""Trials that TPE draws at random, before it models the observed ones."""
CELLS = 10_000
END = b"}\n"
"""End of the last line of what was written together."""
STATES = {"RUNNING": "open", "PRUNED": "paused", "COMPLETE": "complete", "FAIL": "failed"}
"""By Optuna's state of a trial: that of its record."""


class JournalFile:
    """A backend of Optuna's JournalStorage, for a file that one process writes, which holds the study's lease.

    Optuna's own backend makes the file of a study that is only looked at, follows links, and waits half a minute for
    the lock of a writer that was killed. It reads this file; here, operations that belong together are written
    together: a space ends all of their lines but the last, and without that one they are overwritten.

    Args:
        writes: whether operations reach the file; otherwise they stay in memory.

    Raises:
        RunError: the file is a link, or too large.
        ValueError: a line is no JSON.
    """

    def __init__(self, file: Path, *, writes: bool) -> None:
        content = files.read_bytes(file, largest=LARGEST) if files.kind(file) else b""
        content = content[: content.rfind(END) + len(END)] if END in content else b""
        self._file, self._size, self._holds = file, len(content), not writes
        self._logs: list[dict[str, Any]] = [json.loads(line) for line in content.splitlines()]
        self._unwritten: list[dict[str, Any]] = []

    def read_logs(self, log_number_from: int) -> Sequence[dict[str, Any]]:
        """Returns Optuna's operations from a number on."""
        return self._logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Adds operations; raises as `together` does."""
        self._logs += logs
        self._unwritten += logs
        if not self._holds:
            self._write()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context whose operations are written at its end.

        Raises:
            RunError: the disk is full, or may not be written.
        """
        self._holds = True
        yield
        self._holds = False
        self._write()

    def _write(self) -> None:
        folder = self._file.parent
        text = " \n".join(json.dumps(log, separators=(",", ":")) for log in self._unwritten) + "\n"
        try:
            with files.appender(self._file) as stream:
                stream.truncate(self._size)
                written = write_all(stream.fileno(), text.encode())
                os.fsync(stream.fileno())
        except OSError as error:
            raise RunError(
                f"{folder} cannot be written: {error.strerror}: {disk_advice(error)}; then start the same command again"
            ) from error
        self._size += written
        self._unwritten.clear()


class Journal:
    """The trials of a study, and what they have come to.

    Attributes:
        study: Optuna's study.
        open: by number, Optuna's trials that have not ended.

    Args:
        writes: whether trials are drawn and ended; by the one process that holds the study's lease.

    Raises:
        RunError: the journal is damaged.
        UsageError: Optuna is not installed.
    """

    def __init__(self, folder: Path, search: SearchDefinition, *, writes: bool = False) -> None:
        self._optuna = optuna = find_optuna()
        self._search, self._space = search, of_texts(search.space)
        pruners, file = optuna.pruners, folder / FILE
        try:
            self._file = JournalFile(file, writes=writes)
            storage = optuna.storages.JournalStorage(self._file)
            self.study = optuna.create_study(
                storage=storage,
                study_name=NAME,
                direction="maximize" if search.maximize else "minimize",
                pruner=pruners.SuccessiveHalvingPruner(1, search.halving) if search.halving else pruners.NopPruner(),
                load_if_exists=True,
            )
            study = storage.get_study_id_from_name(NAME)
            begun = {
                trial.number: storage.get_trial_id_from_study_id_trial_number(study, trial.number)
                for trial in self.trials
                if trial.state == "open"
            }
        except RunError:
            raise
        except Exception as error:  # whatever Optuna makes of lines that are not its own
            raise RunError(f"{file} is damaged, or not of this version of grappe ({error})") from error
        self.open = {number: optuna.trial.Trial(self.study, trial) for number, trial in begun.items()}

    @property
    def trials(self) -> list[Trial]:
        """The trials that have begun, by number."""
        frozen = self.study.get_trials(deepcopy=False)
        return [self._record(trial) for trial in frozen if trial.state.name in STATES]

    def trial(self, number: int) -> Trial:
        """A trial that has begun."""
        return self._record(self._frozen(number))

    def ask(self) -> int:
        """Draws the fields of a new trial, which are on disk then; returns its number."""
        with self._file.together():
            trial = self.study.ask()
            for name, axis in self._space.items():
                self.study.sampler = self._sampler(trial.number, name)
                axis.suggest(trial, name)
        self.open[trial.number] = trial
        return trial.number

    def report(self, number: int, value: float, step: int) -> None:
        """Notes the objective at a trial's next rung; ends the trial at the last one, or if it is not promoted."""
        trial, rung = self.open[number], len(self._frozen(number).intermediate_values)
        with self._file.together():
            trial.set_user_attr("step", step)
            trial.report(value, (self._search.halving or 1) ** rung)
            if rung + 1 == self._search.rungs:
                self.study.tell(self.open.pop(number), value)
            elif trial.should_prune():
                self.study.tell(self.open.pop(number), state=self._optuna.trial.TrialState.PRUNED)

    def fail(self, number: int, *, reason: str) -> None:
        """Ends a trial without an objective."""
        with self._file.together():
            self.open[number].set_user_attr("reason", reason)
            self.study.tell(self.open.pop(number), state=self._optuna.trial.TrialState.FAIL)

    def _frozen(self, number: int) -> Any:
        return self.study.get_trials(deepcopy=False)[number]

    def _sampler(self, number: int, field: str) -> Any:
        """The sampler of a trial's field: its random state, which a kill would lose, is a function of the seed."""
        digest = hashlib.sha256(f"{self._search.seed}/{number}/{field}".encode()).digest()
        samplers, seed = self._optuna.samplers, int.from_bytes(digest[:4], "big")
        if self._search.sampler == "tpe":  # Bergstra et al. (2011), "Algorithms for hyper-parameter optimization"
            return samplers.TPESampler(seed=seed, n_startup_trials=STARTUP, constant_liar=True)
        if self._search.sampler == "random":
            return samplers.RandomSampler(seed=seed)
        text = grid(self._space)[number][field]
        value = text if isinstance(self._space[field], Choices) else int(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this sampler is new
            return samplers.PartialFixedSampler({field: value}, samplers.RandomSampler(seed=seed))

    def _record(self, frozen: Any) -> Trial:
        """The record of one of Optuna's trials.

        Raises:
            ValueError: it is not of this study.
        """
        rungs = [value for _, value in sorted(frozen.intermediate_values.items())]
        trial = from_json(
            Trial,
            {
                **frozen.user_attrs,
                "number": frozen.number,
                "fields": {name: axis.suggest(frozen, name) for name, axis in self._space.items()},
                "state": STATES[frozen.state.name],
                "value": rungs[-1] if frozen.state.name == "COMPLETE" else None,
                "rungs": rungs,
            },
        )
        if not all(map(math.isfinite, trial.rungs)) or len(rungs) > self._search.rungs:
            raise ValueError(f"its rungs are {rungs}")
        return trial


def find_optuna() -> Any:
    """Imports Optuna.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise UsageError("a search needs Optuna: pip install 'grappe[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def rung_parts(search: SearchDefinition) -> list[Fraction]:
    """The part of a training that each rung ends at."""
    eta, rungs = search.halving or 1, search.rungs
    return [Fraction(1, eta ** (rungs - 1 - rung)) for rung in range(rungs)]


def grid(space: Space) -> list[dict[str, str]]:
    """All combinations, the last field changing fastest.

    Raises:
        UsageError: a field's range has no list of values; or there are too many combinations.
    """
    axes = {field: _values(field, axis) for field, axis in space.items()}
    if math.prod(map(len, axes.values())) > CELLS:
        raise UsageError(f"the grid has more than {CELLS:,} cells: give fewer values, or --sampler random")
    return [dict(zip(axes, cell, strict=True)) for cell in itertools.product(*axes.values())]


def _values(field: str, axis: Axis) -> Sequence[str]:
    if isinstance(axis, Choices):
        return axis.texts
    if axis.integer and not axis.log and axis.high - axis.low < CELLS:
        return [str(value) for value in range(int(axis.low), int(axis.high) + 1)]
    spread = dict.fromkeys(axis.text(axis.at(part / 3)) for part in range(4))
    raise UsageError(
        f"{field}={axis}: a grid needs values, for example '{field}={'|'.join(spread)}'; "
        "ranges are for --sampler random and tpe"
    )
