"""Writes other weights for an exported program, which takes them without being compiled again."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from grappe.errors import UsageError
from grappe.launch import files
from grappe.verbs.export import constants, cpp, operators, record, weights
from grappe.verbs.export.manifest import replacement_readme, sha256, write_manifest
from grappe.verbs.export.package import open_made
from grappe.verbs.export.program import input_names, trace
from grappe.verbs.export.proof import TOLERANCE, Proof, Runner
from grappe.verbs.export.work import Work
from grappe.verbs.export.writers import PACKAGE, compiled

Written = tuple[Proof, str | None]


def write_replacement(work: Work, staged: Path, known: dict[str, Any]) -> Written:
    """Writes the weights of the run's model for the program in the folder `work.weights_for`, and proves them in it.

    Raises:
        UsageError: the folder's package was not made here by this user.
        TaskError: the model differs from the package's in more than its weights.
    """
    assert work.weights_for is not None
    program = work.program()
    names, takes = work.output_names(program), input_names(work.samples)
    with tempfile.TemporaryDirectory(prefix="grappe-package-") as private:
        package = Path(private) / "program" / PACKAGE
        files.make_folder(package.parent)
        made, inside = _copy(work.weights_for / PACKAGE, package)
        work.progress("tracing the model")
        traced = trace(program, work.samples.example())
        operators.check_sources(work.sources, operators.custom_operators(traced))
        found = constants.matching(traced, work.samples, inside)
        constants.write_weights(staged / constants.FILE, found, inside["graph"])
        cpp.write_sources(package, work.samples, takes, names, graph=inside["graph"])
        operators.write_sources(package.parent, work.sources)
        runners: dict[str, Runner] = {"in Python": _opened(package, made, found)}
        why = cpp.cannot_build() if work.build else "it was not asked for"
        if why is None:
            work.progress("building the C++ program")
            built = cpp.build(package.parent, Path(private) / "build")
            options = ("--weights", str(staged / constants.FILE))
            runners["in C++"] = cpp.runner(built, package, names, options)
        proof = work.prove(runners, names, compiled(work.samples))
    tests = work.write_tests(staged, takes, names)
    about = {
        "kind": "weights",
        **known,
        "package": made,
        "weights": inside,
        **work.interface(takes, names),
        "proof": {**dataclasses.asdict(proof), "tolerance": TOLERANCE, "cpp": why or True},
    }
    readme = replacement_readme(about, tests=" ".join(tests[:-1]))
    write_manifest(staged, [constants.FILE, *tests], about, readme)
    return proof, why


def _copy(file: Path, to: Path) -> tuple[str, dict[str, Any]]:
    """Copies a package to where nobody else can change it; returns its SHA-256, and what is known of it."""
    if files.kind(file) != "file":
        raise UsageError(
            f"--weights-for {file.parent}: there is no {file.name}: give a folder that grappe export wrote"
        )
    with files.reader(file) as whole, files.new_file(to, mode=files.PRIVATE) as copy:
        shutil.copyfileobj(whole, copy)
    made = sha256(to)
    inside = record.read_record(made)
    if inside is None:
        raise UsageError(
            f"--weights-for {file.parent}: its {file.name} was not made here by you, as far as is known, and to prove "
            "weights in it is to run what is in it. Export the run as a program of its own, without --weights-for"
        )
    return made, inside


def _opened(package: Path, made: str, found: dict[str, Tensor]) -> Runner:
    opened = open_made(package, made)
    opened.load_constants({name: one.clone() for name, one in found.items()}, check_full_update=False)
    return weights.in_batches(opened)
