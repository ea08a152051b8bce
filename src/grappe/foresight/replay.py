"""Replay: runs recorded operators for real, in their order, and takes the time of each distinct call."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grappe.foresight.recording import Operator, Recording, Ref
from grappe.launch.local import local
from grappe.launch.rank import ProcessRank
from grappe.profiling.memory import reused

RUNS = (3, 30)  # of a recording, without the first
EACH = 6  # times that a distinct call is run in one pass: more blocks of a model are as fast
MEET_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """A recording on its way to the processes that run it."""

    recording: Recording
    threads: int
    seconds: float
    """For all runs but the first two."""
    keeps: bool = True
    """Whether freed memory is kept for later, as in a training under a plan that does not save memory."""
    known: frozenset[str] = frozenset()
    run: None = None


def replayed(
    recording: Recording,
    *,
    threads: int,
    processes: int,
    seconds: float,
    keeps: bool = True,
    known: frozenset[str] = frozenset(),
) -> dict[str, float]:
    """Returns the median seconds of each distinct call, while so many processes on this machine do the same.

    Args:
        known: calls that need no more than to leave their output.

    Raises:
        ProcessDied: there was not enough memory.
    """
    request = ReplayRequest(recording=recording, threads=threads, seconds=seconds, keeps=keeps, known=known)
    return local("grappe.foresight.replay:worker", request, processes)


def worker(request: ReplayRequest, process: ProcessRank, rendezvous_folder: Path) -> dict[str, float]:
    """Runs the recording several times; returns each distinct call's median seconds."""
    torch.set_num_threads(request.threads)
    if request.keeps:
        with reused():
            pass
    found: dict[str, list[float]] = defaultdict(list)
    with torch.no_grad():
        given = _given(request.recording)
        _pass(request, given, None)  # kernels are chosen
        _meet(process, rendezvous_folder)
        begun, runs = time.perf_counter(), 0
        while runs < RUNS[0] or (runs < RUNS[1] and time.perf_counter() - begun < request.seconds):
            _pass(request, given, found)
            runs += 1
            if runs == 1 and time.perf_counter() - begun > request.seconds:
                break
        _meet(process, rendezvous_folder, "after")
    return {key: statistics.median(values) for key, values in found.items()}


def _meet(process: ProcessRank, folder: Path, name: str = "before") -> None:
    """Waits for the other processes, so that all run at the same time."""
    (folder / f"{name}-{process.rank}").touch()
    limit = time.monotonic() + MEET_SECONDS
    while time.monotonic() < limit and not all(
        (folder / f"{name}-{rank}").exists() for rank in range(process.size)
    ):
        time.sleep(0.001)


def _given(recording: Recording) -> dict[int, Any]:
    """Makes the storages that were there before: small numbers; for indices zeros."""
    made = {}
    for number, size, decimal in recording.given:
        storage = torch.UntypedStorage(size)
        whole = torch.empty(0, dtype=torch.float32 if decimal and size % 4 == 0 else torch.uint8).set_(
            storage
        )
        if whole.is_floating_point():
            whole.uniform_(0.001 if recording.positive else -0.03, 0.03)
        else:
            whole.zero_()
        made[number] = storage
    return made


def _pass(request: ReplayRequest, given: dict[int, Any], found: dict[str, list[float]] | None) -> None:
    storages, seen = dict(given), Counter[str]()
    clock, gone = time.perf_counter, list[Any]()
    for one in request.recording.operators:
        gone += [storages.pop(number, None) for number in one.ended]
        if one.view:
            continue
        key = one.key
        seen[key] += 1
        if key in request.known or seen[key] > EACH:
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
            output = None
        took = clock() - begun
        if output is None:
            _left(one, storages)
            continue
        if found is not None:
            found[key].append(took)
        del arguments, keywords
        for ref, leaf in zip(one.outputs, _leaves(output), strict=False):
            storages.setdefault(ref.storage, leaf.untyped_storage())
        del output


def _left(one: Operator, storages: dict[int, Any]) -> None:
    """Leaves an operator's output without running it."""
    for ref in one.outputs:
        if ref.storage not in storages:
            storages[ref.storage] = torch.UntypedStorage(ref.end)


def _real(value: Any, storages: dict[int, Any]) -> Any:
    if isinstance(value, Ref):
        kind = getattr(torch, value.kind)
        storage = storages.get(value.storage)
        if storage is None or storage.nbytes() < value.end:
            storage = torch.UntypedStorage(value.end)
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
            storages[value.storage] = storage
        return torch.empty(0, dtype=kind).set_(storage, value.offset, value.size, value.stride)
    return [_real(one, storages) for one in value] if isinstance(value, tuple) else value


def _function(name: str) -> Any:
    space, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), operator), overload)


def _leaves(output: Any) -> Sequence[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return [leaf for one in output for leaf in _leaves(one)] if isinstance(output, list | tuple) else []
