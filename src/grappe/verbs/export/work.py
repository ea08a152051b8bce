"""Export: model, samples and proof, and the files that every format writes beside its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

import grappe
from grappe.errors import TaskError
from grappe.errors.foreign_text import printable
from grappe.errors.user_code import naming_user_line
from grappe.launch import files
from grappe.private_api.torch import tree_leaves
from grappe.task import Task
from grappe.training.run import Run
from grappe.training.task_reference import field_texts
from grappe.verbs.export import cpp
from grappe.verbs.export.layers import Writer, located
from grappe.verbs.export.program import Program, output_names, program_of
from grappe.verbs.export.proof import Differs, Proof, Runner, prove
from grappe.verbs.export.samples import TYPES, Samples
from grappe.verbs.predict.inputs import batch_size
from grappe.verbs.predict.predict import predict

Format = Literal["program", "safetensors", "transformers", "onnx", "torchscript"]
SPLIT = "validation"
TESTS = 8
"""Samples that are written with their predictions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Export: a run's model and samples, with the user's choices."""

    run: Run
    task: Task
    model: nn.Module
    samples: Samples
    checkpoint: str
    trained: bool
    data: Path
    format: Format
    build: bool
    sources: Sequence[Path]
    weights_for: Path | None
    progress: Callable[[str], None]

    def program(self) -> Program:
        """Makes the module that is exported."""
        return program_of(self.task, self.model, self.samples)

    def predictions(self) -> Iterator[Any]:
        """Predicts the split as `grappe predict` does, with the checkpoint that is exported."""
        step = int(self.checkpoint.rpartition("-")[2])
        return predict(self.run, SPLIT, task=self.task, data=self.data, checkpoint=step, trained=self.trained)

    def output_names(self, program: Program) -> tuple[str, ...]:
        """Names what the program gives.

        Raises:
            TaskError: it gives something that no program can, or two things of one name.
        """
        with naming_user_line(self.task):
            names = output_names(program, self.samples.example())
        if len(set(names)) < len(names):
            raise TaskError(f"two predictions have one name: {', '.join(names)}")
        return names

    def prove(self, runners: dict[str, Runner], names: tuple[str, ...], write: Writer) -> Proof:
        """Proves what was written.

        Args:
            write: writes in the same way what gives each layer's tensors too, to find the layer that differs.

        Raises:
            Differs: a prediction is another one; with the first sample and layer that differ.
        """
        size = self.task.batch_size
        try:
            return prove(
                runners,
                self.samples,
                self.predictions(),
                names=names,
                batch_size=size,
                progress=self.progress,
            )
        except Differs as error:
            raise Differs(f"{error}. {self._layer(error, write)}") from error

    def _layer(self, error: Differs, write: Writer) -> str:
        if error.sample is None:
            return "The model, or what it was compiled to, gives something of another form"
        self.progress("looking for the layer that differs")
        try:
            found = located(error, self.program(), self.samples, predicted=batch_size(self.task), write=write)
        except Exception as failed:  # of tracing or compiling once more: the finding itself must not be lost
            found = f"which layer differs is not known: {type(failed).__name__}: {printable(failed, 300)}"
        return found[:1].upper() + found[1:]

    def interface(self, takes: tuple[str, ...], names: tuple[str, ...]) -> dict[str, Any]:
        """Describes the tensors that go in and come out."""
        inputs = zip(takes, self.samples.dtypes, self.samples.shapes, strict=True)
        return {
            "inputs": [
                {"name": name, "dtype": TYPES[dtype], "shape": list(shape)} for name, dtype, shape in inputs
            ],
            "outputs": [{"name": name} for name in names],
        }

    def write_tests(self, staged: Path, takes: tuple[str, ...], names: tuple[str, ...]) -> list[str]:
        """Writes the first samples and their predictions; returns the files, relative to the folder."""
        folder = staged / "test"
        files.make_folder(folder)
        count = min(TESTS, self.samples.length)
        arrays = cpp.write_samples(folder, takes, self.samples.read(0, count))
        lines = []
        for _, row in zip(range(count), self.predictions(), strict=False):
            leaves = [one.tolist() for one in tree_leaves(row)]
            lines.append(json.dumps(dict(zip(names, leaves, strict=True))))
        files.replace(
            folder / "expected.jsonl", "".join(f"{line}\n" for line in lines).encode(), durable=True
        )
        return [*(f"test/{Path(file).name}" for file in arrays), "test/expected.jsonl"]

    def known(self) -> dict[str, Any]:
        """Describes where the model is from, with what is foreign in it made fit to show."""
        described = self.run.read_description()
        local = "batchnorm=sync" not in str(described.get("plan"))
        several = isinstance(described.get("processes"), int) and described["processes"] > 1
        return {
            "format": 1,
            "grappe": grappe.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "run": printable(self.run.folder.absolute().name),
            "checkpoint": self.checkpoint,
            "averaged": self.task.ema is not None and not self.trained,
            "task": printable(described.get("task", "")),
            "class": type(self.task).__name__,
            "fields": field_texts(self.task),
            "trained_with": printable(described.get("plan", "")),
            "computes_in": "float32, whatever the precision of the training, as grappe predict",
            "buffers": "the mean over the processes' own" if local and several else "as in the checkpoint",
        }
