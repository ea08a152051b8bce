"""Overhead of each framework per step of a tiny network: `python -m benchmarks.overhead --help`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import machine, spread, table
from benchmarks.pacer import Block
from benchmarks.rotation import Pace, installed, rotate

# The hand-written loop runs twice: what separates it from itself is what a difference of nothing looks like.
CONTENDERS = ("handwritten", "grappe", "handwritten", "fabric", "accelerate", "trainer")
NAMES = {
    "handwritten": "hand-written",
    "grappe": "grappe, console and curves on",
    "fabric": "Lightning Fabric",
    "accelerate": "Accelerate",
    "trainer": "Lightning Trainer, barebones",
}
AIM = 25.0  # microseconds over the hand-written loop
HEAD = ("loop", "µs a step", "µs over hand-written", "ratio", "CPU µs over")


def main() -> None:
    """Measures and prints a markdown table for one process and one for two."""
    options = _options()
    if options.profile:
        from benchmarks import sections

        sections.main(options.processes, options.steps)
        return
    raw = {}
    for size in options.processes:
        wanted = [name for name in CONTENDERS if name in options.only]
        raw[size] = measure(wanted, size, _pace(options), options.starts)
    if options.json:
        options.json.write_text(json.dumps(raw, indent=1))


def measure(wanted: Sequence[str], size: int, pace: Pace, starts: int) -> dict[str, list[list[dict[str, float]]]]:
    """Runs the rotation on `size` processes and prints its table; every block of every round, in seconds.

    Args:
        starts: how often all processes are new ones: where a process's memory lies is worth some microseconds a step.
    """
    modules = [name for name in wanted if installed(name)]
    before = machine()
    blocks: dict[int, list[list[Block]]] = {place: [] for place in range(len(modules))}
    for _ in range(starts):
        with tempfile.TemporaryDirectory(prefix="grappe-bench-", ignore_cleanup_errors=True) as folder:
            for place, taken in rotate(modules, size, pace, Path(folder)).items():
                blocks[place] += taken
            _check(modules, Path(folder), pace)
    print(f"\n## Step time on {size} process{'es' if size > 1 else ''}\n")
    print(f"{starts} starts of {pace.rounds} rounds of {pace.block} steps, {pace.warmup} before them not timed.")
    print("Medians over the rounds, ± the 95 % interval, and between which values half of the rounds lie.")
    print(f"From {before}\nto {machine()}.\n")
    print(table(HEAD, rows(modules, blocks, starts)))
    for name in sorted(set(wanted) - set(modules)):
        print(f"\n{NAMES[name]} is not installed here: use benchmarks/run.")
    return {
        f"{place} {module}": [[dataclasses.asdict(block) for block in one] for one in blocks[place]]
        for place, module in enumerate(modules)
    }


def _check(modules: Sequence[str], folder: Path, pace: Pace) -> None:
    """grappe must have done what the table says of it."""
    from benchmarks.contenders.grappe import witness

    for place, module in enumerate(modules):
        if module == "grappe":
            witness(folder / str(place), pace.rounds * (pace.warmup + pace.block))


def rows(modules: Sequence[str], blocks: dict[int, list[list[Block]]], starts: int = 1) -> list[list[str]]:
    """A row for each contender; differences and ratios are taken within a round, then their median."""
    wall = {place: [_micro(one, "wall") for one in taken] for place, taken in blocks.items()}
    cpu = {place: [_micro(one, "cpu") for one in taken] for place, taken in blocks.items()}
    found = []
    for place, module in enumerate(modules):
        row = [NAMES[module], spread(wall[place]).text("{:.0f}")]
        if place == 0:
            found.append([*row, "", "", ""])
            continue
        if module == modules[0]:
            row[0] += ", again"
        over = [mine - base for mine, base in zip(wall[place], wall[0], strict=True)]
        ratio = [mine / base for mine, base in zip(wall[place], wall[0], strict=True)]
        busy = [mine - base for mine, base in zip(cpu[place], cpu[0], strict=True)]
        aim = f" (aim: at most {AIM:.0f})" if module == "grappe" else ""
        row += [_with_error(over, starts) + aim, spread(ratio).text("{:.3f}"), _with_error(busy, starts)]
        found.append(row)
    return found


def _with_error(values: Sequence[float], starts: int) -> str:
    """The error is that of the starts' medians, where there are enough of them."""
    found, each = spread(values), len(values) // starts
    medians = [spread(values[at : at + each]).median for at in range(0, len(values), each)]
    error = spread(medians).error if starts > 2 else found.error
    return found.text("{:+.0f}").replace(" (", f" ±{error:.0f} (", 1)


def _micro(blocks: Sequence[Block], what: str) -> float:
    """Microseconds a step of the slowest process."""
    return max(getattr(block, what) for block in blocks) * 1e6


def _pace(options: argparse.Namespace) -> Pace:
    return Pace(rounds=options.rounds, warmup=options.warmup, block=options.block)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    add = parser.add_argument
    add("--processes", type=int, nargs="+", default=[1, 2], help="on how many processes, one after the other")
    add("--starts", type=int, default=5, help="how often everyone starts anew")
    add("--rounds", type=int, default=20, help="of each start")
    add("--block", type=int, default=150, help="timed steps of each contender in a round")
    add("--warmup", type=int, default=25, help="steps before them that are not timed")
    add("--only", nargs="+", choices=sorted(NAMES), default=sorted(NAMES), help="which contenders")
    add("--json", type=Path, help="write every round's figures here")
    add("--profile", action="store_true", help="show where grappe's microseconds go instead")
    add("--steps", type=int, default=3000, help="steps of a profile")
    options = parser.parse_args()
    if "handwritten" not in options.only:
        parser.error("--only needs handwritten: everything is measured against it")
    return options


if __name__ == "__main__":
    main()
