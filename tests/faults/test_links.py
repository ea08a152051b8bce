"""Links planted in a run: each verb refuses with the link's name, or replaces the link; nothing outside changes."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from grappe.checkpoint.lease import Lease
from grappe.contrib.slurm.jobs import record_job
from grappe.errors import GrappeError
from grappe.training.run import Run
from grappe.training.watchers.tensorboard_log import TensorBoard
from grappe.verbs.follow import RunView
from grappe.verbs.load import load
from grappe.verbs.prune import prune
from grappe.verbs.report.report import report
from grappe.verbs.runs import describe
from tests.parity.tasks import Images
from tests.training.test_training import train

TASK = Images(epochs=2)
SAVED = {"save_every": 1, "keep": 9, "log_samples": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("links") / "run", TASK, steps=3, **SAVED).run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


@pytest.fixture
def outside(made: Path, tmp_path: Path) -> Iterator[Path]:
    """Another run and a file that must stay as they are; a file that must not come to be."""
    place = tmp_path / "outside"
    shutil.copytree(made, place / "other")
    (place / "thesis.txt").write_text("my thesis")
    before = content(place)
    yield place
    assert content(place) == before


def content(folder: Path) -> dict[str, bytes]:
    return {str(one): one.read_bytes() if one.is_file() else b"" for one in sorted(folder.rglob("*"))}


def plant(link: Path, target: Path) -> None:
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target)


def refused(link: Path, verb) -> None:
    with pytest.raises(GrappeError, match="is a link") as error:
        verb()
    assert str(link) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["usage.jsonl", "metrics.jsonl", "samples/rank-0.jsonl", "run.json"])
@pytest.mark.parametrize("target", ["thesis.txt", "none.txt"])
def test_a_file_that_training_writes_is_a_link(run: Path, outside: Path, name: str, target: str) -> None:
    plant(run / name, outside / target)
    if name == "run.json" and target == "none.txt":  # no run then
        with pytest.raises(GrappeError):
            train(run, TASK, steps=5, **SAVED)
    else:
        refused(run / name, lambda: train(run, TASK, steps=5, **SAVED))


@pytest.mark.parametrize("name", ["checkpoints", "samples", "logs", "tensorboard"])
def test_a_folder_that_training_writes_to_is_a_link(run: Path, outside: Path, name: str) -> None:
    target = outside / "other" / name
    plant(run / name, target if target.exists() else outside)
    refused(run / name, lambda: train(run, TASK, steps=5, log=("tensorboard",), **SAVED))


@pytest.mark.parametrize("name", [".rank-0.jsonl", "../.metrics.jsonl.{pid}", "../.run.json.{pid}"])
def test_names_beside_what_is_replaced_lead_nowhere(run: Path, outside: Path, name: str) -> None:
    plant(run / "samples" / name.format(pid=os.getpid()), outside / "thesis.txt")
    assert train(run, TASK, steps=5, **SAVED).step == 5


def test_what_else_writes_or_reads_follows_no_link(run: Path, outside: Path) -> None:
    plant(run / "metrics.jsonl", outside / "other/metrics.jsonl")
    refused(run / "metrics.jsonl", lambda: RunView(Run(run)).update())
    plant(run / "lease.json", outside / "thesis.txt")
    lease = Lease(run)
    lease.take()
    lease.release()
    plant(run / "logs/jobs.jsonl", outside / "thesis.txt")
    refused(run / "logs/jobs.jsonl", lambda: record_job(run, "1", "here", ""))
    plant(run / "tensorboard", outside)
    info = SimpleNamespace(folder=run, start=0, description={})
    refused(run / "tensorboard", lambda: TensorBoard().started(info))
    plant(run / "done", outside / "none.txt")
    Run(run).finish()
    assert (run / "done").is_file()
    assert not (run / "done").is_symlink()


@pytest.mark.parametrize("name", ["report.html", ".report.html.part"])
def test_a_report_replaces_no_other_file(run: Path, outside: Path, name: str) -> None:
    plant(run / name, outside / "thesis.txt")
    file = report([run])
    assert "<html" in file.read_text()
    assert not file.is_symlink()


def test_prune_leaves_what_a_link_names(run: Path, outside: Path) -> None:
    (run / "checkpoints/.step-000009.0123456789abcdef").symlink_to(outside / "other")
    (run / "checkpoints/step-000001/into").symlink_to(outside / "other")
    prune([Run(run)], 1)
    assert Run(run).latest() is not None
    plant(run / "checkpoints", outside / "other/checkpoints")
    refused(run / "checkpoints", lambda: prune([Run(run)], 1))


@pytest.mark.parametrize("verb", [load, describe])
def test_reading_follows_no_link_either(run: Path, outside: Path, verb) -> None:
    plant(run / "checkpoints", outside / "other/checkpoints")
    refused(run / "checkpoints", lambda: verb(run))


def test_a_second_name_of_a_file_keeps_its_content(run: Path, tmp_path: Path) -> None:
    """A backup made of hard links."""
    backup = shutil.copytree(run, tmp_path / "backup", copy_function=os.link)
    before = content(backup)
    train(run, TASK, steps=5, **SAVED)
    assert content(backup) == before


def test_the_run_itself_may_be_reached_by_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "newest").symlink_to(run)
    assert train(tmp_path / "newest", TASK, steps=5, **SAVED).step == 5
