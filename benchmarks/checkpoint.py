"""Costs of checkpoints, and the time until a killed training resumes: `python -m benchmarks.checkpoint`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import xxhash
from torch import Tensor

from benchmarks.commands import ROOT, output
from benchmarks.figures import machine, spread, table
from benchmarks.saving import CONTENDERS, EVERY, network
from grappe.checkpoint import tensor_file
from grappe.checkpoint.format import Retention
from grappe.checkpoint.saver import Saver
from grappe.checkpoint.tensor_file import Piece
from grappe.launch.world import ProcessRank, World

BLOCKING, COST, HASHING = 1.2, 0.01, 0.03  # aims: copies of the state; share of the steps; share of the write
NAMES = {
    "torch_save": "torch.save", "dcp": "torch.distributed.checkpoint, async_save",
    "lightning": "Lightning, ModelCheckpoint", "grappe": "grappe",
}  # fmt: skip


def main() -> None:
    """Measures in turns, and prints markdown tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="of each training")
    parser.add_argument("--folder", type=Path, default=ROOT, help="on the disk that is meant")
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    options = parser.parse_args()
    before = machine()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="grappe-bench-", dir=options.folder) as temporary:
        folder = Path(temporary)
        found["parts"] = parts(folder, 8 * options.rounds)
        found["costs"] = costs(folder, options.rounds, options.steps)
        found["kill"] = [after_a_kill(folder / f"killed-{number}") for number in range(options.rounds)]
    print(f"\n## Checkpoints\n\nFrom {before}\nto {machine()}.\n")
    print(text_of_parts(found["parts"]), text_of_costs(found["costs"]), text_of_kill(found["kill"]), sep="\n\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def state() -> dict[str, Tensor]:
    """Weights and Adam's two moments of benchmarks.saving's network: 50 MB."""
    weights = {f"model.{name}": value.detach() for name, value in network().named_parameters()}
    moments = {f"{kind}.{name}": torch.randn_like(v) for name, v in weights.items() for kind in ("m", "v")}
    return {**weights, **moments}


def parts(folder: Path, rounds: int) -> list[dict[str, float]]:
    """Seconds of one save's parts and of one copy of the same memory, in turns, each round."""
    tensors = state()
    copies = {name: torch.empty_like(value) for name, value in tensors.items()}
    world = World(process=ProcessRank(), device=torch.device("cpu"))
    (folder / "saves").mkdir()
    saver = Saver(folder / "saves", world, "bench", Retention(last=1), lambda: None)
    pieces = [Piece(name, value, tuple(value.shape), (0,) * value.dim()) for name, value in tensors.items()]
    found = []
    for number in range(rounds + 1):
        one = {
            "copy": _seconds(lambda: [copies[name].copy_(value) for name, value in tensors.items()]),
            "blocking": _seconds(lambda number=number: saver.save(number, tensors, {}, {})),
            "rest": _seconds(saver.wait),
            "write": _seconds(lambda number=number: tensor_file.write(folder / f"{number}", pieces)),
            "hash": _hashing(folder / f"{number}-hashed", pieces),
            "torch.save": _seconds(lambda: torch.save(tensors, folder / "rival.pt")),
        }
        for name in (f"{number}", f"{number}-hashed"):
            (folder / name).unlink()
        found.append(one)
    saver.close()
    return found[1:]  # the first save makes its buffers


class TimedHash:
    """XXH3 as the checkpoint has it, with a clock around it."""

    seconds = 0.0

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def update(self, chunk: bytes | memoryview) -> None:
        began = time.perf_counter()
        self._digest.update(chunk)
        TimedHash.seconds += time.perf_counter() - began

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _hashing(file: Path, pieces: list[Piece]) -> float:
    """Seconds that hashing takes of writing the pieces."""
    TimedHash.seconds = 0.0
    with mock.patch.object(tensor_file, "xxhash", SimpleNamespace(xxh3_128=TimedHash)):
        tensor_file.write(file, pieces)
    return TimedHash.seconds


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def costs(folder: Path, rounds: int, steps: int) -> list[dict[str, list[tuple[float, float]]]]:
    """By contender: seconds of ten steps with a save in them and of the ten behind, each round in turns."""
    return [{name: _training(folder, name, steps) for name in CONTENDERS} for _ in range(rounds)]


def _training(folder: Path, name: str, steps: int) -> list[tuple[float, float]]:
    command = [sys.executable, "-m", "benchmarks.saving", name, "--steps", str(steps)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    said = output(command, folder, PYTHONPATH=path)
    return [(one, other) for one, other in json.loads(said.splitlines()[-1])]


def after_a_kill(run: Path) -> dict[str, float]:
    """One of four processes is killed: seconds until the command has ended, and until a step after a restart."""
    arguments = ["digits", "epochs=1000", "--plan", "replicate=4,device=cpu", "--run", str(run)]
    command = [sys.executable, "-m", "grappe", "train", *arguments, "--save-every", "20"]
    curves = run / "metrics.jsonl"
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    _wait_for(lambda: _lines(curves) > 100)
    os.kill(_workers(first.pid)[-1], signal.SIGKILL)
    killed = time.monotonic()
    first.wait()
    ended = time.monotonic()
    lines = _lines(curves)
    second = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    _wait_for(lambda: _lines(curves) != lines)
    stepped = time.monotonic()
    second.send_signal(signal.SIGTERM)
    second.wait()
    return {"ended": ended - killed, "stepped": stepped - ended, "whole": stepped - killed}


def _workers(pid: int) -> list[int]:
    """The training processes below a command: the children of its fork server, which imported what they need."""
    server = [one for one in _children(pid) if _children(one)]
    return _children(server[0]) if server else []


def _children(pid: int) -> list[int]:
    return [int(word) for file in Path(f"/proc/{pid}/task").glob("*/children") for word in file.read_text().split()]


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _wait_for(condition: Callable[[], bool], limit: float = 120.0) -> None:
    until = time.monotonic() + limit
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError(f"nothing happened for {limit:.0f} s")
        time.sleep(0.01)


def text_of_parts(found: list[dict[str, float]]) -> str:
    """Formats the part of a save that training waits for, and the rest."""

    def ratio(over: str, under: str) -> str:
        return spread([one[over] / one[under] for one in found]).text("{:.2f}")

    def ms(name: str) -> str:
        return spread([1e3 * one[name] for one in found]).text("{:.1f}")

    rows = [
        ["one copy of the state in memory", ms("copy"), "1"],
        [f"grappe: what training waits for (aim {BLOCKING})", ms("blocking"), ratio("blocking", "copy")],
        ["grappe: until it is committed, in the background", ms("rest"), ratio("rest", "copy")],
        ["torch.save, without a flush to disk", ms("torch.save"), ratio("torch.save", "copy")],
    ]
    share = spread([one["hash"] / one["write"] for one in found]).text("{:.1%}")
    size = sum(value.numel() * value.element_size() for value in state().values()) / 1e6
    head = ("a save", "ms", "copies")
    return (
        f"### One save of {size:.0f} MB, {len(found)} times\n\n{table(head, rows)}\n\n"
        f"Hashing takes {share} of writing the file and flushing it (aim {HASHING:.0%})."
    )


def text_of_costs(found: list[dict[str, list[tuple[float, float]]]]) -> str:
    """Formats the cost of a checkpoint every ten steps."""
    rows = []
    for name in CONTENDERS:
        pairs = [pair for one in found for pair in one[name]]
        added = spread([100 * (saving / plain - 1) for saving, plain in pairs])
        step = spread([1e3 * plain / (EVERY // 2) for _, plain in pairs])
        rows.append([NAMES[name], step.text("{:.1f}"), f"{added.text('{:+.1f}')} ±{added.error:.1f}", str(len(pairs))])
    head = ("a checkpoint every ten steps", "ms a step without", f"added, % (aim of grappe {COST:.0%})", "saves")
    return f"### Saving while training, {len(found)} rounds\n\n{table(head, rows)}"


def text_of_kill(found: list[dict[str, float]]) -> str:
    """Formats the time until a killed training resumes."""
    rows = [
        [words, spread([one[name] for one in found]).text("{:.1f}")]
        for name, words in (
            ("ended", "until the command has ended"),
            ("stepped", "from then, started again by hand, to the next completed step"),
            ("whole", "together"),
        )
    ]
    return f"### One of four processes killed, {len(found)} times\n\n{table(('digits, replicate=4', 's'), rows)}"


if __name__ == "__main__":
    main()
