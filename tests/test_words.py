"""Tests of the words that all rooms share."""

from collections.abc import Callable
from typing import Any

import pytest

from grappe import words


def test_a_column_that_says_nothing_is_left_out() -> None:
    table = words.filled_table(("plan", "energy", "data", "step"), [("a", "", "-", "1"), ("b", "", "", "2")])
    assert [column.header for column in table.columns] == ["plan", "step"]
    assert [list(column.cells) for column in table.columns] == [["a", "b"], ["1", "2"]]


@pytest.mark.parametrize(
    ("function", "values", "texts"),
    [
        (words.format_bytes, (0, 287_016, 999_499, 999.4e6, 1.26e9, 36), "0 MB|287 kB|999 kB|999 MB|1.3 GB|0 MB"),
        (words.format_number, (0.98, 12.345, 999.96, 45123.4), "0.9800|12.35|1,000|45,123"),  # four significant digits
        (words.format_number, (3.2e-5, 0.0, 2e12), "3.200e-05|0.000|2.000e+12"),
        (words.format_seconds, (2.4e-5, 0.00024, 0.0123, 1.25, 73.0), "0.02 ms|0.2 ms|12.3 ms|1.25 s|73.00 s"),
        (words.plan_name, ("", "replicate=2"), "one process|replicate=2"),
        (words.first_line, (ValueError("\nno such key\n  at line 3"),), "no such key"),
    ],
)
def test_what_is_shown_is_for_people(function: Callable[[Any], str], values: tuple, texts: str) -> None:
    assert [function(each) for each in values] == texts.split("|")


def test_parts_counts_and_lists_are_for_people() -> None:
    sizes = ((36, 302e6), (0, 321e3), (152e6, 1304e6), (1.1e9, 2.4e9), (0, 0))
    texts = [("0 MB", "302 MB"), ("0 kB", "321 kB"), ("152 MB", "1,304 MB"), ("1.1 GB", "2.4 GB"), ("0 MB", "0 MB")]
    assert [words.format_part_of_bytes(*each) for each in sizes] == texts
    counts = [words.count_of(1, "step"), words.count_of(1200, "step"), words.count_of(2, "process")]
    assert counts == ["1 step", "1,200 steps", "2 processes"]
    assert words.and_more(["a", "b"], 2) == "a, b"
    assert words.and_more([1, 2, 3, 4, 5], 2) == "1, 2 and 3 more"


def test_a_job_names_its_node_as_slurm_does_and_a_machine_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n12")
    assert words.host_name() == "n12"
    monkeypatch.delenv("SLURMD_NODENAME")
    assert words.host_name() and words.processor_name()


def test_a_table_without_names_has_no_header() -> None:
    assert not words.plain_table("", "").show_header
    assert words.plain_table("job", "").show_header


def test_a_matrix_has_rows() -> None:
    assert words.format_numbers([[3.0, 1.0], [0.0, 12.5]]) == "3.000, 1.000; 0.000, 12.50"
