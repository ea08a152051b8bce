"""The pairwise cover (cover.txt): each of its cells against one plain process, and the proof that no pair lacks."""

import functools
from typing import Any

import pytest

from grappe.plan import Plan
from tests.parity import contrastive, cover, reference
from tests.parity.cell import TOLERANCE, difference
from tests.parity.test_native import STEPS, assert_learned_alike, check
from tests.processes import Pool

CELLS = cover.stored()
NIGHT = [cell for cell in cover.products() if cell not in CELLS]
TOLERANCES = {"fp32": TOLERANCE, "fp64": 1e-11, "bf16": 1e-2}
"""In fp64, a float32 on the way would differ by 1e-8; in bf16 another order of sums changes where autocast rounds."""


@functools.cache
def expected(kind: str, rule: str, clip: str, double: bool) -> dict[str, Any]:
    """The plain loop's result, computed once for all plans."""
    task = cover.task_of(kind, rule, clip)
    return contrastive.plain(task, STEPS) if kind == "pairs" else reference.train(task, STEPS, double=double)


@pytest.mark.parametrize("cell", [*CELLS, *(pytest.param(cell, marks=pytest.mark.nightly) for cell in NIGHT)], ids=str)
def test_learns_the_same(pool: Pool, cell: str) -> None:
    """Compares weights, losses, norms and scores with the plain loop's; of bf16 the first two, with one process's."""
    text, *names = cell.split()
    plan, task = Plan.parse(text), cover.task_of(*names)
    wanted, tolerance = expected(*names, plan.precision == "fp64"), TOLERANCES[plan.precision]
    if plan.precision != "bf16":
        check(pool, task, str(plan), wanted, tolerance=tolerance)
        return
    [alone] = pool.run("tests.parity.cell:train", 1, task, "precision=bf16", STEPS)
    assert difference(wanted["weights"], alone["weights"])[0] > TOLERANCE, "it did not round at all"
    found = pool.run("tests.parity.cell:train", plan.processes, task, str(plan), STEPS)
    assert all(tensor.dtype == wanted["weights"][name].dtype for name, tensor in found[0]["weights"].items())
    assert_learned_alike(found, alone, text, tolerance)


def test_each_pair_that_can_meet_stands_in_the_cover() -> None:
    lacking = cover.pairs_of(cover.possible()) - cover.pairs_of(cover.numbered(CELLS))
    assert not [(cover.FACTORS[i][a], cover.FACTORS[j][b]) for i, j, a, b in lacking], "python -m tests.parity.cover"
    assert {row.tobytes() for row in cover.numbered(CELLS)} <= {row.tobytes() for row in cover.possible()}
    assert len(CELLS) == len(set(CELLS))


def test_a_cell_that_lacks_is_found() -> None:
    covered = [cover.pairs_of(cover.numbered([line for line in CELLS if line != left_out])) for left_out in CELLS]
    assert all(pairs < cover.pairs_of(cover.numbered(CELLS)) for pairs in covered), "a cell is spare"
