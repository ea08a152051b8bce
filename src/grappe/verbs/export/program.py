"""Program: a task's preprocessing, model and prediction as one module of plain tensors, and its trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from grappe.errors import TaskError
from grappe.errors.foreign_text import printable
from grappe.errors.user_code import line_of
from grappe.private_api.torch import TreeSpec, leaf_names, tree_leaves, tree_unflatten
from grappe.private_api.torch_inductor import quiet
from grappe.task import Task
from grappe.verbs.export.samples import Samples

NAME = re.compile(r"[A-Za-z0-9_ .:+/-]{1,100}")  # stands in C++, JSON and file names as it is
FREE = "Take it out of forward(), or have the task's prediction() do it after the export, in your own program"


class Program(nn.Module):
    """Maps a batch of samples as they are stored to the task's predictions: tensors [B, ...] to tensors [B, ...]."""

    def __init__(
        self, task: Task, model: nn.Module, transform: Callable[[Any], Any] | None, spec: TreeSpec
    ) -> None:
        super().__init__()
        self.model = model
        self._task, self._transform, self._spec = task, transform, spec

    def predict(self, leaves: tuple[Tensor, ...]) -> Any:
        """Computes the task's prediction for a batch, in the task's own form."""
        # Copies: a transform may work in place, and the caller's tensors stay as they are.
        inputs = tree_unflatten([leaf.clone() for leaf in leaves], self._spec)
        if self._transform is not None:
            inputs = self._transform(inputs)
        return self._task.prediction(self._task.forward(self.model, inputs))

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(tree_leaves(self.predict(leaves)))


def program_of(task: Task, model: nn.Module, samples: Samples) -> Program:
    """Makes the program of a task's model, in evaluation mode."""
    return Program(task, model, samples.transform, samples.spec).eval()


def output_names(program: Program, example: list[Tensor]) -> tuple[str, ...]:
    """Names the tensors that the program gives: keys of the prediction's dict, else "output".

    Raises:
        TaskError: one is no tensor with a row for each sample, or has a name that no C++ source can have.
    """
    with torch.no_grad():
        found = program.predict(tuple(example))
    names = leaf_names(found, alone="output")
    for name, leaf in zip(names, tree_leaves(found), strict=True):
        if not isinstance(leaf, Tensor) or leaf.is_complex() or leaf.shape[:1] != example[0].shape[:1]:
            what = f"a tensor {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise TaskError(
                f"the prediction {printable(name, 100)!r} is {what} for {len(example[0])} samples, and a program gives "
                "tensors of real numbers with a row for each sample: give the task a prediction(self, output) that "
                "makes some"
            )
        if not NAME.fullmatch(name):
            raise TaskError(
                f"the prediction {printable(name, 100)!r} cannot be a name in a program: letters, digits and _ are"
            )
    return names


def input_names(samples: Samples) -> tuple[str, ...]:
    """Names the tensors that the program takes: keys of the inputs with a number behind, else "inputs"."""
    nested = tree_unflatten(list(range(len(samples.shapes))), samples.spec)
    names = leaf_names(nested, alone="inputs")
    return tuple(
        f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:60]}{f'-{number}' if len(names) > 1 else ''}"
        for number, name in enumerate(names, start=1)
    )


def trace(program: nn.Module, example: list[Tensor]) -> torch.export.ExportedProgram:
    """Traces the program for any number of samples.

    Raises:
        TaskError: it cannot be traced, or not for any number of samples; the user's line is named where it is known.
    """
    batch = torch.export.Dim("batch", min=1)
    shapes = (tuple({0: batch} for _ in example),)
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(program, tuple(example), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch.export raises many kinds, and the model's own
        raise TaskError(_reason(error)) from error


def _reason(error: Exception) -> str:
    line = line_of(error)
    where = f" ({line})" if line else ""
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return (
            f"the model looks at values in its forward{where}, so which operations it does is known only when it "
            f"runs, and no program can be made of it: use torch.where instead of if. {FREE}"
        )
    first = next((text.strip(" -") for text in str(error).splitlines() if text.startswith("  - ")), "")
    if "Constraints violated" in str(error):
        return (
            "the model is made for some numbers of samples in a batch, and a program takes any: "
            f"{printable(first, 400)}. Let forward() use x.shape[0] or -1 where it has a number"
        )
    text = next(iter(str(error).splitlines()), "")
    return (
        f"torch.export cannot trace the model: {type(error).__name__}: {printable(text, 400)}{where}. {FREE}"
    )
