"""The kill drill: coordinator and trials killed, again and again; the study is the undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

from grappe.verbs.tune.study import open_study
from tests.commands import GRAPPE, Command, until

LINE = str(Path(__file__).with_name("line.py"))
# More, for a long drill: the figures of decision 97 are of 30 kills and 20 trials.
KILLS = int(os.environ.get("GRAPPE_TUNE_KILLS", "6"))
TRIALS = int(os.environ.get("GRAPPE_TUNE_TRIALS", "6"))


def words(study: Path) -> list[str]:
    space = ["lr=0.01..1:log", "width=1|2|3", "epochs=6", "pause=0.05"]
    return [GRAPPE, "tune", LINE, *space, "--trials", str(TRIALS), "--parallel", "2", "--study", str(study)]


def rows(study: Path) -> list[tuple]:
    return [(one.number, one.fields, one.value) for one in open_study(study).trials]


def in_training(study: Path) -> list[int]:
    """The process ids of trials that have a checkpoint, and hold their run."""
    found = []
    for lease in study.glob("trial-*/lease.json"):
        try:
            pid = json.loads(lease.read_text())["pid"]
        except (OSError, ValueError):
            continue
        saved = len(list(lease.parent.glob("checkpoints/step-*"))) > 1
        if (
            saved and "grappe" in Path(f"/proc/{pid}/cmdline").read_text()
            if Path(f"/proc/{pid}").exists()
            else False
        ):
            found.append(pid)
    return found


def test_a_study_survives_kills(tmp_path: Path) -> None:
    undisturbed = Command(*words(tmp_path / "a"), cwd=tmp_path)
    try:
        code, out, err = undisturbed.end()
        assert code == 0, err
    finally:
        undisturbed.close()
    expected = rows(tmp_path / "a")
    assert len(expected) == TRIALS

    study, dice = tmp_path / "b", random.Random(0)
    command = Command(*words(study), cwd=tmp_path)
    coordinators = 0
    try:
        for number in range(KILLS):
            until(lambda: command.process.poll() is not None or in_training(study), "a trial trains")
            time.sleep(dice.random())
            if command.process.poll() is None and number % 3:
                for pid in in_training(study)[: 1 + number % 2]:
                    os.kill(pid, signal.SIGKILL)
                continue
            if number == 0:
                command.stop_signal()  # Ctrl-C
                code, _, err = command.end()
                assert code in (0, 75), err
                assert code == 0 or "the same command with --study" in err
            else:
                command.process.kill()
                command.process.wait()
            command.close()
            coordinators += 1
            command = Command(*words(study), cwd=tmp_path)
        code, out, err = command.end()
        assert code == 0, err
    finally:
        command.close()
    assert coordinators >= KILLS // 3
    assert rows(study) == expected
    assert "best: trial" in out
