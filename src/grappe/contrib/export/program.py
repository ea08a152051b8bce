"""Program: a task's preprocessing, model and prediction as one module of plain tensors; its trace, and its export."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grappe.checkpoint.weights import named_tensors, restored, stored
from grappe.contrib.export.proof import ExportSamples, Runner
from grappe.errors import TaskError
from grappe.errors.foreign_text import printable
from grappe.errors.user_line import line_of
from grappe.plan import Rounding
from grappe.private_api.torch import TreeSpec, leaf_names, tree_leaves, tree_unflatten
from grappe.private_api.torch_inductor import quiet
from grappe.task import Task

NAME = re.compile(r"[A-Za-z0-9_ .:+/-]{1,100}")  # stands in C++, JSON and file names as it is
LIBTORCH = frozenset({"aten", "prim", "prims", "higher_order", "mkldnn", "onednn", "quantized"})
"""Namespaces of the operators that LibTorch registers itself."""
OUTSIDE = "Take it out of forward(), or have the task's prediction() do it after the export, in your own program"


class Program(nn.Module):
    """Maps a batch of samples as they are stored to the task's predictions: tensors [B, ...] to tensors [B, ...]."""

    def __init__(self, task: Task, model: nn.Module, transform: Callable[[Any], Any] | None, spec: TreeSpec) -> None:
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


class RoundedProgram(nn.Module):
    """A program whose matrices are stored rounded, and computed again in each call.

    Args:
        program: its own tensors get the rounded values: it predicts what this module predicts.
    """

    def __init__(self, program: nn.Module, rounding: Rounding) -> None:
        super().__init__()
        self._program = (program,)  # in a tuple: its float32 matrices are no part of this module
        self._parts: dict[str, tuple[torch.dtype, list[str]]] = {}
        for number, (name, tensor) in enumerate(named_tensors(program).items()):
            parts = [part.detach().clone() for part in stored(tensor, rounding)]
            self._parts[name] = tensor.dtype, [f"stored_{number}_{place}" for place in range(len(parts))]
            for buffer, part in zip(self._parts[name][1], parts, strict=True):
                self.register_buffer(buffer, part)
            with torch.no_grad():
                tensor.copy_(restored(*parts, dtype=tensor.dtype))

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        tensors = {
            name: restored(*map(self.get_buffer, buffers), dtype=dtype)
            for name, (dtype, buffers) in self._parts.items()
        }
        return torch.func.functional_call(self._program[0], tensors, leaves)


def program_of(task: Task, model: nn.Module, samples: ExportSamples) -> Program:
    """Makes the program of a task's model, in evaluation mode."""
    return Program(task, model, samples.transform, samples.spec).eval()


def in_batches(program: Callable[..., Any]) -> Runner:
    """Returns what runs `program` on samples [N, ...], a batch size at a time."""

    def run(inputs: list[Tensor], size: int) -> list[Tensor]:
        with torch.no_grad():
            starts = range(0, len(inputs[0]), size)
            batches = [program(*(leaf[start : start + size] for leaf in inputs)) for start in starts]
        return [torch.cat(column) for column in zip(*batches, strict=True)]

    return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportJob:
    """Job of an export: a run's model and its samples, with the user's choices."""

    task: Task
    model: nn.Module
    program: nn.Module
    """A Program, or a RoundedProgram."""
    samples: ExportSamples
    inputs: tuple[str, ...]
    """Names of the tensors that the program takes."""
    outputs: tuple[str, ...]
    """Names of the tensors that the program gives."""
    origin: Mapping[str, Any]
    """Origin of the model: run, checkpoint, task, versions."""
    build: bool
    sources: Sequence[Path]
    progress: Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenModel:
    """Files that a format has written, not yet proven."""

    files: Sequence[str]
    runners: Mapping[str, Runner]
    """Runners of the written files, by the place where they compute."""
    place: str = ""
    """Place of the proof's computations, for README.md."""
    words: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Texts of README.md that this format alone has."""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of the manifest about this format."""
    takes_samples: bool = True
    """Whether the files are a program, which is written with samples and their predictions."""
    not_built: str | None = None
    """Reason why there is no C++ program where there should be one; None: there is one, or none was to be."""


Exporter = Callable[[ExportJob, Path, Path], WrittenModel]
"""Writes a model in one format to a folder; the second folder is for what is needed until it is proven."""


def output_names(program: Program, example: list[Tensor]) -> tuple[str, ...]:
    """Names the tensors that the program gives: keys of the prediction's dict, else "output".

    Raises:
        TaskError: an output is no tensor with a row for each sample, has a name that no C++ source can have, or that
            another one has.
    """
    with torch.no_grad():
        prediction = program.predict(tuple(example))
    names = leaf_names(prediction, alone="output")
    for name, leaf in zip(names, tree_leaves(prediction), strict=True):
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
    if len(set(names)) < len(names):
        raise TaskError(f"two predictions have one name: {', '.join(names)}")
    return names


def input_names(samples: ExportSamples) -> tuple[str, ...]:
    """Names the tensors that the program takes: keys of the inputs with a number appended, else "inputs"."""
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
        line = line_of(error)
        where = f" ({line})" if line else ""
        lines = str(error).splitlines()
        if type(error).__name__ == "GuardOnDataDependentSymNode":
            reason = (
                f"the model looks at values in its forward{where}, so it cannot be exported: use torch.where "
                f"instead of if. {OUTSIDE}"
            )
        elif "Constraints violated" in str(error):
            first = next((text.strip(" -") for text in lines if text.startswith("  - ")), "")
            reason = (
                "the model is made for some numbers of samples in a batch, and a program takes any: "
                f"{printable(first, 400)}. Let forward() use x.shape[0] or -1 where it has a number"
            )
        else:
            text = printable(next(iter(lines), ""), 400)
            reason = f"torch.export cannot trace the model: {type(error).__name__}: {text}{where}. {OUTSIDE}"
        raise TaskError(reason) from error


def custom_operators(traced: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Lists the operators of a traced program that LibTorch does not have, as `namespace::name`."""
    graphs = [module for module in traced.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    names = {target.name() for target in targets if getattr(target, "namespace", "aten") not in LIBTORCH}  # type: ignore[union-attr]
    return tuple(sorted(name.partition(".")[0] for name in names))
