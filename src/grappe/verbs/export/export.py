"""grappe export: writes a run's model as a C++ program, or its weights alone; proven, or not written."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

import grappe
from grappe.errors import TaskError, UsageError
from grappe.errors.foreign_text import printable
from grappe.errors.user_code import naming_user_line
from grappe.launch import files as safe
from grappe.private_api.torch import tree_leaves
from grappe.task import Task
from grappe.training.run import Run
from grappe.training.task_record import given
from grappe.training.task_reference import field_texts
from grappe.verbs.export import cpp, exchange, operators, transformers_folder, weights
from grappe.verbs.export.folder import check_target, whole_or_nothing
from grappe.verbs.export.manifest import field, program_readme, weights_readme, write_manifest
from grappe.verbs.export.package import compile_to, instruction_set, open_made
from grappe.verbs.export.program import Program, input_names, output_names, program_of, trace
from grappe.verbs.export.proof import TOLERANCE, Proof, Runner, prove
from grappe.verbs.export.samples import TYPES, Samples, samples_of
from grappe.verbs.load import data_of, load
from grappe.verbs.predict import predict

Format = Literal["program", "safetensors", "transformers", "onnx", "torchscript"]
SPLIT = "validation"
PACKAGE = "model.pt2"
TESTS = 8
"""Samples that are written with their predictions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export: the folder, and its proof."""

    folder: Path
    checkpoint: str
    proof: Proof
    cpp: str | None
    """Reason why the C++ program was not built; None if it was, or is not part of the format."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Export:
    run: Run
    task: Task
    model: nn.Module
    samples: Samples
    step: int
    trained: bool
    data: Path
    format: Format
    build: bool
    sources: Sequence[Path]
    progress: Callable[[str], None]

    def predictions(self, split: Any) -> Iterator[Any]:
        """Predicts as `grappe predict` does, with the checkpoint that is exported."""
        return predict(
            self.run, split, task=self.task, data=self.data, checkpoint=self.step, trained=self.trained
        )

    def prove(self, runners: dict[str, Runner], names: tuple[str, ...]) -> Proof:
        return prove(
            runners,
            self.samples,
            self.predictions(SPLIT),
            names=names,
            batch_size=self.task.batch_size,
            progress=self.progress,
        )


def export(
    run: Run | Path | str,
    folder: Path | str,
    *,
    checkpoint: int | str | None = None,
    task: Task | type[Task] | str | None = None,
    data: Path | str | None = None,
    format: Format = "program",
    build: bool = True,
    sources: Sequence[Path] = (),
    trained: bool = False,
    progress: Callable[[str], None] = lambda words: None,
) -> Exported:
    """Writes the model of one of a run's checkpoints to `folder`: a C++ program, weights alone, as transformers'
    from_pretrained reads it, ONNX or TorchScript.

    Nothing is left at `folder` unless the predictions for the whole validation split, at several batch sizes, are those
    of grappe.predict.

    Args:
        checkpoint: a step, "best" or "last": that one and no other. None: the newest that verifies.
        task: needed where the run was not trained here by this user, as for grappe.load.
        build: whether to build and prove the C++ program too, where there are cmake and a compiler.
        sources: C++ files that register the operators which the model uses and LibTorch has not.
        trained: take the weights themselves where the run keeps a moving average (`ema`).
        progress: called with a few words, now and then.

    Raises:
        UsageError: the folder holds something; there is no compiler, or a package; the program cannot be built.
        TaskError: the model cannot be traced, with the user's line where it is known.
        Differs: a prediction is another one; with the first sample.
    """
    target = Path(folder)
    check_target(target)
    if format in exchange.FILES:
        exchange.check_packages(format)
    if sources and format != "program":
        raise UsageError(f"--operators: --format {format} compiles nothing: leave the option out")
    run = run if isinstance(run, Run) else Run(run)
    made = given(run, task).resolve()
    model = load(run, made, checkpoint=checkpoint, trained=trained)
    taken = Path(str(model.grappe_checkpoint)).name
    place = data_of(run, data)
    with naming_user_line(made):
        samples = samples_of(made, SPLIT, place)
    work = _Export(
        run=run,
        task=made,
        model=model,
        samples=samples,
        step=int(taken.rpartition("-")[2]),
        trained=trained,
        data=place,
        format=format,
        build=build,
        sources=sources,
        progress=progress,
    )
    known = _known(work, taken)
    with whole_or_nothing(target) as staged:
        proof, why = WRITERS[format](work, staged, known)
    return Exported(folder=target, checkpoint=taken, proof=proof, cpp=why)


def _write_weights(work: _Export, staged: Path, known: dict[str, Any]) -> tuple[Proof, str | None]:
    names = _output_names(work, program_of(work.task, work.model, work.samples))
    files = weights.write_weights(staged, work.model, known)
    again = weights.runner(staged, work.task, work.samples)
    proof = work.prove({"with the weights that were written": again}, names)
    about = {"kind": "safetensors", **known, "proof": dataclasses.asdict(proof)}
    write_manifest(staged, files, about, weights_readme(known))
    return proof, None


def _write_transformers(work: _Export, staged: Path, known: dict[str, Any]) -> tuple[Proof, str | None]:
    names = _output_names(work, program_of(work.task, work.model, work.samples))
    files, kind, again = transformers_folder.write_folder(staged, work.task, work.model, work.samples)
    proof = work.prove({"by from_pretrained": again}, names)
    about = {"kind": "transformers", **known, "proof": dataclasses.asdict(proof)}
    write_manifest(staged, files, about, transformers_folder.readme(known, kind))
    return proof, None


def _write_program(work: _Export, staged: Path, known: dict[str, Any]) -> tuple[Proof, str | None]:
    program = program_of(work.task, work.model, work.samples)
    names, takes = _output_names(work, program), input_names(work.samples)
    work.progress("tracing the model")
    traced = trace(program, work.samples.example())
    custom = operators.custom_operators(traced)
    operators.check_sources(work.sources, custom)
    work.progress("compiling the model, which takes a minute or more")
    package = staged / PACKAGE
    made = compile_to(package, traced)
    runners: dict[str, Runner] = {"in Python": weights.in_batches(open_made(package, made))}
    files = [PACKAGE, *cpp.write_sources(package, work.samples, takes, names)]
    files += operators.write_sources(staged, work.sources)
    why = cpp.cannot_build() if work.build else "it was not asked for"
    with tempfile.TemporaryDirectory(prefix="grappe-build-") as folder:
        if why is None:
            work.progress("building the C++ program")
            runners["in C++"] = cpp.runner(cpp.build(staged, Path(folder)), package, names)
        proof = work.prove(runners, names)
    tests = _write_tests(work, staged, takes, names)
    about = {
        "kind": "program",
        **known,
        "device": "cpu",
        "instruction_set": instruction_set(),
        **_interface(work, takes, names),
        "operators": custom,
        "proof": {**dataclasses.asdict(proof), "tolerance": TOLERANCE, "cpp": why or True},
    }
    inputs = " ".join(tests[:-1])
    what = "preprocessing, model and prediction" if work.samples.transform else "model and prediction"
    readme = program_readme(about, what=what, tests=inputs, tolerance=TOLERANCE)
    write_manifest(staged, [*files, *tests], about, readme)
    return proof, why


def _write_exchange(work: _Export, staged: Path, known: dict[str, Any]) -> tuple[Proof, str | None]:
    assert work.format in exchange.FILES
    kind, file = work.format, staged / exchange.FILES[work.format]
    program, example = program_of(work.task, work.model, work.samples), work.samples.example()
    names, takes = _output_names(work, program), input_names(work.samples)
    work.progress("tracing the model")
    made = exchange.write(kind, file, program, trace(program, example), example, takes, names)
    run = exchange.opened(kind, file, made)
    proof = work.prove({exchange.RUNTIMES[kind]: weights.in_batches(run)}, names)
    tests = _write_tests(work, staged, takes, names)
    about: dict[str, Any] = {
        "kind": kind,
        **known,
        **exchange.versions(kind),
        **_interface(work, takes, names),
        "proof": {**dataclasses.asdict(proof), "tolerance": TOLERANCE},
    }
    inputs, outputs = ", ".join(map(field, about["inputs"])), ", ".join(f"`{name}`" for name in names)
    write_manifest(staged, [file.name, *tests], about, exchange.readme(kind, about, inputs, outputs))
    return proof, None


WRITERS = {
    "program": _write_program,
    "safetensors": _write_weights,
    "transformers": _write_transformers,
    "onnx": _write_exchange,
    "torchscript": _write_exchange,
}


def _interface(work: _Export, takes: tuple[str, ...], names: tuple[str, ...]) -> dict[str, Any]:
    """Describes the tensors that go in and come out."""
    inputs = zip(takes, work.samples.dtypes, work.samples.shapes, strict=True)
    return {
        "inputs": [
            {"name": name, "dtype": TYPES[dtype], "shape": list(shape)} for name, dtype, shape in inputs
        ],
        "outputs": [{"name": name} for name in names],
    }


def _output_names(work: _Export, program: Program) -> tuple[str, ...]:
    with naming_user_line(work.task):
        names = output_names(program, work.samples.example())
    if len(set(names)) < len(names):
        raise TaskError(f"two predictions have one name: {', '.join(names)}")
    return names


def _write_tests(work: _Export, staged: Path, takes: tuple[str, ...], names: tuple[str, ...]) -> list[str]:
    """Writes the first samples and their predictions; returns the files, relative to the folder."""
    folder = staged / "test"
    safe.make_folder(folder)
    count = min(TESTS, work.samples.length)
    files = cpp.write_samples(folder, takes, work.samples.read(0, count))
    lines = []
    for _, row in zip(range(count), work.predictions(SPLIT), strict=False):
        leaves = [one.tolist() for one in tree_leaves(row)]
        lines.append(json.dumps(dict(zip(names, leaves, strict=True))))
    safe.replace(folder / "expected.jsonl", "".join(f"{line}\n" for line in lines).encode(), durable=True)
    return [*(f"test/{Path(file).name}" for file in files), "test/expected.jsonl"]


def _known(work: _Export, taken: str) -> dict[str, Any]:
    """Describes where the model is from, with what is foreign in it made fit to show."""
    described = work.run.read_description()
    local = "batchnorm=sync" not in str(described.get("plan"))
    several = isinstance(described.get("processes"), int) and described["processes"] > 1
    return {
        "format": 1,
        "grappe": grappe.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "run": printable(work.run.folder.absolute().name),
        "checkpoint": taken,
        "averaged": work.task.ema is not None and not work.trained,
        "task": printable(described.get("task", "")),
        "class": type(work.task).__name__,
        "fields": field_texts(work.task),
        "trained_with": printable(described.get("plan", "")),
        "computes_in": "float32, whatever the precision of the training, as grappe predict",
        "buffers": "the mean over the processes' own" if local and several else "as in the checkpoint",
    }
