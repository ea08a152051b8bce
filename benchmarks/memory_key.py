"""Measures what memory= promises: `python -m benchmarks.memory_key`.

Each cell trains a few steps under RLIMIT_DATA with memory=auto, at a limit between what recomputing everything and
nothing needs; its weights are compared with those of a training without a limit, to the bit. The peak of the plan that
was chosen is what torch's allocator gave, samples in memory included, whose bytes stand beside it. The price is of one
process: its own seconds on a core, in turns.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import operator
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import shipped_data
from benchmarks.foresee import measured_cell
from grappe.data.batch import entering
from grappe.data.datasets import dataset_of
from grappe.data.loader import training_loader
from grappe.errors import GrappeError
from grappe.fields import split
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.forecast import memory_forecast
from grappe.foresight.kernels import Kernels
from grappe.foresight.recomputation import Units
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.parallel.activation_checkpointing import checkpoint_activations, switch_off_caches
from grappe.plan import Plan
from grappe.private_api.torch import tree_leaves
from grappe.profiling.memory import keep_freed_memory
from grappe.step.fast_paths import backward
from grappe.step.loss import Loss
from grappe.step.scores import make_losses
from grappe.task import Task
from grappe.training.request import data_folder
from grappe.training.task_reference import TaskReference

FILE = Path(__file__).parent / "results" / "memory_key.json"
TASKS = (
    "pysource width=128 depth=6 heads=4 batch_size=32 megabytes=0.1",
    "cifar10 network=resnet18 batch_size=32",
    "coatnet batch_size=32",
    "examples/gallery/causal_lm.py batch_size=256",
    "examples/gallery/masked_lm.py batch_size=256",
    "tests/parallel/families.py:Llama batch_size=512",
    "examples/gallery/unet.py batch_size=96",
)
PLANS = ("threads=1", "replicate=2,threads=1", "shard=2,threads=1")
PIPELINES = tuple(
    f"pipeline=2,microbatches=4,{more}threads=1"
    for more in ("", "schedule=gpipe,", "schedule=interleaved,", "shard=2,", "replicate=2,")
)
PIPELINED = TASKS[:2]
"""The other tasks' cells are of the plans without a pipeline."""
PARTS = (0.5, 0.25)
"""Of what recomputing everything saves, what is left over."""
STEPS = 2
AMPLE = 1_200_000_000
"""Bytes above the peak, with which nothing is recomputed; what torch may allocate then says what else there is."""
MARGIN = 1.03
TIMES = 15
CHOSEN = re.compile(r"the plan is (\S+), foreseen to take ([0-9.]+) ([kMG])B of ([0-9.]+) ([kMG])B")


def trained(task: str, plan: str, limit: int) -> tuple[str, str, str]:
    """Trains by command; returns the error's message, what was chosen, and a hash of the weights."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "grappe", "train", *task.split(), "--steps", str(STEPS)]
        done = subprocess.run(
            [*command, "--plan", plan, "--run", f"{folder}/run"],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return done.stderr[-600:], "", ""
        files = sorted(Path(folder, "run", "checkpoints").glob(f"step-{STEPS:06}/*.safetensors"))
        weights = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        return "", json.loads(Path(folder, "run", "run.json").read_text()).get("chosen", ""), weights


def measured_prices(fake_model: FakeModel, units: Units, choices: Sequence[Sequence[str]]) -> list[float]:
    """Returns the extra time of each choice over none: the median of pairs in turns, of this process's own seconds."""
    torch.set_num_threads(1)
    task = fake_model.task
    world = World(process=ProcessRank(), device=torch.device("cpu"))
    loader = training_loader(task, dataset_of(task, "train", data_folder()), Plan(), world)
    batch = next(loader.rehearsed())
    micro, models = batch.microbatches[0], []
    for levels in choices:
        torch.manual_seed(0)
        model = task.model().train()
        switch_off_caches(model)
        checkpoint_activations(fake_model.units(model) or [model], units.plan_of(levels))
        models.append(model)
    seconds: list[list[float]] = [[] for _ in models]
    # As in a training without a limit.
    with keep_freed_memory():
        for number, model in itertools.islice(itertools.cycle(enumerate(models)), TIMES * len(models)):
            begun = time.process_time()
            result = make_losses(task, Plan(), world)(task.forward(model, entering(micro)), micro, batch)
            assert isinstance(result, Loss)
            backward((result.values,), (result.output_gradient,))
            del result
            seconds[number].append(time.process_time() - begun)
    return [statistics.median(map(operator.truediv, each, seconds[0])) - 1 for each in seconds[1:]]


def bytes_of_samples(task: Task) -> int:
    """Sums the bytes that torch allocated for the task's samples: on a CPU they are there before memory= chooses."""
    storages = (
        leaf.untyped_storage()
        for part in ("train", "validation")
        for leaf in tree_leaves(vars(dataset_of(task, part, data_folder())))
        if isinstance(leaf, torch.Tensor)
    )
    return sum({each.data_ptr(): each.nbytes() for each in storages if each.resizable()}.values())


def main() -> None:
    """Measures what the file has not yet, or all again."""
    shipped_data.use()
    found = {} if "--again" in sys.argv or not FILE.exists() else json.loads(FILE.read_text())
    kept: dict[str, tuple[int, str]] = {}
    fake_models: dict[str, FakeModel] = {}
    cells = [*itertools.product(TASKS, PLANS, PARTS), *itertools.product(PIPELINED, PIPELINES, PARTS)]
    for name, text, part in cells:
        key = f"{name} | {text} | {part}"
        if key in found:
            continue
        if name not in fake_models:
            task = TaskReference.of(name.split()[0], split(name.split()[1:])).resolve()
            fake_models[name] = FakeModel(task, data_folder(), kernels=Kernels(), records=True)
        try:
            found[key] = cell(name, Plan.parse(text), part, fake_models[name], kept)
        except GrappeError as error:
            found[key] = {"refused": str(error)}
        print(key, found[key], flush=True)
        FILE.write_text(json.dumps(found, indent=1) + "\n")


def size_of(match: re.Match[str], group: int) -> float:
    """Returns the bytes that a group of CHOSEN and the unit after it say."""
    return float(match[group]) * {"k": 1e3, "M": 1e6, "G": 1e9}[match[group + 1]]


def cell(
    name: str, plan: Plan, part: float, fake_model: FakeModel, kept: dict[str, tuple[int, str]]
) -> dict[str, object]:
    """Measures one cell."""
    batch = fake_model.task.batch_size
    full, none = (
        memory_forecast(fake_model, dataclasses.replace(plan, recompute=level)).most or 0 for level in (True, False)
    )
    limit = int(full + part * (none - full))
    key = f"{name} | {plan}"
    if key not in kept:
        ample = int(none * MARGIN) + AMPLE
        error, chosen, weights = trained(name, f"{plan},memory=auto", ample)
        match = CHOSEN.search(chosen)
        if match is None:
            return {"error": error, "chosen": chosen}
        kept[key] = ample - int(MARGIN * size_of(match, 4)), weights
    fixed, reference = kept[key]
    taken = int(limit * MARGIN) + fixed
    error, chosen, weights = trained(name, f"{plan},memory=auto", taken)
    result: dict[str, object] = {"none": none, "full": full, "limit": taken, "error": error, "chosen": chosen}
    match = CHOSEN.search(chosen)
    if match is None:
        return result
    result["same bits"] = weights == reference
    text = match[1]
    found = Plan.parse(text)
    needs = memory_forecast(fake_model, found)
    result |= {"plan": text, "foreseen": needs.peak, "of": size_of(match, 4)}
    result["measured"] = max(one["peak"] for one in measured_cell(name, text))
    result["samples"] = bytes_of_samples(fake_model.task)
    if plan.processes == 1:
        units = Units(fake_model, plan, batch, None, gpu=False)
        levels = [found.recomputed(units.number or 1), ["full"] * (units.number or 1)]
        prices = measured_prices(fake_model, units, [[""] * (units.number or 1), *levels])
        result |= {"price": units.price(levels[0]), "measured price": prices[0]}
        result |= {"full price": units.price(levels[1]), "measured full price": prices[1]}
    return result


if __name__ == "__main__":
    main()
