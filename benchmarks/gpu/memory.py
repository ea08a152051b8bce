"""The largest batch that fits, and what the user is told when memory runs out."""

from __future__ import annotations

import re
import subprocess
import sys

from benchmarks.gpu.part import Part
from benchmarks.gpu.training import plan_on

GPT = "benchmarks/gpu/tasks.py:Tokens"
TINY = ("width=64", "depth=2", "heads=2", "vocabulary=512", "context=64", "samples=128")


def main(part: Part) -> None:
    """Tries both through the command line, as a user would."""
    size = ("samples=512",) if part.on_gpu else TINY
    code, output = _grappe(part, "measure", GPT, *size, "--largest-batch", "--steps", "3", "--repeats", "1")
    found = re.search(r"largest batch[^\n]*", output)
    part.check("largest batch", code == 0 and found is not None, found.group() if found else output[-300:])
    if not part.on_gpu:
        part.not_tried("out of memory", "a CPU's limits are tried by tests/training/test_limits.py")
        return
    code, output = _grappe(part, "train", GPT, "batch_size=4096", "--run", str(part.scratch / "too-large"))
    told = "memory" in output and "mistake of grappe's own" not in output and "Traceback" not in output
    part.check("out of memory: one message, no traceback", code != 0 and told, output[-400:])


def _grappe(part: Part, verb: str, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "grappe", verb, *arguments, "--plan", plan_on(part, "")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr
