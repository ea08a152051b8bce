"""Selection: what is left out is counted with an example of each kind; several splits are refused."""

from pathlib import Path

import pytest

from grappe.data.shards.selection import LeftOut, counts, joined, leave_out, refuse_gaps, refuse_splits, split_of
from grappe.errors import DataError


def test_what_is_left_out_is_counted_by_kind_with_an_example() -> None:
    parts = [LeftOut(), LeftOut()]
    for name in ("ant/a.TXT", "ant/._a.jpg", "bee/README", "./bee/.cache/x.jpg"):
        leave_out(parts[0], name)
    leave_out(parts[1], "b.txt")
    leave_out(parts[1], "ant/more", "linked folders")
    assert counts(joined(parts)) == (
        ".txt 2 (ant/a.TXT), hidden 2 (ant/._a.jpg), linked folders 1 (ant/more), without an ending 1 (bee/README)"
    )
    for number in range(99):
        leave_out(parts[0], f"x.{number}")
    assert len(parts[0]) < 20 and sum(count for count, _ in parts[0].values()) == 4 + 99


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00002.parquet", "train"),
        ("Validation", "validation"),
        ("test.jsonl", "test"),
        ("val_2", "val"),
        ("test_results.jsonl", ""),
        ("training_manual.jsonl", ""),
        ("training.1.tar", "training"),
        ("trains.tar", ""),
        ("contest.jsonl", ""),
        ("evaluation.jsonl", ""),
    ],
)
def test_a_split_is_known_by_the_beginning_of_a_name(name: str, split: str) -> None:
    assert split_of(name) == split


def test_several_splits_are_refused_with_the_names() -> None:
    refuse_splits(Path("data"), ["train", "", "train"])
    with pytest.raises(DataError, match=r"data has several splits \(test, train\): name the folder"):
        refuse_splits(Path("data"), ["train", "test"])


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (("a-00000-of-00003.jsonl", "a-00002-of-00003.jsonl"), "a-00001-of-00003.jsonl"),
        (("a-00002-of-00002.jsonl",), "a-00001-of-00002.jsonl"),
        (("a-00000-of-99999.jsonl",), "a-00001-of-99999.jsonl"),
        (("b/a-00001-of-00002.jsonl", "b/a-00002-of-00002.jsonl", "a-00000-of-00001.jsonl", "c.jsonl"), ""),
    ],
)
def test_a_missing_part_is_named(names: tuple[str, ...], missing: str) -> None:
    if not missing:
        refuse_gaps(Path("data"), names)
        return
    with pytest.raises(DataError, match=f"data lacks {missing}: fetch it"):
        refuse_gaps(Path("data"), names)
