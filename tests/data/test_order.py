"""SampleOrder: every epoch each sample once, and any division of a step is that step."""

import itertools
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grappe.data import draw as drawing
from grappe.data import sampling as module
from grappe.data.draw import permute
from grappe.data.sampling import SampleOrder, cut

# a busy machine is no reason to fail
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SEEDS = st.integers(0, 2**63 - 1)
TINY_BLOCKS = {"_FIRST_BLOCK": 8, "_GROWTH": 2, "_LARGEST_BLOCK": 64}  # many block edges in few samples


def deviations(observed: np.ndarray, expected: float) -> float:
    """Computes the distance of a chi-square statistic from its mean, in standard deviations."""
    freedom = observed.size - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


def permutations(length: int, count: int) -> np.ndarray:
    """One permutation for each of `count` keys: (count, length)."""
    return np.stack([permute(np.arange(length), key=key, length=length) for key in range(count)])


@untimed
@given(key=SEEDS, length=st.integers(10_000, 2**62), start=st.integers(0, 2**62))
def test_no_length_is_too_large(key: int, length: int, start: int) -> None:
    start %= length - 999
    image = permute(np.arange(start, start + 1000), key=key, length=length)
    assert len(set(image.tolist())) == 1000
    assert image.min() >= 0 and image.max() < length


@untimed
@given(key=SEEDS, length=st.integers(1, 2000), data=st.data())
def test_a_position_does_not_depend_on_the_others_asked_for(key: int, length: int, data: st.DataObject) -> None:
    some = np.array(data.draw(st.lists(st.integers(0, length - 1), max_size=20)), np.int64)
    whole = permute(np.arange(length), key=key, length=length)
    assert np.array_equal(permute(some, key=key, length=length), whole[some])


@pytest.mark.parametrize("length", [12, 70])
def test_neighbours_land_anywhere(length: int) -> None:
    drawn = permutations(length, 3000)
    for one, other in ((0, 1), (1, 2), (0, length - 1), (length // 2, length // 2 + 1)):
        assert deviations(np.bincount(drawn[:, one], minlength=length), 3000 / length) < 4
        distance = (drawn[:, other] - drawn[:, one]) % length
        assert deviations(np.bincount(distance, minlength=length)[1:], 3000 / (length - 1)) < 4


def test_the_order_never_changes_silently() -> None:
    assert permute(np.arange(10), key=7, length=10).tolist() == [3, 0, 8, 9, 6, 5, 4, 7, 2, 1]
    assert permute(np.arange(4), key=2026, length=1000).tolist() == [660, 993, 220, 818]
    far = permute(np.arange(10**9, 10**9 + 3), key=1, length=10**12)
    assert far.tolist() == [220098078219, 619216483328, 477906018548]
    ends = permute(np.array([0, 2**62 - 1]), key=2**63 - 1, length=2**62)
    assert ends.tolist() == [2500790233611206238, 396810230519559345]
    assert SampleOrder(seed=1, length=1000, batch_size=4).ids(2, 3).tolist() == [579, 307, 720, 123]


@untimed
@given(seed=SEEDS, length=st.integers(1, 2000), batch_size=st.integers(1, 300), shuffle=st.booleans())
def test_an_epoch_sees_each_sample_once(seed: int, length: int, batch_size: int, shuffle: bool) -> None:
    order = SampleOrder(seed=seed, length=length, batch_size=batch_size, shuffle=shuffle)
    for epoch in range(2):
        steps = [order.ids(epoch, step) for step in range(order.steps_per_epoch)]
        assert all(len(step) == batch_size for step in steps[:-1])
        assert 1 <= len(steps[-1]) <= batch_size
        seen = np.concatenate(steps)
        assert sorted(seen) == list(range(length))
        assert np.array_equal(seen, order.order(epoch, 0, length))
        if not shuffle:
            assert np.array_equal(seen, np.arange(length))


@untimed
@given(size=st.integers(0, 10**13), parts=st.integers(1, 64))
def test_slices_cover_in_order_and_are_even(size: int, parts: int) -> None:
    slices = [cut(size, parts, part) for part in range(parts)]
    edges = [0, *(stop for _, stop in slices)]
    assert [start for start, _ in slices] == edges[:-1] and edges[-1] == size
    assert all(edge % 2 == 0 for edge in edges[:-1] if edge < size)
    pairs = [(stop - start + 1) // 2 for start, stop in slices]
    assert min(pairs) >= 0 and max(pairs) - min(pairs) <= 1


@settings(untimed, max_examples=200)
@given(
    length=st.integers(1, 400),
    batch_size=st.integers(1, 20),
    shuffle=st.booleans(),
    start=st.integers(0, 99),
    count=st.integers(1, 99),
)
def test_blocks_have_the_ids_of_their_steps(length, batch_size, shuffle, start, count):
    order = SampleOrder(seed=9, length=length, batch_size=batch_size, shuffle=shuffle)
    steps = [divmod(step, order.steps_per_epoch) for step in range(start, start + count)]
    with mock.patch.multiple(module, **TINY_BLOCKS):
        blocks = list(order.blocks(start, start + count))
    assert np.array_equal(
        np.concatenate([block for _, _, block in blocks]),
        np.concatenate([order.ids(epoch, step) for epoch, step in steps]),
    )
    for step, epoch, block in blocks:
        assert epoch == step // order.steps_per_epoch
        assert np.array_equal(block[:batch_size], order.ids(epoch, step % order.steps_per_epoch))


def count_evaluated(blocks: Iterator) -> list[int]:
    """Counts the positions of each evaluation that these blocks take."""
    with mock.patch.object(module, "permute", side_effect=permute) as spy:
        deque(blocks, maxlen=0)
    return [len(call.args[0]) for call in spy.call_args_list]


@pytest.mark.parametrize("length", [10**12, 2**39 + 1])  # the latter is nowhere near a square or a power of two
def test_seeking_far_evaluates_no_more_than_a_small_block(length: int) -> None:
    order = SampleOrder(seed=0, length=length, batch_size=8)
    step = 3 * order.steps_per_epoch + 10**9 // 8
    assert count_evaluated(itertools.islice(order.blocks(step, step + 10**6), 1)) == [256]
    assert count_evaluated(order.blocks(step, step + 1)) == [8]


def test_walking_is_rare_for_every_length() -> None:
    rounds = drawing._feistel
    for length in (10**12, 2**39 + 1, 1437, 50_000):
        with mock.patch.object(drawing, "_feistel", side_effect=rounds) as spy:
            permute(np.arange(1000), key=4, length=length)
        assert sum(len(call.args[0]) for call in spy.call_args_list) < 1100


def test_what_is_read_on_or_short_is_evaluated_once_in_few_blocks() -> None:
    order = SampleOrder(seed=0, length=10**12, batch_size=8)
    assert count_evaluated(order.blocks(1000, 11_000)) == [256, 2048, *[16_384] * 4, 12_160]
    order = SampleOrder(seed=0, length=1437, batch_size=256)
    steps = 4 * order.steps_per_epoch
    assert count_evaluated(order.blocks(0, steps)) == [256, 1181, 1437, 1437, 1437]


@pytest.mark.parametrize("length", [20, 24])
def test_a_step_beyond_the_epoch_is_refused(length: int) -> None:
    order = SampleOrder(seed=0, length=length, batch_size=8)
    order.ids(0, 0)
    for step in (3, 4, -1):
        with pytest.raises(AssertionError, match=f"of {length}"):
            order.ids(0, step)


def test_the_order_needs_no_torch() -> None:
    code = "import sys, grappe.data.draw, grappe.data.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
