"""Submissions: what is said before a job is in the queue."""

import dataclasses

import pytest

from grappe import sites
from grappe.contrib.slurm.submit import _warnings
from tests.contrib.slurm.golden import script


@pytest.mark.parametrize(("seconds", "saves", "said"), [(60, True, True), (300, True, False), (60, False, False)])
def test_a_limit_that_a_start_uses_up_is_said(seconds: int, saves: bool, said: bool) -> None:
    job = dataclasses.replace(script(sites.find("narval"), "1-gpu", seconds=seconds), saves=saves)
    words = [warning for warning in _warnings(job) if "--time: a job of 60 s saves 20 s before its end" in warning]
    assert bool(words) is said
