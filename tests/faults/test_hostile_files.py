"""A few of the hostile files that `make soak` tries by the thousand, and how the attack itself tells what it finds."""

import mmap
import time
from pathlib import Path

import pytest

from grappe.errors import GrappeError
from tests.faults import hostile
from tests.faults.fuzz import damage
from tests.faults.hostile_files import Kind
from tests.parity.tasks import Images
from tests.training.test_training import train

NUMBERS = (0, 5, 8, 13, 17, 202)
"""One of each kind at least; 202 once led the attack itself through a link."""


@pytest.mark.slow
def test_some_of_the_files_end_as_they_should(capsys) -> None:
    assert [hostile.main(1, number) for number in NUMBERS] == [0] * len(NUMBERS), capsys.readouterr().out


def failing(rng, honest: Path, place: Path):
    def fails() -> None:
        raise GrappeError("refused")

    def crashes() -> None:
        raise ValueError("the mistake")

    def takes_memory() -> None:
        mmap.mmap(-1, 64 << 20)[::4096] = b"1" * (16 << 10)  # of the heap's spare memory nothing would show

    def writes() -> None:
        (place / "outside/planted").write_text("x")

    yield from (fails, crashes, takes_memory, writes)


def test_each_finding_is_printed_with_its_number(capsys) -> None:
    assert hostile.main(2, 7, {"failing": Kind(case=failing, share=1, model=1e6, own=0.0)}) == 1
    said = capsys.readouterr().out
    for number in (7, 8):
        assert f"FOUND failing {number}: exception: " in said
        assert f"FOUND failing {number}: memory: " in said
        assert f"FOUND failing {number}: wrote outside" in said
    assert "ValueError: the mistake" in said


def dying(rng, honest: Path, place: Path):
    yield lambda: time.sleep(3600)


def test_a_command_that_hangs_is_ended_and_named(capsys) -> None:
    assert hostile.main(1, 3, {"dying": Kind(case=dying, share=1, model=0.0, own=1e9)}, seconds=1.0) == 1
    assert "FOUND dying 3: died: the process ended with -9" in capsys.readouterr().out


@pytest.mark.parametrize("link", ["checkpoints", "checkpoints/step-000001"])
def test_damage_itself_stays_inside(tmp_path: Path, link: str) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    train(run, Images(), steps=1)
    outside.mkdir()
    target = outside / "step-000001"
    (run / "checkpoints/step-000001").rename(target) if link != "checkpoints" else (run / link).rename(outside / "c")
    (run / link).symlink_to(target if link != "checkpoints" else outside / "c")
    before = {one: one.read_bytes() for one in outside.rglob("*") if one.is_file()}
    damage(run, outside, [], sealed=True)
    assert {one: one.read_bytes() for one in outside.rglob("*") if one.is_file()} == before
