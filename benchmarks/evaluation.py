"""Evaluation against the rivals, and whether each sample is counted once: `python -m benchmarks.evaluation`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import commands
from benchmarks.evaluating import PASSES, ROWS
from benchmarks.figures import machine, spread, table
from benchmarks.rotation import installed

NAMES = {
    "handwritten": "tensors in memory, by hand",
    "grappe": "grappe",
    "loader": "DataLoader and sampler, by hand",
    "accelerate": "Accelerate",
    "trainer": "Lightning's validate",
}
HEAD = ("", "ms a pass", "over by hand", "samples counted", "mean loss")


def main() -> None:
    """Evaluates in turns, and prints a markdown table for one process and for two."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="one after the other")
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    options = parser.parse_args()
    names = [name for name in NAMES if installed(name)]
    found = {}
    for size in options.processes:
        before = machine()
        turns = {name: lambda _, name=name, size=size: evaluated(name, size) for name in names}
        found[size] = commands.rounds(turns, options.rounds, f"{size}")
        print(f"\n## One pass over {ROWS:,} images, {size} process{'es' if size > 1 else ''}\n")
        print(f"{options.rounds} rounds, medians of {PASSES} passes.\nFrom {before}\nto {machine()}.\n")
        print(table(HEAD, rows(names, found[size])), flush=True)
        for name in sorted(set(NAMES) - set(names)):
            print(f"\n{NAMES[name]} is not installed here: use benchmarks/run.")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def evaluated(name: str, size: int) -> dict[str, Any]:
    """Seconds of each pass, samples that were counted, and the loss."""
    training = [*commands.launched(size), "-m", "benchmarks.evaluating", name]
    said = commands.output(training, PYTHONPATH=commands.paths(commands.ROOT), OMP_NUM_THREADS="1")
    return json.loads(said.splitlines()[-1])


def rows(names: Sequence[str], found: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each; ratios are taken within a round, then their median."""
    made = []
    hand = [median(one["handwritten"]["seconds"]) for one in found]
    for name in names:
        mine = [median(one[name]["seconds"]) for one in found]
        ratio = spread([a / b for a, b in zip(mine, hand, strict=True)]).text("{:.2f}")
        counted = {f"{one[name]['samples']:,.0f}" for one in found}
        made.append(
            [
                NAMES[name],
                spread([1e3 * one for one in mine]).text("{:.0f}"),
                "" if name == "handwritten" else ratio,
                ", ".join(sorted(counted)),
                f"{found[0][name]['loss']:.6f}",
            ]
        )
    return made


if __name__ == "__main__":
    main()
