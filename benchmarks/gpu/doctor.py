"""grappe doctor on this device, and the energy that a training reports."""

from __future__ import annotations

import subprocess
import sys

import torch

from benchmarks.gpu.part import Part
from benchmarks.gpu.tasks import Small
from benchmarks.gpu.training import plan_on, read_usage, train


def main(part: Part) -> None:
    """Runs the doctor as a user would; energy comes from NVML, or is said not to be measurable."""
    command = [sys.executable, "-m", "grappe", "doctor", "--plan", plan_on(part, "")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=part.scratch)
    output = done.stdout + done.stderr
    named = torch.cuda.get_device_name() in output if part.on_gpu else True
    part.check("the doctor names the device", named and "Traceback" not in output, output[-600:])
    run = train(part, Small(epochs=200 if part.on_gpu else 2), "", "energy")
    joules = [usage["energy"] for usage in read_usage(run.folder) if usage.get("energy")]
    if joules:
        part.measured("energy of a short training", str(joules[-1]))
    else:
        part.not_tried("energy", "no counter of energy can be read here")
