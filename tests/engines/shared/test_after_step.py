"""after_step does the same under every plan and engine, resumes to the bit, and is refused where it cannot."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest

import grappe
from grappe.plan import Plan
from tests.engines.shared.teachers import Distilled
from tests.faults.resume_cell import hashes
from tests.faults.resuming import run
from tests.gallery.cell import runner
from tests.parity.cell import TOLERANCE, difference
from tests.processes import Pool

STEPS = 4
PLANS = (
    "replicate=2", "shard=2", "shard=2,zero=1,microbatches=2", "shard=2,offload=cpu", "tensor=2", "recompute",
    "exact=2,replicate=2", "engine=textbook,replicate=2", "engine=horovod,replicate=2", "engine=lightning,shard=2",
    "engine=deepspeed,replicate=2",
)  # fmt: skip


def train(pool: Pool, task: Distilled, plan: str) -> Any:
    size = Plan.parse(plan).processes
    return pool.run("tests.engines.shared.teachers:train", size, task, plan, STEPS)[0]


@functools.cache
def plain(pool: Pool, way: str) -> dict[str, Any]:
    return train(pool, Distilled(way=way), "")


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_moves_the_teacher_as_one_process_does(pool: Pool, plan: str) -> None:
    alone, spread = plain(pool, "lerp"), train(pool, Distilled(), plan)
    gap, worst = difference(alone["weights"], spread["weights"])
    assert gap <= TOLERANCE, f"{worst} is {gap:.1e} away"
    assert spread["scores"].loss == pytest.approx(alone["scores"].loss, rel=1e-5)


@pytest.mark.parametrize(("way", "plan"), [("data", "shard=2"), ("foreach", "shard=2"), ("noise", "replicate=2")])
def test_parameters_that_are_assigned_and_draws_are_those_of_one_process(pool: Pool, way: str, plan: str) -> None:
    alone, spread = plain(pool, way), train(pool, Distilled(way=way), plan)
    assert difference(alone["weights"], plain(pool, "nothing")["weights"])[0] > 1e-3
    assert difference(alone["weights"], spread["weights"])[0] <= TOLERANCE


def test_what_it_moved_resumes_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    for folder, steps in (("whole", STEPS), ("run", 2), ("run", STEPS)):
        run(pool, Distilled(), "shard=2", tmp_path / folder, steps=steps, save_every=1, evaluate_every=1)
    assert hashes(tmp_path / "run", STEPS) == hashes(tmp_path / "whole", STEPS)


def test_verify_judges_it_by_a_loop_of_its_own(pool: Pool) -> None:
    [verdict] = grappe.verify(Distilled(), ["shard=2,threads=1,device=cpu"], run=runner(pool))
    assert verdict.verdict == "same", verdict


@pytest.mark.parametrize(
    ("way", "plan", "words"),
    [
        ("lerp", "pipeline=2,microbatches=2", "no process has the whole model"),
        ("lerp", "engine=deepspeed,shard=2", "its own copy of the weights"),
        ("noise", "shard=2", "draws random numbers"),
        ("statistics", "replicate=2", "another value on each process"),
        ("other", "", "makes other parameters"),
        ("shape", "", r"shape \[8, 6\], not \[1, 6\].*teachers.py, line"),
        ("fails", "", "teachers.py, line"),
    ],
)
def test_what_no_plan_can_keep_is_refused_with_the_line(pool: Pool, way: str, plan: str, words: str) -> None:
    said = train(pool, Distilled(way=way), plan)
    assert re.match(rf"TaskError.*after_step\(\).*{words}", said), said
