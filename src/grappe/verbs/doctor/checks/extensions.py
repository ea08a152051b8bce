"""Check of extensions in C++: libraries that are missing, and extensions that were built for another torch."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from grappe.launch import command
from grappe.verbs.doctor.checks import Finding, Machine, note, warning
from grappe.verbs.doctor.checks.compiler import of_site
from grappe.words import and_more

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


def check(machine: Machine) -> Iterator[Finding]:
    """Asks the dynamic linker about extensions next to the task; outside jobs, in packages that need torch, too."""
    if not machine.is_node_leader:
        return
    own = list(of_task(machine.task))
    others = [] if machine.job else [name for name in of_packages() if name not in own]
    files = list(dict.fromkeys((*own, *others)))
    if files and runs_files(*platform.libc_ver()):
        yield note(
            f"{len(files)} extensions in C++ are not looked at",
            why=f"this system's ldd (glibc {platform.libc_ver()[1]}) may run the file that it is asked about",
        )
        return
    yield from of_files(files, own, of_site(machine.environment))


def of_files(
    files: Sequence[Path], own: Collection[Path], load: str, seconds: float = ALL_SECONDS
) -> Iterator[Finding]:
    """Asks about `files` while there is time; a warning for the task's `own` files, a note for others."""
    import torch

    home = Path(torch.__file__).parent
    libraries = [home / "lib", *home.parent.glob("nvidia/*/lib")]
    end, left = time.monotonic() + seconds, []
    for file in files:
        text = answer(file, libraries) if time.monotonic() < end else None
        if text is None:
            left.append(file)
        else:
            yield from of_answer(file, text, load, torch.__version__, warning if file in own else note)
    if left:
        yield note(f"{and_more(left, 1)} is not looked at: ldd takes too long")


def runs_files(library: str, version: str) -> bool:
    """Returns whether the ldd of this C library may run the file that it is asked about."""
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    return library == "glibc" and bool(numbers) and numbers < SAFE_GLIBC


def of_task(task: str | None) -> Iterator[Path]:
    """Lists the libraries next to a task's file and in folders there: setup.py build_ext --inplace puts them there."""
    file = Path((task or "").rpartition(":")[0] or task or "")
    if file.suffix == ".py" and file.is_file():
        folder = file.absolute().parent
        yield from sorted((*folder.glob("*.so"), *folder.glob("*/*.so")))


def of_packages() -> Iterator[Path]:
    """Lists the extensions of installed packages that require torch."""
    for package in metadata.distributions():
        if any(REQUIRES_TORCH.match(name) and "extra ==" not in name for name in package.requires or ()):
            named = (name for name in package.files or () if name.name.endswith(TAGGED))
            yield from (path for name in named if (path := Path(str(package.locate_file(name)))).is_file())


def answer(file: Path, libraries: Iterable[Path]) -> str | None:
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


def of_answer(
    file: Path, text: str, load: str, torch: str, level: Callable[..., Finding] = warning
) -> Iterator[Finding]:
    """Returns findings for the output of `ldd -r` on `file`."""
    missing = sorted(set(MISSING.findall(text)))
    if missing:
        cuda = any(re.match(r"lib(torch_cuda|c10_cuda|cu)", name) for name in missing)
        yield level(
            f"{file} needs {', '.join(missing)}: not found by the dynamic linker",
            why="it cannot be imported"
            + (f"; it is built for CUDA, and this torch is {torch}" if cuda and "+cpu" in torch else ""),
            do="build it again with this torch"
            if cuda
            else f"{load} as when it was built, or set LD_LIBRARY_PATH to the library's folder",
        )
    versions = sorted(set(VERSION.findall(text)))
    if versions:
        yield level(
            f"{file} needs {versions[-1]}, which the library that is found here has not",
            why="its compiler is newer than the libstdc++ or libc that Python finds",
            do=f"{load}, which brings its library too; or build it here",
        )
    unknown = [name for name in UNDEFINED.findall(text) if not PYTHON.match(name)]
    if unknown and not missing:
        other = any(part in unknown[0] for part in ("3c10", "2at", "5torch"))
        yield level(
            f"{file} needs {unknown[0]}, which no library has"
            + (f" ({len(unknown)} such symbols)" if len(unknown) > 1 else ""),
            why=f"it was built for another torch than {torch}, or for another ABI of C++"
            if other
            else "a library that it was built with is missing, or another version of it is found",
            do="build it again: pip install --no-build-isolation --force-reinstall --no-deps FOLDER"
            if other
            else f"{load}, as when it was built",
        )
