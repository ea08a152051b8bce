"""Kills of a study's coordinator and of its trials: the study is the undisturbed one, to the last bit.

    python -W ignore -m tests.faults.study_life 50                 # kills; 20 trials, 4 at a time
    python -W ignore -m tests.faults.study_life 50 --parallel 1    # the sampler knows the results: tpe
    python -W ignore -m tests.faults.study_life 50 --halving 3     # with successive halving
    python -W ignore -m tests.faults.study_life 50 --slurm         # trials as jobs, on the cluster of make slurm-up

A study is made that nobody kills. Then the same command is started, and SIGKILL strikes the coordinator or trials, at
random, or Ctrl-C all of them; the command is started again whenever it ended. In the end the fields, the results, the
best trial and each step of each trial's curves are compared. Trials that are jobs are also cancelled, and compared with
those of a study without Slurm. Several trials at a time are drawn at random, as what tpe knows depends on which ends
first; so does which is promoted, and then each trial is compared as far as both studies trained it.
"""

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from grappe.contrib.tune.study import open_study
from grappe.training.run import Run
from tests.commands import GRAPPE, Command, send, until

ROOT = Path(__file__).parents[2]
LINE = str(ROOT / "tests/contrib/tune/line.py")
PLAN = "device=cpu,threads=1,workers=0"
CODES = (0, 75, 130, -signal.SIGINT, -signal.SIGKILL)
"""Of a command that ends, or is ended: also by Ctrl-C before it can handle it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drill:
    """A study to be killed, and how often."""

    kills: int
    trials: int
    parallel: int
    halving: int | None = None
    slurm: bool = False
    seed: int = 0

    @property
    def sampler(self) -> str:
        """The sampler whose draws do not depend on which trial ends first."""
        return "tpe" if self.parallel == 1 else "random"

    def words(self, study: Path, *, slurm: bool) -> list[str]:
        """The command."""
        space = ["lr=0.01..1:log", "width=1|2|3", "epochs=9", "pause=0.05"]
        if slurm:
            wanted = {
                "trials": self.trials,
                "parallel": self.parallel,
                "halving": self.halving,
                "sampler": self.sampler,
            }
            return [sys.executable, "-m", "tests.slurm.study", str(study), LINE, json.dumps(wanted), *space]
        halving = ["--halving", str(self.halving)] if self.halving else []
        return [
            GRAPPE, "tune", LINE, *space, "--trials", str(self.trials), "--parallel", str(self.parallel),
            "--plan", PLAN, *halving, "--sampler", self.sampler, "--study", str(study),
        ]  # fmt: skip


@dataclasses.dataclass
class Figures:
    """Counts of what was killed."""

    coordinators: int = 0
    interrupts: int = 0
    trials: int = 0
    cancelled: int = 0

    @property
    def kills(self) -> int:
        """Number of kills in all."""
        return self.coordinators + self.interrupts + self.trials + self.cancelled


def outcome(study: Path) -> dict[str, object]:
    """All that a study has come to: fields, results, best, and every step of every trial."""
    found = open_study(study)
    rows = [dataclasses.asdict(one) for one in found.trials]
    steps = {}
    for folder in sorted(study.glob("trial-*")):
        records = [(one["step"], one["loss"], one["lr"]) for one in Run(folder).records("step")]
        assert [step for step, *_ in records] == list(range(1, len(records) + 1)), f"{folder}: a step twice, or none"
        steps[folder.name] = records
    best = found.best
    return {"rows": rows, "steps": steps, "best": best and best.number}


def undisturbed(drill: Drill, study: Path) -> dict[str, object]:
    """Makes the study that nobody kills."""
    command = _start(drill, study, slurm=False)
    try:
        code, _, err = command.end()
        assert code == 0, err
    finally:
        command.close()
    return outcome(study)


def in_training(study: Path) -> list[int]:
    """The process ids of trials that have a checkpoint beyond the first, and hold their run."""
    found = []
    for lease in study.glob("trial-*/lease.json"):
        try:
            pid = int(json.loads(lease.read_text())["pid"])
            words = Path(f"/proc/{pid}/cmdline").read_text()
        except (OSError, ValueError):
            continue
        if "grappe" in words and len(list(lease.parent.glob("checkpoints/step-*"))) > 1:
            found.append(pid)
    return found


def disturbed(drill: Drill, study: Path, figures: Figures) -> dict[str, object]:
    """Makes the study through all the kills."""
    dice = random.Random(drill.seed)
    command = _start(drill, study, slurm=drill.slurm)
    try:
        while figures.kills < drill.kills:
            until(lambda: command.process.poll() is not None or in_training(study), "a trial trains")
            time.sleep(dice.random())
            ended = command.process.poll() is not None
            if not ended and (dice.random() < 0.5 and _strike(drill, study, figures, dice)):
                continue
            if not ended and dice.random() < 0.2:
                command.stop_signal()
                figures.interrupts += 1
            elif not ended:
                command.process.kill()
                figures.coordinators += 1
            code, _, err = command.end()
            assert code in CODES, err
            command.close()
            if ended and code == 0:
                break  # there is nothing left to kill
            command = _start(drill, study, slurm=drill.slurm)
        code, out, err = command.end()
        while code == 75:
            command.close()
            command = _start(drill, study, slurm=drill.slurm)
            code, out, err = command.end()
        assert code == 0, err
        assert "best: trial" in out
    finally:
        command.close()
    return outcome(study)


def _strike(drill: Drill, study: Path, figures: Figures, dice: random.Random) -> bool:
    """Kills one or two trials; returns whether there were any."""
    if not (living := in_training(study)):
        return False
    victims = dice.sample(living, min(len(living), dice.choice((1, 1, 2))))
    if drill.slurm and dice.random() < 0.3:
        job = Path(f"/proc/{victims[0]}/environ").read_text().partition("SLURM_JOB_ID=")[2].partition("\0")[0]
        subprocess.run(["scancel", job], check=False)
        figures.cancelled += 1
        return True
    struck = send(victims, signal.SIGKILL)
    figures.trials += struck
    return struck


def _start(drill: Drill, study: Path, *, slurm: bool) -> Command:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    more = {"PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"}
    if slurm:
        more["SLURM_CONF"] = os.environ["SLURM_CONF"]  # the other variables of a job's are not passed on
    return Command(*drill.words(study, slurm=slurm), cwd=study.parent, **more)


def compared(drill: Drill, folder: Path) -> Figures:
    """Drills a study in `folder`.

    Raises:
        AssertionError: the study is another than the undisturbed one.
    """
    figures = Figures()
    expected = undisturbed(drill, folder / "undisturbed")
    found = disturbed(drill, folder / "disturbed", figures)
    if drill.halving and drill.parallel > 1:
        expected, found = _alike(expected, found), _alike(found, expected)
    for name, value in expected.items():
        assert found[name] == value, f"{name}: {found[name]}, not {value}"
    return figures


def _alike(outcome: dict, other: dict) -> dict[str, object]:
    """Returns a study's outcome as far as the other one went: each promotes the trials that are best when they end."""
    rows = zip(outcome["rows"], other["rows"], strict=True)
    steps = {name: records[: len(other["steps"][name])] for name, records in outcome["steps"].items()}
    rungs = [(row["fields"], row["rungs"][: len(there["rungs"])]) for row, there in rows]
    return {"rungs": rungs, "steps": steps}


def main() -> None:
    """Drills one study after another, until there were enough kills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=50)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--halving", type=int)
    parser.add_argument("--slurm", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of the first study's kills")
    asked = parser.parse_args()
    left, seed = asked.kills, asked.seed
    while left > 0:
        drill = Drill(**{**vars(asked), "kills": left, "seed": seed})
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="study-", dir="/tmp") as folder:
            figures = compared(drill, Path(folder))
        print(f"{time.monotonic() - began:.0f} s: {figures}, {figures.kills} kills")
        left, seed = left - figures.kills, seed + 1


if __name__ == "__main__":
    main()
