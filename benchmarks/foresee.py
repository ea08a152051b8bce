"""Predicted memory beside measured memory, for docs/foresee.md: `python -m benchmarks.foresee`.

It measures what benchmarks/results/foresee.json has not yet; with `--again` everything.
`python -m benchmarks.foresee --large` says how long foreseeing 32 plans of 1,024 processes takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import shipped_data
from grappe.checkpoint.saver import Snapshots
from grappe.errors import GrappeError
from grappe.fields import split
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.forecast import memory_forecast
from grappe.foresight.kernels import Kernels
from grappe.launch.rank import ProcessRank
from grappe.launch.start import start
from grappe.plan import Plan
from grappe.training.loop import Training
from grappe.training.options import Options
from grappe.training.request import Request, data_folder
from grappe.training.run import Run
from grappe.training.task_reference import TaskReference
from grappe.training.watchers.base import RunInfo, Watcher
from grappe.training.worker import worker as train_worker

FILE = Path(__file__).parent / "results" / "foresee.json"
STEPS = 3  # the optimizer's state comes with the first
TASKS = (
    "digits", "pysource batch_size=8 megabytes=0.3", "benchmarks/mlp_task.py:Mlp", "coatnet batch_size=8", "mnist",
    "fashion_mnist", "cifar10", "cifar10 network=resnet18 batch_size=32",
    "imagenet network=resnet18 classes=4 image_size=64 batch_size=32",
)  # fmt: skip
PLANS = (
    "", "replicate=2", "shard=2", "shard=2,zero=2", "shard=2,zero=1", "recompute", "microbatches=2", "precision=bf16",
    "replicate=2,microbatches=2", "shard=2,microbatches=2", "shard=2,zero=1,microbatches=2", "shard=2,recompute",
    "replicate=2,precision=bf16", "shard=4", "replicate=2,shard=2", "offload=cpu",
    "pipeline=2,microbatches=4", "pipeline=2,microbatches=4,schedule=gpipe",
    "pipeline=2,microbatches=4,schedule=interleaved", "replicate=2,pipeline=2,microbatches=2",
    "pipeline=2,microbatches=4,recompute", "pipeline=2,microbatches=4,schedule=zero_bubble",
    "pipeline=2,shard=2,microbatches=2", "pipeline=2,shard=2,zero=1,microbatches=2",
    "tensor=2", "tensor=2,microbatches=2,precision=bf16", "shard=2,tensor=2",
)  # fmt: skip
ALSO = (
    *(("coatnet batch_size=8", plan) for plan in ("replicate=2,batchnorm=sync", "shard=2,batchnorm=sync")),
    *(
        ("benchmarks/views_task.py:Views", plan)
        for plan in (
            "", "microbatches=2", "replicate=2", "replicate=2,microbatches=2", "shard=2",
            "shard=2,zero=1,microbatches=2", "pipeline=2,microbatches=2",
        )
    ),
)  # fmt: skip
"""Statistics of batch normalisation over the global batch, and a loss over it."""
SPREAD = (
    "replicate=1024", "shard=1024,zero=1", "shard=1024,zero=2", "shard=1024", "replicate=128,shard=8",
    "replicate=8,shard=128", "replicate=32,shard=32,zero=1", "replicate=2,shard=512",
)  # fmt: skip
LARGE = [
    ",".join(filter(None, (spread, measure)))
    for spread in SPREAD
    for measure in ("", "microbatches=4", "recompute", "recompute,microbatches=4")
]
"""32 plans of 1,024 processes."""
BETWEEN = PLANS[:9]
"""Plans whose evaluation and checkpoint are measured, too, in trainings of their own."""
SMALL = TASKS[:2]
BEGUN = "grappe training begins"
EVALUATION, SAVE = "grappe evaluates", "grappe saves"


class Begun(Watcher):
    """Notes in the profile when the first step begins."""

    def started(self, info: RunInfo) -> None:
        with torch.profiler.record_function(BEGUN):
            pass


def measured(request: Request, process: ProcessRank, rendezvous_folder: Path) -> list[dict]:
    """Runs one process of a training of a few steps; on process 0 returns every process's bytes. Collective.

    Counted is what torch's allocator gives, from the beginning of the process: its peak in the steps, and before them.
    """
    count_all_threads()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profiler, noting(Training, "_evaluate", EVALUATION), noting(Snapshots, "take", SAVE):
        result = train_worker(request, process, rendezvous_folder)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    changes = [one for one in events if one["name"] == "[memory]" and one["args"]["Device Type"] == 0]
    levels = sorted((one["ts"], one["args"]["Total Allocated"]) for one in changes)
    spans = {one["name"]: one for one in events if one.get("ph") == "X" and one["name"] in (BEGUN, EVALUATION, SAVE)}
    begun = spans[BEGUN]["ts"]
    found = {
        "peak": max((level for at, level in levels if at >= begun), default=0),
        "start": max((level for at, level in levels if at < begun), default=0),
    }
    if EVALUATION in spans:
        found["evaluation"] = max(within(levels, spans[EVALUATION]))
        save = spans[SAVE]
        # Only the copying thread counts: another may free a batch meanwhile.
        found["checkpoint"] = sum(
            one["args"]["Bytes"]
            for one in changes
            if one["tid"] == save["tid"] and save["ts"] <= one["ts"] <= save["ts"] + save["dur"]
        )
    (request.base / f"{process.rank}.json").write_text(json.dumps(found))
    if process.rank:
        return []
    held = [one["held"] for one in Run(result.run).read_description()["costs"]]
    return [{"held": one} for one in held]


def count_all_threads() -> None:
    """Lets torch's allocator count in every thread: a profiler alone never sees what threads of gloo free."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


@contextlib.contextmanager
def noting(owner: type, method: str, name: str) -> Iterator[None]:
    """Context in which the profile has each call of a method under `name`."""
    plain = getattr(owner, method)

    def noted(*arguments: Any, **keywords: Any) -> Any:
        with torch.profiler.record_function(name):
            return plain(*arguments, **keywords)

    with mock.patch.object(owner, method, noted):
        yield


def within(levels: list[tuple[float, int]], span: dict) -> list[int]:
    """Returns the bytes in use at a span's beginning, and after each change in it."""
    begun, ended = span["ts"], span["ts"] + span["dur"]
    before = [level for at, level in levels if at < begun]
    return [before[-1], *(level for at, level in levels if begun <= at <= ended)]


def cells() -> Iterator[tuple[str, str]]:
    """Yields each task, with its fields, and each plan that is measured."""
    for task in TASKS:
        for plan in PLANS:
            yield task, plan
    yield from ALSO


def main() -> None:
    """Measures what the file has not yet, or all again, and predicts everything anew."""
    shipped_data.use()
    found = {} if "--again" in sys.argv or not FILE.exists() else json.loads(FILE.read_text())
    for task, plan in cells():
        key = f"{task} | {plan}"
        if key not in found:
            with contextlib.suppress(GrappeError):  # the task does not support the plan
                found[key] = {"measured": measured_cell(task, plan)}
                FILE.write_text(json.dumps(found, indent=1) + "\n")
        if key in found and "between" not in found[key] and task in SMALL and plan in BETWEEN:
            found[key]["between"] = measured_cell(task, plan, between=True)
            FILE.write_text(json.dumps(found, indent=1) + "\n")
    predict(found)


def predict(found: dict[str, Any]) -> None:
    """Predicts every cell anew."""
    sketches = {}
    for key, cell in found.items():
        task, _, plan = key.partition(" | ")
        if task not in sketches:
            name, *fields = task.split()
            made = TaskReference.of(name, split(fields)).resolve()
            sketches[task] = FakeModel(made, data_folder(), kernels=Kernels())
        needs = memory_forecast(sketches[task], Plan.parse(plan))
        states = {name: getattr(needs.states, name) for name in ("parameters", "gradients", "optimizer")}
        cell["predicted"] = {"held": states, "peak": needs.peak, "least": needs.least}
        between = ("evaluation", "evaluation_least", "checkpoint")
        cell["predicted"] |= {name: getattr(needs, name) for name in between}
        print(key, error(cell), flush=True)
        FILE.write_text(json.dumps(found, indent=1) + "\n")


def large() -> None:
    """Says the processor time that foreseeing LARGE takes, from the command's start to its end, beside one plan's."""
    for task in ("digits", "pysource", "coatnet"):
        for plans in (LARGE[:1], [plan.replace("1024", "4") for plan in LARGE[:1]], LARGE):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            options = [part for plan in plans for part in ("--plan", plan)]
            command = [sys.executable, "-m", "grappe", "foresee", task, "batch_size=8192", *options]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(f"{task}, {plans[0]} … ({len(plans)} plans): {seconds:.1f} s of one core", flush=True)


def error(cell: dict) -> float | None:
    """Computes how far the measured peak lies outside the predicted range, in percent; below 0: predicted too low."""
    low, high = cell["predicted"]["least"], cell["predicted"]["peak"]
    if high is None:
        return None
    measured = max(one["peak"] for one in cell["measured"])
    nearest = min(max(measured, low), high)
    return round(100 * (nearest / measured - 1), 2)


def measured_cell(task: str, plan: str, *, between: bool = False) -> list[dict]:
    """Trains a few steps in new processes; returns each process's bytes.

    With `between`, it evaluates and saves at the end.
    """
    name, *fields = task.split()
    with tempfile.TemporaryDirectory() as folder:
        request = Request(
            task=TaskReference.of(name, split(fields)),
            plan=Plan.parse(plan),
            base=Path(folder),
            run=Path(folder) / "run",
            quiet=True,
            options=Options(steps=STEPS, steps_only=not between, no_check=True),
            per_process_watchers=(Begun(),),
        )
        found = start("benchmarks.foresee:measured", request, request.plan, run=request.run)
        for rank, one in enumerate(found):
            one.update(json.loads((Path(folder) / f"{rank}.json").read_text()))
    return found


if __name__ == "__main__":
    large() if "--large" in sys.argv else main()
