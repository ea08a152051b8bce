"""Writes a model without a program of ours: its weights alone, the folder that from_pretrained reads, or ONNX."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from grappe.contrib.export.program import ExportJob, WrittenModel, custom_operators, in_batches, program_of, trace
from grappe.errors import TaskError, UsageError
from grappe.errors.foreign_text import printable
from grappe.errors.user_code import naming_user_line
from grappe.launch import files
from grappe.private_api.torch_inductor import quiet
from grappe.private_api.transformers import models
from grappe.step.task_contract import model_of

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
ONNX = "model.onnx"
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def write_safetensors(job: ExportJob, folder: Path, scratch: Path) -> WrittenModel:
    """Writes the model's state dict and the task's description; a tied weight is written under each of its names."""
    state = {name: value.detach().clone().contiguous() for name, value in job.model.state_dict().items()}
    files.replace(folder / WEIGHTS, save(state, metadata={"format": "pt"}), durable=True)
    config = {name: job.origin[name] for name in ("task", "class", "fields", "checkpoint", "averaged", "run")}
    files.replace(folder / CONFIG, (json.dumps(config, indent=1) + "\n").encode(), durable=True)
    with naming_user_line(job.task):
        model = model_of(job.task)
    model.load_state_dict(load_file(folder / WEIGHTS))

    return WrittenModel(
        files=[WEIGHTS, CONFIG],
        runners={"with the weights that were written": in_batches(program_of(job.task, model, job.samples))},
        takes_samples=False,
    )


def write_transformers(job: ExportJob, folder: Path, scratch: Path) -> WrittenModel:
    """Writes the folder of a model of transformers.

    Adapters of peft are merged into the matrices that they add to: the folder needs no peft.

    Raises:
        TaskError: the task's model is not one model of transformers.
    """
    merge = getattr(job.model, "merge_and_unload", None)
    model: Any = merge() if callable(merge) else job.model
    kind, inside = type(model).__name__, models(model)
    if set(inside) != {""}:
        names = [f"{name} ({type(module).__name__})" for name, module in inside.items()]
        raise TaskError(
            f"--format transformers: {type(job.task).__name__}.model() is {kind}, and from_pretrained "
            f"reads one model of transformers: {'it holds ' + ', '.join(names) if names else 'there is none in it'}. "
            "Take --format safetensors"
        )
    model.save_pretrained(folder)
    written = sorted(file.name for file in folder.iterdir())
    again = type(model).from_pretrained(folder, local_files_only=True).eval()

    return WrittenModel(
        files=written,
        runners={"by from_pretrained": in_batches(program_of(job.task, again, job.samples))},
        words={"kind": kind},
        takes_samples=False,
    )


def check_packages() -> None:
    """Raises UsageError where a package that the format needs is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"--format onnx needs {', '.join(missing)}: pip install 'grappe[onnx]'")


def write_onnx(job: ExportJob, folder: Path, scratch: Path) -> WrittenModel:
    """Writes the program to `model.onnx`.

    Raises:
        TaskError: the program cannot be traced, or ONNX cannot express it.
    """
    job.progress("tracing the model")
    example = job.samples.example()
    traced = trace(job.program, example)
    if custom := custom_operators(traced):
        raise TaskError(f"--format onnx has not the operators {', '.join(custom)}: --format program compiles them")
    file = folder / ONNX
    try:
        with quiet(), torch.no_grad():
            made = torch.onnx.export(
                traced,
                tuple(example),
                input_names=list(job.inputs),
                output_names=list(job.outputs),
                dynamo=True,
                verbose=False,
            )
            assert made is not None
            made.save(str(file), external_data=False)
    except Exception as error:  # of the exporter, which has many kinds
        text = printable(" ".join(str(error).split()), 500)
        raise TaskError(
            f"--format onnx cannot express the model: {type(error).__name__}: {text}. Take --format program"
        ) from error
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [taken.name for taken in session.get_inputs()]

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        feed = {name: leaf.numpy() for name, leaf in zip(names, leaves, strict=True)}
        return tuple(torch.from_numpy(array) for array in session.run(None, feed))

    return WrittenModel(
        files=[ONNX],
        runners={"in onnxruntime": in_batches(run)},
        place="in onnxruntime",
        words={"feed": ", ".join(f'"{name}": numpy.load("test/{name}.npy")' for name in job.inputs)},
        facts={name: importlib.metadata.version(name) for name in PACKAGES},
    )
