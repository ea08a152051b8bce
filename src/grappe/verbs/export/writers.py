"""Writes the files of each format of an export, and proves them."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from grappe.verbs.export import constants, cpp, exchange, operators, record, transformers_folder, weights
from grappe.verbs.export.layers import Call, Watched, Writer
from grappe.verbs.export.manifest import field, program_readme, weights_readme, write_manifest
from grappe.verbs.export.package import compile_to, instruction_set, open_made
from grappe.verbs.export.program import input_names, program_of, trace
from grappe.verbs.export.proof import TOLERANCE, Proof, Runner
from grappe.verbs.export.samples import Samples
from grappe.verbs.export.work import Work

PACKAGE = "model.pt2"
Written = tuple[Proof, str | None]
"""The proof, and why there is no C++ program, if so."""


def compiled(samples: Samples) -> Writer:
    """Returns what compiles a program that gives its layers too, and opens the package."""

    def write(watched: Watched) -> Call:
        with tempfile.TemporaryDirectory(prefix="grappe-layers-") as folder:
            file = Path(folder) / PACKAGE
            return open_made(file, compile_to(file, trace(watched, samples.example())))

    return write


def _again(work: Work, model: Callable[[], nn.Module]) -> Writer:
    """Returns what gives the layers of a model that was made from what was written."""
    return lambda watched: Watched(program_of(work.task, model(), work.samples))


def _write_weights(work: Work, staged: Path, known: dict[str, Any]) -> Written:
    names = work.output_names(work.program())
    files = weights.write_weights(staged, work.model, known)
    model = weights.read_again(staged, work.task)
    run = weights.in_batches(program_of(work.task, model, work.samples))
    proof = work.prove({"with the weights that were written": run}, names, _again(work, lambda: model))
    about = {"kind": "safetensors", **known, "proof": dataclasses.asdict(proof)}
    write_manifest(staged, files, about, weights_readme(known))
    return proof, None


def _write_transformers(work: Work, staged: Path, known: dict[str, Any]) -> Written:
    names = work.output_names(work.program())
    files, kind, model = transformers_folder.write_folder(staged, work.task, work.model)
    run = weights.in_batches(program_of(work.task, model, work.samples))
    proof = work.prove({"by from_pretrained": run}, names, _again(work, lambda: model))
    about = {"kind": "transformers", **known, "proof": dataclasses.asdict(proof)}
    write_manifest(staged, files, about, transformers_folder.readme(known, kind))
    return proof, None


def _write_program(work: Work, staged: Path, known: dict[str, Any]) -> Written:
    program = work.program()
    names, takes = work.output_names(program), input_names(work.samples)
    work.progress("tracing the model")
    traced = trace(program, work.samples.example())
    custom = operators.custom_operators(traced)
    operators.check_sources(work.sources, custom)
    work.progress("compiling the model, which takes a minute or more")
    package = staged / PACKAGE
    made = compile_to(package, traced)
    opened = open_made(package, made)
    inside = constants.describe(traced, work.samples, opened.get_constant_fqns())
    runners: dict[str, Runner] = {"in Python": weights.in_batches(opened)}
    files = [PACKAGE, *cpp.write_sources(package, work.samples, takes, names, graph=inside["graph"])]
    files += operators.write_sources(staged, work.sources)
    why = cpp.cannot_build() if work.build else "it was not asked for"
    with tempfile.TemporaryDirectory(prefix="grappe-build-") as folder:
        if why is None:
            work.progress("building the C++ program")
            runners["in C++"] = cpp.runner(cpp.build(staged, Path(folder)), package, names)
        proof = work.prove(runners, names, compiled(work.samples))
    tests = work.write_tests(staged, takes, names)
    about = {
        "kind": "program",
        **known,
        "device": "cpu",
        "instruction_set": instruction_set(),
        **work.interface(takes, names),
        "operators": custom,
        "proof": {**dataclasses.asdict(proof), "tolerance": TOLERANCE, "cpp": why or True},
        "weights": inside,
    }
    inputs = " ".join(tests[:-1])
    what = "preprocessing, model and prediction" if work.samples.transform else "model and prediction"
    readme = program_readme(about, what=what, tests=inputs, tolerance=TOLERANCE)
    write_manifest(staged, [*files, *tests], about, readme)
    if not record.write_record(made, inside):
        work.progress("your home folder cannot be written: --weights-for will not know this package")
    return proof, why


def _write_exchange(work: Work, staged: Path, known: dict[str, Any]) -> Written:
    assert work.format in exchange.FILES
    kind, file = work.format, staged / exchange.FILES[work.format]
    program, example = work.program(), work.samples.example()
    names, takes = work.output_names(program), input_names(work.samples)

    def write(watched: Watched) -> Call:
        with tempfile.TemporaryDirectory(prefix="grappe-layers-") as folder:
            again = Path(folder) / file.name
            layers = [f"layer-{number}" for number, _ in enumerate(watched.names(example))]
            made = exchange.write(
                kind, again, watched, trace(watched, example), example, takes, [*layers, *names]
            )
            return exchange.opened(kind, again, made)

    work.progress("tracing the model")
    made = exchange.write(kind, file, program, trace(program, example), example, takes, names)
    run = exchange.opened(kind, file, made)
    proof = work.prove({exchange.RUNTIMES[kind]: weights.in_batches(run)}, names, write)
    tests = work.write_tests(staged, takes, names)
    about: dict[str, Any] = {
        "kind": kind,
        **known,
        **exchange.versions(kind),
        **work.interface(takes, names),
        "proof": {**dataclasses.asdict(proof), "tolerance": TOLERANCE},
    }
    inputs, outputs = ", ".join(map(field, about["inputs"])), ", ".join(f"`{name}`" for name in names)
    write_manifest(staged, [file.name, *tests], about, exchange.readme(kind, about, inputs, outputs))
    return proof, None


WRITERS: dict[str, Callable[[Work, Path, dict[str, Any]], Written]] = {
    "program": _write_program,
    "safetensors": _write_weights,
    "transformers": _write_transformers,
    "onnx": _write_exchange,
    "torchscript": _write_exchange,
}
