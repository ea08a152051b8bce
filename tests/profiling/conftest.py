"""Fixtures of control groups: which ones a process is in, as Linux writes it."""

from pathlib import Path

import pytest


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The groups of a Slurm job's step, in version 1 and 2."""
    file = tmp_path / "own"
    file.write_text("9:memory:/slurm/job_7/step_0\n2:cpu,cpuacct:/slurm/job_8/step_1\n0::/system.slice/job_7\n")
    return file
