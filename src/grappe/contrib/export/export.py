"""grappe export: writes a run's model as a C++ program, its weights alone, or ONNX; proven, or not written."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grappe.contrib.export import program as programs
from grappe.contrib.export.cpp import write_program
from grappe.contrib.export.folder import (
    ExportOptions,
    Format,
    check_target,
    complete_or_nothing,
    readme_text,
    write_manifest,
)
from grappe.contrib.export.formats import check_packages, write_onnx, write_safetensors, write_transformers
from grappe.contrib.export.proof import TOLERANCE, TYPES, Proof, prove, samples_of, write_npy
from grappe.errors.foreign_text import printable
from grappe.errors.user_code import naming_user_line
from grappe.launch import files
from grappe.plan import Plan, Rounding
from grappe.private_api.torch import tree_leaves
from grappe.task import Task
from grappe.training.run import Run
from grappe.training.task_reference import field_texts, resolve_task
from grappe.verbs.evaluate import evaluate
from grappe.verbs.load import data_of, load
from grappe.verbs.predict.predict import predict
from grappe.words import VERSION

FORMATS: Mapping[Format, programs.Exporter] = {
    "program": write_program,
    "safetensors": write_safetensors,
    "transformers": write_transformers,
    "onnx": write_onnx,
}
DEFAULTS = ExportOptions()
SPLIT = "validation"
TESTS = 8
"""Samples that are written with their predictions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportResult:
    """Result of an export: the folder, and its proof."""

    folder: Path
    checkpoint: str
    proof: Proof
    cpp: str | None
    """Reason why the C++ program was not built; None if it was, or is not part of the format."""
    scores: Mapping[Rounding, Mapping[str, float]]
    """Loss and metrics of validation, of weights in "fp32" and of the rounded ones; empty: nothing was rounded."""


def checked(
    run: Run | Path | str, folder: Path | str, options: ExportOptions, task: Task | type[Task] | str | None = None
) -> tuple[Run, Task]:
    """Checks the arguments of `export` without loading the model; returns the run and its task.

    Raises:
        UsageError: the folder holds something, or a package is missing.
        RunError: the folder is no run.
        TaskError: the run's task is not known, or cannot be found.
    """
    check_target(Path(folder))
    if options.format == "onnx":
        check_packages()
    run = run if isinstance(run, Run) else Run(run)
    return run, resolve_task(run, task).resolve()


def export(
    run: Run | Path | str,
    folder: Path | str,
    options: ExportOptions = DEFAULTS,
    *,
    checkpoint: int | str | None = None,
    task: Task | type[Task] | str | None = None,
    data: Path | str | None = None,
    progress: Callable[[str], None] = lambda words: None,
) -> ExportResult:
    """Writes the model of one of a run's checkpoints to `folder`: a C++ program, weights alone, as transformers'
    from_pretrained reads it, or ONNX.

    Nothing is left at `folder` unless the predictions for the whole validation split, at several batch sizes,
    equal grappe.predict's; with rounded weights, those of the model that has them.

    Args:
        checkpoint: a step, "best" or "last": that one and no other. None: the newest that verifies.
        task: needed where the run was not trained here by this user, as for grappe.load.
        progress: called with a few words, now and then.

    Raises:
        UsageError: the folder holds something; there is no compiler, or a package; the program cannot be built.
        TaskError: the model cannot be traced, with the user's line where it is known.
        PredictionMismatch: a prediction is another one; with the first sample.
    """
    format, weights, trained = options.format, options.weights, options.trained
    target = Path(folder)
    run, resolved = checked(run, target, options, task)
    model = load(run, resolved, checkpoint=checkpoint, trained=trained)
    name = Path(str(model.grappe_checkpoint)).name
    place = data_of(run, data)
    with naming_user_line(resolved):
        samples = samples_of(resolved, SPLIT, place)
        program = programs.program_of(resolved, model, samples)
        carrier = program if weights == "fp32" else programs.RoundedProgram(program, weights).eval()
        outputs = programs.output_names(program, samples.example())
    job = programs.ExportJob(
        task=resolved,
        model=model,
        program=carrier,
        samples=samples,
        inputs=programs.input_names(samples),
        outputs=outputs,
        origin={**_origin(run, resolved, name, averaged=resolved.ema is not None and not trained), "weights": weights},
        build=not options.no_build,
        sources=options.operators,
        progress=progress,
    )

    step = int(name.rpartition("-")[2])

    def predictions() -> Iterator[Any]:
        if weights == "fp32":
            yield from predict(run, SPLIT, task=resolved, data=place, checkpoint=step, trained=trained)
            return
        size = resolved.batch_size
        for first in range(0, samples.length, size):
            inputs = samples.read(np.arange(first, min(first + size, samples.length)))
            yield from zip(*programs.in_batches(program)(inputs, size), strict=True)

    def scores(rounding: Rounding) -> dict[str, float]:
        progress(f"scoring the weights in {rounding}")
        plan = Plan(device="cpu")
        measured = evaluate(
            run, SPLIT, plan, task=resolved, data=place, checkpoint=step, trained=trained, rounding=rounding
        )
        numbers = {name: value for name, value in measured.metrics.items() if isinstance(value, float)}
        return {"loss": measured.loss, **numbers}

    with complete_or_nothing(target) as staged, tempfile.TemporaryDirectory(prefix="grappe-build-") as scratch:
        written = FORMATS[format](job, staged, Path(scratch))
        proof = prove(
            written.runners, samples, predictions(), names=outputs, batch_size=resolved.batch_size, progress=progress
        )
        names, interface = list(written.files), {}
        if written.takes_samples:
            names += _write_tests(job, staged / "test", predictions())
            tensors = zip(job.inputs, samples.dtypes, samples.shapes, strict=True)
            inputs = [{"name": name, "dtype": TYPES[dtype], "shape": list(shape)} for name, dtype, shape in tensors]
            interface = {"inputs": inputs, "outputs": [{"name": name} for name in outputs]}
        roundings: tuple[Rounding, ...] = () if weights == "fp32" else ("fp32", weights)
        scored = {rounding: scores(rounding) for rounding in roundings}
        proven = {**dataclasses.asdict(proof), "tolerance": TOLERANCE, "scores": scored}
        if format == "program":
            proven["cpp"] = written.not_built or True
        facts = {"kind": format, **job.origin, **written.facts, **interface, "proof": proven}
        write_manifest(staged, names, facts, readme_text(facts, written.place, written.words))
    return ExportResult(folder=target, checkpoint=name, proof=proof, cpp=written.not_built, scores=scored)


def _origin(run: Run, task: Task, checkpoint: str, *, averaged: bool) -> dict[str, Any]:
    """Describes where the model is from, with what is foreign in it made fit to show."""
    description = run.read_description()
    plan = Plan.parse(description.get("plan", ""))
    own_statistics = plan.data_parallel > 1 and not plan.synchronises
    return {
        "format": 1,
        "grappe": VERSION,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "run": printable(run.folder.absolute().name),
        "checkpoint": checkpoint,
        "averaged": averaged,
        "task": printable(description.get("task", "")),
        "class": type(task).__name__,
        "fields": field_texts(task),
        "trained_with": printable(description.get("plan", "")),
        "computes_in": "float32, whatever the precision of the training, as grappe predict",
        "buffers": "the mean over the processes' own" if own_statistics else "as in the checkpoint",
    }


def _write_tests(job: programs.ExportJob, folder: Path, predictions: Iterator[Any]) -> list[str]:
    """Writes the first samples and their predictions; returns the files, relative to the exported folder."""
    files.make_folder(folder)
    count = min(TESTS, job.samples.length)
    arrays = write_npy(folder, job.inputs, job.samples.read(np.arange(count)))
    lines = []
    for _, row in zip(range(count), predictions, strict=False):
        leaves = [leaf.tolist() for leaf in tree_leaves(row)]
        lines.append(json.dumps(dict(zip(job.outputs, leaves, strict=True))))
    files.replace(folder / "expected.jsonl", "".join(f"{line}\n" for line in lines).encode(), durable=True)
    return [*(f"test/{Path(file).name}" for file in arrays), "test/expected.jsonl"]
