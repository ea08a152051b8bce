"""Writes a model of transformers as the folder that `from_pretrained` reads: config.json and model.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from grappe.errors import TaskError
from grappe.private_api.transformers import models
from grappe.task import Task

TEXT = """# {title}

A trained model of transformers: {kind}.

```python
from transformers import {kind}

model = {kind}.from_pretrained("THIS FOLDER")
```

What turns text or images into the inputs is not in here: `tokenizer.save_pretrained("THIS FOLDER")` adds it.
`manifest.json` and `SHA256SUMS` have the hash of each file: `sha256sum --check SHA256SUMS`.
"""


def write_folder(folder: Path, task: Task, model: nn.Module) -> tuple[list[str], str, nn.Module]:
    """Writes the model; returns the files' names, its class's name, and the model read again.

    Adapters of peft are merged into the matrices that they add to: the folder needs no peft.

    Raises:
        TaskError: the task's model is not one model of transformers.
    """
    one = _one(task, model)
    one.save_pretrained(folder)
    again = type(one).from_pretrained(folder, local_files_only=True).eval()
    return sorted(file.name for file in folder.iterdir()), type(one).__name__, again


def readme(known: Mapping[str, Any], kind: str) -> str:
    """Formats the README."""
    return TEXT.format(title=f"{known['class']}, {known['checkpoint']}", kind=kind)


def _one(task: Task, model: nn.Module) -> Any:
    merge = getattr(model, "merge_and_unload", None)
    whole = merge() if callable(merge) else model
    found = models(whole)
    if set(found) != {""}:
        inside = [f"{name} ({type(one).__name__})" for name, one in found.items()]
        raise TaskError(
            f"--format transformers: {type(task).__name__}.model() is {type(whole).__name__}, and from_pretrained "
            f"reads one model of transformers: {'it holds ' + ', '.join(inside) if inside else 'there is none in it'}. "
            "Take --format safetensors"
        )
    return whole
