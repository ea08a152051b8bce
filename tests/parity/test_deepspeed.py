"""The DeepSpeed engine against one plain process: ZeRO 0 to 3, and what waits in host memory or on a disk."""

import dataclasses
from pathlib import Path

import pytest
import torch

from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from tests import needs
from tests.parity import reference
from tests.parity.cell import TOLERANCE, difference, train
from tests.parity.tasks import Images, Tokens
from tests.parity.test_native import STEPS, TASKS, check
from tests.parity.ways import Forked
from tests.parity.wide import Wide
from tests.processes import Pool

needs.library("deepspeed")
pytestmark = pytest.mark.usefixtures("operators")

TOGETHER = Tokens(batch_size=9)
"""Clipping, a schedule, ignored tokens, a short last batch of 8, and microbatches that do not divide, all at once."""
PLANS = [
    "replicate=2",
    "shard=2,zero=1",
    "shard=2,zero=2",
    "shard=2",
    "shard=2,offload=cpu",
    "shard=2,offload=nvme:{disk}",
]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.mark.parametrize("plan", PLANS)
def test_everything_at_once(pool: Pool, disk: Path, plan: str) -> None:
    text = f"engine=deepspeed,microbatches=3,{plan.format(disk=disk)}"
    check(pool, TOGETHER, text, reference.train(TOGETHER, STEPS))
    assert not list(disk.iterdir()), "something was left on the disk"


@pytest.mark.parametrize("plan", ["shard=2,offload=nvme:{disk}", "offload=nvme:{disk},microbatches=2"])
def test_what_is_large_enough_to_go_to_the_disk_learns_the_same(pool: Pool, disk: Path, plan: str) -> None:
    task = Wide()
    check(pool, task, f"engine=deepspeed,{plan.format(disk=disk)}", reference.train(task, STEPS))


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_synchronised_batchnorm_is_that_of_one_process(pool: Pool, plan: str) -> None:
    task = Images(batchnorm=True, rule="adam", clip=0.5, batch_size=3, samples=8, epochs=3)
    check(pool, task, f"engine=deepspeed,batchnorm=sync,{plan}", reference.train(task, STEPS))


def test_bf16_is_autocast_with_whole_parameters(pool: Pool) -> None:
    task = Images(rule="sgd", clip=0.5)
    one = pool.run("tests.parity.cell:train", 1, task, "precision=bf16", STEPS)[0]
    other = pool.run("tests.parity.cell:train", 2, task, "engine=deepspeed,shard=2,precision=bf16", STEPS)[0]
    assert all(tensor.dtype == torch.float32 for tensor in other["weights"].values())
    assert difference(one["weights"], other["weights"])[0] < 1e-2
    full = reference.train(task, STEPS)
    assert difference(full["weights"], other["weights"])[0] > TOLERANCE, "it did not round at all"
    check(pool, task, "replicate=2", full)  # autocast was left behind, once


class Steep(Images):
    """Task with a finite loss and an infinite gradient."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().loss(output, target) + (output[:, 0] * 0).sqrt()


@pytest.mark.parametrize("plan", ["shard=2,zero=1", "shard=2"])
def test_an_infinite_gradient_is_said_and_not_stood_still_at(pool: Pool, plan: str) -> None:
    for told in pool.run("tests.engines.told:told", 2, Steep(), f"engine=deepspeed,{plan}", 2):
        assert told.startswith("DivergedError: the gradient is not finite")


def test_a_parameter_that_nothing_reaches_is_named(pool: Pool) -> None:
    for told in pool.run("tests.engines.told:told", 2, Images(unused=True), "engine=deepspeed,shard=2", 2):
        assert told.startswith("TaskError: the loss does not depend on spare: DeepSpeed would let weight decay")


def bits_around(process: ProcessRank, rendezvous_folder: Path, task: Tokens, text: str) -> float:
    """Computes the difference of two plain trainings with another training between them, in one process."""
    before, _, after = (
        train(dataclasses.replace(process, job=f"{process.job}-{turn}"), rendezvous_folder, task, plan, STEPS)[
            "weights"
        ]
        for turn, plan in enumerate(("", text, ""))
    )
    return difference(before, after)[0]


@pytest.mark.parametrize("plan", ["offload=cpu", ""])
def test_a_process_computes_the_same_bits_after_it(pool: Pool, plan: str) -> None:
    # ZeRO 3 replaces torch.nn.functional.linear, and says that this persists.
    text = f"engine=deepspeed,{plan}".rstrip(",")
    assert pool.run(f"{__name__}:bits_around", 1, TASKS["tokens-sgd"], text) == [0.0]


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2,zero=1"])
def test_layers_in_another_order_on_another_process_are_summed_by_name(pool: Pool, plan: str) -> None:
    found = pool.run("tests.parity.cell:train", 2, Forked(), f"engine=deepspeed,{plan}", STEPS)
    gap, name = difference(reference.train(Forked(), STEPS, ways=2)["weights"], found[0]["weights"])
    assert gap <= TOLERANCE, name  # it evaluates by slices, too, which the reference does not


@pytest.mark.parametrize(
    ("both", "plan", "words"),
    [
        (True, "shard=2,zero=2", "reach b.bias before and after a.bias"),
        (True, "shard=2", "before and after"),
        (False, "replicate=2", "reach a.weight, a.bias, b.weight, …, but not both"),
        (False, "shard=2,zero=1", "but not both"),
        (False, "shard=2,zero=2", "but not both"),
    ],
)
def test_what_would_be_summed_with_something_else_is_refused(pool: Pool, both: bool, plan: str, words: str) -> None:
    task, text = Forked(both=both), f"engine=deepspeed,{plan}"
    for told in pool.run("tests.engines.told:told", Plan.parse(text).processes, task, text, STEPS):
        assert told.startswith("TaskError: the model uses different parameters for different samples")
        assert words in told
        assert "use engine=native" in told
