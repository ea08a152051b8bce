"""Tests of the checkpoints that are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grappe.checkpoint.commit import Origin, commit, write_new
from grappe.checkpoint.format import latest, list_checkpoints, step_folder
from grappe.checkpoint.retention import Retention


def made(folder: Path, step: int, loss: object = None) -> None:
    beside = folder / f".step-{step}"
    beside.mkdir()
    state = json.dumps({"step": step, "validation_loss": loss}).encode()
    commit(
        beside,
        step_folder(folder, step),
        {"state.json": write_new(beside / "state.json", state)},
        Origin(step=step),
    )


def steps(folder: Path) -> list[int]:
    return [one.step for one in list_checkpoints(folder)]


@pytest.mark.parametrize(
    ("losses", "last", "kept"),
    [
        ([None] * 5, 2, [5, 4]),
        ([None] * 2, 3, [2, 1]),
        ([0.5, 0.1, 0.3, 0.2, None], 1, [5, 2]),
        ([0.5, 0.4, 0.3, 0.2, 0.1], 2, [5, 4]),
        ([0.1, 0.1, None, None], 1, [4, 2]),  # as good: the newer
        ([0.5, 0.1, 0.3, float("nan"), float("nan")], 1, [5, 2]),
        ([0.5, float("-inf"), 0.3, None], 1, [4, 3]),
        ([0.5, "0.1", True, 0.7], 1, [4, 1]),
    ],
)
def test_the_newest_and_the_best_stay(tmp_path, losses: list, last: int, kept: list[int]) -> None:
    for step, loss in enumerate(losses, start=1):
        made(tmp_path, step, loss)
    removed = Retention(last=last).clean(tmp_path, len(losses))
    assert steps(tmp_path) == kept
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"step-{n:06d}" for n in sorted(kept)]
    assert {one.name for one in removed} == {f"step-{n:06d}" for n in range(1, len(losses) + 1)} - {
        f"step-{n:06d}" for n in kept
    }


@pytest.mark.parametrize("last", [1, 3])
def test_damaged_later_ones_do_not_push_out_what_is_whole(tmp_path, last: int) -> None:
    """A training that went on from step 3, as 6, 7 and 9 did not verify, has just committed 4."""
    for step in (2, 3, 4, 6, 7, 9):
        made(tmp_path, step)
    for step in (6, 7, 9):
        (step_folder(tmp_path, step) / "state.json").write_text("{}")
    Retention(last=last).clean(tmp_path, 4)
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.step == 4


def test_a_state_that_cannot_be_read_is_not_the_best(tmp_path) -> None:
    for step in (1, 2, 3):
        made(tmp_path, step, float(step))
    (step_folder(tmp_path, 1) / "state.json").write_text("damaged")
    Retention(last=1).clean(tmp_path, 3)
    assert steps(tmp_path) == [3, 2]


def test_what_holds_a_users_own_file_stays(tmp_path) -> None:
    for step in (1, 2, 3):
        made(tmp_path, step)
    (step_folder(tmp_path, 1) / "thesis.txt").write_text("mine")
    assert Retention(last=1).clean(tmp_path, 3) == [step_folder(tmp_path, 2)]
    assert (step_folder(tmp_path, 1) / "thesis.txt").read_text() == "mine"
