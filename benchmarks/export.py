"""Compares an exported C++ program with Python: from start to the first answer, and one sample at a time.

    python -m benchmarks.export [--rounds 5]

Digits is trained for an epoch and exported. The program and `python -c` with torch alone, the same network and the
same weights, answer for one sample in turns, each on one thread. CPU seconds are what each computes; the clock also
counts other programs. Latency is of the compiled package and of the model, in one Python process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import grappe
from grappe.private_api.torch_inductor import load_package
from grappe.verbs.export import cpp
from grappe.verbs.export.export import export

CALLS = 300
PYTHON = """
import sys, numpy, torch
from torch import nn
model = nn.Sequential(
    nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
    nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    nn.Sequential(nn.Flatten(), nn.Linear(512, 128), nn.ReLU()),
    nn.Linear(128, 10),
)
model.load_state_dict(torch.load(sys.argv[1], weights_only=True))
model.eval()
with torch.inference_mode():
    images = torch.from_numpy(numpy.load(sys.argv[2])).float().div_(128).sub_(1)
    probability, number = model(images).softmax(1).max(1)
print({"class": number.tolist(), "probability": probability.tolist()})
"""


def started(command: list[str]) -> tuple[float, float]:
    """Seconds by the clock, and of computing, from a command's start to its end."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def microseconds(call: Callable[[], object]) -> float:
    """The median time of a call."""
    found = []
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return statistics.median(found[CALLS // 10 :]) * 1e6


def measure(folder: Path, rounds: int) -> dict[str, float]:
    """The figures, by name."""
    run = grappe.train("digits", "threads=1,device=cpu", folder / "run", fields={"epochs": "1"})
    made = export(run, folder / "out", build=False).folder
    program = cpp.build(made, folder / "build")
    model = grappe.load(run)
    torch.save(model.state_dict(), folder / "weights.pt")
    one = np.load(made / "test" / "inputs.npy")[:1]
    np.save(folder / "one.npy", one)
    ways = {
        "C++": [str(program), str(made / "model.pt2"), str(folder / "one.npy")],
        "Python": [sys.executable, "-c", PYTHON, str(folder / "weights.pt"), str(folder / "one.npy")],
    }
    for command in ways.values():
        started(command)  # files are in memory from here on
    starts = {name: [] for name in ways}
    for _ in range(rounds):
        for name, command in ways.items():
            starts[name].append(started(command))
    found = {}
    for name, pairs in starts.items():
        for index, what in enumerate(("start, s by the clock", "start, s of computing")):
            found[f"{name}: {what}"] = statistics.median(pair[index] for pair in pairs)
    torch.set_num_threads(1)
    package, bytes_ = load_package(made / "model.pt2"), torch.from_numpy(one)
    with torch.inference_mode():
        ready = bytes_.float().div_(128).sub_(1)
        found["package: one sample, µs"] = microseconds(lambda: package(bytes_))
        found["model: one sample, µs"] = microseconds(lambda: model(ready).softmax(1).max(1))
    return found


def main() -> None:
    """Prints the figures as a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="grappe-bench-") as folder:
        found = measure(Path(folder), asked.rounds)
    print("\n## Out of Python\n\n| | |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:.3g} |")
    for what in ("by the clock", "of computing"):
        ratio = found[f"C++: start, s {what}"] / found[f"Python: start, s {what}"]
        print(f"| C++ / Python, {what} | {ratio:.2f} |")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
