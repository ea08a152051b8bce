"""A start that is refused takes back what it made, and nothing else."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from grappe.checkpoint.format import leftovers
from grappe.checkpoint.lease import Lease
from grappe.engines.base import EngineSetup
from grappe.engines.native import Native
from grappe.errors import GrappeError, PlanError, RunError
from grappe.launch.files import kind
from grappe.training.run import FAILED, Run
from grappe.training.start_run import other_bits
from grappe.training.worker import worker
from tests.parity.tasks import Images
from tests.training.test_training import HERE, request_of, train


def refused_start(folder: Path, weights: Path | None) -> str:
    request = request_of(folder, Images(epochs=1), data=folder, weights=weights)
    with pytest.raises(GrappeError) as error:
        worker(request, HERE, folder.parent)
    return str(error.value)


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    file = tmp_path / "bad.pt"
    torch.save({"other": torch.ones(1)}, file)
    return file


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(folder)): one.read_bytes() if one.is_file() else b"/" for one in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize(
    "held", [None, {}, {"logs/job-17.out": "a job's output"}, {"logs/submit-1.sh": "#!/bin/bash", "logs/mine": "mine"}]
)
def test_a_refused_start_leaves_what_was_there(tmp_path: Path, bad: Path, held: dict[str, str] | None) -> None:
    run = tmp_path / "run"
    if held is not None:
        run.mkdir()
    for name, text in (held or {}).items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(text)
    before = files(tmp_path)
    assert "bad.pt" in refused_start(run, bad)
    assert files(tmp_path) == before


def test_a_plan_that_the_engine_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, folder = files(tmp_path), tmp_path / "runs" / "run"

    def refuse(self: Native, setup: EngineSetup) -> None:
        assert (folder / "checkpoints" / "step-000000").is_dir()
        (folder / "logs" / "rank-0.log").write_text("begun")
        first = folder / "checkpoints" / "step-000000"
        first.rename(first.with_name("step-000007"))  # where the other program's training stood
        raise PlanError("no such plan")

    monkeypatch.setattr(Native, "__init__", refuse)
    assert refused_start(folder, None) == "no such plan"
    assert files(tmp_path) == before
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "job-1.out").write_text("of a job")
    assert refused_start(folder, None) == "no such plan"
    assert [*files(folder)] == ["logs", "logs/job-1.out", "logs/rank-0.log"]


@pytest.mark.parametrize(
    "name", ["logs-of-mine/thesis.txt", "rendezvous-notes/a", "rendezvous-notes", "logs", "thesis.txt"]
)
def test_a_folder_of_other_things_is_refused_and_left_alone(tmp_path: Path, bad: Path, name: str) -> None:
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    before = files(tmp_path)
    assert "is not a run" in refused_start(file.parents[name.count("/")], bad)
    assert files(tmp_path) == before


def test_a_users_own_files_among_the_checkpoints_stay(tmp_path: Path) -> None:
    run = train(tmp_path / "run", Images(epochs=3), steps=2, save_every=1, keep=1).run
    checkpoints = Run(run).checkpoints
    folders = (".step-notes", ".old-thoughts", ".step-000001.0123456789abcdef", "step-000002")
    mine = [checkpoints / name / "thesis.txt" for name in folders]
    for file in mine:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    (checkpoints / ".step-000001.0123456789abcdef/rank-0.safetensors").write_bytes(bytes(9))
    (checkpoints / ".step-000003.fedcba9876543210").mkdir()
    (checkpoints / ".step-000003.fedcba9876543210/rank-0.safetensors").write_bytes(bytes(9))
    assert [one.name for one in leftovers(checkpoints)] == [".step-000003.fedcba9876543210"]
    train(run, Images(epochs=3), steps=6, save_every=1, keep=1)
    assert all(file.read_text() == "mine" for file in mine)
    assert not (checkpoints / ".step-000003.fedcba9876543210").exists()
    (checkpoints / "step-000006/state.json").write_text("damaged")
    (checkpoints / "step-000006/thesis.txt").write_text("mine")
    train(run, Images(epochs=3), steps=6, save_every=1, keep=1)  # that step again
    assert [one.read_text() for one in checkpoints.glob("*step-000006*/thesis.txt")] == ["mine"]
    assert Run(run).latest().step == 6


def test_one_of_many_starts_at_the_same_moment_begins_the_run(tmp_path: Path) -> None:
    for round_ in range(8):
        folder = tmp_path / f"run-{round_}"
        together = threading.Barrier(4)

        def begin(number: int, folder: Path = folder, together: threading.Barrier = together) -> int | None:
            together.wait()
            try:
                Run.begin(folder, {"id": str(number)})
            except RunError:
                return None
            return number

        with ThreadPoolExecutor(4) as pool:
            began = [one for one in pool.map(begin, range(4)) if one is not None]
        assert len(began) == 1
        assert Run(folder).read_id() == str(began[0])
        assert sorted(files(folder)) == ["checkpoints", "logs", "run.json"]


def test_a_start_that_lost_its_lease_notes_no_failure_in_its_successors_run(tmp_path: Path) -> None:
    run = Run.begin(tmp_path / "run", {})[0]
    mine, other = Lease(run.folder), Lease(run.folder)
    other.take()
    for lease, noted in ((mine, ""), (other, "file")):
        with pytest.raises(RuntimeError), run.noting_failure(lease.token):
            raise RuntimeError("lost")
        assert kind(run.folder / FAILED) == noted
    other.release()


BEFORE = {"plan": "replicate=2,exact=8", "threads": 1, "device": "cpu", "processor": "A, AVX512"}
BEFORE |= {"versions": {"torch": "2.13.0"}}


def test_what_changes_the_bits_of_exact_is_named() -> None:
    assert other_bits(BEFORE, {**BEFORE, "plan": "replicate=4,exact=8"}) == []
    now = {**BEFORE, "plan": "exact=4", "threads": 2, "versions": {"torch": "2.14.0"}}
    assert other_bits(BEFORE, now) == ["exact 8 -> 4", "threads 1 -> 2", "torch 2.13.0 -> 2.14.0"]
    assert other_bits({**BEFORE, "processor": "B, AVX2"}, BEFORE) == ["processor B, AVX2 -> A, AVX512"]
    assert other_bits({"plan": ""}, BEFORE) == ["exact 0 -> 8"]
    assert other_bits(BEFORE, {**BEFORE, "plan": "replicate=2", "threads": 7}) == []
