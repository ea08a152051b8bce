"""A training with a planted cause of slowness: as a task, as a `grappe.Loop` and as a plain script.

`main` runs it in this process; `grappe launch benchmarks/planted.py` runs it as a script or a loop of several. The
meter's LEAST_SECONDS is lowered, and each sentence is written to the file of the environment's GRAPPE_CAUSES.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import grappe
from grappe import Arrays, Task
from grappe.tasks import digits, pysource
from grappe.training import bottleneck, headspace

SECONDS = 1.0
WRITTEN = "GRAPPE_CAUSES"
KNOBS = "GRAPPE_KNOBS"
BUSY = "GRAPPE_CAUSES_BUSY"
"""Whether other programs compute on this machine, which are not the training's cause."""
CLASSES = 4
TRACED = '"traced"' in os.environ.get(KNOBS, "")
"""Whether TraceML watches the script, which then spreads itself."""


def shorten() -> None:
    """Lowers the meter's least time, and has it write what it finds and the times that it found it in."""
    if hasattr(bottleneck, "plain"):
        return
    bottleneck.LEAST_SECONDS = headspace.LEAST_SECONDS = SECONDS
    bottleneck.plain = plain = bottleneck.bottleneck  # type: ignore[attr-defined]

    def finding(times: Any, *waiting: Any) -> Any:
        if os.environ.get(BUSY):
            bottleneck._other_programs = lambda times: None
        cause = plain(times, *waiting)
        row = {
            "kind": "" if cause is None else cause.kind,
            "faster": 1.0 if cause is None else cause.faster,
            "sentence": "" if cause is None else cause.sentence,
            "seconds": max(each.total for each in times),
            "times": [dataclasses.asdict(each) | {"cores": len(each.cores)} for each in times],
        }
        if WRITTEN in os.environ:
            with Path(f"{os.environ[WRITTEN]}.{os.getpid()}").open("a") as file:
                file.write(json.dumps(row) + "\n")
        return cause

    bottleneck.bottleneck = finding


shorten()


class Slow(Dataset):
    """Random rows, each of which takes a time to load: asleep, as from a slow disk, or computing."""

    def __init__(self, task: Planted, rows: int) -> None:
        self._nap, self._work, self._rows = task.nap, task.work, rows
        self._row = torch.randn(task.tokens, task.width)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self._nap:
            time.sleep(self._nap)
        if self._work:
            end = time.thread_time() + self._work
            while time.thread_time() < end:
                sum(range(200))
        return self._row, index % CLASSES


class Late(nn.Module):
    """Multiplies by a matrix, more often on process 1."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        rank = int(os.environ.get("RANK", multiprocessing.current_process().name.rpartition("-")[2] == "1"))
        self.times = times if rank == 1 else 0
        self._matrix = np.ones(
            (width, width), np.float32
        )  # NumPy's, as all processes must make the same calls of torch

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            self._matrix @ self._matrix
        return x


class Mean(nn.Module):
    """The mean over a sample's tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Planted(Task):
    """A perceptron over tokens with a cause of slowness."""

    epochs: int = 1
    batch_size: int = 16
    steps: int = 200
    """Steps of an epoch."""
    width: int = 256
    layers: int = 2
    tokens: int = 16
    """Rows of a sample: each layer computes with them all."""
    adam: bool = False
    nap: float = 0.0
    """Seconds that a sample waits to be loaded."""
    work: float = 0.0
    """CPU seconds that a sample takes to load."""
    late: int = 0
    """Additional products of process 1 in each step."""
    sending: float = 0.0
    """Seconds that an exchange of gradients takes longer."""
    disk: float = 0.0
    """Seconds that a file takes longer to reach the disk."""
    watching: float = 0.0
    watch_every: int = 1
    evaluate_every: int = 1_000_000
    save_every: int = 1_000_000
    validation: int = 16
    workers: int = 0
    threads: int = 0

    def model(self) -> nn.Module:
        if self.sending:
            _slow_exchange(self.sending)
        if self.disk:
            plain, seconds = os.fsync, self.disk
            os.fsync = lambda file: (time.sleep(seconds), plain(file))[1]
        layers = [nn.Linear(self.width, self.width) for _ in range(self.layers)]
        extra = [Late(self.width, self.late)] if self.late else []
        return nn.Sequential(*extra, *layers, Mean(), nn.Linear(self.width, CLASSES))

    def data(self, split: str, folder: Path) -> Any:
        rows = self.steps * self.batch_size if split == "train" else self.validation
        if (self.nap or self.work) and split == "train":
            return Slow(self, rows)
        draw = torch.Generator().manual_seed(0)
        row = torch.randn(1, self.tokens, self.width, generator=draw)
        return Arrays(row.expand(rows, -1, -1), torch.arange(rows) % CLASSES)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        kind = torch.optim.Adam if self.adam else torch.optim.SGD
        return kind([each[1] if isinstance(each, tuple) else each for each in named_parameters], lr=1e-4)


def _slow_exchange(seconds: float) -> None:
    """Makes each exchange of gradients take longer from now on, in DistributedDataParallel and in a collective."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    made = DistributedDataParallel.__init__

    def slow(group, bucket):
        size = dist.get_world_size(group)

        def after(done: Any) -> Tensor:
            time.sleep(seconds)
            return done.value()[0] / size

        work: Any = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(after)

    def with_hook(self: Any, *arguments: Any, **keywords: Any) -> None:
        made(self, *arguments, **keywords)
        self.register_comm_hook(keywords.get("process_group"), slow)

    DistributedDataParallel.__init__ = with_hook  # type: ignore[method-assign]


class Watching(grappe.Watcher):
    """Sleeps in steps, as a logger that writes to a slow disk."""

    def __init__(self, seconds: float, every: int) -> None:
        self._seconds, self._every = seconds, every

    def stepped(self, record: Any) -> None:
        if not record.step % self._every:
            time.sleep(self._seconds)


class Rows(Dataset):
    """Samples of an Arrays."""

    def __init__(self, task: Planted, split: str) -> None:
        rows = task.steps * task.batch_size if split == "train" else task.validation
        self._row, self._rows = torch.randn(task.tokens, task.width), rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._row, index % CLASSES


class Digits(digits.Digits):
    """The shipped task, in a module that shortens the meter's least time in each process."""


class PySource(pysource.PySource):
    """The shipped task, in that module too."""


SHIPPED: dict[str, type[Task]] = {"digits": Digits, "pysource": PySource}


def as_task(task: Planted, plan: str, folder: Path) -> None:
    """Trains it as a task."""
    words = [plan] if plan else []
    slow = task.nap or task.work
    words += [f"workers={task.workers},loading=processes"] if slow else []  # else the kinds are tried first
    words += [f"threads={task.threads}"] if task.threads else []
    options = grappe.Options(
        evaluate_every=task.evaluate_every, save_every=task.save_every, no_check=True,
    )  # fmt: skip
    watchers = [Watching(task.watching, task.watch_every)] if task.watching else []
    grappe.train(task, ",".join(words), folder, options=options, watchers=watchers)


def as_loop(task: Planted, plan: str, folder: Path) -> None:
    """Trains it by a grappe.Loop."""
    words = [plan] if plan else []
    words += [f"workers={task.workers},loading=processes"] if task.nap or task.work else []
    words += [f"threads={task.threads}"] if task.threads else []
    with grappe.Loop(",".join(words) or None, folder, save_every=task.save_every) as loop:
        model = task.model()
        model, optimizer = loop.parallelize(model, task.optimizer(model.parameters()))
        data = _dataset(task, "train")
        for step, (inputs, targets) in enumerate(loop.batches(data, task.batch_size), 1):
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if not step % task.evaluate_every:
                loop.evaluate(
                    _dataset(task, "validation"),
                    lambda inputs, targets: nn.functional.cross_entropy(model(inputs), targets, reduction="none"),
                    task.batch_size,
                )


def _dataset(task: Planted, split: str) -> Dataset:
    return (
        Slow(task, task.steps * task.batch_size) if (task.nap or task.work) and split == "train" else Rows(task, split)
    )


def as_script(task: Planted, step: Callable[[nn.Module], Any] = contextlib.nullcontext) -> None:
    """Trains it as a plain script does, with whatever intercepts it; under torchrun by DistributedDataParallel.

    Args:
        step: makes the context of a step; of torch's null context for a script that nobody edited.
    """
    if task.threads:
        torch.set_num_threads(task.threads)
    model: nn.Module = task.model()
    batch, options = task.batch_size, dict[str, Any](shuffle=True)
    if TRACED and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo")
        torch.set_num_threads(1)
        model, batch = nn.parallel.DistributedDataParallel(model), batch // 2
        options = {"sampler": torch.utils.data.DistributedSampler(_dataset(task, "train"))}  # type: ignore[arg-type]
    optimizer = task.optimizer(model.parameters())
    train = DataLoader(_dataset(task, "train"), batch, num_workers=task.workers, **options)
    validation = DataLoader(_dataset(task, "validation"), task.batch_size)
    began = time.perf_counter()
    for number, (inputs, targets) in enumerate(train, 1):
        if number == 2:
            began = time.perf_counter()
        with step(model):
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if not number % task.evaluate_every:
            with torch.no_grad():
                for further, classes in validation:
                    nn.functional.cross_entropy(model(further), classes)
        if TRACED and not number % task.save_every:  # grappe saves a script's state by itself
            torch.save([model.state_dict(), optimizer.state_dict()], "state.pt")
        if task.watching and not number % task.watch_every:
            time.sleep(task.watching)
    if WRITTEN in os.environ:
        taken = (time.perf_counter() - began) / max(1, len(train) - 1)
        Path(f"{os.environ[WRITTEN]}-step").write_text(str(taken))


def main() -> None:
    """Runs what the environment's GRAPPE_KNOBS asks for, in this process."""
    knobs = json.loads(os.environ[KNOBS])
    way, plan, folder = knobs.pop("way"), knobs.pop("plan"), Path(knobs.pop("folder"))
    if "shipped" in knobs:
        steps = int(knobs.pop("steps"))
        options = grappe.Options(steps=steps, no_check=True)
        grappe.train(SHIPPED[knobs.pop("shipped")], plan, folder, options=options, fields=knobs)
        return
    task = Planted(**knobs)
    if way == "traced":
        import traceml_ai as traceml  # its venv has it

        traceml.init(mode="auto")
        as_script(task, traceml.trace_step)
    elif way == "script":
        as_script(task)
    elif way == "loop":
        as_loop(task, "" if "RANK" in os.environ or task.__class__.__module__ == "__main__" else plan, folder)
    else:
        as_task(task, plan, folder)


if __name__ == "__main__":
    main()
