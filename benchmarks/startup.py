"""Starting up: seconds from the command to its first step's end, and to its own: `python -m benchmarks.startup`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import commands, tiny
from benchmarks.figures import machine, spread, table
from benchmarks.rotation import installed
from benchmarks.starting import FIRST, STEPS

NAMES = {
    "plain": "plain script",
    "grappe": "grappe train",
    "fabric": "Lightning Fabric",
    "accelerate": "Accelerate",
    "trainer": "Lightning Trainer",
}
HEAD = ("", "to the first step, s", "over plain", "whole command, s", "over plain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Seconds from the command's start."""

    first: float
    whole: float


def main() -> None:
    """Starts everyone in turns, and prints a markdown table for one process and for two."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="one after the other")
    parser.add_argument("--only", nargs="+", choices=sorted(NAMES), default=sorted(NAMES), help="beside plain")
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    options = parser.parse_args()
    wanted = [name for name in NAMES if name == "plain" or name in options.only]
    names = [name for name in wanted if installed(name)]
    found = {}
    for size in options.processes:
        before = machine()
        turns = {name: lambda _, name=name, size=size: start(name, size) for name in names}
        found[size] = commands.rounds(turns, options.rounds, f"{size}", warm=True)
        print(f"\n## Starting up, {size} process{'es' if size > 1 else ''}\n")
        print(f"{options.rounds} rounds of a training of {STEPS} steps.\nFrom {before}\nto {machine()}.\n")
        print(table(HEAD, rows(names, found[size])), flush=True)
        for name in sorted(set(wanted) - set(names)):
            print(f"\n{NAMES[name]} is not installed here: use benchmarks/run.")
    if options.json:
        told = {
            size: [{name: dataclasses.asdict(one) for name, one in turn.items()} for turn in turns]
            for size, turns in found.items()
        }
        options.json.write_text(json.dumps(told, indent=1))


def start(name: str, size: int) -> Start:
    """One training, begun and ended."""
    with tempfile.TemporaryDirectory(prefix="grappe-bench-") as folder:
        told = Path(folder) / "first"
        began = time.monotonic()
        commands.output(
            command(name, size, folder),
            Path(folder),
            **{FIRST: str(told), "PYTHONPATH": commands.paths(commands.ROOT), "OMP_NUM_THREADS": "1"},
        )
        return Start(first=float(told.read_text()) - began, whole=time.monotonic() - began)


def command(name: str, size: int, folder: str) -> list[str]:
    """As its users begin it, on this machine."""
    if name == "grappe":
        plan = f"device=cpu,threads=1,replicate={size}"
        task = f"{Path(__file__).parent / 'tiny_task.py'}:Telling"
        words = (f"batch_size={tiny.BATCH * size}", "--plan", plan, "--steps", str(STEPS))
        return [sys.executable, "-m", "grappe", "train", task, *words, "--run", str(Path(folder) / "run")]
    training = ["-m", "benchmarks.starting", name, "--processes", str(size)]
    if size > 1 and name in ("plain", "accelerate"):  # `accelerate launch` starts no two on CPUs without MPI
        return [*commands.launched(size), *training]
    return [sys.executable, *training]


def rows(names: Sequence[str], found: Sequence[dict[str, Start]]) -> list[list[str]]:
    """A row for each; ratios are taken within a round, then their median."""
    made = []
    for name in names:
        row = [NAMES[name]]
        for what in ("first", "whole"):
            mine = [getattr(one[name], what) for one in found]
            plain = [getattr(one["plain"], what) for one in found]
            ratios = spread([a / b for a, b in zip(mine, plain, strict=True)]).text("{:.2f}")
            row += [spread(mine).text("{:.1f}"), "" if name == "plain" else ratios]
        made.append(row)
    return made


if __name__ == "__main__":
    main()
