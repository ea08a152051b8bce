"""Check of the C++ compiler, with which extensions, torch.compile and grappe export build: version, headers, nvcc."""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from grappe import sites
from grappe.errors import GrappeError
from grappe.launch import command
from grappe.verbs.doctor.checks import Finding, Machine, error, note, warning

COMPILERS = ("c++", "g++", "clang++")
STANDARD = "c++20"
PROGRAM = "#include <concepts>\n#include <vector>\nint main() { return static_cast<int>(std::vector<int>().size()); }\n"
"""What a compiler of that standard takes, with its library's headers."""
USERS = "extensions in C++, compile and grappe export need it"

Bounds = tuple[tuple[int, ...], tuple[int, ...]]
"""The oldest compiler that nvcc takes, and the first that is too new."""


def check(machine: Machine) -> Iterator[Finding]:
    """Tries the compiler that torch would take on a small program; looks for Python's headers, and for nvcc."""
    if not machine.is_node_leader:
        return
    import torch

    plan, deepspeed = machine.plan, machine.plan.engine == "deepspeed"
    # DeepSpeed's kernels for Adam, and a GPU's torch.compile, do without a compiler of this standard.
    level = warning if plan.compile or deepspeed else note
    on_cpu = plan.device == "cpu" or not torch.cuda.is_available()
    # A training ends without one for inductor's kernels on a CPU, and for DeepSpeed's disk.
    if (plan.compile and on_cpu) or (deepspeed and plan.offload.startswith("nvme")):
        level = error
    load = of_site(machine.environment)
    name = of_name(machine.environment)
    if name is None:
        yield level("there is no C++ compiler on the PATH", why=USERS, do=load)
        return
    version = version_of(name)
    yield from of_standard(name, version, load, warning if level is note else level)
    yield from of_python(Path(sysconfig.get_paths()["include"]), load, level)
    yield from of_nvcc(version)


def of_site(environment: Mapping[str, str]) -> str:
    """Returns the command that brings a compiler here: the site's modules, or a package."""
    modules = sites.find(sites.current(environment)).job.modules
    if modules or "LMOD_CMD" in environment or "MODULESHOME" in environment:
        return f"module load {' '.join(('gcc', *modules))}"
    return "install one: apt install g++, or conda install gxx"


def of_name(environment: Mapping[str, str]) -> str | None:
    """Returns the compiler: $CXX, which torch takes first, or what is on the PATH; None if there is none."""
    candidates = (environment.get("CXX", ""), *COMPILERS)
    return next((name for name in candidates if name and shutil.which(name)), None)


def version_of(compiler: str) -> tuple[str, tuple[int, ...]]:
    """Returns a compiler's kind, gcc or clang, and its version; no numbers where it does not print them."""
    try:
        text = command.run(compiler, "--version")
    except GrappeError:
        return "", ()
    match = re.search(r"\d+\.\d+(\.\d+)?", re.sub(r"\([^)]*\)", "", text.partition("\n")[0]))
    numbers = tuple(int(part) for part in match[0].split(".")) if match else ()
    return ("clang" if "clang" in text else "gcc"), numbers


def of_standard(
    name: str, compiler: tuple[str, tuple[int, ...]], load: str, level: Callable[..., Finding]
) -> Iterator[Finding]:
    """Returns a finding where the compiler cannot build for this torch, whose headers are of C++20."""
    try:
        command.run(name, f"-std={STANDARD}", "-fsyntax-only", "-x", "c++", "-", words=PROGRAM)
    except GrappeError:
        version = ".".join(map(str, compiler[1]))
        yield level(
            f"the C++ compiler {name} ({f'{compiler[0]} {version}' if version else 'of no version'}) does not fit",
            why=f"torch's extensions are compiled with -std={STANDARD}, which gcc has from 10 on, and clang from 10 on",
            do=load,
        )


def of_python(include: Path, load: str, level: Callable[..., Finding]) -> Iterator[Finding]:
    """Returns a finding where Python's own headers are missing."""
    if not (include / "Python.h").is_file():
        remedy = load if load.startswith("module") else "apt install python3-dev, or take a Python with its headers"
        yield level(
            f"there is no Python.h in {include}", why=f"this Python's headers are not installed: {USERS}", do=remedy
        )


def of_nvcc(compiler: tuple[str, tuple[int, ...]]) -> Iterator[Finding]:
    """Returns findings for nvcc, where there is one and torch is built for CUDA."""
    import torch

    built = torch.version.cuda
    if built is None or shutil.which("nvcc") is None:
        return
    from torch.utils import cpp_extension

    bounds = cpp_extension.CUDA_CLANG_VERSIONS if compiler[0] == "clang" else cpp_extension.CUDA_GCC_VERSIONS
    try:
        text = command.run("nvcc", "--version")
    except GrappeError as mistake:
        yield warning(
            f"nvcc does not run: {mistake}", why="extensions for CUDA cannot be built", do="check CUDA_HOME and PATH"
        )
        return
    match = re.search(r"release (\d+\.\d+)", text)
    if match:
        yield from of_cuda(match[1], built, compiler, bounds.get(match[1]))


def of_cuda(nvcc: str, built: str, compiler: tuple[str, tuple[int, ...]], bounds: Bounds | None) -> Iterator[Finding]:
    """Returns findings for the versions of nvcc, of the CUDA that torch is built for, and of the compiler."""
    if nvcc.partition(".")[0] != built.partition(".")[0]:
        yield warning(
            f"nvcc is of CUDA {nvcc}, and torch is built for {built}",
            why="extensions for CUDA are refused by torch when they are built",
            do=f"module load cuda/{built}, or install that toolkit, and set CUDA_HOME",
        )
    if bounds and compiler[1] and not bounds[0] <= compiler[1] < bounds[1]:
        least, beyond = (".".join(map(str, bound)) for bound in bounds)
        yield warning(
            f"nvcc {nvcc} takes no {compiler[0]} {'.'.join(map(str, compiler[1]))}",
            why=f"it takes {compiler[0]} from {least}, and before {beyond}: extensions for CUDA cannot be built",
            do="load or install one of those, and set CXX to it",
        )
