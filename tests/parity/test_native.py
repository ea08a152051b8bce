"""Compares cells of plans with one plain process: contract 7. Their list is cover.txt."""

import functools
import math

import pytest

from grappe.plan import Plan
from grappe.task import Task
from tests.parity import reference
from tests.parity.cell import TOLERANCE, difference
from tests.parity.tasks import Images, Tokens
from tests.processes import Pool

STEPS = 6
TASKS = {
    "sgd": Images(rule="sgd"),
    "adam": Images(rule="adam", clip=0.5),
    "tokens": Tokens(),
    "tokens-sgd": Tokens(rule="sgd", clip=None, batch_size=5),
    "tiny": Images(batch_size=3, samples=7, epochs=4, clip=0.5),
    "frozen": Images(frozen=True, rule="adam"),
    "unused": Images(unused=True),
}


@functools.cache
def expected(name: str, pieces: int = 1, ways: int = 1) -> dict:
    """The plain loop's result, computed once for all plans."""
    return reference.train(TASKS[name], STEPS, pieces, ways)


def assert_learned_alike(found: list[dict], wanted: dict, plan: str, tolerance: float = TOLERANCE) -> None:
    """Holds process 0's weights and each process's losses to those of another training."""
    gap, name = difference(wanted["weights"], found[0]["weights"])
    assert gap <= tolerance, f"{plan}: {name} is {gap:.1e} away"
    for one in found:
        assert one["losses"] == pytest.approx(wanted["losses"], rel=tolerance)


def check(pool: Pool, task: Task, plan: str, wanted: dict, steps: int = STEPS, tolerance: float = TOLERANCE) -> dict:
    """Runs a cell and compares it; gives back what process 0 found."""
    found = pool.run("tests.parity.cell:train", Plan.parse(plan).processes, task, plan, steps)
    assert_learned_alike(found, wanted, plan, tolerance)
    for one in found:
        if not has_local_statistics(task, plan):
            assert one["scores"].loss == pytest.approx(wanted["validation"], rel=tolerance)
            assert dict(one["scores"].metrics) == {k: pytest.approx(v) for k, v in wanted["metrics"].items()}
        assert one["scores"] == found[0]["scores"], "the processes do not agree"
        for mine, theirs in zip(one["norms"], wanted["norms"], strict=True):
            assert mine is None or mine == pytest.approx(theirs, rel=tolerance)
    return found[0]


def has_local_statistics(task: Task, plan: str) -> bool:
    """Evaluation then uses the mean of the processes' statistics, which the reference's first model has not."""
    spread = Plan.parse(plan)
    return getattr(task, "batchnorm", False) and spread.data_parallel > 1 and not spread.synchronises


def test_the_tolerance_would_notice_a_learning_rate_off_by_a_thousandth() -> None:
    wanted = expected("sgd")
    off = {name: tensor * 1.0001 for name, tensor in wanted["weights"].items()}
    assert difference(wanted["weights"], off)[0] > TOLERANCE
    assert math.isfinite(wanted["losses"][-1])
