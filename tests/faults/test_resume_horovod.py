"""Killed and resumed under Horovod: the same bits under the same plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.resume_cell import curves, hashes, samples
from tests.faults.test_resume import STEPS, run
from tests.parity.tasks import Images
from tests.processes import Pool


@pytest.mark.parametrize("plan", ["engine=horovod", "engine=horovod,replicate=2,microbatches=2"])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_goes_on_to_the_same_bits(pool: Pool, tmp_path: Path, plan: str, rule: str) -> None:
    task = Images(rule=rule, batchnorm=True, dropout=0.3, clip=0.5)
    run(pool, task, plan, tmp_path / "whole", save_every=2)
    run(pool, task, plan, tmp_path / "parts", 5, save_every=2)
    hashes(tmp_path / "parts", 4)
    assert "resuming from step 4" in run(pool, task, plan, tmp_path / "parts", save_every=2)
    assert hashes(tmp_path / "parts", STEPS) == hashes(tmp_path / "whole", STEPS)
    assert curves(tmp_path / "parts") == curves(tmp_path / "whole")
    assert samples(tmp_path / "parts") == samples(tmp_path / "whole")
