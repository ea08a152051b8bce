"""Console: a live bar on a terminal, a line an evaluation elsewhere, and the closing table."""

from __future__ import annotations

import time
from typing import IO, TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from grappe.scores import Scores
from grappe.watchers.base import Outcome, Record, Watcher

if TYPE_CHECKING:
    from grappe.training import Training

REFRESH_SECONDS = 0.2


class Console(Watcher):
    """Shows a training on `stream`; draws five times a second, whatever the number of steps."""

    def __init__(self, stream: IO[str], sample: str = "samples") -> None:
        self._console = RichConsole(file=stream, highlight=False, soft_wrap=not stream.isatty())
        self._live = stream.isatty()
        self._sample = sample
        self._progress: Progress | None = None
        self._drawn = self._samples_drawn = 0.0
        self._record: Record | None = None
        self._scores: Scores | None = None
        self._training: Training | None = None
        self._rate = 0.0
        self._seconds = 0.0

    def started(self, training: Training) -> None:
        self._training = training
        self._drawn = time.monotonic()
        if self._live:
            self._progress = Progress(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
                auto_refresh=False,  # a thread of its own would take time from the steps
                transient=True,
            )
            self._bar = self._progress.add_task(
                "starting", total=training.total_steps, completed=training.start, epoch=1
            )
            self._progress.start()

    def stepped(self, record: Record) -> None:
        self._record = record
        self._seconds += record.seconds
        self._samples_drawn += 1
        if self._seconds > REFRESH_SECONDS:
            self._refresh()

    def evaluated(self, step: int, scores: Scores) -> None:
        self._scores = scores
        assert self._training is not None
        self._refresh()
        epoch = -(-step // self._training.per_epoch)
        train = f"loss {self._record.loss:.4f}   " if self._record else ""
        self._console.print(
            f"epoch {epoch:>3}  step {step:>6}  {train}validation loss {scores.loss:.4f}"
            f"{_metrics(scores)}   {self._rate:,.0f} {self._sample}/s"
        )

    def failed_to_save(self, problem: str) -> None:
        self._console.print(f"{problem}; the checkpoint before it is whole, training goes on")

    def ended(self, outcome: Outcome | None) -> None:
        if self._progress is not None:
            self._progress.stop()
        if outcome is not None:
            self._console.print(self._closing(outcome))

    def _refresh(self) -> None:
        assert self._training is not None
        if self._seconds:
            self._rate = self._samples_drawn * self._training.batch_size / self._seconds
        self._seconds = self._samples_drawn = 0.0
        if self._progress is None or self._record is None:
            return
        text = f"loss {self._record.loss:.4f}{_metrics(self._scores)}  {self._rate:,.0f} {self._sample}/s"
        self._progress.update(
            self._bar,
            completed=self._record.step,
            description=text,
            epoch=self._record.epoch + 1,
            refresh=True,
        )

    def _closing(self, outcome: Outcome) -> Table:
        assert self._training is not None
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        words = {
            "finished": "finished",
            "stopped": "stopped: no better for a while",
            "interrupted": "interrupted, saved",
            "paused": "paused after the steps asked for",
        }
        table.add_row("training", f"{words[outcome.status]}, {outcome.step} steps")
        if outcome.scores is not None:
            for name, value in outcome.scores.metrics.items():
                table.add_row(name, _with_counts(name, value, outcome.scores))
            table.add_row("validation loss", f"{outcome.scores.loss:.4f}")
        total = sum(outcome.phases.values())
        parts = [f"{name} {seconds:.1f} s" for name, seconds in outcome.phases.items() if seconds >= 0.05]
        table.add_row("time", f"{total:.1f} s: {', '.join(parts)}")
        table.add_row("run", str(self._training.run.folder))
        return table


def _metrics(scores: Scores | None) -> str:
    if scores is None:
        return ""
    return "".join(
        f"   {name} {value:.4f}" for name, value in scores.metrics.items() if isinstance(value, float)
    )


def _with_counts(name: str, value: float | list[float], scores: Scores) -> str:
    if isinstance(value, list):
        return ", ".join(f"{one:.4f}" for one in value)
    if name == "accuracy":
        return f"{value:.2%} ({round(value * scores.samples)} of {scores.samples})"
    return f"{value:.4f} (over {scores.samples})"
