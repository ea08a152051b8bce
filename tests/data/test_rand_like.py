"""rand_like and randn_like: a sample's own numbers, wherever its row is."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import grappe
from grappe.data.batch import InModel, Microbatch, SampleIds, entering, inside, with_rows
from grappe.data.loader import training_loader
from grappe.errors import TaskError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.plan import Plan
from tests.parity.tasks import Images


def samples(*ids: int, epoch: int = 0, seed: int = 3) -> SampleIds:
    return SampleIds(seed, epoch, np.array(ids, dtype=np.int64))


@pytest.mark.parametrize("draw", [grappe.rand_like, grappe.randn_like])
@pytest.mark.parametrize("width", [1, 3, 64, 1001])
def test_a_row_is_the_samples_wherever_it_is(draw, width: int) -> None:
    many = tuple(range(37))
    with inside(samples(*many)):
        whole = draw(torch.empty(37, width))
    for places in ([5], [36, 0, 7], list(range(10, 27))):
        with inside(samples(*places)):
            assert torch.equal(draw(torch.empty(len(places), width)), whole[places])


@pytest.mark.parametrize("draw", [grappe.rand_like, grappe.randn_like])
def test_other_seeds_epochs_samples_and_salts_draw_others(draw) -> None:
    like, found = torch.empty(1, 8), []
    for one in (samples(4), samples(5), samples(4, epoch=1), samples(4, epoch=-1), samples(4, seed=2)):
        with inside(one):
            found += [draw(like), draw(like, salt=1)]
            assert torch.equal(draw(like), found[-2])  # and the same when it is asked again
    assert len({tuple(one.flatten().tolist()) for one in found}) == 10


def test_normal_numbers_are_standard_normal() -> None:
    with inside(samples(*range(400))):
        numbers = grappe.randn_like(torch.empty(400, 50, 10)).double().flatten()
    count = len(numbers)
    assert abs(float(numbers.mean())) < 5 / count**0.5
    assert abs(float(numbers.var()) - 1) < 5 * (2 / count) ** 0.5
    for bound in (-2.0, -1.0, -0.3, 0.0, 0.7, 1.5, 3.0):
        below = float(torch.special.ndtr(torch.tensor(bound)))
        share = float((numbers < bound).double().mean())
        assert abs(share - below) < 5 * (below * (1 - below) / count) ** 0.5
    pairs = numbers.view(-1, 2)
    assert abs(float((pairs[:, 0] * pairs[:, 1]).mean())) < 5 / (count / 2) ** 0.5


def test_type_and_shape_are_those_of_the_tensor() -> None:
    with inside(samples(1, 2)):
        found = grappe.randn_like(torch.empty(2, 3, 4, dtype=torch.bfloat16))
        assert found.shape == (2, 3, 4) and found.dtype == torch.bfloat16
        assert grappe.rand_like(torch.empty(2)).shape == (2,)


@pytest.mark.parametrize("like", [torch.empty(3, 2), torch.empty(())])
def test_what_has_no_row_for_each_sample_is_refused(like: torch.Tensor) -> None:
    with inside(samples(1, 2)), pytest.raises(TaskError, match=r"a batch of 2.*augment"):
        grappe.randn_like(like)


@pytest.fixture(autouse=True)
def outside_a_batch() -> Iterator[None]:
    """Whatever trained in this process before."""
    with inside(None):
        yield


def test_without_a_batch_they_are_torchs() -> None:
    assert InModel.samples is None
    torch.manual_seed(5)
    found = grappe.randn_like(torch.empty(7)), grappe.rand_like(torch.empty(7))
    torch.manual_seed(5)
    assert torch.equal(found[0], torch.randn(7)) and torch.equal(found[1], torch.rand(7))


def test_a_microbatch_is_entered_and_cut() -> None:
    with inside(None):
        micro = Microbatch("inputs", None, 3, None, 0, samples(7, 8, 9))
        assert entering(micro) == "inputs"
        whole = grappe.rand_like(torch.empty(3, 2))
        with with_rows(slice(0, 2)):
            assert torch.equal(grappe.rand_like(torch.empty(2, 2)), whole[:2])
        assert torch.equal(grappe.rand_like(torch.empty(3, 2)), whole)
    assert InModel.samples is None


class Noised(Images):
    """Images with noise from augment, in evaluation too."""

    def augment(self, inputs, targets, keys, training=True):
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.backends.cuda.matmul.allow_tf32  # the flag alone: what it does needs a GPU
        return grappe.randn_like(inputs), targets


def test_augment_draws_for_its_own_samples() -> None:
    task, found = Noised(), []
    data = task.data("train", Path())
    for plan in ("", "microbatches=3"):
        world = World(process=ProcessRank(), device=torch.device("cpu"))
        loader = training_loader(task, data, Plan.parse(plan), world)
        torch.backends.cuda.matmul.allow_tf32 = True  # as precision=tf32 sets it
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                batches = list(loader.batches(0, 3))
            assert torch.backends.cuda.matmul.allow_tf32
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
        found.append(torch.cat([micro.inputs for batch in batches for micro in batch.microbatches]))
    assert torch.equal(*found)
    assert len(found[0].flatten(1).unique(dim=0)) == 29


def test_compiled_code_draws_for_the_batch_of_the_call() -> None:
    compiled = torch.compile(lambda x: x + grappe.rand_like(x), backend="eager")
    zeros = torch.zeros(2, 4)
    for one in (samples(1, 2), samples(3, 4)):
        with inside(one):
            assert torch.equal(compiled(zeros), grappe.rand_like(zeros))
