"""The core without its extensions: it trains, resumes, evaluates, predicts, verifies and foresees."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import grappe

TASK = ("digits", "epochs=1")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "grappe", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_core_needs_no_extension(tmp_path: Path) -> None:
    source = Path(grappe.__file__).parent
    shutil.copytree(source, tmp_path / "grappe", ignore=shutil.ignore_patterns("contrib", "__pycache__"))
    np.save(tmp_path / "new.npy", np.zeros((3, 1, 8, 8), np.float32))
    commands = (
        ("train", *TASK, "--plan", "replicate=2,device=cpu", "--run", "first", "--steps", "4"),
        ("train", *TASK, "--plan", "shard=2,device=cpu", "--run", "first"),
        ("evaluate", "first"),
        ("predict", "first", "new.npy", "--out", "predicted.npz"),
        ("verify", *TASK, "--plan", "replicate=2", "--steps", "2"),
        ("foresee", "digits", "--plan", "shard=2", "--site", "narval"),
        ("runs",),
        ("engines",),
        ("--help",),
    )
    for words in commands:
        done = run(tmp_path, *words)
        assert not done.returncode, (words, done.stdout[-1000:], done.stderr[-2000:])
    for command in ("export", "submit", "tune", "launch", "lr-find", "doctor"):
        assert f"│ {command} " not in done.stdout
    refused = run(tmp_path, "measure", "digits", "--site", "narval")
    assert refused.returncode == 2
    assert "needs the extension 'slurm'" in refused.stderr
    refused = run(tmp_path, "train", "digits", "--plan", "engine=deepspeed")
    assert refused.returncode == 2
    assert "there is no engine 'deepspeed'" in refused.stderr
