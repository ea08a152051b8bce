"""Profile: runs torch's profiler over a few steps; lists what takes longest, and writes a trace for Perfetto."""

from __future__ import annotations

import collections
import itertools
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grappe.launch import files
from grappe.launch.terminal import UserStream, say
from grappe.profiling.phases import WARMUP
from grappe.training.watchers.base import Outcome, Record, RunInfo, Watcher

STEPS = 5
TOP = 12
COMMUNICATION = ("gloo:", "nccl:", "nccldevkernel", "c10d::", "mpi:")


class Event(NamedTuple):
    """An operation of a processor or a GPU; times in microseconds."""

    name: str
    began: float
    ended: float
    own: float
    """Time without called operations."""
    place: str
    """"main", "device", or another thread."""


class Profile(Watcher):
    """Watcher that profiles `steps` steps on this process.

    Args:
        stream: a stream for the summary in addition to the file; None: only the file.
        after: the step after which it begins; None: the warm-up's last.
    """

    prompt = True  # it begins and ends between two steps

    def __init__(self, rank: int, steps: int, stream: UserStream | None, *, after: int | None = None) -> None:
        self._rank, self._steps, self._stream = rank, steps, stream
        self._after, self._before = after, WARMUP
        self._seen = 0
        self._profiler: Any = None
        self._text = ""
        self._folder = Path()

    def started(self, info: RunInfo) -> None:
        self._folder = info.folder / "profile"
        if self._after is not None:
            self._before = max(1, self._after - info.start)  # steps of this start

    def stepped(self, record: Record) -> None:
        self._seen += 1
        if self._seen == self._before:
            import torch
            from torch.profiler import ProfilerActivity, profile

            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._profiler.__enter__()
        elif self._profiler is not None and self._seen == self._before + self._steps:
            self._end()

    def ended(self, outcome: Outcome | None) -> None:
        if self._profiler is not None:  # the training was shorter
            self._end()
        if self._stream is None or outcome is None:
            return
        needed = self._before + self._steps
        say(self._text or f"too few steps to profile: {self._seen} of {needed}\n", self._stream, end="")

    def _end(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        files.make_folder(self._folder)
        trace = self._folder / f"rank-{self._rank}.json.gz"
        # torch writes where a name leads: into a folder that nobody else knows, and from there into the run.
        with tempfile.TemporaryDirectory(prefix="grappe-profile-") as private:
            packed = Path(private) / trace.name
            profiler.export_chrome_trace(str(packed))  # compressed, as the name ends in .gz
            with files.reader(packed) as stream:
                files.replace(trace, stream.read(), files.IN_PART)
        steps = self._seen - self._before
        self._text = summary(_events(profiler), steps, f"process {self._rank}")
        self._text += f"\nfull trace: {trace} (open it in ui.perfetto.dev)\n"
        files.replace(self._folder / f"rank-{self._rank}.txt", self._text.encode(), files.IN_PART)


def _events(profiler: Any) -> list[Event]:
    from torch.autograd import DeviceType

    timed = [event for event in profiler.events() if event.time_range.end > event.time_range.start]
    on_host = collections.Counter(event.thread for event in timed if event.device_type == DeviceType.CPU)
    # The thread with most operators drives the steps; a communication library's has few.
    main = on_host.most_common(1)[0][0] if on_host else None
    events = []
    for event in timed:
        device = event.device_type != DeviceType.CPU
        place = "device" if device else "main" if event.thread == main else f"thread {event.thread}"
        duration = event.time_range.end - event.time_range.start
        own = duration if device else event.self_cpu_time_total
        events.append(Event(event.name, event.time_range.start, event.time_range.end, own, place))
    return events


def summary(events: Sequence[Event], steps: int, title: str) -> str:
    """Lists what took longest in a step: operators, kernels, idle gaps, communication and its overlap."""
    spans = {place: union(event for event in events if event.place == place) for place in ("main", "device")}
    all_spans = [span for several in spans.values() for span in several]
    if not all_spans or steps < 1:
        return f"{title}: no operation was recorded\n"
    step_time = (max(end for _, end in all_spans) - min(begin for begin, _ in all_spans)) / steps
    lines = [f"{title}: {steps} steps of {_time(step_time)}, the longest in each step:"]
    for place, word in (("main", "operators on the host (their own time)"), ("device", "kernels on the GPU")):
        lines += _top([event for event in events if event.place == place], steps, step_time, word)
        lines += _gaps(spans[place], events, place, steps, step_time)
    messages = [event for event in events if event.name.lower().startswith(COMMUNICATION)]
    if messages:
        others = [event for event in events if not event.name.lower().startswith(COMMUNICATION)]
        place = "device" if any(event.place == "device" for event in others) else "main"
        computed = [event for event in others if event.place == place]
        total = _length(messages)
        share = (total + _length(computed) - _length([*messages, *computed])) / total
        lines.append(f"communication {_time(total / steps)} a step, {share:.0%} of it while something was computed")
    return "\n".join(lines) + "\n"


def _top(events: Sequence[Event], steps: int, step_time: float, word: str) -> list[str]:
    if not events:
        return []
    own: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        own[event.name].append(event.own)
    lines = [f"  {word}"]
    for name, calls in sorted(own.items(), key=lambda item: -sum(item[1]))[:TOP]:
        time = sum(calls) / steps
        lines.append(f"    {_time(time):>10} {time / step_time:>5.0%} {len(calls) / steps:>6.0f} x  {name[:80]}")
    return lines


def _gaps(
    spans: Sequence[tuple[float, float]], events: Sequence[Event], place: str, steps: int, step_time: float
) -> list[str]:
    """Returns the idle gaps between operations, and the operation before the longest."""
    if len(spans) < 2:
        return []
    gaps = [(begin - end, end) for (_, end), (begin, _) in itertools.pairwise(spans)]
    total = sum(length for length, _ in gaps) / steps
    ends = {event.ended: event.name for event in events if event.place == place}
    longest = sorted(gaps, reverse=True)[:3]
    after = ", ".join(f"{_time(length)} after {ends.get(end, '?')[:40]}" for length, end in longest)
    where = "no operator ran on the main thread" if place == "main" else "the GPU had nothing to do"
    return [f"  {where}: {_time(total)} a step ({total / step_time:.0%}); the longest: {after}"]


def union(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Returns the intervals in which at least one of `events` was running, in order and disjoint."""
    spans: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.began):
        if spans and event.began <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], event.ended))
        else:
            spans.append((event.began, event.ended))
    return spans


def _length(events: Iterable[Event]) -> float:
    """Computes the time in which at least one of `events` was running."""
    return sum(end - begin for begin, end in union(events))


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e3:.3g} ms" if microseconds >= 1e3 else f"{microseconds:.3g} µs"
