"""Five tasks of a newcomer, by the exact commands of the first guides: own task, resume, four GPUs, sweep, Slurm job.

There is no GPU here: four processes on the CPU stand in for four GPUs. Slurm is the real one of tests/slurm.
"""

import json
import shlex
import sys
from pathlib import Path

import pytest
from docs import translations

import grappe
from grappe.training.run import Run
from tests.commands import GRAPPE, Command, ran
from tests.docs.test_blocks import commands
from tests.docs.test_pieces import COMPLETE, block_of, opened
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import cluster  # noqa: F401


def shown(guide: str, start: str) -> list[list[str]]:
    """The commands, in words, of the guide's first block that has a command which begins so."""
    page = (translations.ROOT / "docs" / guide).read_text()
    blocks = [commands(opened(block)[1]) for block in translations.blocks(page)]
    found = next(lines for lines in blocks if any(line.startswith(start) for line in lines))
    return [shlex.split(line)[1:] for line in found]


def typed(words: list[str], folder: Path) -> str:
    done = ran(GRAPPE, *words, cwd=folder)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in Run(run).records("evaluation")]


def test_own_task_from_numpy_files_then_four_processes(tmp_path: Path) -> None:
    make = block_of("task.md", "# make_digits.py: writes data/digits.npz")
    (tmp_path / "make_digits.py").write_text(make)
    (tmp_path / "digits_npz.py").write_text(block_of("task.md", COMPLETE))
    ran(sys.executable, "make_digits.py", cwd=tmp_path).check_returncode()
    train, evaluate, four, _ = shown("task.md", "grappe train digits_npz.py")
    typed(train, tmp_path)
    scores = json.loads(typed([*evaluate, "--json"], tmp_path))
    assert scores["metrics"]["accuracy"] > 0.9
    said = typed(four, tmp_path)
    assert "on 4 processes" in said
    assert losses(tmp_path / "runs" / "four") == pytest.approx(losses(tmp_path / "runs" / "mine"), rel=1e-4)


def test_interrupted_and_resumed(tmp_path: Path) -> None:
    first, again = shown("resume.md", "grappe train digits")
    assert first == again
    long = [word.replace("epochs=40", "epochs=4000") for word in first]  # not over before Ctrl-C, on any machine
    training = Command(GRAPPE, *long, cwd=tmp_path)
    try:
        assert training.process.stdout
        for line in training.process.stdout:
            if line.startswith("epoch "):
                break
        training.stop_signal()
        code, out, err = training.end()
    finally:
        training.close()
    assert code == 75, out + err
    run = Run(tmp_path / "runs" / "long")
    stopped = run.latest().step
    said = typed([*long, "--steps", str(stopped + 5)], tmp_path)
    assert f"step {stopped}" in said
    assert run.latest().step == stopped + 5


def test_a_sweep(tmp_path: Path) -> None:
    _, tune = shown("tour.md", "grappe lr-find")
    said = typed(tune, tmp_path)
    assert "best: trial" in said
    assert len(list((tmp_path / "runs").rglob("trial-*"))) == 4


def test_a_slurm_job(cluster: Cluster, tmp_path: Path) -> None:  # noqa: F811
    submit, wait, logs = shown("slurm.md", "grappe submit --time 10m -- train digits epochs=3")
    typed(submit, tmp_path)
    typed(wait, tmp_path)
    assert "accuracy" in typed(logs, tmp_path)
    assert len(losses(tmp_path / "runs" / "job")) == 3
    assert grappe.evaluate(tmp_path / "runs" / "job").metrics["accuracy"] > 0.8
