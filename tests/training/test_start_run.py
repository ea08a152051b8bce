"""Tests of the messages on exactness when a run is resumed."""

from grappe.training.start_run import other_bits

BEFORE = {"plan": "replicate=2,exact=8", "threads": 1, "device": "cpu", "processor": "A, AVX512"}
BEFORE |= {"versions": {"torch": "2.13.0"}}


def test_what_changes_the_bits_of_exact_is_named() -> None:
    assert other_bits(BEFORE, {**BEFORE, "plan": "replicate=4,exact=8"}) == []
    now = {**BEFORE, "plan": "exact=4", "threads": 2, "versions": {"torch": "2.14.0"}}
    assert other_bits(BEFORE, now) == ["exact 8 -> 4", "threads 1 -> 2", "torch 2.13.0 -> 2.14.0"]
    assert other_bits({**BEFORE, "processor": "B, AVX2"}, BEFORE) == ["processor B, AVX2 -> A, AVX512"]
    assert other_bits({"plan": ""}, BEFORE) == ["exact 0 -> 8"]
    assert other_bits(BEFORE, {**BEFORE, "plan": "replicate=2", "threads": 7}) == []
