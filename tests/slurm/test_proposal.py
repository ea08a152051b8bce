"""grappe measure --proposal on a real Slurm: jobs of one, two and four nodes, whose efficiency is planted."""

import json
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import grappe

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
TASK = str(Path(__file__).with_name("planted.py"))
FIXED, SHARED, BATCH = 0.5, 0.25, 8
STRONG = {count: (FIXED + SHARED * BATCH) / (count * FIXED + SHARED * BATCH) for count in (1, 2, 4)}
"""Efficiency, as planted: 1, 0.83, 0.625; of weak scaling it is 1."""
SITE = """
title = "Four nodes"
source = "tests"
date = 2026-12-01
node = { cores = 8, memory_gb = 19 }
queue = [{ name = "wide", options = ["--partition=wide"], max_nodes = 4 }]
scaling = { counts = 3, efficiency = 0.75, source = "tests" }
charge = { unit = "node-hours", gpu = 1, cores_per_unit = 1 }

[ask]
account = "none"
options = ["--exclusive"]
"""


def test_the_efficiency_is_the_planted_one(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole nodes, so that no other job's start-up falls into the steps of one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "grappe" / "sites").mkdir(parents=True)
    (tmp_path / "grappe" / "sites" / "four.toml").write_text(SITE)
    said = grappe(
        "measure", TASK, f"fixed={FIXED}", f"shared={SHARED}", "--proposal", "--site", "four", "--plan",
        "threads=1,workers=0", "--steps", "10", "--repeats", "1", "--job-time", "10m", "--out", "p.html", cwd=tmp_path,
    )  # fmt: skip
    assert "5 jobs on 1, 2, 4 nodes: strong and weak scaling, 10 steps each" in said
    deadline = time.monotonic() + 5 * PATIENCE_SECONDS
    while cluster.run("squeue", "-h").strip():
        assert time.monotonic() < deadline, [file.read_text() for file in tmp_path.rglob("job-*.out")]
        time.sleep(0.5)
    gather = said.rpartition("once they have ended: grappe ")[2].splitlines()[0].split()
    made = json.loads(grappe(*gather, "--json", cwd=tmp_path, code=1).splitlines()[-1])
    assert {row["nodes"]: row["efficiency"] for row in made["rows"] if row["kind"] == "strong"} == pytest.approx(
        STRONG, abs=0.02
    )
    assert [row["efficiency"] for row in made["rows"] if row["kind"] == "weak"] == pytest.approx([1, 1], abs=0.02)
    states = {check["rule"]: check["state"] for check in made["checks"]}
    assert states["the same losses on every count"] == states["the same input in all"] == "passed"
    assert states["parallel efficiency of at least 75%"] == "failed"
    assert made["nodes"] == 2
    assert {file.suffix for file in tmp_path.glob("p.*")} == {".html", ".csv", ".tex"}
