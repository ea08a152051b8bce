"""A training that is killed goes on to the bits of the one that never stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.part import Part
from benchmarks.gpu.training import plan_on, sha256, weights
from grappe.plan import Plan

TASK = ("benchmarks/gpu/tasks.py:Small", "epochs=20", "dropout=0.1")
PLANS = ("", "replicate=2", "exact=2,replicate=2", "precision=bf16")
LIMIT_SECONDS = 120


def main(part: Part) -> None:
    """Kills each training by SIGKILL in its middle, starts it again, and compares with one that was left alone."""
    for plan in PLANS:
        name = plan.replace(",", "-") or "plain"
        whole, killed = part.scratch / f"whole-{name}", part.scratch / f"killed-{name}"
        undisturbed = _start(part, plan, whole)
        if Plan.parse(plan).processes > 1:  # one MPS at a time
            undisturbed.wait(LIMIT_SECONDS)
        process = _start(part, plan, killed)
        step = _wait_for_a_checkpoint(killed, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(1)  # the training's processes notice that their parent is gone
        code = _start(part, plan, killed).wait(LIMIT_SECONDS)
        undisturbed.wait(LIMIT_SECONDS)
        same = code == 0 and sha256(weights(whole)) == sha256(weights(killed))
        part.check(
            f"killed after step {step} under {plan or 'the plain plan'}: the same bits", same, f"exit code {code}"
        )


def _start(part: Part, plan: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "grappe", "train", *TASK, "--run", str(folder), "--save-every", "16"]
    with (part.folder / "output.txt").open("ab") as log:
        return subprocess.Popen(
            [*command, "--plan", plan_on(part, plan)], stdout=log, stderr=log, start_new_session=True
        )


def _wait_for_a_checkpoint(folder: Path, process: subprocess.Popen[bytes]) -> int:
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end and process.poll() is None:
        steps = [int(one.parent.name.removeprefix("step-")) for one in folder.glob("checkpoints/step-*/manifest.json")]
        if max(steps, default=0) >= 32:
            return max(steps)
        time.sleep(0.02)
    raise RuntimeError("no checkpoint came: see output.txt")
