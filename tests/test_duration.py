"""Durations as people write them."""

from __future__ import annotations

import pytest

from grappe.duration import seconds
from grappe.errors import UsageError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("90", 90), ("90s", 90), ("1.5m", 90), (".5h", 1800), ("2h", 7200), ("1d", 86400), ("30 m", 1800),
        ("05:00", 300), ("02:30:00", 9000), ("1-00:00:01", 86401),
    ],
)  # fmt: skip
def test_what_people_write(text: str, wanted: float) -> None:
    assert seconds(text, "--time-limit") == wanted


@pytest.mark.parametrize("text", ["", "0", "-5", "5 minutes", "1:2:3:4", "nan", "inf", "1e3", "٣", "0:00"])
def test_what_says_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--time-limit=.*give seconds"):
        seconds(text, "--time-limit")
