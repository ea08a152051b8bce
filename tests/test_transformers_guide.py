"""The guide for users of Trainer: its task trains, and the options and keys of its table exist."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import grappe
from grappe.plan import Plan
from grappe.task import Task

pytest.importorskip("transformers")

from tests.parallel.families import Llama

PAGE = (Path(__file__).parent.parent / "docs" / "transformers.md").read_text()
[TASK] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TABLE = PAGE.partition("## TrainingArguments")[2].partition("\n## ")[0]


def test_its_task_trains_with_a_folders_weights(here: Path) -> None:
    task = Llama()
    task.model().save_pretrained("models/llama")
    data = task.data("train", here)
    (here / "data").mkdir()
    for split in ("train", "validation"):
        torch.save({**data.inputs, "labels": data.targets}, here / "data" / f"{split}.pt")
    (here / "fine_tune.py").write_text(TASK)
    words = {"fields": {"batch_size": "8"}, "options": grappe.Options(steps=1)}
    run = grappe.train("fine_tune.py", "threads=1,device=cpu", "runs/llama", **words)
    assert (here / "runs" / "llama").exists() and run is not None


def test_the_options_keys_and_methods_of_the_table_exist() -> None:
    fields = {field.name for field in dataclasses.fields(grappe.Options)}
    for option in set(re.findall(r"--([a-z][a-z-]+)", TABLE)) - {"plan", "run", "format"}:
        assert option.replace("-", "_") in fields, option
    keys = {field.name for field in dataclasses.fields(Plan)}
    for plan in re.findall(r"--plan ([^`]+)`", TABLE):
        assert {part.partition("=")[0] for part in plan.split(",")} <= keys, plan
    for method in re.findall(r"`(\w+)\(\)`", TABLE):
        assert hasattr(Task, method), method
    for name in re.findall(r"grappe\.(\w+)", TABLE):
        assert getattr(grappe, name), name


def test_the_arguments_of_the_table_are_transformers() -> None:
    from transformers import TrainingArguments

    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    elsewhere = {"EarlyStoppingCallback", "compute_metrics", "data_collator"}
    for line in TABLE.splitlines():
        for name in re.findall(r"`([a-zA-Z_0-9]+)`", line.split("|")[1]) if line.startswith("| `") else ():
            assert name in known | elsewhere, name
