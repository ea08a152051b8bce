"""Writes a C++ program with the model as native code; builds it from its folder alone, and runs it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grappe.contrib.export.folder import crc32, sha256, shipped_text
from grappe.contrib.export.program import ExportJob, WrittenModel, custom_operators, in_batches, trace
from grappe.contrib.export.proof import TOLERANCE, TYPES, ExportSamples, Runner, write_npy
from grappe.errors import GrappeError, UsageError
from grappe.errors.foreign_text import printable
from grappe.launch import command, files
from grappe.private_api import torch_inductor

PACKAGE = "model.pt2"
SOURCES = ("CMakeLists.txt", "main.cpp", "npy.h", "json.h", "checksum.h")
OPERATORS = "operators"
SUFFIXES = (".cpp", ".cc", ".cxx")
COMPILERS = ("g++", "clang++", "c++")
OPTIONS = {"compile_threads": 1, "cpp_cache_precompile_headers": False}
PORTABLE = {"cpp.march": "x86-64-v3", "cpp.simdlen": 256}
"""AVX2: torch would compile for this very processor, and a job's node may have another."""
OPEN = "import sys; from torch._inductor import aoti_load_package as load; load(sys.argv[1])"
"""Opened in a process of its own first: torch 2.11 for CUDA 13 ended by SIGSEGV there."""
OPEN_SECONDS = 600.0
BUILD_SECONDS = 1800.0  # a busy machine; LibTorch's headers are large
RUN_SECONDS = 3600.0
SCALARS = {
    "f2": "Half", "f4": "Float", "f8": "Double", "u1": "Byte", "i1": "Char", "i2": "Short", "i4": "Int", "i8": "Long",
    "b1": "Bool",
}  # fmt: skip
OPERATORS_ROW = "| `operators/` | the operators {}, which LibTorch has not: compiled into the program |\n"


def write_program(job: ExportJob, folder: Path, scratch: Path) -> WrittenModel:
    """Compiles the model to `model.pt2`, and writes the program's sources next to it.

    Raises:
        TaskError: the model cannot be traced.
        UsageError: it cannot be compiled here; the sources of its own operators are missing.
    """
    job.progress("tracing the model")
    traced = trace(job.program, job.samples.example())
    operators = custom_operators(traced)
    check_sources(job.sources, operators)
    job.progress("compiling the model, which takes a minute or more")
    package = folder / PACKAGE
    compiled = open_package(package, compile_to(package, traced))
    written = [PACKAGE, *write_sources(package, job.samples, job.inputs, job.outputs)]
    if job.sources:
        files.make_folder(folder / OPERATORS)
    for file in job.sources:
        files.replace(folder / OPERATORS / file.name, file.read_bytes(), durable=True)
        written.append(f"{OPERATORS}/{file.name}")
    runners: dict[str, Runner] = {"in Python": in_batches(compiled)}
    not_built = None if job.build else "--no-build was given"
    if job.build and shutil.which("cmake") is None:
        not_built = "there is no cmake on the PATH"
    if not_built is None:
        job.progress("building the C++ program")
        runners["in C++"] = runner(build(folder, scratch), package, job.outputs)

    instructions, names = instruction_set(), ", ".join(f"`{name}`" for name in operators)
    return WrittenModel(
        files=written,
        runners=runners,
        place="in Python" if not_built else "in Python and by the C++ program, built from its folder alone",
        words={
            "torch": torch.__version__.partition("+")[0],
            "tests": " ".join(f"test/{name}.npy" for name in job.inputs),
            "tolerance": TOLERANCE,
            "what": "preprocessing, model and prediction" if job.samples.transform else "model and prediction",
            "instructions": instructions,
            "operators": OPERATORS_ROW.format(names) if names else "",
            "missing": f" The C++ program was not built: {not_built}." if not_built else "",
        },
        facts={"device": "cpu", "instruction_set": instructions, "operators": operators},
        not_built=not_built,
    )


def check_sources(sources: Sequence[Path], names: Sequence[str]) -> None:
    """Raises UsageError unless `sources` are C++ files, given if and only if the model uses the operators `names`."""
    if names and not sources:
        raise UsageError(
            f"the model uses operators that LibTorch does not have: {', '.join(names)}. Give the C++ source that "
            "registers them, which the program compiles: --operators FILE.cpp (operators written in Python cannot be "
            "exported); or take the weights alone: --format safetensors"
        )
    if sources and not names:
        raise UsageError("--operators: the model uses no operator but LibTorch's own: leave the option out")
    for file in sources:
        if file.suffix not in SUFFIXES or not file.is_file():
            raise UsageError(f"--operators {file}: give a file of C++ ({', '.join(SUFFIXES)}) that is there")
    if len({file.name for file in sources}) < len(sources):
        raise UsageError("--operators: two files have one name: rename one")


def instruction_set() -> str:
    """Returns the processor that the package needs: "AVX2", or this machine's where it or torch can make no other."""
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() == "x86_64" and capability in ("AVX2", "AVX512") and torch_inductor.compiles_for_others():
        return "AVX2"
    return f"{platform.machine()} {capability}"


def compile_to(file: Path, traced: torch.export.ExportedProgram) -> str:
    """Compiles the traced program to `file`, a package of native code; returns the file's SHA-256.

    Raises:
        UsageError: there is no C++ compiler ($CXX, or on the PATH), or it fails.
    """
    if not any(name and shutil.which(name) for name in (os.environ.get("CXX", ""), *COMPILERS)):
        raise UsageError(
            "grappe export compiles the model, and there is no C++ compiler on the PATH: module load gcc on a cluster, "
            "apt install g++ elsewhere; or take the weights alone: --format safetensors"
        )
    options: dict[str, Any] = {**OPTIONS, **(PORTABLE if instruction_set() == "AVX2" else {})}
    with tempfile.TemporaryDirectory(prefix="grappe-export-") as scratch:
        try:
            torch_inductor.compile_package(traced, file, options, Path(scratch))
        except Exception as error:  # of torch's compiler, or of the C++ compiler
            text = printable(" ".join(str(error).split()), 700)
            raise UsageError(
                f"torch cannot compile the model: {type(error).__name__}: {text}. The weights alone need no compiler: "
                "--format safetensors"
            ) from error
    return sha256(file)


def open_package(file: Path, digest: str) -> Callable[..., Any]:
    """Opens a package that this process has written: opening runs what is in it.

    Args:
        digest: its SHA-256, as `compile_to` returned it.

    Raises:
        GrappeError: it is not as it was written, or opening it ends a process.
    """
    if files.kind(file) != "file" or sha256(file) != digest:
        raise GrappeError(f"{file} is not as it was made: somebody has changed it, and it is not opened")
    try:
        command.run(sys.executable, "-P", "-c", OPEN, str(file), seconds=OPEN_SECONDS)
    except command.Failed as error:  # any other failure has its message when it is opened here
        if (signal := -(error.code or 0)) > 0:
            raise GrappeError(
                f"torch {torch.__version__} has compiled the model, and is ended by signal {signal} when it opens "
                "the package: export with another torch (2.13 opens its own on the machines tried), or take the "
                "weights alone: --format safetensors"
            ) from error
    return torch_inductor.load_package(file)


def write_sources(package: Path, samples: ExportSamples, inputs: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """Writes the program's sources next to the package; returns their names."""
    folder = package.parent
    for name in SOURCES:
        files.replace(folder / name, shipped_text(name).encode(), durable=True)
    rows = []
    for name, shape, dtype in zip(inputs, samples.shapes, samples.dtypes, strict=True):
        kind, size = TYPES[dtype], shape.numel() * dtype.itemsize
        text, numbers = "".join(f", {length}" for length in shape), ", ".join(map(str, shape))
        rows.append(f'    {{"{name}", "{kind}", at::k{SCALARS[kind]}, {{{numbers}}}, "{text}", {size}}}')
    major, minor = torch.__version__.split(".")[:2]
    text = shipped_text("model.h.in").format(
        inputs=",\n".join(rows),
        outputs=", ".join(f'"{name}"' for name in outputs),
        instructions=instruction_set(),
        major=major,
        minor=minor,
        bytes=package.stat().st_size,
        crc=crc32(package),
    )
    files.replace(folder / "model.h", text.encode(), durable=True)
    return [*SOURCES, "model.h"]


def build(folder: Path, into: Path) -> Path:
    """Builds the program of an exported folder, outside of the folder; returns the program.

    Raises:
        UsageError: it cannot be built; with the compiler's own words.
    """
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    try:
        command.run("cmake", "-S", str(folder), "-B", str(into), prefix, seconds=BUILD_SECONDS)
        command.run("cmake", "--build", str(into), seconds=BUILD_SECONDS)
    except command.Failed as error:
        raise UsageError(
            f"the exported program cannot be built here: {printable(str(error)[-1500:])}. With --no-build "
            "it is written without; its predictions are compared in Python then"
        ) from error
    return into / "predict"


def runner(program: Path, package: Path, names: Sequence[str]) -> Runner:
    """Returns what runs the built program on samples [N, ...], a batch size at a time, and reads its lines."""

    def run(inputs: list[Tensor], size: int) -> list[Tensor]:
        with tempfile.TemporaryDirectory(prefix="grappe-samples-") as folder:
            arrays = write_npy(Path(folder), [str(number) for number in range(len(inputs))], inputs)
            environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
            words = (str(program), str(package), *arrays, "--batch", str(size))
            text = command.run(*words, seconds=RUN_SECONDS, environment=environment)
        rows = [json.loads(line) for line in text.splitlines()]
        return [torch.from_numpy(np.array([row[name] for row in rows], np.float64)) for name in names]

    return run
