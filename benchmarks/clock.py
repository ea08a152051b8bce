"""What the chronometer takes of each step: `python -m benchmarks.clock`.

One training has it and goes without it by turns, in blocks of steps of one process: two processes differ by some
microseconds a step by where their memory lies, which is more than it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import commands
from benchmarks.contenders import grappe
from benchmarks.figures import machine, spread, table
from benchmarks.pacer import Seat
from grappe.data.batch import Batch
from grappe.phases import DATA, FORWARD, WATCHING
from grappe.training import Training

AIM = 5.0  # microseconds
BLOCK, WARMUP = 100, 20
SECONDS = 3e-4  # what each step is said to have taken where nobody looked


class Turns:
    """Takes the chronometer out of a training and puts it back, every so many steps."""

    def __init__(self, pairs: int) -> None:
        self.on, self._left = True, BLOCK
        self._blocks = 2 * pairs
        self._began = 0.0
        self._taken: dict[bool, list[float]] = {True: [], False: []}

    def differences(self) -> list[float]:
        """Of each pair of blocks, microseconds a step that the one with the chronometer took longer."""
        pairs = zip(self._taken[True], self._taken[False], strict=True)
        return [1e6 * (timed - untimed) for timed, untimed in pairs]

    def tick(self, training: Training) -> bool:
        """A step is over; whether it was the last."""
        self._left -= 1
        if self._left == BLOCK - WARMUP:
            self._began = time.perf_counter()
        if self._left:
            return False
        self._taken[self.on].append((time.perf_counter() - self._began) / (BLOCK - WARMUP))
        self._blocks -= 1
        # With it first, then without it first, so that a drift favours neither.
        if len(self._taken[True]) != len(self._taken[False]):
            self._put(training, not self.on)
        self._left = BLOCK
        return not self._blocks

    def _put(self, training: Training, on: bool) -> None:
        clock, engine, self.on = training.chronometer, training.engine, on
        parts: Any = vars(engine)
        task: Any = vars(parts["_task"])
        if on:
            for name in ("switch", "tell", "lap"):
                delattr(clock, name)
            parts["_phase"], task["loss"] = clock.tell, self._loss
            clock.forget()
            return
        self._loss = task.pop("loss")  # the class's own comes to light
        for name, instead in (("switch", _nothing), ("tell", _nothing), ("lap", lambda: SECONDS)):
            setattr(clock, name, instead)
        parts["_phase"] = _nothing


def _nothing(phase: int) -> None:
    return


def run(pairs: int) -> list[float]:
    """One training's differences, one for each pair of blocks."""
    turns = Turns(pairs)
    after = Training.after

    def paced(self: Training, result: Any) -> bool:
        return after(self, result) or turns.tick(self)

    def timed(self: Training, batches: Iterator[Batch]) -> Iterator[Batch]:
        """As Training._timed, which looks its clock up once."""
        while True:
            if turns.on:
                self.chronometer.switch(DATA)
            batch = next(batches, None)
            if batch is None:
                self.chronometer.switch(WATCHING)
                return
            if turns.on:
                self.chronometer.switch(FORWARD)
            yield batch

    Training.after, Training._timed = paced, timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="grappe-bench-") as folder:
        seat = Seat(rank=0, size=1, folder=Path(folder))
        os.environ["GRAPPE_TERMINAL"] = str(grappe.terminal(Path(folder) / grappe.TERMINAL))
        grappe.train(seat)
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
            commands.output(
                [sys.executable, *words], PYTHONPATH=commands.paths(commands.ROOT), OMP_NUM_THREADS="1"
            )
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
