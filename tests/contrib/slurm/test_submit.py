"""Submissions: what is said before a job is in the queue."""

import dataclasses
from pathlib import Path

import pytest

from grappe import sites
from grappe.cli.commands import app
from grappe.contrib.slurm.commands import read_submission
from grappe.contrib.slurm.resources import laid_out
from grappe.contrib.slurm.submit import _warnings
from grappe.errors import PlanError
from grappe.sites.sbatch import JobOptions
from tests.contrib.slurm.golden import script


@pytest.mark.parametrize(("seconds", "saves", "said"), [(60, True, True), (300, True, False), (60, False, False)])
def test_a_limit_that_a_start_uses_up_is_said(seconds: int, saves: bool, said: bool) -> None:
    job = dataclasses.replace(script(sites.find("narval"), "1-gpu", seconds=seconds), saves=saves)
    words = [warning for warning in _warnings(job) if "--time: a job of 60 s saves 20 s before its end" in warning]
    assert bool(words) is said


def test_two_processes_on_one_slice_are_refused_with_the_reason() -> None:
    job = JobOptions(site="narval", account="def-x", gpus=("1g.5gb",))
    with pytest.raises(PlanError, match=r"a100_1g\.5gb is a slice of a GPU, for one process: slices have no link"):
        laid_out(read_submission(("train", "digits", "--plan", "replicate=2"), job, app))


def test_the_script_counts_the_processes_that_launch_starts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("import torch")
    job = ("submit", "--site", "narval", "--account", "def-x", "--dry-run")
    for words, text in ((("--gpus", "2"), "2 processes on 1 node"), (("--gpus", "8"), "8 processes on 2 nodes")):
        assert app([*job, *words, "--", "launch", "train.py"]) == 0
        assert f"Canada. {text}, plan: replicate={words[1]}" in capsys.readouterr().out
