"""grappe doctor on this device: what it says beside what torch and nvidia-smi say; power and energy by NVML."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

import torch

from benchmarks.gpu.pace import train_here
from benchmarks.gpu.part import Part
from benchmarks.gpu.tasks import Tokens
from benchmarks.gpu.training import plan_on, read_usage
from grappe.contrib.doctor import on_device
from grappe.contrib.doctor.checks.gpus import VisibleGpu, of_devices
from grappe.contrib.doctor.checks.python import of_architectures
from grappe.profiling import energy
from grappe.training.options import Options


def main(part: Part) -> None:
    """Runs the doctor as a user would, then holds its readings against others'."""
    _doctor_on_gpu(part)  # it starts MPS, and this process holds nothing of the GPU yet
    _doctor(part)
    if part.on_gpu:
        _findings(part)
        _nvidia_smi(part)
    else:
        part.not_tried("the doctor's findings against torch's and nvidia-smi's", "there is no GPU here")
    _power(part)


def _run(part: Part, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "grappe", "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=part.scratch)
    return done.returncode, done.stdout + done.stderr


def _doctor(part: Part) -> None:
    _, output = _run(part, "--plan", plan_on(part, ""))
    expected = _expected() if part.on_gpu else "threads of each process: 1"
    part.check("the doctor names the device", expected in output and "Traceback" not in output, expected)


def _expected() -> str:
    """Returns what the doctor is to say of the first GPU."""
    facts = torch.cuda.get_device_properties(0)
    memory = f"{facts.total_memory / 1e9:.0f} GB"
    return f"0: {facts.name}, {memory}, compute capability {facts.major}.{facts.minor}"


def _doctor_on_gpu(part: Part) -> None:
    """Tries `grappe doctor --gpu`, which ends with 2 where there is no GPU that torch can use."""
    code, output = _run(part, "--gpu")
    lines = output.strip().splitlines()
    text = "; ".join(line for line in lines if not line.startswith("passed")) or "all passed"
    if torch.cuda.is_available():
        part.check("grappe doctor --gpu", code == 0 and "FAILED" not in output, text, lines=len(lines))
    else:
        part.check("grappe doctor --gpu without a GPU: one line", code == 2 and len(lines) == 1, text)


def _findings(part: Part) -> None:
    """The doctor's own functions find no fault with this device and this torch; a wrong one is found."""
    facts = torch.cuda.get_device_properties(0)
    capability = (facts.major, facts.minor)
    device = VisibleGpu(facts.name, facts.total_memory / 1e9, capability)
    listed, *others = of_devices([device], "bf16", torch.version.hip)
    right = facts.name in listed.what and (not others or capability < (8, 0))
    part.check("the doctor on bf16 here", right, "; ".join(one.what for one in (listed, *others)))
    built = torch.cuda.get_arch_list()
    found = list(of_architectures(built, [capability], torch.__version__))
    part.check("torch has code for this GPU", not found, f"sm_{facts.major}{facts.minor} of {', '.join(built)}")
    other = list(of_architectures(["sm_10"], [capability], torch.__version__))
    part.check("a torch without code for this GPU is found", any(one.level == "error" for one in other))


def _nvidia_smi(part: Part) -> None:
    """Holds name, memory and capability against the driver's own tool."""
    if shutil.which("nvidia-smi") is None:
        part.not_tried("the device against nvidia-smi", "there is no nvidia-smi here")
        return
    command = ["nvidia-smi", "-i", "0", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        part.not_tried("the device against nvidia-smi", done.stdout.strip() or done.stderr.strip())
        return
    name, mebibytes, capability = (word.strip() for word in done.stdout.splitlines()[0].split(","))
    facts = torch.cuda.get_device_properties(0)
    # The driver keeps a little for itself.
    near = 0.95 <= facts.total_memory / (float(mebibytes) * 2**20) <= 1.0
    same = name == facts.name and capability == f"{facts.major}.{facts.minor}"
    part.check("the device against nvidia-smi", near and same, done.stdout.strip())


def _power(part: Part) -> None:
    """A training's mean power lies between that of the idle GPU and the board's limit."""
    for trial in on_device.readings(torch.device(part.device)):
        part.trial(trial)
    if part.on_gpu:
        task, steps = Tokens(depth=4, batch_size=8, samples=1024), 800
    else:
        task = Tokens(width=64, depth=2, heads=2, vocabulary=512, context=64, batch_size=4, samples=256)
        steps = 10
    counters = energy.gpu_counters(0).counters if part.on_gpu else ()
    idle, limit = 0.0, 0.0
    if counters:
        time.sleep(2)  # until what ran before is over
        idle, limit = counters[0].watts(), counters[0].limit_watts()  # type: ignore[attr-defined]
    options = Options(steps_only=True, steps=steps)
    folder = train_here(part, task, "precision=bf16", "power", options, lambda: None)
    # Each is a mean over a second; the first has the start in it, and the last one the end.
    watts = [one["watts"]["gpu"] for one in read_usage(folder) if "gpu" in one.get("watts", {})][1:-1]
    if not watts:
        reason = "the training was too short" if counters else "no counter of its energy can be read here"
        part.not_tried("the GPU's mean power in a training", reason)
        return
    mean = sum(watts) / len(watts)
    part.check(
        "the GPU's mean power in a training",
        0.9 * idle < mean <= 1.05 * limit,
        f"{mean:.0f} W, {idle:.0f} before it, {limit:.0f} at most",
        watts=mean,
        idle_watts=idle,
        limit_watts=limit,
    )
