"""Remarks at a training's end on random numbers that were not those of one process."""

from __future__ import annotations

import pytest
import torch

from grappe.data.whole_batch_draws import OWN_DRAWS
from grappe.engines.shared.microbatch import remarks_on_draws
from grappe.plan import Plan
from grappe.step.fast_paths import seed_dropout

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("", ""),
        ("replicate=2", ""),
        ("replicate=8", "dropout=whole makes it so"),
        ("pipeline=2,microbatches=8", "dropout=whole makes it so"),
        ("replicate=2,compile", "compile"),
        ("tensor=2,replicate=2", "tensor"),
        ("replicate=8,dropout=local", ""),
        ("exact=8,replicate=8", ""),
    ],
)
def test_dropout_that_is_not_one_processs_is_said_where_something_was_drawn(plan: str, words: str) -> None:
    OWN_DRAWS.clear()
    seed_dropout(1, 2, CPU, 0)
    assert remarks_on_draws(Plan.parse(plan), CPU) == []
    torch.rand(1)
    found = remarks_on_draws(Plan.parse(plan), CPU)
    assert (words in found[0]) if words else not found


def test_draws_without_rows_are_named() -> None:
    OWN_DRAWS.add("multinomial")
    try:
        [found] = remarks_on_draws(Plan.parse("replicate=2"), CPU)
    finally:
        OWN_DRAWS.clear()
    assert "multinomial" in found
