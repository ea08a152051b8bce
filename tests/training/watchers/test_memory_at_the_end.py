"""The peak memory at a training's end: a sum, but of several parts only."""

from __future__ import annotations

from grappe.training.watchers.console import _spent


def test_a_peak_is_a_sum_where_it_has_several_parts() -> None:
    assert _spent({"host": 488_000_000}) == "488 MB"
    assert (
        _spent({"host": 488_000_000, "parameters": 102_000_000}) == "488 MB = parameters 102 MB, rest 386 MB"
    )
