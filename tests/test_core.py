"""The core without its extensions: it trains, resumes, evaluates, predicts, verifies and foresees."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import grappe

TASK = ("digits", "epochs=1")
IN_ONE_PROCESS = """
import json, sys
from grappe.cli.commands import main

for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as end:
        if end.code:
            print(*words, file=sys.stderr)
            raise
"""
"""Python and torch are imported once, and the server that processes are forked from starts once."""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, *words]
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
        ("foresee", "digits", "--plan", "shard=2"),
        ("engines",),
        ("train", "digits", "--plan", "engine=deepspeed"),
    )
    done = run(tmp_path, "-c", IN_ONE_PROCESS, json.dumps(commands))
    assert done.returncode == 2, (done.stdout[-1000:], done.stderr[-2000:])
    assert done.stderr.endswith(" ".join(commands[-1]) + "\n"), "one before failed: " + done.stderr[-2000:]
    assert "there is no engine 'deepspeed'" in done.stderr
    shown = run(tmp_path, "-m", "grappe", "--help")
    assert not shown.returncode and " train " in shown.stdout and " export " not in shown.stdout
