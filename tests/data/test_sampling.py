"""Sampling: weighted, balanced and bucketed orders are functions of seed, epoch and step, the same on any world."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grappe import Arrays, Sampling, Task, draw
from grappe.data.loader import training_loader
from grappe.data.sampling import DrawnSamples, SampleOrder, cut
from grappe.errors import TaskError
from grappe.plan import Plan
from tests.data.test_loader import world
from tests.data.test_order import untimed

few = settings(untimed, max_examples=40)


def order_of(sampling: Sampling, length: int, batch_size: int = 8, seed: int = 3) -> SampleOrder:
    drawn = DrawnSamples(sampling, length)
    return SampleOrder(seed=seed, length=drawn.samples, batch_size=batch_size, sampling=drawn)


def epoch_of(order: SampleOrder, epoch: int) -> np.ndarray:
    return np.concatenate([order.ids(epoch, step) for step in range(order.steps_per_epoch)])


@st.composite
def samplings(draw) -> tuple[Sampling, int]:
    length = draw(st.integers(1, 120))
    seed = draw(st.integers(0, 1000))
    generator = np.random.default_rng(seed)
    kind = draw(st.sampled_from(["weights", "classes", "plain"]))
    columns: dict = {}
    if kind == "weights":
        columns["weights"] = generator.exponential(size=length) * (generator.random(length) < 0.8)
        columns["weights"][generator.integers(length)] = 1.0
    if kind == "classes":
        columns["classes"] = generator.integers(0, 4, length)
    if draw(st.booleans()):
        columns["lengths"] = generator.integers(1, 50, length)
    samples = draw(st.none() | st.integers(1, 200))
    return Sampling(**columns, samples=samples, window=draw(st.integers(1, 5))), length


@few
@given(made=samplings(), batch_size=st.integers(1, 30), epoch=st.integers(0, 5))
def test_each_sample_comes_as_often_as_its_weight_says(made: tuple[Sampling, int], batch_size: int, epoch: int) -> None:
    sampling, length = made
    order = order_of(sampling, length, batch_size)
    ids = epoch_of(order, epoch)
    assert len(ids) == order.length == (sampling.samples or length)
    assert len(set(ids.tolist())) == len(ids)  # every copy has an id of its own
    seen = Counter((ids % length).tolist())
    weights = np.ones(length) if sampling.weights is None else sampling.weights
    if sampling.classes is not None:
        counts = Counter(sampling.classes.tolist())
        weights = np.array([1 / counts[one] for one in sampling.classes.tolist()])
    expected = len(ids) * weights / weights.sum()
    for sample in range(length):
        assert np.floor(expected[sample] - 1e-6) <= seen[sample] <= np.ceil(expected[sample] + 1e-6)
    if sampling.weights is None and sampling.classes is None and sampling.samples in (None, length):
        assert sorted(ids) == list(range(length))
    for sample, copies in seen.items():  # copies are numbered from 0
        assert sorted(ids[ids % length == sample] // length) == list(range(copies))


@few
@given(made=samplings(), batch_size=st.integers(1, 30), parts=st.integers(1, 6), data=st.data())
def test_any_world_and_any_position_have_the_same_order(made, batch_size, parts, data):
    sampling, length = made
    whole = [order_of(sampling, length, batch_size).order(epoch, 0, sampling.samples or length) for epoch in (0, 1)]
    order = order_of(sampling, length, batch_size)
    visits = [(epoch, step) for epoch in (0, 1) for step in range(order.steps_per_epoch)]
    for epoch, step in data.draw(st.permutations(visits)):  # a resumed run begins anywhere
        ids = order.ids(epoch, step)
        assert np.array_equal(ids, whole[epoch][step * batch_size : (step + 1) * batch_size])
        slices = [ids[slice(*cut(len(ids), parts, part))] for part in range(parts)]
        assert np.array_equal(np.concatenate(slices), ids)


def test_epochs_and_seeds_differ_and_classes_are_balanced() -> None:
    classes = np.array(["rare"] * 10 + ["often"] * 90)
    order = order_of(Sampling(classes=classes), 100)
    first, second = epoch_of(order, 0), epoch_of(order, 1)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, epoch_of(order_of(Sampling(classes=classes), 100, seed=4), 0))
    assert Counter(classes[first % 100]) == {"rare": 50, "often": 50}
    # over epochs all of the many are seen
    seen = {one for epoch in range(12) for one in (epoch_of(order, epoch) % 100).tolist()}
    assert seen == set(range(100))


def test_batches_have_similar_lengths() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 2000)
    bucketed, plain = (order_of(Sampling(lengths=lengths), 2000, 16), SampleOrder(seed=3, length=2000, batch_size=16))

    def padding(order: SampleOrder) -> float:
        steps = [lengths[order.ids(0, step)] for step in range(order.steps_per_epoch)]
        return 1 - sum(one.sum() for one in steps) / sum(one.max() * len(one) for one in steps)

    assert padding(plain) > 0.4
    assert padding(bucketed) < 0.03
    means = [lengths[bucketed.ids(0, step)].mean() for step in range(bucketed.steps_per_epoch)]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3  # batches are not in order of length


class Weighted(Task):
    batch_size: int = 6

    def data(self, split, folder):
        return Arrays(torch.arange(20.0), torch.arange(20))

    def sampling(self, dataset):
        return Sampling(weights=torch.tensor([5.0] * 4 + [1.0] * 16), samples=31)

    def augment(self, inputs, targets, keys):
        return torch.stack([inputs, draw(keys, 1)[:, 0]], 1), targets


class WeightedSamples(Weighted):
    def data(self, split, folder):
        return torch.utils.data.Subset(super().data(split, folder), range(20))


@pytest.mark.parametrize("task", [Weighted(), WeightedSamples()])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_together_load_the_one_process_batches(task: Task, processes: int) -> None:
    def batches(size: int, rank: int) -> list[torch.Tensor]:
        loader = training_loader(task, task.data("train", Path()), Plan(workers=0), world(rank, size))
        return [batch.microbatches[0].inputs[: batch.microbatches[0].rows] for batch in loader.batches(0, 12)]

    alone = batches(1, 0)
    together = [torch.cat(parts) for parts in zip(*(batches(processes, r) for r in range(processes)), strict=True)]
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    epoch = torch.cat(alone[:6])
    assert len(epoch) == 31
    assert len({tuple(row.tolist()) for row in epoch}) == 31  # copies of a sample are augmented independently
    assert len(set(epoch[:, 0].tolist())) < 21


def test_what_does_not_fit_is_refused() -> None:
    for sampling, words in (
        (Sampling(weights=[1, 2]), r"weights has shape \[2\], and the training data 3 samples"),
        (Sampling(weights=[1, -1, 1]), "must be finite and not negative"),
        (Sampling(weights=[0, 0, 0]), "some above 0"),
        (Sampling(weights=[1, 1, 1], classes=[0, 1, 1]), "weights or classes, not both"),
        (Sampling(samples=0), "must be at least 1"),
        (Sampling(lengths=[1]), r"lengths has shape \[1\]"),
        (Sampling(copies=0), "copies=0"),
        (Sampling(copies=2, samples=10), "copies cannot be combined"),
    ):
        with pytest.raises(TaskError, match=words):
            DrawnSamples(sampling, 3)
    with pytest.raises(TaskError, match="batch_size=8 is not a multiple of"):
        order_of(Sampling(copies=3), 30, 8).ids(0, 0)


@pytest.mark.parametrize(("length", "batch_size", "copies"), [(60, 12, 3), (61, 8, 2), (7, 8, 4), (40, 6, 3)])
def test_copies_of_a_sample_share_its_batch(length: int, batch_size: int, copies: int) -> None:
    """Repeated augmentation: Hoffer et al. 2020, "Augment your batch"; an epoch is as long as without."""
    order = order_of(Sampling(copies=copies), length, batch_size)
    assert order.length == length
    seen: list[int] = []
    for step in range(order.steps_per_epoch):
        ids = order.ids(1, step)
        samples = order.samples(ids)
        distinct = batch_size // copies
        if len(ids) == batch_size:
            assert all(count == copies for count in Counter(samples.tolist()).values())
            if distinct > 1:
                partners = np.arange(batch_size) ^ 1
                assert (samples != samples[partners]).all()
        assert len(set(ids.tolist())) == len(ids)  # another key for each copy
        assert not set(samples.tolist()) & set(seen)
        seen += samples.tolist()
    assert not np.array_equal(epoch_of(order, 1), epoch_of(order, 2))
    for start, stop in ((0, 5), (3, length), (length - 1, length)):
        assert np.array_equal(order.order(1, start, stop), epoch_of(order, 1)[start:stop])
