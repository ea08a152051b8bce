"""Measures what the coordinator of a search costs: its processor seconds beside those of its trials.

python -m benchmarks.coordinator FOLDER digits lr=0.01..1:log epochs=30 --trials 12 --parallel 2

Processor seconds do not depend on what else the machine does. The start (Python, torch, Optuna) is paid once; the rest
grows with the trials. The server that trials are forked from counts as start: it imports torch once for all of them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from grappe.contrib.tune.study import open_study
from grappe.training.run import Run

TICKS = os.sysconf("SC_CLK_TCK")
LOOK_SECONDS = 0.1


def processor_seconds(pid: int) -> float:
    """The seconds that a process itself has computed; 0.0 when it has ended."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / TICKS
    return 0.0


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    with contextlib.suppress(OSError):
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def main() -> None:
    folder, *words = sys.argv[1:]
    study = Path(folder)
    command = subprocess.Popen(
        [sys.executable, "-m", "grappe", "tune", *words, "--study", str(study)], stdout=subprocess.DEVNULL
    )
    seen: dict[int, float] = {}
    start, server = 0.0, 0.0
    while command.poll() is None:
        for pid in [command.pid, *children(command.pid)]:
            seen[pid] = max(seen.get(pid, 0.0), processor_seconds(pid))
        if not start and any(study.glob("trial-*/metrics.jsonl")):
            start = seen[command.pid]
            server = sum(seen.values()) - start
        time.sleep(LOOK_SECONDS)
    trials = open_study(study).trials
    used = [Run(study / f"trial-{one.number:04d}").read_description()["used"] for one in trials]
    seconds = sum(one["cpu_hours"] * 3600 for one in used)
    own = seen[command.pid] - start
    print(f"{len(trials)} trials: {seconds:.1f} processor seconds, {seconds / len(trials):.1f} each")
    print(f"start of the coordinator: {start:.2f} s, of the server: {server:.2f} s, once")
    print(f"after that: {own:.2f} s, {own / len(trials):.3f} s a trial, {own / seconds:.2%} of the trials'")
    print(f"in all: {(sum(seen.values())) / seconds:.2%}")


if __name__ == "__main__":
    main()
