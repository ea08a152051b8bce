"""grappe tasks, grappe engines: what there is, generated from the code."""

from __future__ import annotations

import dataclasses

from rich.console import Group
from rich.table import Table

from grappe import engines, tasks
from grappe.plan import Plan

MEANING = {
    "device": "auto, cpu or cuda",
    "backend": "auto, gloo, nccl or mpi: what carries the collectives",
    "replicate": "copies of the model, each on its slice of the batch (data parallel)",
    "shard": "processes that share parameters, gradients and optimizer state",
    "zero": "what shard splits: 1 optimizer state, 2 gradients too, 3 parameters too",
    "pipeline": "stages of the model, one after the other",
    "schedule": "of a pipeline: gpipe, 1f1b, interleaved, zero_bubble",
    "stages": "of a pipeline: stages of each process, for interleaved and zero_bubble",
    "tensor": "processes that split the matrices, where the task says how",
    "microbatches": "pieces of a process's slice, whose gradients add up",
    "precision": "fp32, tf32, bf16 or fp16 (with a loss scale)",
    "batchnorm": "statistics per process (local) or over the global batch (sync)",
    "channels_last": "images as NHWC in memory",
    "recompute": "keep each unit's inputs only, and run it again in backward",
    "compile": "torch.compile on each unit",
    "offload": "cpu, nvme:FOLDER: parameters and optimizer state wait in host memory, or on a disk",
    "config": "a file of the engine's own settings, DeepSpeed's ds_config.json",
    "per_device": "processes that share a GPU",
    "exact": "the same bits on any number of processes",
    "threads": "CPU threads of each process",
    "workers": "data-loading processes of each process",
}


def support() -> list[tuple[str, str, str, list[bool]]]:
    """Rows (key, default, meaning, whether each engine has it) for every key of a plan but `engine`."""
    classes = [engines.find(name) for name in engines.names()]
    return [
        (field.name, "auto" if field.default is None else str(field.default), MEANING[field.name],
         [field.name in engine.axes for engine in classes])
        for field in dataclasses.fields(Plan)
        if field.name != "engine"
    ]  # fmt: skip


def plan_table() -> Table:
    """The keys of a plan, and which engine honours them."""
    names = engines.names()
    table = Table("key", "default", "what it is", *names, box=None, padding=(0, 2, 0, 0))
    for key, default, meaning, able in support():
        table.add_row(key, default.lower(), meaning, *["yes" if one else "" for one in able])
    return table


def plan_markdown() -> str:
    """The same table for the README."""
    names = engines.names()
    lines = ["| key | default | what it is | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    for key, default, meaning, able in support():
        cells = " | ".join("yes" if one else "" for one in able)
        lines.append(f"| `{key}` | {default.lower()} | {meaning} | {cells} |")
    return "\n".join(lines)


def task_list() -> Table:
    """The shipped tasks."""
    table = Table("task", "what it learns", box=None, padding=(0, 2, 0, 0))
    for name in tasks.names():
        table.add_row(name, tasks.describe(tasks.find(name)))
    return table


def task_fields(name: str) -> Group:
    """A task's words about itself, its fields and their defaults."""
    cls = tasks.find(name)
    table = Table("field", "default", box=None, padding=(0, 2, 0, 0))
    for field, default in tasks.defaults(cls).items():
        table.add_row(field, str(default))
    return Group(tasks.describe(cls), table)
