"""Jobs for the tests: submitted as a user does, watched from outside, and held to what they must leave behind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from grappe.training.run import Run
from tests.commands import GRAPPE, SLOW, ran
from tests.patience import PATIENCE_SECONDS
from tests.slurm.cluster import Cluster

EPOCHS = 5
PLAN = "replicate=2,threads=1,workers=0,device=cpu"


def grappe(*words: str, cwd: Path, code: int | None = 0) -> str:
    """Runs `grappe …`, and returns its output."""
    done = ran(GRAPPE, *words, cwd=cwd)
    if code is not None:
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def run_of(said: str) -> str:
    """Returns the run's folder that `grappe submit` has printed; what it says of its progress may follow."""
    return said.rsplit("run ", maxsplit=1)[-1].splitlines()[0]


def submit(*words: str, cwd: Path) -> str:
    """Submits to the cluster without its doctor, for ten minutes if no time is given; returns what is printed."""
    time_limit = () if "--time" in words else ("--time", "10m")
    return grappe("submit", "--site", "generic", "--no-doctor", *time_limit, *words, cwd=cwd)


def waited(said: str, cwd: Path) -> tuple[Path, str]:
    """Waits for the job that was submitted so; returns the run's folder and its log."""
    folder = run_of(said)
    grappe("wait", folder, cwd=cwd)
    return Path(folder), grappe("logs", folder, cwd=cwd)


class Job:
    """A training of tests/slow.py on two nodes, from its submission to its end."""

    def __init__(
        self, cluster: Cluster, folder: Path, name: str, *options: str, epochs: int = EPOCHS, pause: float = 0.05
    ) -> None:
        self.cluster, self.folder, self.run = cluster, folder, folder / name
        self.total = epochs * 8  # 32 points, 4 a step
        words = (SLOW, f"epochs={epochs}", f"pause={pause}", "--save-every", "4", "--log-samples", "--plan", PLAN)
        submit("--nodes", "2", *options, "--", "train", *words, "--run", str(self.run), cwd=folder)
        self._read()

    @classmethod
    def of(cls, cluster: Cluster, folder: Path, name: str) -> Job:
        """Returns the job of a run that was submitted in another way."""
        job = cls.__new__(cls)
        job.cluster, job.folder, job.run = cluster, folder, folder / name
        job._read()
        return job

    def _read(self) -> None:
        self.job = json.loads((self.run / "logs" / "jobs.jsonl").read_text().splitlines()[-1])["job"]

    def until(self, true: Callable[[], object], what: str) -> None:
        """Waits until `true()`."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not true():
            assert time.monotonic() < deadline, f"waited in vain until {what}\n{self.state()}{self.said()}"
            time.sleep(0.05)

    def steps(self) -> int:
        """The newest step in the curves."""
        return max((record["step"] for record in self._records()), default=0)

    def _records(self) -> list[dict]:
        return list(Run(self.run).records("step")) if Run.is_run(self.run) else []

    def trains(self, beyond: int = 5) -> None:
        """Waits until it is well under way."""
        self.until(lambda: self.steps() > beyond, f"it is beyond step {beyond}")

    def state(self) -> str:
        """Returns the job's state from Slurm."""
        return self.cluster.run("scontrol", "show", "job", self.job, check=False)

    def said(self) -> str:
        """The job's own log."""
        return "".join(file.read_text() for file in sorted((self.run / "logs").glob("job-*.out")))

    def restarts(self) -> int:
        """Returns the job's number of restarts."""
        return int(Run(self.run).read_description()["restarts"]) if Run.is_run(self.run) else 0

    def pids(self) -> list[int]:
        """Reads the ids of the job's training processes from their logs, of the newest start only."""
        own = "".join(file.read_text() for file in (self.run / "logs").glob("rank-0.log"))  # of one process alone
        lines = [line.split() for line in (self.said() + own).splitlines() if "step in" in line]
        newest: dict[str, int] = {}
        for words in lines:
            newest[words[0]] = int(words[-1])
        return [pid for pid in newest.values() if Path(f"/proc/{pid}").exists()]

    def ends(self) -> None:
        """Waits for its end; then the run is finished, and nothing shows that it was ever stopped."""
        self.until((self.run / "done").exists, "it is finished")
        self.until(lambda: not self.cluster.run("squeue", "-h", "-j", self.job, check=False).strip(), "it has ended")
        steps = [record["step"] for record in self._records()]
        assert steps == list(range(1, self.total + 1)), self.said()
        assert ids(self.run, steps) == self._undisturbed(), "other samples than without any stop"

    def _undisturbed(self) -> list[list[int]]:
        from grappe.data.sampling import SampleOrder

        order = SampleOrder(length=32, batch_size=4, seed=0)
        return [sorted(map(int, order.ids(step // 8, step % 8))) for step in range(self.total)]


def ids(run: Path, steps: list[int]) -> list[list[int]]:
    """The samples that each step took, of all processes together."""
    taken: dict[int, list[int]] = {step: [] for step in steps}
    for file in sorted((run / "samples").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "step":
                taken[record["step"]] += record["ids"]
    return [sorted(taken[step]) for step in steps]
