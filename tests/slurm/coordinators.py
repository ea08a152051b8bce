"""Coordinators for the tests: of studies whose trials are jobs, started as a user does, and watched from outside."""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.commands import Command
from tests.contrib.tune import line
from tests.patience import PATIENCE_SECONDS

LINE = str(Path(line.__file__))
SPACE = {"lr": "0.01..1:log", "width": "1|2"}
ROOT = str(Path(__file__).parents[2])


def words(slow: Path) -> list[str]:
    """Returns the fields of a task that has 2 steps an epoch, and a checkpoint after each."""
    return [*(f"{name}={text}" for name, text in SPACE.items()), "epochs=20", "pause=0.25", f"while_there={slow}"]


@contextlib.contextmanager
def coordinator(study: Path, *words: str, **wanted) -> Iterator[Command]:
    """Starts a study whose trials are jobs, two at a time."""
    path = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    more = {"PYTHONPATH": path, "SLURM_CONF": os.environ["SLURM_CONF"]}
    as_text = json.dumps({"parallel": 2, **wanted})
    command = [sys.executable, "-m", "tests.slurm.study", str(study), LINE, as_text, *words]
    found = Command(*command, cwd=study.parent, **more)
    try:
        yield found
    finally:
        found.close()


def says(command: Command, told: str) -> None:
    """Waits until a coordinator has said this."""
    assert command.process.stderr is not None
    said = []
    patience = threading.Timer(PATIENCE_SECONDS, command.process.kill)
    patience.start()
    try:
        for text in command.process.stderr:
            said.append(text)
            if told in text:
                return
    finally:
        patience.cancel()
    raise AssertionError(f"it ended, and has not said {told}: {said}")


def ends(command: Command) -> None:
    """Waits until a study is complete."""
    code, out, err = command.end()
    assert code == 0, err
    assert "best: trial" in out


def jobs_of(study: Path) -> list[list[str]]:
    """The jobs of each trial."""
    files = sorted(study.glob("trial-*/logs/jobs.jsonl"))
    return [[json.loads(text)["job"] for text in file.read_text().splitlines()] for file in files]
