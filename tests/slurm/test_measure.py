"""grappe measure --site: each point a job of a real Slurm, gathered once they have ended."""

import json
import re
import time
from pathlib import Path

import pytest

from grappe.training.run import Run
from tests.commands import SLOW
from tests.patience import PATIENCE_SECONDS
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import grappe

pytestmark = pytest.mark.slow


def test_points_become_jobs_and_jobs_become_points(cluster: Cluster, tmp_path: Path) -> None:
    """Two plans; before their jobs have begun, they are looked at too."""
    plans = [f"{plan}device=cpu,threads=1,workers=0" for plan in ("", "replicate=2,")]
    cluster.run("scontrol", "update", "partitionname=gpu", "state=down")  # takes jobs, and starts none
    try:
        runs, gather = _submitted(plans, tmp_path)
        assert "nothing to gather yet: its job" in grappe(*gather, cwd=tmp_path, code=2)
    finally:
        cluster.run("scontrol", "update", "partitionname=gpu", "state=up")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while cluster.run("squeue", "-h").strip():
        assert time.monotonic() < deadline, [file.read_text() for file in tmp_path.rglob("job-*.out")]
        time.sleep(0.2)
    # Beyond its one epoch of 8 steps: a training that is measured takes all that are asked for, and saves nothing.
    assert [len(list(Run(run).records("step"))) for run in runs] == [15, 15]
    assert not any(file for run in runs for file in run.glob("checkpoints/step-000015"))
    table = grappe(*gather, cwd=tmp_path)
    assert "jobs do not count them" in table
    points = json.loads((tmp_path / "m.json").read_text())["points"]
    assert [point["processes"] for point in points] == [1, 2]
    # A step pauses for 0.02 s, however many processes share its 4 samples.
    assert all(0 < point["samples_per_second"] < 4 / 0.02 for point in points)


def _submitted(plans: list[str], folder: Path) -> tuple[list[Path], list[str]]:
    """The runs, and the command that gathers them."""
    said = grappe(
        "measure", SLOW, "pause=0.02", "epochs=1", "--plan", plans[0], "--plan", plans[1], "--steps", "10",
        "--repeats", "1", "--site", "generic", "--job-time", "5m", "--out", "m.json", cwd=folder,
    )  # fmt: skip
    assert re.findall(r"^job \d+: (\d cores?) ", said, re.MULTILINE) == ["1 core", "2 cores"]
    gather = said.rpartition("once they have ended: grappe ")[2].split()
    return [Path(word) for word in gather if "/measure-" in word], gather
