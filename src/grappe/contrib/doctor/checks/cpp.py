"""Checks of C++: the compiler, its headers and nvcc, and extensions that do not load."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sysconfig
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from grappe import sites
from grappe.contrib.doctor.checks import Finding, Level, Machine, note, of_level, once_a_node, warning
from grappe.errors import GrappeError
from grappe.launch import command
from grappe.words import and_more

COMPILERS = ("c++", "g++", "clang++")
STANDARD = "c++20"
PROGRAM = "#include <concepts>\n#include <vector>\nint main() { return static_cast<int>(std::vector<int>().size()); }\n"
"""A program that needs a compiler of that standard and its library's headers."""
USERS = "extensions in C++, compile and grappe export need it"

Version = tuple[str, tuple[int, ...]]
"""A compiler's kind, gcc or clang, and its version; no numbers where it does not print them."""
Bounds = tuple[tuple[int, ...], tuple[int, ...]]
"""The oldest compiler that nvcc takes, and the first that is too new."""

EACH_SECONDS, ALL_SECONDS = 5.0, 20.0
"""For a library, and for all of them: each takes some milliseconds, and processors may be waiting."""
TAGGED = tuple(name for name in EXTENSION_SUFFIXES if name != ".so")
"""Suffixes of extensions that Python imports. Packages ship other libraries in variants, but load one."""
SAFE_GLIBC = (2, 27)
"""The first whose ldd never runs the file that it is asked about."""
MISSING = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
VERSION = re.compile(r"version `((?:GLIBCXX|CXXABI|GLIBC)_[\w.]+)' not found")
UNDEFINED = re.compile(r"undefined symbol: (\w+)")
PYTHON = re.compile(r"_?Py[A-Z_]")  # the interpreter has those
REQUIRES_TORCH = re.compile(r"torch\b(?!-)", re.ASCII)


@once_a_node
def check_compiler(machine: Machine) -> Iterator[Finding]:
    """Tries the compiler that torch would take on a small program; looks for Python's headers, and for nvcc."""
    import torch

    plan, deepspeed = machine.plan, machine.plan.engine == "deepspeed"
    # DeepSpeed's kernels for Adam, and a GPU's torch.compile, do without a compiler of this standard.
    level: Level = "warning" if plan.compile or deepspeed else "note"
    on_cpu = plan.device == "cpu" or not torch.cuda.is_available()
    # A training ends without one for inductor's kernels on a CPU, and for DeepSpeed's disk.
    if (plan.compile and on_cpu) or (deepspeed and plan.offload.startswith("nvme")):
        level = "error"
    load = compiler_remedy(machine.environment)
    name = compiler_name(machine.environment)
    if name is None:
        yield of_level(level, "there is no C++ compiler on the PATH", why=USERS, do=load)
        return
    compiler = compiler_version(name)
    try:
        command.run(name, f"-std={STANDARD}", "-fsyntax-only", "-x", "c++", "-", words=PROGRAM)
    except GrappeError:
        version = ".".join(map(str, compiler[1]))
        yield of_level(
            "warning" if level == "note" else level,
            f"the C++ compiler {name} ({f'{compiler[0]} {version}' if version else 'of no version'}) does not fit",
            why=f"torch's extensions are compiled with -std={STANDARD}, which gcc has from 10 on, and clang from 10 on",
            do=load,
        )
    yield from of_headers(Path(sysconfig.get_paths()["include"]), load, level)
    if torch.version.cuda is not None and shutil.which("nvcc") is not None:
        yield from of_nvcc(compiler, torch.version.cuda)


def compiler_remedy(environment: Mapping[str, str]) -> str:
    """Returns the command that brings a compiler here: the site's modules, or a package."""
    modules = sites.find(sites.current(environment)).job.modules
    if modules or "LMOD_CMD" in environment or "MODULESHOME" in environment:
        return f"module load {' '.join(('gcc', *modules))}"
    return "install one: apt install g++, or conda install gxx"


def compiler_name(environment: Mapping[str, str]) -> str | None:
    """Returns the compiler: $CXX, which torch takes first, or what is on the PATH; None if there is none."""
    candidates = (environment.get("CXX", ""), *COMPILERS)
    return next((name for name in candidates if name and shutil.which(name)), None)


def compiler_version(compiler: str) -> Version:
    """Returns a compiler's kind and version; ("", ()) if it does not run."""
    try:
        text = command.run(compiler, "--version")
    except GrappeError:
        return "", ()
    match = re.search(r"\d+\.\d+(\.\d+)?", re.sub(r"\([^)]*\)", "", text.partition("\n")[0]))
    numbers = tuple(int(part) for part in match[0].split(".")) if match else ()
    return ("clang" if "clang" in text else "gcc"), numbers


def of_headers(include: Path, load: str, level: Level) -> Iterator[Finding]:
    """Returns a finding where Python's own headers are missing."""
    if not (include / "Python.h").is_file():
        remedy = load if load.startswith("module") else "apt install python3-dev, or take a Python with its headers"
        what = f"there is no Python.h in {include}"
        yield of_level(level, what, why=f"this Python's headers are not installed: {USERS}", do=remedy)


def of_nvcc(compiler: Version, built: str) -> Iterator[Finding]:
    """Returns findings for the installed nvcc, by the CUDA that torch is built for."""
    from torch.utils import cpp_extension

    bounds = cpp_extension.CUDA_CLANG_VERSIONS if compiler[0] == "clang" else cpp_extension.CUDA_GCC_VERSIONS
    try:
        text = command.run("nvcc", "--version")
    except GrappeError as mistake:
        yield warning(
            f"nvcc does not run: {mistake}", why="extensions for CUDA cannot be built", do="check CUDA_HOME and PATH"
        )
        return
    if match := re.search(r"release (\d+\.\d+)", text):
        yield from of_cuda(match[1], built, compiler, bounds.get(match[1]))


def of_cuda(nvcc: str, built: str, compiler: Version, bounds: Bounds | None) -> Iterator[Finding]:
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


@once_a_node
def check_extensions(machine: Machine) -> Iterator[Finding]:
    """Asks the dynamic linker about extensions next to the task; outside jobs, in packages that need torch, too."""
    file, own = Path((machine.task or "").rpartition(":")[0] or machine.task or ""), list[Path]()
    if file.suffix == ".py" and file.is_file():  # setup.py build_ext --inplace puts libraries next to it, or below
        own = sorted(library for form in ("*.so", "*/*.so") for library in file.absolute().parent.glob(form))
    others = [] if machine.job else [name for name in installed_extensions() if name not in own]
    files = list(dict.fromkeys((*own, *others)))
    if files and ldd_runs_files(*platform.libc_ver()):
        yield note(
            f"{len(files)} extensions in C++ are not looked at",
            why=f"this system's ldd (glibc {platform.libc_ver()[1]}) may run the file that it is asked about",
        )
        return
    yield from of_extensions(files, own, compiler_remedy(machine.environment))


def of_extensions(
    files: Sequence[Path], own: Collection[Path], load: str, seconds: float = ALL_SECONDS
) -> Iterator[Finding]:
    """Asks about `files` while there is time; a warning for the task's `own` files, a note for others."""
    import torch

    home = Path(torch.__file__).parent
    libraries = [home / "lib", *home.parent.glob("nvidia/*/lib")]
    end, left = time.monotonic() + seconds, []
    for file in files:
        text = ldd_output(file, libraries) if time.monotonic() < end else None
        if text is None:
            left.append(file)
        else:
            yield from of_ldd(file, text, load, torch.__version__, "warning" if file in own else "note")
    if left:
        yield note(f"{and_more(left, 1)} is not looked at: ldd takes too long")


def ldd_runs_files(library: str, version: str) -> bool:
    """Returns whether the ldd of this C library may run the file that it is asked about."""
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    return library == "glibc" and bool(numbers) and numbers < SAFE_GLIBC


def installed_extensions() -> Iterator[Path]:
    """Lists the extensions of installed packages that require torch."""
    for package in metadata.distributions():
        if any(REQUIRES_TORCH.match(name) and "extra ==" not in name for name in package.requires or ()):
            named = (name for name in package.files or () if name.name.endswith(TAGGED))
            yield from (path for name in named if (path := Path(str(package.locate_file(name)))).is_file())


def ldd_output(file: Path, libraries: Iterable[Path]) -> str | None:
    """Returns what `ldd -r` says, with torch's libraries where they are once torch is imported; None: no answer."""
    before = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    path = ":".join((*map(str, libraries), *filter(None, before)))
    try:
        return command.run(
            "ldd", "-r", str(file), both=True, seconds=EACH_SECONDS, environment={**os.environ, "LD_LIBRARY_PATH": path}
        )
    except command.Missing:
        return ""
    except command.Failed as mistake:
        return None if mistake.code is None else str(mistake)


def of_ldd(file: Path, text: str, load: str, torch: str, level: Level = "warning") -> Iterator[Finding]:
    """Returns findings for the output of `ldd -r` on `file`."""
    missing = sorted(set(MISSING.findall(text)))
    if missing:
        cuda = any(re.match(r"lib(torch_cuda|c10_cuda|cu)", name) for name in missing)
        yield of_level(
            level,
            f"{file} needs {', '.join(missing)}: not found by the dynamic linker",
            why="it cannot be imported"
            + (f"; it is built for CUDA, and this torch is {torch}" if cuda and "+cpu" in torch else ""),
            do="build it again with this torch"
            if cuda
            else f"{load} as when it was built, or set LD_LIBRARY_PATH to the library's folder",
        )
    versions = sorted(set(VERSION.findall(text)))
    if versions:
        yield of_level(
            level,
            f"{file} needs {versions[-1]}, which the library that is found here has not",
            why="its compiler is newer than the libstdc++ or libc that Python finds",
            do=f"{load}, which brings its library too; or build it here",
        )
    unknown = [name for name in UNDEFINED.findall(text) if not PYTHON.match(name)]
    if unknown and not missing:
        other = any(part in unknown[0] for part in ("3c10", "2at", "5torch"))
        yield of_level(
            level,
            f"{file} needs {unknown[0]}, which no library has"
            + (f" ({len(unknown)} such symbols)" if len(unknown) > 1 else ""),
            why=f"it was built for another torch than {torch}, or for another ABI of C++"
            if other
            else "a library that it was built with is missing, or another version of it is found",
            do="build it again: pip install --no-build-isolation --force-reinstall --no-deps FOLDER"
            if other
            else f"{load}, as when it was built",
        )
