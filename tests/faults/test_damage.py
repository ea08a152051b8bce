"""Bit flips, truncations and swapped files: each is detected and the checkpoint before is used, or is harmless."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from grappe.checkpoint.foreign_training import Begin
from grappe.checkpoint.format import Checkpoint
from grappe.checkpoint.initial import build
from grappe.checkpoint.weights import named_tensors
from grappe.errors import RunError
from grappe.training.run import Run
from grappe.verbs.load import load
from tests.faults.conftest import END, PLANS, TASK, Recorded
from tests.faults.resume_cell import hashes

DAMAGES = 200  # of each plan's run
KINDS = ("flip", "flip", "flip", "truncate", "swap", "other", "lose", "grow")
Content = tuple[dict[str, torch.Tensor], dict]


@pytest.fixture(scope="module", params=PLANS)
def was(request: pytest.FixtureRequest, recorded) -> Recorded:
    return recorded(request.param)


@pytest.fixture
def run(tmp_path, was: Recorded) -> Run:
    """A run with checkpoints of steps 3 and 6."""
    return Run(shutil.copytree(was.run, tmp_path / "run"))


def content(checkpoint: Checkpoint) -> Content:
    tensors = checkpoint.read_tensors()
    return {name: tensors.read(name) for name in tensors}, checkpoint.read_values()


def alike(a: Content, b: Content) -> bool:
    return a[1] == b[1] and set(a[0]) == set(b[0]) and all(torch.equal(a[0][n], b[0][n]) for n in a[0])


def damaged(run: Run, kind: str, file: Path, generator: random.Random) -> dict[Path, bytes]:
    """Damages it on disk; what was in the files that are touched."""
    before = {file: file.read_bytes()}
    text = bytearray(before[file])
    if kind == "flip":
        text[generator.randrange(len(text))] ^= 1 << generator.randrange(8)
        file.write_bytes(text)
    elif kind == "truncate":
        file.write_bytes(text[: generator.randrange(len(text))])
    elif kind == "grow":
        file.write_bytes(text + bytes(generator.randrange(1, 9)))
    elif kind == "lose":
        file.unlink()
    elif kind == "swap":  # two files of a checkpoint, each under the other's name
        other = generator.choice([one for one in file.parent.iterdir() if one != file])
        before[other] = other.read_bytes()
        file.write_bytes(before[other])
        other.write_bytes(before[file])
    else:  # the file of that name of another checkpoint
        others = [one for one in run.checkpoints.iterdir() if one != file.parent]
        file.write_bytes((generator.choice(others) / file.name).read_bytes())
    return before


def test_damage_to_a_checkpoint(run, was) -> None:
    generator = random.Random(3)
    whole = {step: content(Checkpoint(folder=run.checkpoints / f"step-{step:06d}", step=step)) for step in (3, 6)}
    files = sorted(file for step in (3, 6) for file in (run.checkpoints / f"step-{step:06d}").iterdir())
    assert len(files) == 2 * (was.size + 2)
    passed_over = 0
    for count in range(DAMAGES):
        kind, file = generator.choice(KINDS), generator.choice(files)
        before = damaged(run, kind, file, generator)
        newest = run.latest()
        told = f"{count}: {kind} of {file.relative_to(run.folder)}"
        assert newest is not None, told
        assert newest.step in whole, told
        assert alike(content(newest), whole[newest.step]), told
        assert newest.step == 6 or file.parent.name == "step-000006", told
        passed_over += newest.step == 3
        for one, text in before.items():
            one.write_bytes(text)
    assert passed_over > DAMAGES / 3
    newest = run.latest()
    assert alike(content(newest), whole[6])


@pytest.mark.parametrize("kind", ["flip", "lose", "truncate"])
def test_the_training_goes_on_from_the_one_before_to_the_same_bits(run, was, kind: str) -> None:
    """The part of the last process: in a pipeline, what nobody else has."""
    part = run.checkpoints / f"step-000006/rank-{was.size - 1}.safetensors"
    damaged(run, kind, part, random.Random(5))
    told = was.go_on(run.folder)
    assert "step-000006 does not verify: skipped" in told
    assert "resuming from step 3" in told
    assert hashes(run.folder, END) == was.end


def test_when_nothing_is_whole_it_begins_again_and_says_so(run, was) -> None:
    for folder in run.checkpoints.iterdir():
        damaged(run, "lose", folder / f"rank-{was.size - 1}.safetensors", random.Random(6))
    told = was.go_on(run.folder)
    for step in (3, 6):
        assert f"step-00000{step} does not verify: skipped" in told
    assert "starting again from step 0" in told
    assert hashes(run.folder, END) == was.end


def test_no_bit_of_a_manifest_can_flip_unseen(run) -> None:
    """Every fifth of its bits, so that each byte has one or two."""
    folder = run.checkpoints / "step-000006"
    whole = content(Checkpoint(folder=folder, step=6))
    manifest = folder / "manifest.json"
    good = manifest.read_bytes()
    for position in range(0, len(good) * 8, 5):
        text = bytearray(good)
        text[position // 8] ^= 1 << position % 8
        manifest.write_bytes(text)
        newest = run.latest()
        assert newest.step == 3 or alike(content(newest), whole)
    manifest.write_bytes(good)


def flips(good: bytes, count: int) -> Iterator[bytes]:
    generator = random.Random(4)
    for _ in range(count):
        text = bytearray(good)
        text[generator.randrange(len(text))] ^= 1 << generator.randrange(8)
        yield bytes(text)


def test_damage_to_the_curves_loses_a_line_at_most(run) -> None:
    file = run.folder / "metrics.jsonl"
    good = file.read_bytes()
    lines = len(good.splitlines())
    for text in (*flips(good, 200), good[:-20], b"\xff" * 99 + b"\n" + good, b"[" * 100_000 + b"\n" + good):
        file.write_bytes(text)
        assert lines - 2 <= len(list(run.records())) <= lines + 1  # a flipped line end takes two
        run.cut_back(3)
        assert all(isinstance(one.get("step", 0), int) for one in run.records())
    file.write_bytes(good)


def test_damage_to_the_description_is_said_or_harmless(run) -> None:
    file = run.folder / "run.json"
    good, whole = file.read_bytes(), run.read_description()
    for text in (*flips(good, 200), good[:-20], b""):
        file.write_bytes(text)
        try:
            assert {name: run.read_description().get(name) for name in whole} == whole  # a flip in the key of the hash
        except RunError as error:
            assert "run.json cannot be read" in str(error) or "run.json is damaged" in str(error)
        assert run.latest().step == 6
    file.write_bytes(good)
    assert run.read_description() == whole


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_that_was_parted_is_taken_over_whole(recorded, tmp_path, plan: str) -> None:
    run = Run(shutil.copytree(recorded(plan).run, tmp_path / "run"))
    newest, model = run.latest(), load(run, TASK)
    assert newest is not None
    build(TASK, tmp_path / "new/checkpoints", Begin(source=run.folder))
    (tmp_path / "new/run.json").write_text("{}")
    begun = Run(tmp_path / "new").latest()
    first = begun.read_model()
    assert set(first) == set(newest.read_model()) == set(named_tensors(TASK.model()))
    for name, tensor in named_tensors(model).items():
        assert torch.equal(first.read(name), tensor), name
    with torch.no_grad():
        output = model(TASK.data("validation", tmp_path).inputs)
    assert output.isfinite().all()
    untrained = named_tensors(TASK.model())
    assert all(not torch.equal(tensor, untrained[name]) for name, tensor in named_tensors(model).items())
