"""A model whose training does not fit into the memory of a process, until what waits goes to a disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grappe.training.options import Options
from grappe.training.run import Run
from tests.engines.limited import REFUSED
from tests.parity import reference
from tests.parity.wide import Wide
from tests.processes import Pool

pytest.importorskip("deepspeed")
pytestmark = [
    pytest.mark.usefixtures("operators"),
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only"),
]

TASK = Wide(width=1024, depth=40, samples=4, batch_size=4, epochs=8)
NUMBERS = 40 * (1024 * 1024 + 1024)
PLAIN = 16 * NUMBERS
"""Bytes of parameters, gradients and Adam's two moments in fp32: the least that one plain process needs."""
ROOM = PLAIN * 15 // 16


def train(pool: Pool, plan: str, folder: Path, steps: int) -> str:
    options = Options(steps=steps, save_every=2)
    return pool.run("tests.engines.limited:train", 1, TASK, plan, folder, options, ROOM)[0]


def test_the_disk_takes_what_one_process_has_no_memory_for(pool: Pool, tmp_path: Path) -> None:
    told = train(pool, "", tmp_path / "plain", 2)
    assert told.startswith(REFUSED), f"{ROOM} bytes were enough for a plain training: {told}"
    (tmp_path / "disk").mkdir()
    plan = f"engine=deepspeed,offload=nvme:{tmp_path / 'disk'}"
    assert "paused after --steps, 2 steps" in train(pool, plan, tmp_path / "run", 2)
    losses = [record["loss"] for record in Run(tmp_path / "run").records() if record["kind"] == "step"]
    assert losses == pytest.approx(reference.train(TASK, 2)["losses"], rel=1e-5)
    saved = Run(tmp_path / "run").latest()
    assert saved is not None
    assert saved.step == 2
    kinds = {name.rpartition(".")[2] for name in saved.read_tensors()}
    assert kinds == {"weight", "bias", "exp_avg", "exp_avg_sq"}
    assert not list((tmp_path / "disk").iterdir())
