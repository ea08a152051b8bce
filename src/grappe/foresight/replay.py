"""Replay: runs recorded operators for real, in their order, and takes the time of each distinct call."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grappe.foresight.meeting import Meeting
from grappe.foresight.recording import Operator, Recording, Ref
from grappe.launch.local import local
from grappe.launch.rank import ProcessRank
from grappe.profiling.memory import keep_freed_memory

RUNS = (3, 30)  # of the recordings, without the first
EACH = 6  # times that a distinct call is run in one pass: more blocks of a model are as fast


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """Recordings on their way to the processes that run them."""

    recordings: tuple[Recording, ...]
    """Of one step, in order: what one leaves in the caches the next one finds there."""
    threads: int
    seconds: float
    """For all runs but the first two."""
    keeps: bool = True
    """Whether freed memory is kept for later, as in a training under a plan that does not save memory."""
    holds: bool = True
    """Whether gradients stay until the update."""
    known: frozenset[str] = frozenset()
    """Calls that are not timed."""
    run: None = None


def replayed(
    recordings: Sequence[Recording],
    *,
    threads: int,
    processes: int,
    seconds: float,
    keeps: bool = True,
    holds: bool = True,
    known: frozenset[str] = frozenset(),
) -> dict[str, float]:
    """Returns the usual seconds of each distinct call, while so many processes on this machine do the same.

    Args:
        known: calls that are run between the others, and not timed.

    Raises:
        ProcessDied: there was not enough memory.
    """
    request = ReplayRequest(
        recordings=tuple(recordings),
        threads=threads,
        seconds=seconds,
        keeps=keeps,
        holds=holds,
        known=known,
    )
    return local("grappe.foresight.replay:worker", request, processes)


def worker(request: ReplayRequest, process: ProcessRank, rendezvous_folder: Path) -> dict[str, float]:
    """Runs the recordings several times; returns each distinct call's mean seconds in the middle half of the runs."""
    torch.set_num_threads(request.threads)
    meeting = Meeting(process, rendezvous_folder)
    # All is free at a pass's end; a training's heap has state on top, and gives nothing back (decision 40).
    heap = keep_freed_memory() if request.keeps else contextlib.nullcontext()
    with heap, torch.no_grad(), _without_denormals():
        given = [_given(recording) for recording in request.recordings]
        _pass(request, given, meeting)  # kernels are chosen
        begun = time.perf_counter()
        runs = [_pass(request, given, meeting)]
        took = time.perf_counter() - begun
        more = 0 if took > request.seconds else max(RUNS[0], min(RUNS[1], int(request.seconds / took))) - 1
        runs += [_pass(request, given, meeting) for _ in range(meeting.agreed(more))]
    return _usual(runs)


def _usual(runs: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """Computes each call's mean seconds in the middle half of the runs, by their whole time.

    The median step of a training is about the sum of such means. The sum of each call's median is less: of a hundred
    calls some are slow in every step.
    """
    ordered = sorted(runs, key=lambda run: sum(sum(values) for values in run.values()))
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    return {key: statistics.fmean(took for run in middle for took in run.get(key, ())) for key in middle[0]}


@contextlib.contextmanager
def _without_denormals() -> Iterator[None]:
    """Context in which numbers next to 0 count as 0: deep models make some of made-up inputs, and they are slow."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _given(recording: Recording) -> dict[int, Any]:
    """Makes the storages that were there before: small numbers; for indices zeros."""
    made = {}
    for number, size, decimal in recording.given:
        made[number] = storage = _filled(size, decimal)
        whole = torch.empty(0, dtype=_kind(size, decimal)).set_(storage)
        if whole.is_floating_point():
            whole.uniform_(0.001 if recording.positive else -0.03, 0.03)
    return made


def _filled(size: int, decimal: bool) -> torch.UntypedStorage:
    """Makes a storage of one small number, for indices of 0: what memory held before may be slow to compute with."""
    storage = torch.UntypedStorage(size)
    whole = torch.empty(0, dtype=_kind(size, decimal)).set_(storage)
    whole.fill_(0.01 if whole.is_floating_point() else 0)
    return storage


def _kind(size: int, decimal: bool) -> torch.dtype:
    return torch.float32 if decimal and size % 4 == 0 else torch.uint8


def _pass(
    request: ReplayRequest, given: Sequence[dict[int, Any]], meeting: Meeting
) -> dict[str, list[float]]:
    """Runs the recordings once; returns the seconds of each call that is not known yet."""
    seen, found, kept = Counter[str](), dict[str, list[float]](), list[dict[int, Any]]()
    for recording, storages in zip(request.recordings, given, strict=True):
        meeting.wait()  # as a training's processes do for each other's gradients
        kept.append(dict(storages))
        held = recording.gradients if request.holds else frozenset[int]()
        _run(recording, kept[-1], held, seen, found)
    return {key: values for key, values in found.items() if key not in request.known}


def _run(
    recording: Recording,
    storages: dict[int, Any],
    held: frozenset[int],
    seen: Counter[str],
    found: dict[str, list[float]],
) -> None:
    clock, gone = time.perf_counter, list[Any]()
    for one in recording.operators:
        gone += [storages.pop(number, None) for number in one.ended if number not in held]
        key = one.key
        seen[key] += 1
        if seen[key] > EACH:
            _left(one, storages)
            continue
        arguments = [_real(value, storages) for value in one.arguments]
        keywords = {name: _real(value, storages) for name, value in one.keywords}
        function = _function(one.name)
        begun = clock()
        gone.clear()  # giving memory back is a part of a step's time
        try:
            output = function(*arguments, **keywords)
        except (RuntimeError, IndexError, NotImplementedError):
            _left(one, storages)
            continue
        took = clock() - begun
        found.setdefault(key, []).append(took)
        del arguments, keywords
        for ref, leaf in zip(one.outputs, _leaves(output), strict=False):
            storages.setdefault(ref.storage, leaf.untyped_storage())
        del output


def _left(one: Operator, storages: dict[int, Any]) -> None:
    """Makes an operator's output without running it."""
    for ref in one.outputs:
        if ref.storage not in storages:
            storages[ref.storage] = _filled(ref.end, getattr(torch, ref.kind).is_floating_point)


def _real(value: Any, storages: dict[int, Any]) -> Any:
    if isinstance(value, Ref):
        kind = getattr(torch, value.kind)
        storage = storages.get(value.storage)
        if storage is None or storage.nbytes() < value.end:
            storage = storages[value.storage] = _filled(value.end, kind.is_floating_point)
        return torch.empty(0, dtype=kind).set_(storage, value.offset, value.size, value.stride)
    return [_real(one, storages) for one in value] if isinstance(value, tuple) else value


def _function(name: str) -> Any:
    space, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), operator), overload)


def _leaves(output: Any) -> Sequence[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [leaf for one in output for leaf in _leaves(one)] if isinstance(output, list | tuple) else []
