"""Check of extensions in C++: libraries that are missing, and extensions that were built for another torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from grappe.errors import GrappeError
from grappe.launch import command
from grappe.verbs.doctor.checks.compiler import of_site
from grappe.verbs.doctor.finding import Finding, Machine, warning

MOST = 60
"""Libraries that are looked at: each takes some milliseconds."""
MISSING = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
VERSION = re.compile(r"version `((?:GLIBCXX|CXXABI|GLIBC)_[\w.]+)' not found")
UNDEFINED = re.compile(r"undefined symbol: (\w+)")
PYTHON = re.compile(r"_?Py[A-Z_]")  # the interpreter has those
REQUIRES_TORCH = re.compile(r"torch\b(?!-)", re.ASCII)


def check(machine: Machine) -> Iterator[Finding]:
    """Asks the dynamic linker about the extensions of packages that require torch, and of those beside the task."""
    if not machine.is_node_leader:
        return
    import torch

    home = Path(torch.__file__).parent
    libraries = [home / "lib", *home.parent.glob("nvidia/*/lib")]
    load = of_site(machine.environment)
    for file in list(dict.fromkeys((*of_task(machine.task), *of_packages())))[:MOST]:
        yield from of_answer(file, answer(file, libraries), load, torch.__version__)


def of_task(task: str | None) -> Iterator[Path]:
    """Lists the libraries beside a task's file, and in folders there, where setup.py build_ext --inplace puts any."""
    file = Path((task or "").rpartition(":")[0] or task or "")
    if file.suffix == ".py" and file.is_file():
        folder = file.absolute().parent
        yield from sorted((*folder.glob("*.so"), *folder.glob("*/*.so")))


def of_packages() -> Iterator[Path]:
    """Lists the libraries of installed packages that require torch."""
    for package in metadata.distributions():
        if any(REQUIRES_TORCH.match(one) and "extra ==" not in one for one in package.requires or ()):
            named = (one for one in package.files or () if one.suffix == ".so")
            yield from (found for one in named if (found := Path(str(package.locate_file(one)))).is_file())


def answer(file: Path, libraries: Iterable[Path]) -> str:
    """Returns what `ldd -r` says of a library, with torch's own where they are once torch is imported."""
    before = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    path = ":".join((*map(str, libraries), *filter(None, before)))
    try:
        return command.run(
            "ldd", "-r", str(file), both=True, environment={**os.environ, "LD_LIBRARY_PATH": path}
        )
    except command.Missing:
        return ""
    except GrappeError as mistake:
        return str(mistake)


def of_answer(file: Path, text: str, load: str, torch: str) -> Iterator[Finding]:
    """Returns findings for what `ldd -r` said of `file`."""
    missing = sorted(set(MISSING.findall(text)))
    if missing:
        cuda = any(re.match(r"lib(torch_cuda|c10_cuda|cu)", one) for one in missing)
        yield warning(
            f"{file} needs {', '.join(missing)}: not found by the dynamic linker",
            "it cannot be imported"
            + (f"; it is built for CUDA, and this torch is {torch}" if cuda and "+cpu" in torch else ""),
            "build it again with this torch"
            if cuda
            else f"{load} as when it was built, or set LD_LIBRARY_PATH to the library's folder",
        )
    versions = sorted(set(VERSION.findall(text)))
    if versions:
        yield warning(
            f"{file} needs {versions[-1]}, which the library that is found here has not",
            "its compiler is newer than the libstdc++ or libc that Python finds",
            f"{load}, which brings its library too; or build it here",
        )
    unknown = [one for one in UNDEFINED.findall(text) if not PYTHON.match(one)]
    if unknown and not missing:
        other = any(part in unknown[0] for part in ("3c10", "2at", "5torch"))
        yield warning(
            f"{file} needs {unknown[0]}, which no library has"
            + (f" ({len(unknown)} such symbols)" if len(unknown) > 1 else ""),
            f"it was built for another torch than {torch}, or for another ABI of C++"
            if other
            else "a library that it was built with is missing, or another one is found",
            "build it again: pip install --no-build-isolation --force-reinstall --no-deps FOLDER"
            if other
            else f"{load}, as when it was built",
        )
