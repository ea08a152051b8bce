"""An exported C++ program against Python: `python -m benchmarks.exported` exports digits, and prints two tables.

The machine is rarely quiet, so that each figure is of a pair: contenders take turns, and ratios are of one round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import commands
from benchmarks.figures import machine, spread, table

NAMES = {"python": "Python, plain torch", "grappe": "Python, grappe predict", "cpp": "C++ program"}
AIM = 0.25
BLOCK, BLOCKS = 100, 40  # calls in a row, and how many such rows each contender takes
PYTHON = """
import sys, numpy, torch
from torch import nn
net = nn.Sequential(
    nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
    nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 128), nn.ReLU()),
    nn.Linear(128, 10),
).eval()
net.load_state_dict(torch.load(sys.argv[1], weights_only=True))
x = torch.from_numpy(numpy.load(sys.argv[2])).float().div_(128).sub_(1)
with torch.inference_mode():
    probability, number = net(x).softmax(1).max(1)
print({"class": number.tolist(), "probability": probability.tolist()}, flush=True)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Seconds of a command that answers for one sample."""

    first: float
    """By the clock, from its start to its first line."""
    cpu: float
    """Of computing, of the whole command."""


def main() -> None:
    """Exports, measures, and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exported", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="grappe-bench-") as name:
        folder = Path(name)
        before = machine()
        turns = commands_of(folder)
        starts = commands.rounds(turns, options.rounds, "starting", warm=True)
        print(
            f"\n## From the start to the first answer\n\n{options.rounds} rounds of one sample of digits, one thread."
        )
        print(f"From {before}\nto {machine()}.\n")
        print(table(("", "s by the clock", "over Python", "s of computing", "over Python"), start_rows(starts)))
        before = machine()
        calls = latencies(folder)
        print(f"\n## A batch of one sample\n\n{BLOCKS} rounds of {BLOCK} calls in a row, one thread; medians of a row.")
        print(f"From {before}\nto {machine()}.\n")
        print(table(("", "µs a call", "over eager"), latency_rows(calls)), flush=True)
    if options.json:
        told = [{name: dataclasses.asdict(one) for name, one in turn.items()} for turn in starts]
        options.json.write_text(json.dumps({"starts": told, "calls": calls}, indent=1))


def commands_of(folder: Path) -> dict[str, Callable[[str], Answer]]:
    """Trains and exports digits, and builds the program; returns the contenders."""
    import numpy as np
    import torch

    import grappe

    run = commands.grappe(folder, folder / "run", "digits", "--steps", "40", "--plan", "threads=1").run
    commands.output([sys.executable, "-m", "grappe", "export", str(run.folder), "--out", "out"], folder)
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    commands.output(["cmake", "-S", "out", "-B", "build", prefix], folder)
    commands.output(["cmake", "--build", "build"], folder)
    torch.save(grappe.load(run).state_dict(), folder / "weights.pt")
    np.save(folder / "one.npy", np.load(folder / "out/test/inputs.npy")[:1])
    python = [sys.executable, "-c", PYTHON, "weights.pt", "one.npy"]
    predict = [sys.executable, "-m", "grappe", "predict", str(run.folder), "one-float.npy"]
    one = np.load(folder / "one.npy").astype(np.float32) / 128 - 1
    np.save(folder / "one-float.npy", one)
    cpp = ["build/predict", "out/model.pt2", "one.npy"]
    wanted = {"python": python, "grappe": predict, "cpp": cpp}
    return {name: lambda _, words=words: answer(words, folder) for name, words in wanted.items()}


def answer(command: Sequence[str], folder: Path) -> Answer:
    """Starts a command, and waits for its first line and its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        first = time.monotonic() - began
        process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or "class" not in line:
        raise RuntimeError(f"{' '.join(command[:3])} ended with {process.returncode}: {line}")
    return Answer(first=first, cpu=used.ru_utime + used.ru_stime)


def start_rows(found: Sequence[dict[str, Answer]]) -> list[list[str]]:
    """A row for each; ratios are taken within a round, then their median."""
    made = []
    for name, title in NAMES.items():
        row = [title]
        for what in ("first", "cpu"):
            mine, plain = ([getattr(turn[one], what) for turn in found] for one in (name, "python"))
            ratios = spread([a / b for a, b in zip(mine, plain, strict=True)]).text("{:.2f}")
            aim = f", aim: {AIM}" if name == "cpp" else ""
            row += [spread(mine).text("{:.2f}"), "" if name == "python" else f"{ratios}{aim}"]
        made.append(row)
    return made


def latencies(folder: Path) -> dict[str, list[float]]:
    """Times single samples in this process: median seconds of each row of calls, contenders in turns."""
    import numpy as np
    import torch

    from grappe.contrib.export.cpp import open_package
    from grappe.contrib.export.folder import sha256
    from grappe.contrib.export.program import program_of
    from grappe.contrib.export.proof import samples_of
    from grappe.tasks.digits import Digits

    torch.set_num_threads(1)
    task, package = Digits(), folder / "out/model.pt2"
    program = program_of(task, task.model(), samples_of(task, "validation", folder))
    compiled = open_package(package, sha256(package))  # by this very benchmark
    inputs = torch.from_numpy(np.load(folder / "one.npy"))
    contenders: dict[str, Callable[[Any], Any]] = {"eager": program, "package": compiled}
    found: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.inference_mode():
        for number in range(-1, BLOCKS):  # the first is not counted
            for name in list(contenders)[:: 1 if number % 2 else -1]:
                seconds = row_of_calls(contenders[name], inputs)
                if number >= 0:
                    found[name].append(seconds)
    return found


def row_of_calls(call: Callable[[Any], Any], inputs: Any) -> float:
    """Returns the median seconds of BLOCK calls."""
    seconds = []
    for _ in range(BLOCK):
        began = time.perf_counter()
        call(inputs)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def latency_rows(found: dict[str, list[float]]) -> list[list[str]]:
    """A row for each; ratios of neighbouring rows of calls."""
    ratios = spread([a / b for a, b in zip(found["package"], found["eager"], strict=True)]).text("{:.2f}")
    text = {name: spread([1e6 * one for one in values]).text("{:.0f}") for name, values in found.items()}
    return [["eager, in Python", text["eager"], ""], ["the package, in Python", text["package"], ratios]]


if __name__ == "__main__":
    main()
