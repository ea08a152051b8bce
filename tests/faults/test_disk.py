"""A disk that is full, may not be written, or is gone: the run says so, keeps the old, goes on or stops as asked."""

import functools
import os
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grappe.checkpoint.commit import verify
from grappe.checkpoint.format import leftovers, list_checkpoints
from grappe.errors import RunError
from grappe.launch.world import ProcessRank
from grappe.training.options import Options
from grappe.training.run import Run
from tests.commands import until
from tests.faults.conftest import PLANS
from tests.faults.resume_cell import curves, hashes, part
from tests.parity.tasks import Images
from tests.processes import Pool
from tests.small_disk import fill
from tests.training.test_training import same, train, weights

AT: dict[int, Callable[[], object]] = {}
CALLS = [0]


class Disturbed(Images):
    """Things happen to the disk before some of its steps."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            CALLS[0] += 1
            if CALLS[0] in AT:
                until(lambda: not saving(), "the save before is done")
                AT.pop(CALLS[0])()
        return super().loss(output, target)


def saving() -> bool:
    return any(thread.name == "grappe-save" for thread in threading.enumerate())


def make_read_only(folder: Path) -> None:
    """As after an error of the disk: files that are open stay writable. Undone by unmounting it once."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)


def at(**steps: Callable[[], object]) -> None:
    """Sets what happens at which step: at(step4=...)."""
    CALLS[0] = 0
    AT.clear()
    AT.update({int(name.removeprefix("step")): act for name, act in steps.items()})


TASK = Disturbed(epochs=3, rule="adam")


def test_a_full_disk_costs_a_checkpoint_and_not_the_training(disk, capsys) -> None:
    at(step4=lambda: fill(disk), step8=(disk / "ballast").unlink)
    result = train(disk / "run", TASK)
    assert (result.status, result.step) == ("finished", 9)
    out = capsys.readouterr().out.replace("\n", " ")
    assert "step 6 could not be saved: [Errno 28]" in out
    assert "the checkpoint before it is intact, and training continues" in out
    run = Run(result.run)
    assert [one.step for one in list_checkpoints(run.checkpoints)] == [9, 3, 0]
    assert all(verify(one.folder) is None for one in list_checkpoints(run.checkpoints))
    assert leftovers(run.checkpoints) == []
    assert [one["step"] for one in run.records("step")] == list(range(1, 10))  # the curves waited for room
    at()
    assert same(weights(run.folder), weights(train(disk / "other", TASK).run))


def test_it_stops_when_that_was_asked(disk) -> None:
    at(step4=lambda: fill(disk))
    with pytest.raises(RunError, match=r"step 6 could not be saved: .*No space.*checkpoint before it is whole"):
        train(disk / "run", TASK, stop_on_failed_save=True)
    (disk / "ballast").unlink()
    assert Run(disk / "run").latest().step == 3
    at()
    assert train(disk / "run", TASK).status == "finished"


def test_the_last_checkpoint_must_be_written(disk) -> None:
    at(step8=lambda: fill(disk))
    with pytest.raises(RunError, match=r"step 9 could not be saved: .*free some space, and start again"):
        train(disk / "run", TASK)
    (disk / "ballast").unlink()
    at()
    assert train(disk / "run", TASK).status == "finished"


def test_a_disk_that_becomes_read_only(disk, capsys) -> None:
    at(step4=lambda: make_read_only(disk))
    with pytest.raises(RunError, match=r"step 9 could not be saved: \[Errno 30\] Read-only"):
        train(disk / "run", TASK)
    assert "step 6 could not be saved: [Errno 30]" in capsys.readouterr().out.replace("\n", " ")
    assert Run(disk / "run").latest().step == 3
    subprocess.run(["umount", "--lazy", str(disk)], check=True)
    (disk / "run/lease.json").unlink()  # it could not be given back, and its process, which is this one, lives
    at()
    assert train(disk / "run", TASK).status == "finished"


def test_a_disk_that_is_read_only_is_said_at_once(disk) -> None:
    at()
    train(disk / "run", TASK, steps=3)
    make_read_only(disk)
    for name in ("run", "new"):
        with pytest.raises(RunError, match="cannot be written: Read-only file system"):
            train(disk / name, TASK)


def test_a_run_that_is_removed_while_it_trains(tmp_path) -> None:
    at(step4=lambda: shutil.rmtree(tmp_path / "run"))
    with pytest.raises(RunError, match=r"step 6 could not be saved: .*No such file"):
        train(tmp_path / "run", TASK)
    assert not (tmp_path / "run").exists()  # nothing of it came back


def may_write(size: int) -> None:
    """From now on no file of this process may have more bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def told(process: ProcessRank, rendezvous_folder: Path, *arguments: Any) -> str:
    """Returns a training's output to its user, from a pool's process, with the error that ends it."""
    try:
        return part(process, rendezvous_folder, *arguments)
    except RunError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        return f"grappe: {error}"


PARTED = Images(epochs=4, rule="adam", dropout=0.3, clip=0.5)
LAST = 12


@pytest.fixture(params=PLANS[1:])
def on_two(request: pytest.FixtureRequest, pool: Pool) -> Callable[..., list[str]]:
    """Trains on two processes, saving every other step; what each tells."""
    if "deepspeed" in request.param:
        pytest.importorskip("deepspeed")

    def run(folder: Path, dies_at: int | None = None, happenings: object = None, **options: bool):
        chosen = Options(save_every=2, **options)
        function = "tests.faults.test_disk:told"
        return pool.run(function, 2, PARTED, request.param, folder, chosen, dies_at, happenings)

    return run


def test_processes_whose_saves_fail_go_on_and_lose_nothing(disk, tmp_path, on_two) -> None:
    happenings = {
        (0, 3): functools.partial(fill, disk),
        (0, 5): functools.partial(os.unlink, disk / "ballast"),
        (1, 7): functools.partial(may_write, 4096),  # the other process's part is written all the same
        (1, 9): functools.partial(may_write, resource.RLIM_INFINITY),
    }
    out = on_two(disk / "run", 9, happenings)[0].replace("\n", " ")
    assert "step 4 could not be saved: [Errno 28]" in out
    assert "step 8 could not be saved: [Errno 27]" in out
    assert out.count("the checkpoint before it is intact, and training continues") == 2, out
    run = Run(disk / "run")
    assert [one.step for one in list_checkpoints(run.checkpoints)] == [6, 2, 0]
    assert all(verify(one.folder) is None for one in list_checkpoints(run.checkpoints))
    assert leftovers(run.checkpoints) == []
    assert "resuming from step 6" in on_two(disk / "run")[0]
    on_two(tmp_path / "whole")
    assert hashes(disk / "run", LAST) == hashes(tmp_path / "whole", LAST)
    assert curves(disk / "run") == curves(tmp_path / "whole")


def test_processes_stop_when_that_was_asked_and_where_the_last_save_fails(disk, tmp_path, on_two) -> None:
    first = on_two(disk / "run", None, {(0, 3): functools.partial(fill, disk)}, stop_on_failed_save=True)
    for one in first:
        assert re.match(r"grappe: step 4 could not be saved: .*No space.*checkpoint before it is whole", one)
    (disk / "ballast").unlink()
    second = on_two(disk / "run", None, {(0, 11): functools.partial(fill, disk)})
    for one in second:
        assert re.match(r"grappe: step 12 could not be saved: .*free some space, and start again", one)
    (disk / "ballast").unlink()
    assert not Run(disk / "run").is_finished()
    assert "resuming from step 10" in on_two(disk / "run")[0]
    on_two(tmp_path / "whole")
    assert hashes(disk / "run", LAST) == hashes(tmp_path / "whole", LAST)
