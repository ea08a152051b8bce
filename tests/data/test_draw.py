"""Draws: each sample's own, however the batch was divided."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grappe.data.draw import draw, drawn, mix, mix_steps, mixup_pairs, sample_keys
from grappe.data.sampling import SampleOrder, cut

# a busy machine is no reason to fail
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

WORDS = st.integers(-(2**63), 2**64 - 1)
KEYS = st.lists(st.integers(0, 2**63 - 1), max_size=20)


def test_the_bits_never_change_silently() -> None:
    assert mix(0) == 5225608189600411232
    assert mix(0, 0) == 3617558351911305818
    assert mix(1, 2, 3) == 37039206658386963
    assert mix(-1) == mix(2**64 - 1) == 8759535669819888656
    keys = sample_keys(3, 1, np.array([0, 1, 10**12]))
    assert keys.tolist() == [2482289063980384216, 2533777038635110281, 4505842209939355401]
    assert (draw(torch.from_numpy(keys), 3) * 2**24).tolist() == [
        [11029485, 12906297, 4326975],
        [11896698, 8142652, 6931342],
        [12068232, 16110700, 6434345],
    ]


def test_draws_are_the_published_splitmix64() -> None:
    published = (  # seed 1234567, https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    )
    drawn = draw(torch.tensor([1234567]), 5)[0] * 2**24
    assert drawn.tolist() == [bits >> 40 for bits in published]


@untimed
@given(words=st.lists(WORDS, min_size=2, max_size=4))
def test_a_hash_is_a_key_and_tells_words_apart(words: list[int]) -> None:
    key = mix(*words)
    assert 0 <= key < 2**63
    assert key != mix(*words[:-1]) and key != mix(*words, 0)
    assert (key == mix(*words[::-1])) == (words == words[::-1])


@untimed
@given(seed=WORDS, epoch=st.integers(0, 10**6), ids=st.lists(st.integers(0, 2**62), max_size=20))
def test_many_keys_are_the_single_ones(seed: int, epoch: int, ids: list[int]) -> None:
    keys = sample_keys(seed, epoch, np.array(ids, np.int64))
    assert keys.dtype == np.int64
    assert keys.tolist() == [mix(seed, epoch, index) for index in ids]


@untimed
@given(keys=KEYS, n=st.integers(0, 9), data=st.data())
def test_a_draw_depends_on_its_key_and_place_alone(keys: list[int], n: int, data: st.DataObject) -> None:
    whole = draw(torch.tensor(keys, dtype=torch.int64), n)
    assert whole.shape == (len(keys), n) and whole.dtype == torch.float32
    some = data.draw(st.lists(st.integers(0, max(len(keys) - 1, 0)), max_size=len(keys)))
    fewer = data.draw(st.integers(0, n))
    again = draw(torch.tensor([keys[index] for index in some], dtype=torch.int64), fewer)
    assert torch.equal(again, whole[some, :fewer])


@untimed
@given(
    length=st.integers(1, 100), batch_size=st.integers(1, 40), parts=st.integers(1, 6), microbatches=st.integers(1, 4)
)
def test_dividing_a_step_changes_no_draw_and_no_pair(length, batch_size, parts, microbatches):
    ids = SampleOrder(seed=1, length=length, batch_size=batch_size).ids(2, 0)
    drawn, partner = [], []
    for part in range(parts):
        start, stop = cut(len(ids), parts, part)
        for microbatch in range(microbatches):
            low, high = (start + edge for edge in cut(stop - start, microbatches, microbatch))
            drawn.append(draw(torch.from_numpy(sample_keys(1, 2, ids[low:high])), 3))
            partner.append(mixup_pairs(high - low) + low)
    assert torch.equal(torch.cat(drawn), draw(torch.from_numpy(sample_keys(1, 2, ids)), 3))
    assert torch.equal(torch.cat(partner), mixup_pairs(len(ids)))


@pytest.mark.parametrize(("samples", "numbers"), [(0, 3), (1, 0), (3, 5), (64, 128), (1000, 40)])
def test_numpy_draws_the_bits_that_torch_draws(monkeypatch: pytest.MonkeyPatch, samples: int, numbers: int) -> None:
    keys = torch.from_numpy(sample_keys(0, 0, np.arange(samples)))
    few = drawn(keys.numpy(), numbers)
    monkeypatch.setattr("grappe.data.draw._ONE_THREAD", -1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    many = draw(keys, numbers)
    assert few.dtype == np.float32
    assert torch.equal(torch.from_numpy(few), many)


def test_rows_are_mixed_two_by_two() -> None:
    assert mixup_pairs(6).tolist() == [1, 0, 3, 2, 5, 4]
    assert mixup_pairs(5).tolist() == [1, 0, 3, 2, 4]
    assert mixup_pairs(1).tolist() == [0]
    assert mixup_pairs(0).tolist() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same_bits() -> None:
    keys = torch.from_numpy(sample_keys(0, 0, np.arange(100_000)))
    assert torch.equal(draw(keys.cuda(), 5).cpu(), draw(keys, 5))
    assert torch.equal(mixup_pairs(101, "cuda").cpu(), mixup_pairs(101))


def test_seeds_of_many_steps_are_those_of_each() -> None:
    for rest in ((), (3,), (0, 7), (-1,)):
        found = mix_steps(12345678901234567890, 250, 300, *rest)
        assert found == [mix(12345678901234567890, step, *rest) for step in range(250, 550)]
