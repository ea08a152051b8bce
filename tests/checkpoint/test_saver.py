"""Saving in the background: what is copied when, what is reported, what is left."""

import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grappe.checkpoint.commit import verify
from grappe.checkpoint.format import Retention, latest, leftovers, list_checkpoints
from grappe.checkpoint.saver import Saver, Snapshots
from grappe.checkpoint.tensor_file import Piece
from grappe.launch.world import ProcessRank, World, join
from grappe.plan import Plan
from grappe.profiling import memory
from tests.commands import until

ALONE = World(process=ProcessRank(), device=torch.device("cpu"))


def saver(folder: Path, may_commit: Callable[[], None] = lambda: None, keep: int = 3) -> Saver:
    return Saver(folder, ALONE, "token", Retention(last=keep), may_commit)


def save(to: Saver, step: int, **values: Any) -> str | None:
    return to.save(step, {"model.w": torch.full((3,), float(step))}, {}, values)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


class Gate:
    """A commit that waits to be let through."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)


def test_a_save_is_committed_and_holds_what_was_given(tmp_path) -> None:
    to = saver(tmp_path)
    weights, count = torch.randn(4, 3).t(), torch.tensor(7)
    assert to.save(5, {"model.w": weights}, {"local.0.n": count}, {"engine": {"x": 1.5}}) is None
    assert to.wait() is None
    assert to.wait() is None  # nothing to wait for
    assert names(tmp_path) == ["step-000005"]
    newest = latest(tmp_path)
    assert newest.read_values() == {"step": 5, "engine": {"x": 1.5}}
    assert torch.equal(newest.read_tensors().read("model.w"), weights)
    assert torch.equal(newest.read_tensors().read("local.0.n"), count)


def test_training_goes_on_while_it_writes(tmp_path) -> None:
    gate = Gate()
    to = saver(tmp_path, gate)
    weights = torch.zeros(1 << 20)
    values = {"seen": 1}
    assert to.save(1, {"model.w": weights}, {}, values) is None
    weights += 1  # while the file may still be being written
    values["seen"] = 2
    assert gate.reached.wait(60)
    weights += 1
    assert list_checkpoints(tmp_path) == []
    gate.opened.set()
    assert to.save(2, {"model.w": weights}, {}, values) is None
    weights += 1
    assert to.wait() is None
    second, first = list_checkpoints(tmp_path)
    assert verify(first.folder) is verify(second.folder) is None
    assert bool((first.read_tensors().read("model.w") == 0).all())
    assert bool((second.read_tensors().read("model.w") == 2).all())
    assert (first.read_values()["seen"], second.read_values()["seen"]) == (1, 2)


def test_a_failed_save_is_told_by_the_next_and_the_run_goes_on(tmp_path) -> None:
    to = saver(tmp_path)
    save(to, 1)
    (tmp_path / ".step-000002.token").write_text("in the way")
    assert save(to, 2) is None
    problem = save(to, 3)
    assert problem.startswith("step 2 could not be saved: ")
    assert "File exists" in problem
    assert to.wait() is None
    assert [one.step for one in list_checkpoints(tmp_path)] == [3, 1]
    assert all(verify(one.folder) is None for one in list_checkpoints(tmp_path))


@pytest.mark.parametrize(
    ("tensor", "value", "words"),
    [
        (torch.zeros(2), {1, 2}, "TypeError"),
        (torch.zeros(2, dtype=torch.complex128), 0, "complex128"),
        (torch.zeros(2), [[]] * 3, None),
    ],
)
def test_no_kind_of_failure_is_taken_for_a_commit(tmp_path, tensor, value, words: str | None) -> None:
    to = saver(tmp_path)
    to.save(4, {"model.w": tensor}, {}, {"value": value})
    problem = to.wait()
    assert (problem is None) == (words is None)
    assert words is None or words in (problem or "")
    assert [one.step for one in list_checkpoints(tmp_path)] == ([] if words else [4])
    assert leftovers(tmp_path) == []


def test_nothing_is_deleted_before_a_commit(tmp_path) -> None:
    to = saver(tmp_path, keep=1)
    save(to, 1)
    assert to.wait() is None
    gate = Gate()
    to = saver(tmp_path, gate, keep=1)
    save(to, 2)
    assert gate.reached.wait(60)
    assert [one.step for one in list_checkpoints(tmp_path)] == [1]
    gate.opened.set()
    assert to.wait() is None
    assert names(tmp_path) == ["step-000002"]


def test_a_folder_that_vanished_does_not_come_back_in_part(tmp_path) -> None:
    folder = tmp_path / "run/checkpoints"
    to = saver(folder)
    save(to, 1)
    assert "No such file" in (to.wait() or "")
    assert names(tmp_path) == []


def test_a_folder_that_vanishes_while_others_are_waited_for_ends_the_wait(tmp_path) -> None:
    waiting = World(process=ProcessRank(size=2), device=torch.device("cpu"))
    to = Saver(tmp_path, waiting, "token", Retention(), lambda: None)
    thread = threading.Thread(target=to._write, args=(1, [], {}), daemon=True)
    thread.start()
    until((tmp_path / ".step-000001.token/rank-0.safetensors.done").exists, "its own part is written")
    # At once: the saver removes what is its own as soon as it sees that anything is gone.
    (tmp_path / ".step-000001.token").rename(tmp_path / "removed")
    thread.join(60)
    assert not thread.is_alive()
    assert "was removed" in (to._error or "")


def test_closing_gives_up_on_a_save_that_waits_for_others(tmp_path) -> None:
    waiting = World(process=ProcessRank(size=2), device=torch.device("cpu"))
    to = Saver(tmp_path, waiting, "token", Retention(), lambda: None)
    to._thread = threading.Thread(target=to._write, args=(1, [], {}), daemon=True)
    to._thread.start()
    to.close()
    assert not to._thread.is_alive()
    assert names(tmp_path) == []


def two_save(process: ProcessRank, meet: Path, folder: Path, failing: int, streamed: bool) -> list[str | None]:
    """Three saves of which the second fails on the process `failing`; what each wait told.

    With `streamed` the values are made while they are written, and both processes must be there for each.
    """
    world = join(Plan.parse(f"replicate={process.size},threads=1"), process, meet)
    to = Saver(folder, world, "token", Retention(), lambda: None)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(5):
            together = torch.ones(3)
            torch.distributed.all_reduce(together)
            yield f"model.{index}", together

    told = []
    for step in (1, 2, 3):
        if step == 2 and process.rank == failing:
            (folder / ".step-000002.token").mkdir(exist_ok=True)
            (folder / f".step-000002.token/rank-{failing}.safetensors").touch()
        world.gather(None)
        device = "meta" if streamed else "cpu"
        shared = {f"model.{index}": torch.full((3,), 2.0, device=device) for index in range(5)}
        own = {f"local.{process.rank}.n": torch.tensor(step)}
        to.save(step, shared, own, {}, stream if streamed else None)
        told.append(to.wait())
    to.close()
    world.leave()
    return told


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_fails_abandons_the_save_on_both(pool, tmp_path, failing: int, streamed: bool) -> None:
    """And goes on gathering for the other, where values are streamed."""
    told = pool.run("tests.checkpoint.test_saver:two_save", 2, tmp_path, failing, streamed)
    assert told[0] == told[1]
    assert told[0][0] is told[0][2] is None
    assert "step 2 could not be saved" in told[0][1]
    assert "rank-" in told[0][1]
    assert names(tmp_path) == ["step-000001", "step-000003"]
    third = latest(tmp_path).read_tensors()
    assert all(third.read(f"model.{index}").eq(2).all() for index in range(5))
    assert [int(third.read(f"local.{rank}.n")) for rank in (0, 1)] == [3, 3]


def test_what_is_streamed_is_committed_without_ever_being_there_together(tmp_path) -> None:
    alive: list[weakref.ref] = []

    def stream():
        for step in range(8):
            value = torch.full((2, 3), float(step))
            assert sum(one() is not None for one in alive) <= 2, "more than the one before is still held"
            alive.append(weakref.ref(value))
            yield f"model.{step}", value
            del value

    shapes = {f"model.{step}": torch.empty(2, 3, device="meta") for step in range(8)}
    to = saver(tmp_path)
    assert to.save(7, shapes, {"local.0.n": torch.tensor(3)}, {"x": 1}, stream) is None
    assert to.wait() is None
    newest = latest(tmp_path)
    assert newest.read_values() == {"step": 7, "x": 1}
    for step in range(8):
        assert newest.read_tensors().read(f"model.{step}").eq(step).all()
    assert newest.read_tensors().read("local.0.n") == 3


def test_leftovers_are_what_kills_left(tmp_path) -> None:
    for name in (".step-000003.abc", ".old-step-000001.abc", "step-000002", ".old-thoughts"):
        (tmp_path / name).mkdir()
    assert sorted(entry.name for entry in leftovers(tmp_path)) == [".old-step-000001.abc", ".step-000003.abc"]
    assert leftovers(tmp_path, older_than_seconds=1000) == []
    assert leftovers(tmp_path / "nowhere") == []


def test_without_memory_for_a_copy_pieces_are_given_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots, pieces = Snapshots(), [Piece(name, torch.ones(2), (2,), (0,)) for name in "ab"]
    buffers: list[str] = []

    def short(self: Snapshots, piece: Piece) -> torch.Tensor:
        buffers.append(piece.name)
        if piece.name == "b":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return torch.empty(2)

    monkeypatch.setattr(Snapshots, "_buffer", short)
    given, copied = snapshots.take(iter(pieces))
    assert not copied and buffers == ["a", "b"]
    assert all(mine.data is theirs.data for mine, theirs in zip(given, pieces, strict=True))


def test_copies_that_leave_a_step_no_room_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots, pieces = Snapshots(), [Piece(name, torch.ones(2), (2,), (0,)) for name in "ab"]
    asked = list[tuple[int, int, bool]]()

    def has_room(size: int, processes: int, *, peak_known: bool) -> bool:
        asked.append((size, processes, peak_known))
        return peak_known

    monkeypatch.setattr(memory, "has_room", has_room)
    assert not snapshots.take(pieces, 2, peak_known=False)[1]
    assert snapshots.take(pieces, 2)[1] and snapshots.take(pieces, 2)[1]
    assert asked == [(16, 2, False), (16, 2, True)]  # what is kept needs no more room


def test_without_memory_for_a_thread_the_training_writes(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = saver(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert save(to, 1) is None
        assert latest(tmp_path).step == 1  # type: ignore[union-attr]
        shutil.rmtree(tmp_path)
        assert save(to, 2) is None
    tmp_path.mkdir()
    assert "step 2 could not be saved" in str(save(to, 3))
    assert to.wait() is None
    assert names(tmp_path) == ["step-000003"]


def refuse(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_failure_is_noted_before_anybody_is_told_that_the_part_is_written(tmp_path) -> None:
    """Process 0 waits for every part; a failure that the others had not heard of would have it wait for ever."""
    to, noted = saver(tmp_path / "gone"), list[str | None]()

    class Written(threading.Event):
        def set(self) -> None:
            noted.append(to._error)
            super().set()

    to._written = Written()
    save(to, 1)
    told = to.wait()
    assert "No such file" in told
    assert noted == [told]
