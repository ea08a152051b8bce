"""Models and batches that are harder to trace: foreseen as they are, or refused with the user's own line."""

from __future__ import annotations

from pathlib import Path

import pytest

from grappe.data.loader import training_order
from grappe.errors import TaskError
from grappe.foresight.compose import needs
from grappe.foresight.sketch import Sketch
from grappe.plan import Plan
from tests.foresight import unusual


@pytest.mark.parametrize(
    ("task", "line"), [(unusual.Chosen, r"x\[x\[:, 0\] > 0\]"), (unusual.Numpy, r"x\.numpy\(\)")]
)
@pytest.mark.parametrize("plan", ["", "shard=2", "replicate=2,microbatches=2"])
def test_what_needs_values_is_refused_with_its_line(task: type, line: str, plan: str) -> None:
    with pytest.raises(TaskError, match=rf"{task.__name__} cannot run without values.*unusual\.py.*{line}"):
        needs(Sketch(task(), Path("data")), Plan.parse(plan))


def test_ragged_samples_are_padded_as_the_trainings_first_batch() -> None:
    sketch = Sketch(unusual.Ragged(), Path("data"))
    for rows in (4, 64, 128, 1000):
        inputs = sketch.batches.of(rows).microbatches[0].inputs
        assert tuple(inputs.shape) == (rows, 40)


def test_a_long_sample_that_is_not_among_the_first_counts_in_a_batch_that_has_it() -> None:
    class Late(unusual.Ragged):
        def data(self, split: str, folder: Path) -> object:
            first = training_order(self, unusual.Sentences()).ids(0, 0).tolist()
            return unusual.Sentences(long=frozenset({first[20]}))

    batches = Sketch(Late(), Path("data")).batches
    assert [batches.of(rows).microbatches[0].inputs.shape[1] for rows in (16, 64)] == [10, 40]


def test_tied_weights_of_two_layers_are_one_parameter() -> None:
    found = needs(Sketch(unusual.Ragged(), Path("data")), Plan())
    assert found.states.parameters == 4 * (500 * 128 + 128 * 128 + 128)
    assert found.states.optimizer == 2 * found.states.parameters + 3 * 4  # and a count of steps for each


def test_what_a_function_of_the_users_keeps_is_counted() -> None:
    plain, custom = (
        max(mark.level for mark in Sketch(task(), Path("data")).trace(64).marks)
        for task in (unusual.Rows, unusual.Custom)
    )
    assert custom - plain >= 3 * 64 * 128 * 4  # one more tensor in each of three units
