"""The choice of a checkpoint, and what is said of those that are not taken."""

import json
import shutil
from pathlib import Path

import pytest

from grappe.checkpoint.commit import Origin, commit, write_new
from grappe.checkpoint.format import Retention, latest, list_checkpoints, select, step_folder
from grappe.errors import RunError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 10, 20 and 30; that of step 20 is the best."""
    found = tmp_path / "run/checkpoints"
    found.mkdir(parents=True)
    for step, loss in ((10, 0.5), (20, 0.1), (30, 0.3)):
        made(found, step, loss)
    return found


def made(folder: Path, step: int, loss: object = None, run: str = "ours") -> None:
    beside = folder / f".step-{step}"
    beside.mkdir()
    state = json.dumps({"step": step, "validation_loss": loss}).encode()
    files = {"state.json": write_new(beside / "state.json", state)}
    commit(beside, step_folder(folder, step), files, Origin(step=step, run=run))


def taken(folder: Path, which: int | str | None = None, saved: int | None = None) -> tuple[int | None, str]:
    found = select(folder, which, run="ours", saved=saved)
    return found.checkpoint.step if found.checkpoint else None, str(found)


def refused(folder: Path, which: int | str) -> str:
    with pytest.raises(RunError) as error:
        select(folder, which, run="ours")
    return str(error.value)


def test_the_newest_a_step_or_the_best_is_taken(folder: Path) -> None:
    assert taken(folder) == taken(folder, "last") == (30, "step-000030 (newest)")
    assert taken(folder, saved=30) == taken(folder)
    assert taken(folder, 10) == taken(folder, "10") == (10, "step-000010 (as asked)")
    assert taken(folder, "best") == (20, "step-000020 (best: validation loss 0.1000)")


def damage(folder: Path, kind: str) -> str:
    """Damages the newest; what is said of it."""
    newest = folder / "step-000030"
    if kind == "damaged":
        (newest / "state.json").write_text("{}")
        return "step-000030 does not verify: skipped (state.json differs from what was saved)"
    if kind == "emptied":
        shutil.rmtree(newest)
        newest.mkdir()
        return "step-000030 does not verify: skipped (its manifest or a file cannot be read: "
    if kind == "missing":
        shutil.rmtree(newest)
        return "step-000030, which run.json says was saved, is missing"
    if kind == "renamed":
        newest.rename(folder / "step-30")
        return "step-30 is not a checkpoint's name: skipped"
    if kind == "linked":
        newest.rename(folder.parent / "elsewhere")
        newest.symlink_to(folder.parent / "elsewhere")
        return "step-000030 is a link: skipped"
    if kind == "a file":
        shutil.rmtree(newest)
        newest.write_text("")
        return "step-000030 is not a checkpoint's name: skipped"
    shutil.rmtree(newest)
    if kind == "copied":
        shutil.copytree(folder / "step-000020", folder / "step-000090")
        return "step-000090 does not verify: skipped (it is the checkpoint of step 20, in a folder of another name)"
    made(folder, 30, run="theirs")
    return "step-000030 does not verify: skipped (it is a checkpoint of another run)"


@pytest.mark.parametrize(
    "kind", ["damaged", "emptied", "missing", "renamed", "linked", "a file", "copied", "another run's"]
)
def test_what_is_not_taken_is_named(folder: Path, kind: str) -> None:
    words = damage(folder, kind)
    step, told = taken(folder, saved=30)
    assert step == 20
    assert words in told
    assert told.endswith("; step-000020 is taken")
    with pytest.raises(RunError, match=r"the last checkpoint of .* cannot be read: ") as error:
        select(folder, "last", run="ours", saved=30)
    assert words in str(error.value)


@pytest.mark.parametrize("kind", ["damaged", "emptied", "missing", "renamed", "linked", "a file", "another run's"])
def test_what_is_asked_for_is_never_another(folder: Path, kind: str) -> None:
    damage(folder, kind)
    assert "30" in refused(folder, 30)
    assert "There is: --checkpoint" in refused(folder, 30)


def test_nobody_knows_the_best_of_what_cannot_be_read(folder: Path) -> None:
    (folder / "step-000010/state.json").write_text("{}")
    assert "the best one is unknown" in refused(folder, "best")


def test_without_losses_there_is_no_best(tmp_path: Path) -> None:
    made(tmp_path, 1)
    assert "has a validation loss" in refused(tmp_path, "best")


@pytest.mark.parametrize("which", ["newest", "-1", "1e3", "\u0663", "9" * 5000, ""])
def test_what_is_no_checkpoint_is_refused(folder: Path, which: str) -> None:
    assert "give a step, last or best" in refused(folder, which)


def test_where_nothing_is_whole_that_is_said(folder: Path) -> None:
    for one in folder.iterdir():
        (one / "manifest.json").unlink()
    step, told = taken(folder)
    assert step is None
    assert told.count("does not verify") == 3
    assert told.endswith("no checkpoint verifies")


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
    gone = set(range(1, len(losses) + 1)) - set(kept)
    assert {one.name for one in removed} == {f"step-{n:06d}" for n in gone}


@pytest.mark.parametrize("last", [1, 3])
def test_damaged_later_ones_do_not_push_out_what_is_whole(tmp_path, last: int) -> None:
    """A training that went on from step 3, as 6, 7 and 9 did not verify, has just committed 4."""
    for step in (2, 3, 4, 6, 7, 9):
        made(tmp_path, step)
    for step in (6, 7, 9):
        (step_folder(tmp_path, step) / "state.json").write_text("{}")
    Retention(last=last).clean(tmp_path, 4)
    newest = latest(tmp_path)
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
