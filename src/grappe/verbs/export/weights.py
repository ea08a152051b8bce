"""Writes a model's weights alone, as safetensors, with the task's fields as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from grappe.errors.user_code import naming_user_line
from grappe.launch import files
from grappe.step.task_contract import model_of
from grappe.task import Task

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def write_weights(folder: Path, model: nn.Module, known: Mapping[str, Any]) -> list[str]:
    """Writes the model's state dict and the task's description; a tied weight is written under each of its names."""
    state = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    files.replace(folder / WEIGHTS, save(state, metadata={"format": "pt"}), durable=True)
    config = {name: known[name] for name in ("task", "class", "fields", "checkpoint", "averaged", "run")}
    files.replace(folder / CONFIG, (json.dumps(config, indent=1) + "\n").encode(), durable=True)
    return [WEIGHTS, CONFIG]


def read_again(folder: Path, task: Task) -> nn.Module:
    """Makes a new model with the weights which were written."""
    with naming_user_line(task):
        model = model_of(task)
    model.load_state_dict(load_file(folder / WEIGHTS))
    return model


def in_batches(program: Callable[..., Any]) -> Callable[[list[Tensor], int], list[Tensor]]:
    """Returns what runs `program` on samples [N, ...], a batch size at a time."""

    def run(inputs: list[Tensor], size: int) -> list[Tensor]:
        found = []
        with torch.no_grad():
            for first in range(0, len(inputs[0]), size):
                found.append(program(*(leaf[first : first + size] for leaf in inputs)))
        return [torch.cat(column) for column in zip(*found, strict=True)]

    return run
