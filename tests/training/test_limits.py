"""With each process's memory limited, plans that share a model train what one process cannot; it says so itself."""

import contextlib
import os
import re
from pathlib import Path

import pytest
from pytest import approx

from grappe.contrib.deepspeed import library
from grappe.training.run import Run
from tests import needs
from tests.commands import GRAPPE, Command

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TASK = str(ROOT / "tests" / "short_source.py")
NARROW = str(ROOT / "tests" / "narrow.py")
LIMIT_MB = 980  # of RLIMIT_DATA; Python and torch have 350 to 390 of them, connections to other processes 80 to 140


def train(folder: Path, plan: str, task: str = TASK, limit_mb: int = LIMIT_MB) -> tuple[int, str, str]:
    line = f'ulimit -d {limit_mb * 1000}; exec "$0" train {task} --plan "device=cpu,threads=1{plan}" --run {folder}'
    with contextlib.closing(Command("bash", "-c", line, GRAPPE, cwd=folder.parent, OMP_NUM_THREADS="1")) as command:
        return command.end()


def test_one_process_cannot_and_is_told_what_can(tmp_path: Path) -> None:
    code, _, err = train(tmp_path / "run", "")
    assert code == 2, err
    assert "Traceback" not in err
    told = re.search(
        r"out of memory in process 0, which may take 1\.0 GB \(RLIMIT_DATA.*\). It held 152 MB of parameters, "
        r"152 MB of gradients, (\d+) MB of optimizer state \(of 305 MB\), (\d+) MB of activations",
        err,
    )
    assert told, err
    assert int(told[1]) < 305
    assert re.search(r"Foreseen to fit: device=cpu,shard=2,\S* \(\d+ MB a process\)", err), err
    assert ("offload=nvme:FOLDER" in err) == library.installed()
    assert Run(tmp_path / "run").latest() is not None, "nothing that was saved is lost"


def test_a_disk_can(tmp_path: Path) -> None:
    plan = f",engine=deepspeed,offload=nvme:{tmp_path / 'disk'}"
    needs.need(plan)
    (tmp_path / "disk").mkdir()
    code, out, err = train(tmp_path / "run", plan)
    assert code == 0, err
    assert "finished, 2 steps" in out
    run = Run(tmp_path / "run")
    assert run.is_finished()
    found = run.latest()
    assert found.step == 2
    (held,) = (one["held"] for one in run.read_description()["costs"])
    assert sum(held.values()) < 305e6, "what waits is not on the disk"
    assert {name.rpartition(".")[2] for name in found.read_tensors()} >= {"weight", "exp_avg", "exp_avg_sq"}
    assert not list((tmp_path / "disk").iterdir())


@pytest.mark.parametrize("plan", [",shard=2", ",pipeline=2,microbatches=2"])
def test_two_processes_can(tmp_path: Path, plan: str) -> None:
    code, out, err = train(tmp_path / "run", plan)
    assert code == 0, err
    assert len(re.findall(r"peak memory, process \d .* parameters \d+ MB, gradients \d+ MB, optimizer", out)) == 2
    run = Run(tmp_path / "run")
    assert run.is_finished()
    assert run.latest().step == 2
    held = [one["held"] for one in run.read_description()["costs"]]
    assert 300e6 < sum(one["parameters"] for one in held) + sum(one["gradients"] for one in held) < 310e6
    assert all(one["optimizer"] == approx(2 * one["parameters"], rel=0.01) for one in held)


@pytest.mark.soak
def test_a_volume_that_one_process_cannot_hold_trains_in_two(tmp_path: Path) -> None:
    volume = "volumes size=144 width=4 batch_size=1 volumes=1 epochs=1 --steps-only"
    code, _, err = train(tmp_path / "alone", "", volume, 1150)
    assert code == 2 and "out of memory in process 0, which may take 1.2 GB" in err, err
    code, out, err = train(tmp_path / "two", ",domain=2", volume, 1150)
    assert code == 0, err
    assert "finished, 1 step" in out


def test_checkpoints_copies_leave_a_step_its_memory(start, tmp_path: Path) -> None:
    words = ("--plan", "device=cpu,threads=1", "--steps", "3", "--save-every", "1", "--run", "run")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    code, _, err = start(GRAPPE, "train", f"{NARROW}:Narrow", *words, OMP_NUM_THREADS="1", PYTHONPATH=path).end()
    assert (code, err) == (0, "")
    assert Run(tmp_path / "run").latest().step == 3
    assert "the training waits for it" in (tmp_path / "run/logs/rank-0.log").read_text()
