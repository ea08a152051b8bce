"""Causes of errors outside the user's code: refused memory, processes and threads, and broken packages."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import itertools
import os
import re
import resource
import sysconfig
import traceback
from collections.abc import Iterable
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path

from grappe.errors import GrappeError
from grappe.words import and_more

WORDS = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory", "bad_alloc")
WHERE_LIMITED = ("can't start new thread", "could not create a primitive")
"""Python's words and oneDNN's, for which there are other reasons where memory is not limited."""
LIMITS = {resource.RLIMIT_DATA: "`ulimit -d`", resource.RLIMIT_AS: "`ulimit -v`"}
"""Limits of a process's memory, and the shell's words that set them."""


def limits_set() -> list[str]:
    """Returns the shell's words for the limits that this process's memory has."""
    return [words for kind, words in LIMITS.items() if resource.getrlimit(kind)[0] != resource.RLIM_INFINITY]


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether `error` is an out-of-memory error, of a CPU or a GPU."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    is_candidate = isinstance(error, RuntimeError | OSError) and not isinstance(error, GrappeError)
    # Without a limit of the address space, or of data, a thread's stack always has room: then it is threads that are
    # limited.
    words = (*WORDS, *WHERE_LIMITED) if limits_set() else WORDS
    return is_candidate and any(word in str(error) for word in words)


THREADS = ("can't start new thread", "Resource temporarily unavailable")
"""Python's words, and a C++ library's (gloo)."""


def refused_process(error: BaseException) -> str | None:
    """One line where `error` means that the system starts no further process or thread; else None."""
    # An EAGAIN about a file, or from a pipe that is full, is something else: the first has a name.
    forked = isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN and error.filename is None
    threaded = isinstance(error, RuntimeError) and any(words in str(error) for words in THREADS)
    if not forked and not threaded:
        return None
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    most = "as many as the system allows" if limit == resource.RLIM_INFINITY else str(limit)
    return (
        "the system starts no further process or thread: this user may have "
        f"{most} (ulimit -u), those of other programs included, and each needs memory (ulimit -v): end other "
        "programs, raise the limit, or use a plan of fewer processes with threads=1,workers=0"
    )


WATCHED = ("torch", "numpy", "lightning", "deepspeed", "torchmetrics", "torchvision", "grappe")
"""Named first: what grappe, or a task, imports most."""


IMPORT_FAILED = re.compile(
    r"\b(?:ImportError|ModuleNotFoundError)\b|AttributeError: (?:partially initialized )?module '(\w+)"
)


def hiding(traceback_text: str, pythonpath: str) -> dict[str, str]:
    """Returns those of the hidden modules that can be why an import, or a module's attribute, failed."""
    failed = IMPORT_FAILED.search(traceback_text)
    hidden = {} if failed is None else hidden_modules(pythonpath)
    return {entry: and_more(names, 5) for entry, names in hidden.items() if failed and (failed[1] or names[0]) in names}


def hidden_modules(pythonpath: str) -> dict[str, list[str]]:
    """Maps the folders of PYTHONPATH to the installed modules that they hide; those of WATCHED come first."""
    own = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    resolved = {Path(folder).resolve() for folder in own}
    hidden = {}
    for entry in filter(None, pythonpath.split(os.pathsep)):
        files = (
            () if Path(entry).resolve() in resolved else (*Path(entry).glob("*.py"), *Path(entry).glob("*/__init__.py"))
        )
        names = sorted({file.parent.name if file.stem == "__init__" else file.stem for file in files})
        specs = [PathFinder.find_spec(name, own) for name in names]
        if installed := [spec.name for spec in specs if spec is not None and spec.has_location]:
            hidden[entry] = sorted(installed, key=lambda name: (name not in WATCHED, name))
    return hidden


COMPANIONS = ("torchvision", "torchaudio")
"""Companions of torch, each made for one version of it."""


def unfit_packages(names: Iterable[str] = COMPANIONS) -> list[str]:
    """Names the installed companions of torch that require another version of it: their import often fails."""
    lines = []
    for name, torch in itertools.product(names, distributions(name="torch")):
        for companion in distributions(name=name):
            pinned = re.search(
                r"^torch ?\(?==([^\s,;)*]+)(?=[\s,;)]|$)", "\n".join(companion.requires or ()), re.MULTILINE
            )
            if pinned is not None and pinned[1] not in (torch.version, torch.version.partition("+")[0]):
                lines.append(
                    f"{name} {companion.version} is made for torch {pinned[1]}, and torch {torch.version} is "
                    f"installed: install a {name} that fits, or remove it: pip uninstall {name}"
                )
    return lines


def broken_package(error: BaseException) -> str | None:
    """One line on the installed package in whose own import `error` was raised; None where it was in none."""
    package: str | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "<module>":
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if package in (None, "", "__main__", "grappe", "torch"):
        return None
    with contextlib.suppress(Exception):  # metadata of whatever form
        for name in importlib.metadata.packages_distributions().get(package, [package]):
            text = str(error).strip().partition("\n")[0]
            version = importlib.metadata.version(name)
            return (
                f"{name} {version} cannot be imported ({type(error).__name__}: {text}); it "
                f"may not fit torch {importlib.metadata.version('torch')}: install a {name} that does, or remove it: "
                f"pip uninstall {name}"
            )
    return None
