"""Tests that a mixture draws from its sources as its weights say, each source in an order of its own."""

from collections import Counter

import numpy as np
import pytest

from grappe.data import Corpus
from grappe.data.corpus import mixture as mixtures
from grappe.data.corpus.mixture import Mixture
from grappe.data.datasets import training_order
from grappe.errors import TaskError
from grappe.task import Task
from tests.data.corpus.shards import corpus_folder


class Rows(list):
    """A dataset of names, hashable as torch's datasets are."""

    __hash__ = object.__hash__


@pytest.fixture
def small_periods(monkeypatch):
    monkeypatch.setattr(mixtures, "_PERIOD", 20)
    monkeypatch.setattr(mixtures, "_LEAST", 20)


def drawn(mixture, order, epoch, start, stop):
    return [mixture[int(number)] for number in order.order(epoch, start, stop) % len(mixture)]


def test_shares_follow_the_weights_and_each_source_is_read_through(small_periods):
    first, second = Rows(f"a{n}" for n in range(30)), Rows(f"b{n}" for n in range(1000))
    mixture = Mixture({first: 3, second: 1}, samples=200, names=["a", "b"])
    order = training_order(Task(batch_size=8, seed=1), mixture)
    assert order.length == 200 and order.steps_per_epoch == 25
    names = [name for epoch in range(2) for name in drawn(mixture, order, epoch, 0, 200)]
    for period in range(20):
        assert Counter(name[0] for name in names[20 * period : 20 * period + 20]) == {"a": 15, "b": 5}
    of_a = [name for name in names if name[0] == "a"]
    assert all(sorted(of_a[n : n + 30]) == sorted(first) for n in range(0, 300, 30))
    assert len(set(of_a[:30]) & set(of_a[30:60])) == 30 and of_a[:30] != of_a[30:60]
    assert len({name for name in names if name[0] == "b"}) == 100  # none twice
    ids = np.concatenate([order.order(0, 0, 200), order.order(1, 0, 200)])
    assert len(set(ids.tolist())) == 400  # a sample that comes again has an id of its own, and other random numbers


def test_it_seeks_to_any_step_without_what_came_before(small_periods):
    def order():
        sources = {Rows(range(50)): {0: 1.0, 30: 0.0}, Rows(range(100, 180)): 0.5}
        return training_order(Task(batch_size=7, seed=5), Mixture(sources, samples=333, names="ab"))

    whole = np.concatenate([order().order(epoch, 0, 333) for epoch in range(3)])
    for epoch, start, stop in ((2, 100, 333), (0, 13, 14), (1, 0, 333)):
        assert np.array_equal(order().order(epoch, start, stop), whole[epoch * 333 + start : epoch * 333 + stop])


def test_weights_follow_a_schedule_of_steps(small_periods):
    mixture = Mixture({Rows("a" * 500): {0: 1, 100: 0}, Rows("b" * 500): {0: 0, 100: 1}}, samples=2000, names="ab")
    order = training_order(Task(batch_size=10), mixture)
    names = "".join(drawn(mixture, order, 0, 0, 2000))
    shares = [names[n : n + 100].count("b") for n in range(0, 2000, 100)]
    assert shares[:10] == sorted(shares[:10]) and shares[0] <= 10 and set(shares[10:]) == {100}
    assert 45 <= names[450:550].count("b") <= 55
    counted = order.sampling.drawn(1234, 0, 10)
    assert counted == {"a": names[:1234].count("a"), "b": names[:1234].count("b")}


def test_weights_of_a_short_training_follow_its_steps():
    mixture = Mixture({Rows("a" * 500): 1, Rows("b" * 500): {0: 0, 50: 1}}, samples=400, names="ab")
    halves = [drawn(mixture, training_order(Task(batch_size=8), mixture), 0, n, n + 200).count("b") for n in (0, 200)]
    assert 25 <= halves[0] <= 45 and 75 <= halves[1] <= 95  # t / (1 + t) of them, whose mean is 0.19 and 0.42


def test_many_small_shares_come_out_even():
    sources = {Rows(range(9)): weight for weight in (1e-4, 0.3, 0.3, 0.3, {0: 0.1, 50: 0.0})}
    mixture = Mixture(sources, samples=10**6, names="abcde")
    order = mixture.epoch_order()
    counts = np.array([order.drawn(n, 0, 1000) and list(order.drawn(n, 0, 1000).values()) for n in (40960, 819200)])
    assert counts.sum(1).tolist() == [40960, 819200]
    assert (counts >= 0).all() and counts[1][0] in range(82, 92)


def test_rows_in_blocks_are_read_by_windows_in_a_mixture(tmp_path):
    blocks = Corpus(corpus_folder(tmp_path / "large", ".parquet", 300), window=2)
    rows = Corpus(corpus_folder(tmp_path / "small", ".jsonl", 50))
    mixture = Corpus.mix({blocks: 0.75, rows: 0.25}, samples=400)
    assert mixture.names == ["large", "small"]
    order = training_order(Task(batch_size=16), mixture)
    ids = order.order(0, 0, 400)
    of_blocks = ids[ids % 350 < 300]
    assert len(set(of_blocks[:300])) == len(of_blocks[:300]) > 270
    assert len(set(of_blocks[:20] // 10)) <= 2 * 2 + 2  # the first rows come from few row groups


def test_what_is_no_mixture_is_one_message():
    for weights, message in (({}, "one source"), ({Rows("a"): 0}, "one source"), ({Rows("a"): -1}, "weight of")):
        with pytest.raises(TaskError, match=message):
            Mixture(weights, names=["a"] * len(weights))
    with pytest.raises(TaskError, match="different names"):
        Mixture({Rows("a"): 1, Rows("b"): 1}, names=["same", "same"])
