"""Compiles a traced program to a package of native code, and opens none but that one."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from grappe.errors import GrappeError, UsageError
from grappe.errors.foreign_text import printable
from grappe.errors.native_code import refuse_package
from grappe.launch import files
from grappe.private_api import torch_inductor
from grappe.verbs.export.manifest import sha256

COMPILERS = ("g++", "clang++", "c++")
PORTABLE = {"cpp.march": "x86-64-v3", "cpp.simdlen": 256}
"""AVX2: torch would compile for this very processor, and a job's node may have another."""
OPTIONS = {
    "compile_threads": 1,
    "cpp_cache_precompile_headers": False,
    # Else biases of up to 8 numbers and scalars become part of the code, and no other weights can take their place.
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
}


def instruction_set() -> str:
    """Returns what the package needs of a processor: "AVX2", or this machine's kind where it has no AVX2."""
    found = torch.backends.cpu.get_cpu_capability()
    if platform.machine() == "x86_64" and found in ("AVX2", "AVX512"):
        return "AVX2"
    return f"{platform.machine()} {found}"


def compiler() -> str | None:
    """Returns the C++ compiler: $CXX, or the first that is on the PATH; None if there is none."""
    wanted = (os.environ.get("CXX", ""), *COMPILERS)
    return next((found for name in wanted if name and (found := shutil.which(name))), None)


def compile_to(file: Path, program: torch.export.ExportedProgram) -> str:
    """Compiles the program to `file`; returns the file's SHA-256.

    Raises:
        UsageError: there is no C++ compiler, or it fails.
    """
    if compiler() is None:
        raise UsageError(
            "grappe export compiles the model, and there is no C++ compiler on the PATH: module load gcc on a cluster, "
            "apt install g++ elsewhere; or take the weights alone: --format safetensors"
        )
    options: dict[str, Any] = {**OPTIONS, **(PORTABLE if instruction_set() == "AVX2" else {})}
    with tempfile.TemporaryDirectory(prefix="grappe-export-") as scratch:
        try:
            torch_inductor.compile_package(program, file, options, Path(scratch))
        except Exception as error:  # of torch's compiler, or of the C++ compiler
            text = printable(" ".join(str(error).split()), 700)
            raise UsageError(
                f"torch cannot compile the model: {type(error).__name__}: {text}. The weights alone need no compiler: "
                "--format safetensors"
            ) from error
    return sha256(file)


def open_made(file: Path, made: str | None) -> torch_inductor.Package:
    """Opens a package that this user has made: opening runs what is in it.

    Args:
        made: its SHA-256, as `compile_to` returned it, or a record keeps it; None: it was made elsewhere.

    Raises:
        UsageError: it was made elsewhere, or is not as it was made.
    """
    if made is None:
        refuse_package(file)
    check_made(file, made)
    return torch_inductor.load_package(file)


def check_made(file: Path, made: str | None) -> None:
    """Raises GrappeError where a file is not as this process has made it."""
    if files.kind(file) != "file" or sha256(file) != made:
        raise GrappeError(f"{file} is not as it was made: somebody has changed it, and it is not opened")
