"""Pipelines of what the cover has no kind for: a GPT, new shapes, compiled stages, and the bits of microbatches."""

import functools
from pathlib import Path

import pytest
import torch

from grappe import Arrays
from grappe.plan import Plan
from grappe.task import fields
from grappe.tasks.pysource import IGNORED, PySource
from tests.parity import reference
from tests.parity.tasks import Images, Tokens
from tests.parity.test_native import STEPS, check
from tests.processes import Pool

SPLIT = [
    "pipeline=2,microbatches=2,tensor=2",
    "pipeline=2,schedule=gpipe,microbatches=3,tensor=2",
    "pipeline=2,schedule=interleaved,microbatches=2,tensor=2",
    "pipeline=2,schedule=zero_bubble,microbatches=2,tensor=2",
]


class Prose(PySource):
    """The shipped GPT, on few samples.

    With SGD: in so narrow a model a few of the gradients at the start are hardly larger than Adam's epsilon, and the
    plain loop itself differs by 1.4e-5 when it sums its batches in three pieces.
    """

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.2, momentum=0.9)

    def data(self, split: str, folder: Path) -> Arrays:
        whole = super().data(split, folder)
        first = int((whole.targets == IGNORED).any(1).nonzero()[0])
        chosen = slice(first, first + 17)
        return Arrays(whole.inputs[chosen], whole.targets[chosen], transform=torch.Tensor.long)


GPT = Prose(width=16, depth=2, heads=2, context=32, megabytes=0.3, batch_size=7, epochs=3)


@functools.cache
def prose() -> dict:
    return reference.train(Taught(**fields(GPT)), STEPS)


class Taught(Prose):
    """For the reference, which takes arrays as they are."""

    def data(self, split: str, folder: Path) -> Arrays:
        data = super().data(split, folder)
        return Arrays(data.inputs.long(), data.targets)


@pytest.mark.parametrize("plan", [*SPLIT, "pipeline=2,schedule=interleaved,microbatches=4,shard=2"])
def test_the_shipped_gpt_learns_the_same(pool: Pool, plan: str) -> None:
    check(pool, GPT, plan, prose())


def test_microbatches_of_two_new_shapes_in_a_round_are_evaluated(pool: Pool) -> None:
    # Each process waited until the other took the next shape's description, for ever.
    task = Tokens(batch_size=9, rule="sgd")
    plan = "pipeline=2,schedule=interleaved,microbatches=2"
    check(pool, task, plan, reference.train(task, STEPS))


def test_gradients_are_clipped_where_a_stage_has_none(pool: Pool) -> None:
    task = Images(frozen=True, clip=0.5)
    check(pool, task, "pipeline=3,schedule=gpipe,microbatches=2", reference.train(task, STEPS))


@pytest.mark.slow
def test_compiled_stages_learn_the_same(pool: Pool) -> None:
    """Batches of one shape: what has another is compiled again, as tests/parity/test_special.py does."""
    task = Images(rule="adam", clip=0.5, samples=24)
    check(pool, task, "pipeline=2,microbatches=2,compile", reference.train(task, STEPS))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_pipeline_rounds_as_one_process_with_the_same_microbatches(pool: Pool, precision: str) -> None:
    """To the bit: where bf16 through a pipeline differs from one process, it is that the batch is cut."""
    plans = (f"microbatches=4,precision={precision}", f"pipeline=2,microbatches=4,precision={precision}")
    task = Tokens(rule="sgd", batch_size=12)
    one, two = (pool.run("tests.parity.cell:train", Plan.parse(plan).processes, task, plan, 4)[0] for plan in plans)
    assert two["losses"] == one["losses"]
    assert set(one["weights"]) == set(two["weights"])
    assert all(torch.equal(tensor, two["weights"][name]) for name, tensor in one["weights"].items())
