"""Console: shows a training to its user: a live bar on a terminal, a line for each evaluation, a table at the end."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from grappe.checkpoint.format import list_checkpoints, validation_loss
from grappe.data.sampling import samples_seen
from grappe.language import translated, translated_cell, translated_name, translated_numbers
from grappe.launch.safe_console import SafeConsole
from grappe.launch.terminal import UserStream, wrapped
from grappe.step.scores import Scores
from grappe.training.watchers.base import Outcome, Record, RunInfo, Watcher
from grappe.training.watchers.expected_end import ExpectedEnd
from grappe.words import count_of, format_bytes, format_number, format_numbers

REFRESH_SECONDS = 0.2
DRAWING = 0.01  # part of the time that drawing may take
SHOWN = 8  # processes whose memory is shown
LITTLE = 0.05  # of a peak: less of parameters, gradients and optimizer state together is not shown
TRAINING = "training_"
WIDE = 96  # characters that the longest line takes


class Console(Watcher):
    """Watcher that shows a training on `stream`; draws at most five times a second.

    Args:
        sample: the word for a sample in the rate per second.
        prints: whether a line with the training loss and metrics follows a step; None: none does.
        end: the expected end, printed where there is no live bar (the bar shows the remaining time).
    """

    def __init__(
        self,
        stream: UserStream,
        sample: str = "samples",
        prints: Callable[[int], bool] | None = None,
        *,
        end: ExpectedEnd | None = None,
        typed: Sequence[str] = (),
    ) -> None:
        self._prints, self._typed = prints, typed
        self._line, self._epoch = _MeanLoss(), _MeanLoss()  # since the last such line; since the last evaluation
        # Set explicitly: a notebook's environment variables would make rich draw as on a terminal.
        self._console = SafeConsole(stream, force_terminal=stream.isatty())
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._console.soft_wrap = not self._live
        self._end = None if self._live else end
        # Other output goes above the bar, unless it is redirected to a log.
        self._shared = stream.fileno() == sys.stdout.fileno() if self._live else False
        self._unit = (
            f" {translated_name(f'{sample}/s', stream)}" if not self._live or self._console.width >= WIDE else "/s"
        )
        self._progress: Progress | None = None
        self._steps = 0  # since the bar was drawn
        self._record: Record | None = None
        self._scores: Scores | None = None
        self._lowest = (math.inf, 0)  # validation loss, and its step
        self._info: RunInfo | None = None
        self._rate = 0.0
        self._seconds, self._between = 0.0, REFRESH_SECONDS

    def started(self, info: RunInfo) -> None:
        self._info = info
        self._samples = samples_seen(info.start, info.samples, info.batch_size)
        if self._end is not None:
            self._end.started(info)
        if self._live:
            self._progress = Progress(
                TextColumn(f"{self._word('epoch')} {{task.fields[epoch]}}", markup=False),
                BarColumn(bar_width=24 if self._console.width >= WIDE else 10),
                MofNCompleteColumn(),
                TextColumn("{task.description}", markup=False),
                TimeRemainingColumn(compact=True),
                console=self._console,
                auto_refresh=False,  # a thread of its own would take time from the steps
                transient=True,
                redirect_stdout=self._shared,
                redirect_stderr=self._shared,
            )
            self._bar = self._progress.add_task(
                self._word("starting"), total=info.last_step, completed=info.start, epoch=1
            )
            self._progress.start()

    def stepped(self, record: Record) -> None:
        self._record = record
        self._seconds += record.seconds
        self._steps += 1
        assert self._info is not None
        samples, self._samples = record.samples - self._samples, record.samples
        self._epoch.add(record, samples)
        if self._prints is not None:
            self._line.add(record, samples)
            if self._prints(record.step):
                mean, self._line = self._line, _MeanLoss()
                rate = mean.samples / mean.seconds if mean.seconds else 0.0
                self._print(
                    f"{self._word('epoch')} {record.epoch + 1:>2}  {self._word('step')} {record.step:>4}  "
                    f"{self._word('loss')} {format_number(mean.loss)}{_metrics(record.metrics)}  lr {record.lr:.3g}  "
                    f"{self._speed(rate)}"
                )
        if self._end is not None and (line := self._end.stepped(record.step)) is not None:
            self._console.print(line)
        if self._seconds > self._between:
            self._refresh()

    def evaluated(self, step: int, scores: Scores) -> None:
        self._scores = scores
        assert self._info is not None
        end = self._end.evaluated(step) if self._end is not None else ""
        self._refresh()
        epoch = -(-step // self._info.steps_per_epoch)
        self._lowest = min(self._lowest, (scores.loss, step))
        mean, self._epoch = self._epoch, _MeanLoss()
        train = f"{self._word('loss')} {format_number(mean.loss)}  " if mean.samples else ""
        loss = f"{self._word(scores.split)} {format_number(scores.loss)}"
        self._print(
            f"{self._word('epoch')} {epoch:>2}  {self._word('step')} {step:>4}  {train}"
            f"{loss}{_metrics(scores.metrics)}  {self._speed(self._rate)}"
            f"{translated(end, self._console.file)}"
        )

    def checked(self, step: int, finding: str) -> None:
        self._console.print(finding)

    def noted(self, step: int, bottleneck: str) -> None:
        self._console.print(bottleneck)

    def failed_to_save(self, problem: str) -> None:
        self._console.print(f"{problem}; the checkpoint before it is intact, and training continues")

    def ended(self, outcome: Outcome | None) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._console.soft_wrap = True  # the terminal wraps: a command is copied in one piece
        if outcome is not None:
            self._console.lines(self._closing(outcome))

    def _refresh(self) -> None:
        assert self._info is not None
        if self._seconds:
            self._rate = self._steps * self._info.batch_size / self._seconds
        self._seconds, self._steps = 0.0, 0
        if self._record is None or self._progress is None:
            return
        metrics = _metrics(self._scores.metrics) if self._scores is not None else ""
        text = f"{self._word('loss')} {format_number(self._record.loss)}{metrics}  {self._speed(self._rate)}"
        text = translated_numbers(text, self._console.file)
        step, epoch = self._record.step, self._record.epoch + 1
        began = time.perf_counter()
        self._progress.update(self._bar, completed=step, description=text, epoch=epoch, refresh=True)
        self._between = max(REFRESH_SECONDS, (time.perf_counter() - began) / DRAWING)

    def _closing(self, outcome: Outcome) -> list[Text]:
        assert self._info is not None
        words = {
            "finished": "finished",
            "stopped": "stopped: no lower loss within patience",
            "interrupted": "interrupted, saved",
            "paused": "paused after --steps",
        }
        rows = [("training", f"{words[outcome.status]}, {count_of(outcome.step, 'step')}")]
        if outcome.scores is not None:
            for name, value in outcome.scores.metrics.items():
                shown = name.replace("_", " ") if name.startswith(TRAINING) else f"{outcome.scores.split} {name}"
                rows.append((shown, _with_counts(name, value, outcome.scores)))
            rows.append((f"{outcome.scores.split} loss", format_number(outcome.scores.loss)))
        best = min(list_checkpoints(self._info.folder / "checkpoints"), key=validation_loss, default=None)
        if best is not None and (loss := validation_loss(best)) < math.inf:
            name, epoch = best.folder.name, -(-best.step // self._info.steps_per_epoch)
            rows.append(("best checkpoint", f"{name}, epoch {epoch}: validation loss {format_number(loss)}"))
            lowest, step = self._lowest
            if lowest < loss:
                rows.append(("", f"lower in step {step}, {format_number(lowest)}, where no checkpoint was due"))
        if outcome.limited_validation:
            rows.append(("validation", outcome.limited_validation))
        spent = outcome.timing.totals
        total = sum(spent.values())
        longest, least = sorted(spent.items(), key=lambda part: -part[1]), max(0.05, 0.02 * total)
        parts = [f"{self._word(name)} {seconds:.1f} s" for name, seconds in longest if seconds >= least]
        rows.append(("time", str(translated(f"{total:.1f} s: {', '.join(parts)}", self._console.file))))
        if outcome.bottleneck:
            rows.append(("bottleneck", outcome.bottleneck))
        rows += _memory(outcome, self._word)
        rows += [("engine", remark) for remark in outcome.remarks]
        rows.append(("run", str(self._info.folder)))
        if outcome.status == "interrupted" and self._typed:
            folder = [str(self._info.folder)] if self._typed[-1] == "--run" else []
            rows.append(("next", shlex.join([*self._typed, *folder])))
        if outcome.status in ("finished", "stopped") and outcome.scores is not None:
            folder = shlex.quote(str(self._info.folder))
            if best is None or best.step == outcome.step:
                rows.append(("next", f"grappe evaluate {folder}"))
            else:
                rows.append(("next", f"grappe evaluate {folder} --checkpoint best"))
            rows.append(("", f"grappe report {folder}"))
        shown = []
        for name, value in rows:
            shown.append((self._word(name), translated_cell(value, self._console.file)))
        width = max(len(name) for name, _ in shown)
        commands = ("grappe ", str(self._info.folder))  # what is copied stays in one piece
        return [
            Text(line if value.startswith(commands) else wrapped(line, self._console.file, width + 2))
            for name, value in shown
            for line in [f"{name:<{width}}  {value}"]
        ]

    def _word(self, name: str) -> str:
        return translated_name(name, self._console.file)

    def _speed(self, rate: float) -> str:
        return f"{rate:,.0f}{self._unit}"

    def _print(self, line: str) -> None:
        self._console.print(Text(translated_numbers(line, self._console.file)))


class _MeanLoss:
    """Mean loss over the samples of steps, without those that an overflow skipped."""

    def __init__(self) -> None:
        self._sum, self._counted, self.samples, self.seconds = 0.0, 0, 0, 0.0

    def add(self, record: Record, samples: int) -> None:
        self.samples, self.seconds = self.samples + samples, self.seconds + record.seconds
        if not record.skipped:
            self._sum += record.loss * samples
            self._counted += samples

    @property
    def loss(self) -> float:
        return self._sum / self._counted if self._counted else math.nan


def _memory(outcome: Outcome, word: Callable[[str], str]) -> list[tuple[str, str]]:
    """Formats each process's peak memory and its parts; of many processes, only the highest and the lowest peak.

    A small model's parts say nothing: all processes share a row then.
    """
    ranked = sorted(enumerate(outcome.peaks), key=lambda entry: -_most(entry[1]))
    if len(ranked) == 1:
        return [("peak memory", _spent(ranked[0][1], word))]
    if not any(map(_parts, outcome.peaks)):
        least, most = (format_bytes(_most(ranked[place][1])) for place in (-1, 0))
        return [("peak memory", f"{most if least == most else f'{least} to {most}'} in each process")]
    if len(ranked) > SHOWN:
        ranked = [ranked[0], ranked[-1]]
    return [
        (f"peak memory, process {rank}", _spent(entry, word))
        for rank, entry in sorted(ranked, key=lambda entry: entry[0])
    ]


def _most(peak: Mapping[str, int]) -> int:
    return peak.get("device", peak.get("host", 0))


def _parts(peak: Mapping[str, int]) -> dict[str, int]:
    """Returns what the parameters, gradients and optimizer state take; nothing where that is too little to matter."""
    kinds = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}
    held = {word: peak[kind] for kind, word in kinds.items() if kind in peak}
    return held if sum(held.values()) >= LITTLE * _most(peak) else {}


def _spent(peak: Mapping[str, int], word: Callable[[str], str] = str) -> str:
    held = _parts(peak)
    if not held:
        return word(format_bytes(_most(peak)))
    rest = max(0, _most(peak) - sum(held.values()))
    parts = [f"{word(name)} {word(format_bytes(number))}" for name, number in {**held, "rest": rest}.items()]
    return f"{word(format_bytes(_most(peak)))} = {', '.join(parts)}"


def _metrics(metrics: Mapping[str, float | list[float]]) -> str:
    numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
    return "".join(f"  {name} {format_number(value)}" for name, value in numbers.items())


def _with_counts(name: str, value: float | list[float], scores: Scores) -> str:
    if isinstance(value, list):
        return format_numbers(value)
    hits = value * scores.samples
    if name == "accuracy" and abs(hits - round(hits)) < 0.01:  # otherwise it counts pixels, for example
        return f"{value:.2%} ({round(hits)} of {scores.samples})"
    over = scores.losses.get(name, scores.samples)
    shown = format_number(value)
    return shown if name.startswith(TRAINING) else f"{shown} (over {over:.12g})"


def sample_word(dataset: Any) -> str:
    """Returns "images" if a dataset's first input has an image's shape, [1 or 3, height, width]; else "samples"."""
    sample = None if hasattr(dataset, "endless") else dataset[0]  # a stream is not read twice
    inputs: Any = sample[0] if isinstance(sample, tuple | list) and sample else None
    return "images" if getattr(inputs, "ndim", 0) == 3 and inputs.shape[0] in (1, 3) else "samples"
