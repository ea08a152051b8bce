"""grappe: what `grappe train` runs in each process, with its bar on a terminal and its curves in a file."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks import tiny
from benchmarks.pacer import Pacer, Seat
from benchmarks.tiny_task import TinyTask
from grappe.launch.rank import ProcessRank
from grappe.plan import as_plan
from grappe.step.loss import StepResult
from grappe.training.loop import Training
from grappe.training.options import Options
from grappe.training.request import Request
from grappe.training.task_reference import TaskReference
from grappe.training.worker import worker

NEVER = 10**9
TERMINAL = "terminal"
WAITING = 10_000  # steps: more than a second's, which is how late curves may be written


def run(seat: Seat, pacer: Pacer, task: str = "") -> None:
    """Steps for ever, of the tiny network, or of a task's file without a terminal; the pacer ends it."""
    if seat.rank == 0 and not task:
        os.environ["GRAPPE_TERMINAL"] = str(terminal(seat.folder / TERMINAL))
    with_behind_each_step(pacer.tick)
    train(seat, task=task)


def train(seat: Seat, steps: int | None = None, task: str = "") -> None:
    """A training of `worker`'s own making, without evaluation and saving until it ends: after `steps`, or never."""
    plan = f"device={seat.device},threads=1" + (f",replicate={seat.size}" if seat.size > 1 else "")
    if task:
        plan += ",workers=0"  # as the plain loop, which loads in its own process
        reference = TaskReference.of(task, {"epochs": str(NEVER)})
    else:
        reference = TaskReference.of(TinyTask(epochs=NEVER, batch_size=tiny.BATCH * seat.size))
    options = Options(evaluate_every=NEVER, save_every=NEVER, steps=steps)
    request = Request(task=reference, plan=as_plan(plan), run=seat.folder / "run", options=options)
    process = ProcessRank(
        rank=seat.rank, size=seat.size, local_rank=seat.rank, local_size=seat.size, launcher="torchrun"
    )
    worker(request, process, seat.folder)


def with_behind_each_step(tick: Callable[[], bool]) -> None:
    """Has `tick` called behind every step: time is taken outside engines, between two `after` calls."""
    after = Training.after

    def paced(self: Training, result: StepResult) -> bool:
        stop = after(self, result)
        if tick():
            # The others' turns are no step of ours: as one, they would bring forward what is drawn and
            # written every so many seconds, out of the steps that are timed.
            self.clock.begin()
        return stop

    Training.after = paced  # type: ignore[method-assign]


def terminal(record: Path) -> int:
    """The descriptor of a terminal; what is drawn on it is copied to a file by a process of its own."""
    ours, theirs = pty.openpty()
    with record.open("wb") as out:
        subprocess.Popen(["cat"], stdin=ours, stdout=out, stderr=subprocess.DEVNULL)
    os.close(ours)
    os.environ["TERM"] = "xterm-256color"  # rich draws no bar on a dumb one
    return theirs


def witness(folder: Path, steps: int) -> None:
    """Raises RuntimeError unless the bar was drawn and the curves were written during `steps` steps."""
    lines = len((folder / "run" / "metrics.jsonl").read_text().splitlines())
    drawn = (folder / TERMINAL).read_bytes().count(b"loss")
    if not lines or lines < steps - WAITING or not drawn:
        raise RuntimeError(f"grappe wrote {lines} lines of curves for {steps} steps and drew {drawn} bars")
