"""Every state that a crash can leave a save in, by its recorded file operations, is the old or the new."""

import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from grappe.checkpoint.commit import read_json, write_json
from grappe.checkpoint.format import STATE, Retention, latest, list_checkpoints
from grappe.checkpoint.initial import _save
from grappe.checkpoint.saver import Saver
from grappe.checkpoint.tensor_file import Piece
from grappe.checkpoint.weights import MODEL
from grappe.launch.world import ProcessRank, World
from tests.faults.conftest import END, PLANS
from tests.faults.resume_cell import hashes, hashes_of
from tests.faults.trace import Operation, Recorder, Tree, left, rebuild, recording, unsynced

ALL_SUBSETS = 7  # operations; of more, a sample
SAMPLE = 2**ALL_SUBSETS


def save(folder: Path, step: int, size: int = 1, keep: int = 1) -> None:
    """A save of `size` processes, process 0 last, as the commit waits for the others."""
    for rank in reversed(range(size)):
        world = World(process=ProcessRank(rank=rank, size=size), device=torch.device("cpu"))
        saver = Saver(folder, world, "token", Retention(last=keep), lambda: None)
        pieces = [Piece(f"{MODEL}{rank}", torch.full((9,), float(step)), (9,), (0,))]
        saver._write(step, pieces, {"size": size})
        assert saver._error is None


def loaded(folder: Path) -> int | None:
    """The step of the newest checkpoint, wholly what was saved then; None: there is none."""
    newest = latest(folder)
    if newest is None:
        return None
    state, tensors = newest.read_values(), newest.read_tensors()
    assert state["step"] == newest.step
    assert set(tensors) == {f"{MODEL}{rank}" for rank in range(state["size"])}
    for name in tensors:
        assert torch.equal(tensors.read(name), torch.full((9,), float(newest.step)))
    return newest.step


def states(recorder: Recorder) -> Iterator[tuple[int, Tree]]:
    """Each state once: with how many operations were done, and what a crash then may leave."""
    generator = random.Random(7)
    seen = set()
    for done in range(len(recorder.operations) + 1):
        operations = recorder.operations[:done]
        for kept in subsets(operations, generator):
            tree = left(recorder, kept)
            key = repr(sorted(flat(tree)))
            if (done == len(recorder.operations), key) not in seen:
                seen.add((done == len(recorder.operations), key))
                yield done, tree


def subsets(operations: list[Operation], generator: random.Random) -> Iterator[list[Operation]]:
    open_ = unsynced(operations)
    if len(open_) <= ALL_SUBSETS:
        choices = [set(some) for n in range(len(open_) + 1) for some in itertools.combinations(open_, n)]
    else:
        choices = [{one for one in open_ if generator.random() < 0.5} for _ in range(SAMPLE)]
        choices += [{one} for one in open_] + [set(open_), set()]
    for dropped in choices:
        yield [one for index, one in enumerate(operations) if index not in dropped]


def flat(tree: Tree, path: str = "") -> Iterator[tuple[str, bytes]]:
    for name, content in tree.items():
        if isinstance(content, bytes):
            yield f"{path}/{name}", content
        else:
            yield f"{path}/{name}/", b""
            yield from flat(content, f"{path}/{name}")


def before(folder: Path, *steps: int) -> None:
    for step in steps:
        save(folder, step, keep=9)


def damaged(folder: Path, *steps: int) -> None:
    before(folder, *steps)
    (folder / f"step-{steps[-1]:06d}/{STATE}").write_text("damaged")


CASES: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], set[int | None], int]] = {
    "the first": (lambda folder: None, lambda folder: save(folder, 1), {None, 1}, 1),
    "the next": (lambda folder: before(folder, 1), lambda folder: save(folder, 2), {1, 2}, 2),
    "and two go": (lambda folder: before(folder, 1, 2), lambda folder: save(folder, 3), {2, 3}, 3),
    "of two processes": (lambda folder: before(folder, 1), lambda folder: save(folder, 2, 2), {1, 2}, 2),
    "the same again": (lambda folder: before(folder, 1, 2), lambda folder: save(folder, 2), {2}, 2),
    "over a damaged one": (lambda folder: damaged(folder, 1, 2), lambda folder: save(folder, 2), {1, 2}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_crash_leaves_the_old_or_the_new(tmp_path, case: str) -> None:
    prepare, act, possible, new = CASES[case]
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    prepare(folder)
    with recording(folder) as recorder:
        act(folder)
    assert loaded(folder) == new
    committed = commit_of(recorder)
    outcomes = set()
    for count, (done, tree) in enumerate(states(recorder)):
        rebuild(tree, tmp_path / f"state{count}")
        outcome = loaded(tmp_path / f"state{count}")
        shutil.rmtree(tmp_path / f"state{count}")
        assert outcome in possible, f"after {done} operations: {recorder.operations[:done][-3:]}"
        assert done <= committed or outcome == new
        outcomes.add(outcome)
    assert outcomes == possible
    print(f"{case}: {len(recorder.operations)} operations, {count + 1} different states")
    assert left(recorder, recorder.operations) == as_tree(folder)  # the recorder missed nothing


def commit_of(recorder: Recorder) -> int:
    """Finds the operation after which the new checkpoint's name is on disk for good."""
    root = recorder.root.stat().st_ino
    synced = [i for i, one in enumerate(recorder.operations) if one.kind == "sync" and one.inode == root]
    return max(synced, default=-1)


@pytest.mark.parametrize("plan", PLANS)
def test_whatever_a_crash_leaves_a_run_goes_on_to_the_same_bits(tmp_path, recorded, plan: str) -> None:
    """Processes that save side by side; the run goes on from the fullest of the states that lead to a step."""
    was = recorded(plan)
    recorder, folder = was.recorder, was.run / "checkpoints"
    wanted = {one.step: hashes_of(one) for one in list_checkpoints(folder)}
    assert set(wanted) == {3, 6}
    committed, fullest = commit_of(recorder), dict[int, Tree]()
    for count, (done, tree) in enumerate(states(recorder)):
        rebuild(tree, tmp_path / f"state{count}")
        newest = latest(tmp_path / f"state{count}")
        told = f"after {done} operations: {recorder.operations[:done][-3:]}"
        assert newest is not None, told
        assert hashes_of(newest) == wanted.get(newest.step), told
        assert done <= committed or newest.step == 6, told
        shutil.rmtree(tmp_path / f"state{count}")
        fullest[newest.step] = max(fullest.get(newest.step, {}), tree, key=lambda one: len([*flat(one)]))
    assert left(recorder, recorder.operations) == as_tree(folder)
    assert set(fullest) == {3, 6}
    print(f"{plan}: {len(recorder.operations)} operations, {count + 1} different states")
    for step, tree in fullest.items():
        run = tmp_path / f"run{step}"
        shutil.copytree(was.run, run, ignore=shutil.ignore_patterns("checkpoints"))
        rebuild(tree, run / "checkpoints")
        assert f"resuming from step {step}" in was.go_on(run)
        assert hashes(run, END) == was.end


def as_tree(folder: Path) -> Tree:
    return {entry.name: as_tree(entry) if entry.is_dir() else entry.read_bytes() for entry in folder.iterdir()}


def test_step_0_is_there_or_not(tmp_path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    model = torch.nn.Linear(2, 3)
    with recording(folder) as recorder:
        _save(model, folder, "")
    outcomes = set()
    for count, (_, tree) in enumerate(states(recorder)):
        rebuild(tree, tmp_path / f"state{count}")
        newest = latest(tmp_path / f"state{count}")
        outcomes.add(newest is None)
        if newest is not None:
            assert all(torch.equal(newest.read_model().read(n), p) for n, p in model.named_parameters())
    assert outcomes == {True, False}


def test_json_is_the_old_or_the_new(tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    old, new = {"status": "running", "step": 1}, {"status": "done", "step": 22}
    (folder / "run.json").write_text(json.dumps(old))
    with recording(folder) as recorder:
        write_json(folder / "run.json", new)
    seen = []
    for count, (_, tree) in enumerate(states(recorder)):
        rebuild(tree, tmp_path / f"state{count}")
        content = read_json(tmp_path / f"state{count}/run.json")
        assert content in (old, new)
        seen.append(content)
    assert old in seen
    assert seen[-1] == new
