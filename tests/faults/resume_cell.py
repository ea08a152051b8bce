"""Trainings that are given up in the middle, and go on: what each process of a pool does, with all the real parts."""

import contextlib
import dataclasses
import hashlib
import io
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from grappe import Arrays
from grappe.checkpoint.format import Checkpoint
from grappe.launch.rank import ProcessRank
from grappe.launch.signals import SIGNALS
from grappe.plan import Plan
from grappe.step.loss import StepResult
from grappe.task import Task
from grappe.training import worker as verb
from grappe.training.loop import Training
from grappe.training.options import Options
from grappe.training.run import Run
from grappe.training.task_reference import TaskReference
from tests.faults.trace import Recorder, recording
from tests.parity.tasks import Images


class Given(BaseException):
    """The process is dead, as far as the training can tell; no `except Exception` may catch it."""


class Apart(Dataset):
    """Samples one by one, so that data workers load them."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, index: int) -> tuple:
        return self._arrays[index]


class Loaded(Images):
    """Images that go through a DataLoader."""

    def data(self, split: str, folder: Path) -> Dataset:
        return Apart(super().data(split, folder))


Happening = Callable[[], object]


def part(
    process: ProcessRank,
    rendezvous_folder: Path,
    task: Task,
    text: str,
    run: Path,
    options: Options,
    dies_at: int | None,
    happenings: Mapping[tuple[int, int], Happening] | None = None,
    given: Path | None = None,
) -> str:
    """Trains, or goes on, until the end or until it dies behind step `dies_at`; what the user is told.

    Args:
        given: another script's file to begin with, its optimizer's state too.
        happenings: by process and step: what happens to it behind that step, when no save is under way.
    """
    plan = Plan.parse(f"{text},threads=1" if text else "threads=1")
    request = verb.Request(
        task=TaskReference.of(task),
        plan=plan,
        run=run,
        base=run.parent,
        data=run.parent,
        weights=given,
        with_optimizer=given is not None,
        options=options,
    )
    # Another launcher than ours, so that the pool's own output is left alone.
    process = dataclasses.replace(process, launcher="test")

    class Mortal(Training):
        def after(self, result: StepResult) -> bool:
            stop = super().after(result)
            step = result.batch.step + 1
            mine = (happenings or {}).get((process.rank, step))
            ends = step == dies_at or any(at == step for _, at in happenings or ())
            if ends and (problem := self.saver.wait()) is not None:  # else it were chance what is saved by then
                self.watchers.call("failed_to_save", problem)
            if mine is not None:
                mine()
            if step == dies_at:
                raise Given
            return stop

    told = io.StringIO()
    with _as_if_started(), mock.patch.object(verb, "Training", Mortal), contextlib.redirect_stdout(told):
        try:
            verb.worker(request, process, rendezvous_folder)
        except Given:
            if dist.is_initialized():
                dist.destroy_process_group()
    return told.getvalue()


def recorded(
    process: ProcessRank, rendezvous_folder: Path, task: Task, text: str, run: Path, options: Options
) -> Recorder:
    """Trains to the end; what this process did to the run's folder of checkpoints, which is there."""
    with recording(run / "checkpoints") as recorder:
        part(process, rendezvous_folder, task, text, run, options, None)
    return recorder


@contextlib.contextmanager
def _as_if_started() -> Iterator[None]:
    """Signals as they were afterwards; data workers allowed, which multiprocessing refuses to daemons."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    daemon = config.pop("daemon", None)
    try:
        yield
    finally:
        if daemon is not None:
            config["daemon"] = daemon
        for number, handler in handlers.items():
            signal.signal(number, handler)


def hashes(run: Path, step: int) -> dict[str, str]:
    """By name: the hash of each tensor of a checkpoint (dtype, shape and bits), and its JSON."""
    checkpoint = Run(run).latest()
    assert checkpoint.step == step
    return hashes_of(checkpoint)


def hashes_of(checkpoint: Checkpoint) -> dict[str, str]:
    """As `hashes`, of one that is there."""
    found = {"json": json.dumps(checkpoint.read_values(), sort_keys=True)}
    tensors = checkpoint.read_tensors()
    for name in tensors:
        tensor = tensors.read(name)
        bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        words = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
        found[name] = hashlib.sha256(words + bits).hexdigest()
    return found


def curves(run: Path) -> list[dict]:
    """The steps and evaluations of a run, in order, without their seconds."""
    return [
        {name: value for name, value in one.items() if name not in ("seconds", "data", "device")}
        for one in sorted(Run(run).records(), key=lambda one: (one["step"], one["kind"]))
        if one["kind"] in ("step", "evaluation")  # the others are times
    ]


def samples(run: Path) -> dict[int, list[int]]:
    """By step: the sample ids that all processes took, in the order of their slices."""
    steps: dict[int, list[int]] = {}
    files = sorted((run / "samples").iterdir(), key=lambda file: int(file.stem.partition("-")[2]))
    for file in files:
        for line in file.read_text().splitlines():
            one = json.loads(line)
            if one["kind"] == "step":
                steps.setdefault(one["step"], []).extend(one["ids"])
    return dict(sorted(steps.items()))
