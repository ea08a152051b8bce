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

codes = []
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as end:
        codes.append(end.code)
print(*(code or 0 for code in codes), file=sys.stderr)
"""
"""Python and torch are imported once, and the server that processes are forked from starts once."""


def test_the_core_needs_no_extension(tmp_path: Path) -> None:
    source = Path(grappe.__file__).parent
    shutil.copytree(source, tmp_path / "grappe", ignore=shutil.ignore_patterns("contrib"))
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
        ("help", "all"),
        ("train", "digits", "--plan", "engine=deepspeed"),
        ("measure", "digits", "--site", "narval"),
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-c", IN_ONE_PROCESS, json.dumps(commands)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    codes = done.stderr.splitlines()[-1].split()
    assert codes == ["0"] * (len(commands) - 2) + ["2", "2"], (codes, done.stdout[-1000:], done.stderr[-2000:])
    assert "there is no engine 'deepspeed'" in done.stderr
    assert "needs the extension 'slurm'" in done.stderr
    assert "│ train " in done.stdout
    for command in ("export", "submit", "tune", "launch", "lr-find", "doctor"):
        assert f"│ {command} " not in done.stdout
