"""Measures what the chronometer takes of each step: `python -m benchmarks.clock`.

One training has it and goes without it by turns, in blocks of steps of one process: two processes differ by some
microseconds a step by where their memory lies, which is more than it takes. While it is off, an empty call stays where
a phase is announced: five in a step, a fifth of a microsecond in all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import commands
from benchmarks.contenders import grappe
from benchmarks.figures import machine, spread, table
from benchmarks.pacer import Seat
from grappe.profiling.chronometer import Chronometer

AIM = 5.0  # microseconds
BLOCK, WARMUP = 100, 20
SECONDS = 3e-4  # what each step is said to have taken while it is off
LAP, SWITCH = Chronometer.end_step, Chronometer.switch.__code__


class Turns:
    """Switches the chronometer off and on again, every so many steps; called in place of `Chronometer.end_step`."""

    def __init__(self) -> None:
        self.on, self._left = True, BLOCK
        self._began = 0.0
        self._taken: dict[bool, list[float]] = {True: [], False: []}

    def lap(self, chronometer: Chronometer) -> float:
        """A step is over."""
        seconds = LAP(chronometer) if self.on else SECONDS
        self._left -= 1
        if self._left == BLOCK - WARMUP:
            self._began = time.perf_counter()
        elif not self._left:
            self._turn(chronometer)
        return seconds

    def differences(self) -> list[float]:
        """Of each pair of blocks, microseconds a step that the one with the chronometer took longer."""
        pairs = zip(self._taken[True], self._taken[False], strict=True)
        return [1e6 * (timed - untimed) for timed, untimed in pairs]

    def _turn(self, chronometer: Chronometer) -> None:
        self._taken[self.on].append((time.perf_counter() - self._began) / (BLOCK - WARMUP))
        self._left = BLOCK
        # With it first, then without it first, so that a drift favours neither.
        if len(self._taken[True]) == len(self._taken[False]):
            return
        self.on = not self.on
        # The engine holds the method since it was made: what can be changed is what the method does.
        Chronometer.switch.__code__ = SWITCH if self.on else _nothing.__code__
        if self.on:
            chronometer.begin()


def _nothing(self: Chronometer, phase: int, clock: Any = None) -> None:
    return


def run(pairs: int) -> list[float]:
    """One training's differences, one for each pair of blocks."""
    turns = Turns()

    def lap(self: Chronometer) -> float:
        return turns.lap(self)

    Chronometer.end_step = lap  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="grappe-bench-") as folder:
        seat = Seat(rank=0, size=1, folder=Path(folder))
        os.environ["GRAPPE_TERMINAL"] = str(grappe.terminal(Path(folder) / grappe.TERMINAL))
        grappe.train(seat, steps=2 * pairs * BLOCK)
    return turns.differences()


def main() -> None:
    """Starts several trainings, one after the other, and prints what the chronometer takes in each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clock", description=__doc__)
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=150, help=f"of blocks of {BLOCK} steps in each")
    parser.add_argument("--json", type=Path, help="write every pair's figures here")
    parser.add_argument("--one", type=Path, help="one training in this process; its figures go to this file")
    options = parser.parse_args()
    if options.one:
        options.one.write_text(json.dumps(run(options.pairs)))
        return
    before, found = machine(), []
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "one.json"
        words = ("-m", "benchmarks.clock", "--one", str(told), "--pairs", str(options.pairs))
        for _ in range(options.starts):
            commands.output([sys.executable, *words], PYTHONPATH=commands.paths(commands.ROOT), OMP_NUM_THREADS="1")
            found.append(json.loads(told.read_text()))
    print(f"\n## What the chronometer takes of a step\n\nFrom {before}\nto {machine()}.\n")
    rows = [[str(at), spread(one).text("{:+.1f}")] for at, one in enumerate(found, 1)]
    medians = [statistics.median(one) for one in found]
    rows.append(["all", f"{spread(medians).text('{:+.1f}')}, aim: at most {AIM:.0f}"])
    print(table(("start", "µs a step"), rows))
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
