"""Trains small tasks under many plans and hashes the trained weights, to show that a refactoring keeps every bit.

    python -m benchmarks.weight_hashes --write before.json      # before the change
    python -m benchmarks.weight_hashes --compare before.json    # after the change: exit code 1 if a hash differs

Only what a user has is called (`grappe.train`, `grappe.load`, the command line), so that the script runs unchanged
when grappe's modules are renamed. Hashes are comparable on one machine, with one Python and one torch. Horovod and
DeepSpeed must be there; DeepSpeed compiles its optimizer for minutes when it is used for the first time.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import grappe

COMMON = "device=cpu,threads=1"
"""Of every plan: more threads would sum in another order each time."""
LIMIT_SECONDS = 3600
"""For one training: far more than any takes, since DeepSpeed leaves a lock behind when its compiling is cut off."""
ONE_PROCESS = "one process"
STOP = 3
"""The step at which a resumed training was stopped: DIGITS has 6 in all, OWN 8."""
BEYOND_THE_END = 1000

DIGITS = "digits epochs=1 batch_size=256"
GPT = "pysource width=16 depth=2 heads=2 context=64 megabytes=0.08 batch_size=200 dropout=0.1"
COATNET = "coatnet epochs=1 side=16 batch_size=704"
OWN = "own.py"
OWN_ADAM = "own.py rule=adam clip=0.1 width=12"
OWN_EVEN = "own.py norm=layer samples=64"
OWN_LOADED = "own.py loaded=true"

PLANS = {
    DIGITS: (
        "", "replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2", "replicate=2,shard=2",
        "microbatches=4", "microbatches=3,replicate=2", "recompute", "precision=bf16", "precision=fp16,replicate=2",
        "channels_last", "offload=cpu,shard=2", "compile",
        "pipeline=2,microbatches=4", "pipeline=2,microbatches=4,schedule=gpipe",
        "pipeline=2,microbatches=4,schedule=interleaved", "pipeline=2,microbatches=4,schedule=zero_bubble",
        "pipeline=2,microbatches=2,replicate=2",
        "exact=4", "exact=4,replicate=2", "exact=4,shard=2",
        "engine=textbook", "engine=textbook,replicate=2", "engine=textbook,microbatches=4",
        "engine=textbook,exact=4,replicate=2",
        "engine=lightning", "engine=lightning,replicate=2", "engine=lightning,shard=2",
        "engine=lightning,offload=cpu,shard=2",
        "engine=horovod", "engine=horovod,replicate=2",
        "engine=deepspeed", "engine=deepspeed,replicate=2", "engine=deepspeed,shard=2,zero=1",
        "engine=deepspeed,shard=2,zero=2", "engine=deepspeed,shard=2",
    ),
    GPT: (
        "", "shard=2,precision=bf16", "tensor=2", "tensor=2,microbatches=2", "tensor=2,replicate=2", "recompute",
        "pipeline=2,microbatches=4,schedule=interleaved", "pipeline=2,microbatches=2,tensor=2",
        "pipeline=2,microbatches=2,shard=2,recompute", "exact=2", "exact=2,shard=2",
        "engine=lightning,tensor=2", "engine=textbook,replicate=2", "engine=deepspeed,shard=2,recompute",
        "engine=horovod,replicate=2,microbatches=2",
    ),
    COATNET: ("replicate=2,batchnorm=sync",),
    OWN: (
        "", "replicate=2", "replicate=2,batchnorm=sync", "shard=2,batchnorm=sync", "microbatches=4",
        "channels_last,precision=bf16", "precision=fp16", "recompute", "exact=4", "exact=4,replicate=2",
        "engine=textbook", "engine=lightning,replicate=2,batchnorm=sync", "engine=lightning,precision=bf16",
        "engine=deepspeed,shard=2,batchnorm=sync", "engine=horovod,replicate=2",
    ),
    OWN_ADAM: (
        "", "replicate=2", "shard=2,zero=2", "offload=cpu,shard=2", "engine=lightning,microbatches=2",
        "engine=deepspeed,shard=2", "engine=deepspeed,shard=2,precision=bf16", "engine=deepspeed,shard=2,offload=cpu",
    ),
    OWN_EVEN: ("pipeline=2,microbatches=2", "pipeline=2,microbatches=4,schedule=interleaved,replicate=2"),
    OWN_LOADED: ("workers=0", "workers=1,replicate=2"),
}  # fmt: skip
# Stopped at STOP under the first plan, then trained to the end under the second.
RESUMED = {
    DIGITS: (("shard=2", "engine=lightning,replicate=2"),),
    OWN_ADAM: (("replicate=2", "replicate=2"), ("engine=deepspeed,shard=2", "engine=deepspeed,shard=2")),
}
# Trained under the first plan, then another run under the second, with the weights of the first.
STARTED_FROM = {DIGITS: (("shard=2", "engine=textbook,replicate=2"),)}

OWN_TASK = '''
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from grappe import Arrays, Task, draw


class Pairs(torch.utils.data.Dataset):
    """Samples that a loader must fetch one by one."""

    def __init__(self, images, classes):
        self.images, self.classes = images, classes

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.classes[index]


class Own(Task):
    """Small images with all that a plan could get wrong: 61 samples in batches of 16 leave 13 for the last."""

    epochs: int = 2
    batch_size: int = 16
    clip: float | None = 0.5
    rule: Literal["sgd", "adam"] = "sgd"
    norm: Literal["batch", "layer"] = "batch"
    width: int = 8
    dropout: float = 0.3
    samples: int = 61
    loaded: bool = False

    def model(self):
        norm = nn.BatchNorm2d(self.width) if self.norm == "batch" else nn.GroupNorm(1, self.width)
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, self.width, 3, padding=1, bias=False), norm, nn.ReLU()),
            nn.Sequential(nn.Conv2d(self.width, 8, 3, stride=2), nn.ReLU(), nn.Dropout(self.dropout)),
            nn.Sequential(nn.Flatten(), nn.Linear(72, 16), nn.Tanh()),
            nn.Sequential(nn.Dropout(self.dropout), nn.Linear(16, 16), nn.Tanh()),
            nn.Linear(16, 5),
        )

    def data(self, split, folder):
        generator = torch.Generator().manual_seed(5 if split == "train" else 6)
        images = torch.randn(self.samples, 3, 8, 8, generator=generator)
        classes = torch.randint(0, 5, (self.samples,), generator=generator)
        return Pairs(images, classes) if self.loaded else Arrays(images, classes)

    def augment(self, inputs, targets, keys):
        shift = draw(keys, 2)
        return inputs * (0.5 + shift[:, :1, None, None]) + shift[:, 1:, None, None], targets

    def loss(self, output, target):
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        matrices, rest = [], []
        for name, parameter in named_parameters:
            (rest if name.endswith("bias") else matrices).append((name, parameter))
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
        if self.rule == "adam":
            return torch.optim.AdamW(groups, lr=0.003)
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def schedule(self, optimizer, total_steps):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3) / (1 + step))

    def units(self, model):
        return list(model)
'''


class Failed(Exception):
    """A training did not come to its end."""


def same_hashes() -> list[tuple[str, ...]]:
    """Labels whose hashes must be equal: contracts of grappe, not of its source."""
    exact = [
        tuple(label(task, plan) for plan in PLANS[task] if plan.startswith(f"exact={pieces}"))
        for task, pieces in ((DIGITS, 4), (GPT, 2), (OWN, 4))
    ]
    resumed = [
        (label(task, after), resumed_label(task, before, after))
        for task, pairs in RESUMED.items()
        for before, after in pairs
        if before == after
    ]
    return [*exact, *resumed]


def label(task: str, plan: str) -> str:
    return f"{task} | {plan or ONE_PROCESS}"


def resumed_label(task: str, before: str, after: str) -> str:
    return f"{label(task, before)}, at step {STOP} resumed under {after or ONE_PROCESS}"


def from_label(task: str, before: str, after: str) -> str:
    return f"{label(task, before)}, then --from it {after or ONE_PROCESS}"


class Trainer:
    """Trains in temporary folders; what grappe prints goes to a log file, whose end an error shows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        (folder / "own.py").write_text(OWN_TASK)

    def plain(self, task: str, plan: str, weights: Path | None = None) -> Path:
        """The folder of a run that was trained to its end in this interpreter."""
        name, fields = self._parsed(task)
        run = self._new_run()
        with self._limited(), self._log(run).open("w") as log, contextlib.redirect_stdout(log):
            grappe.train(name, full(plan), run, fields=fields, from_=weights)
        return run

    def resumed(self, task: str, before: str, after: str) -> Path:
        """The folder of a run that was stopped half way and resumed, each by a command of its own."""
        name, fields = self._parsed(task)
        run, texts = self._new_run(), [f"{field}={value}" for field, value in fields.items()]
        for plan, steps in ((before, STOP), (after, BEYOND_THE_END)):
            command = [sys.executable, "-m", "grappe", "train", name, *texts, "--plan", full(plan)]
            with self._log(run).open("a") as log:
                done = subprocess.run(
                    [*command, "--run", str(run), "--steps", str(steps)],
                    stdout=log, stderr=log, timeout=LIMIT_SECONDS, check=False,
                )  # fmt: skip
            if done.returncode:
                raise Failed(self._log(run).read_text()[-600:])
        return run

    def started_from(self, task: str, before: str, after: str) -> Path:
        """The folder of a run that began with the weights of another."""
        return self.plain(task, after, weights=self.plain(task, before))

    def clear(self) -> None:
        """Removes the runs: a network of 25 million parameters leaves 600 MB."""
        for run in self._folder.glob("run-*"):
            shutil.rmtree(run, ignore_errors=True)

    def _parsed(self, task: str) -> tuple[str, dict[str, str]]:
        name, *fields = task.split()
        if name.endswith(".py"):
            name = str(self._folder / name)
        return name, dict(field.split("=", 1) for field in fields)

    def _new_run(self) -> Path:
        self._count += 1
        return self._folder / f"run-{self._count}"

    def _log(self, run: Path) -> Path:
        return self._folder / f"{run.name}.log"

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        def stop(*_: object) -> None:
            raise Failed(f"no end within {LIMIT_SECONDS} s")

        signal.signal(signal.SIGALRM, stop)
        signal.alarm(LIMIT_SECONDS)
        try:
            yield
        finally:
            signal.alarm(0)


def full(plan: str) -> str:
    return f"{plan},{COMMON}" if plan else COMMON


def trainings(trainer: Trainer) -> Iterator[tuple[str, Callable[[], Path]]]:
    """Each combination's label, and what trains it."""

    def later(train: Callable[..., Path], *arguments: str) -> Callable[[], Path]:
        return lambda: train(*arguments)

    for task, plans in PLANS.items():
        for plan in plans:
            yield label(task, plan), later(trainer.plain, task, plan)
    for task, pairs in RESUMED.items():
        for before, after in pairs:
            yield resumed_label(task, before, after), later(trainer.resumed, task, before, after)
    for task, pairs in STARTED_FROM.items():
        for before, after in pairs:
            yield from_label(task, before, after), later(trainer.started_from, task, before, after)


def digest(model: torch.nn.Module) -> str:
    """One hash of all parameters and buffers."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def measure(only: str) -> tuple[dict[str, str], dict[str, str]]:
    """The hashes by label, and by label why there is none."""
    hashes, failures = dict[str, str](), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="grappe-hashes-") as folder:
        trainer = Trainer(Path(folder))
        for name, train in trainings(trainer):
            if only not in name:
                continue
            began = time.perf_counter()
            try:
                hashes[name] = digest(grappe.load(train()))
                shown = hashes[name][:12]
            except Exception as error:  # one broken plan must not hide the others
                failures[name], shown = f"{type(error).__name__}: {error}", "FAILED"
            print(f"{time.perf_counter() - began:6.1f} s  {shown:12}  {name}", file=sys.stderr, flush=True)
            trainer.clear()
    return hashes, failures


def differences(before: dict[str, str], after: dict[str, str], only: str) -> list[tuple[str, str, str]]:
    """(label, hash before, hash now) of what is not the same; "-" where there is none."""
    return [
        (name, before.get(name, "-"), after.get(name, "-"))
        for name in dict.fromkeys([*before, *after])
        if only in name and before.get(name) != after.get(name)
    ]


def unequal(hashes: dict[str, str]) -> list[list[str]]:
    """Groups of labels that must have one hash and have several."""
    found = [[name for name in group if name in hashes] for group in same_hashes()]
    return [group for group in found if len({hashes[name] for name in group}) > 1]


def report(hashes: dict[str, str], failures: dict[str, str], before: dict[str, str], only: str) -> bool:
    """Prints what is wrong; returns whether anything is."""
    wrong = differences(before, hashes, only) if before else []
    if wrong:
        width = max(len(name) for name, *_ in wrong)
        print(f"{'task | plan':{width}}  before        now", file=sys.stderr)
        for name, old, new in wrong:
            print(f"{name:{width}}  {old[:12]:12}  {new[:12]}", file=sys.stderr)
    groups = unequal(hashes)
    for group in groups:
        print(f"these must have one hash: {'; '.join(group)}", file=sys.stderr)
    for name, message in failures.items():
        print(f"failed: {name}\n  {message}", file=sys.stderr)
    same = len(hashes) - sum(name in hashes for name, *_ in wrong)
    if before:
        print(f"{same} of {len(hashes)} hashes are the same as before", file=sys.stderr)
    return bool(wrong or groups or failures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the hashes there; default: print them")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="hashes of before; exit code 1 on a difference")
    parser.add_argument("--only", default="", metavar="TEXT", help="only combinations whose label has this in it")
    request = parser.parse_args()
    before = json.loads(request.compare.read_text()) if request.compare else {}
    began = time.perf_counter()
    hashes, failures = measure(request.only)
    print(f"{len(hashes)} combinations in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    text = json.dumps(hashes, indent=1)
    if request.write:
        request.write.write_text(text + "\n")
    elif not request.compare:
        print(text)
    return int(report(hashes, failures, before, request.only))


if __name__ == "__main__":
    sys.exit(main())
