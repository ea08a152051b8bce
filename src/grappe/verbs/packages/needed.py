"""Works out which packages a job needs: the engine's, the loggers', the task's imports, and the user's own requests."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from grappe.errors import UsageError
from grappe.sites.environment import Packages, packages
from grappe.sites.wheel import own_wheel
from grappe.verbs.packages.imports import packages_of_file, packages_of_task
from grappe.verbs.packages.resolve import Unresolvable, Wheelhouse, resolve

REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)(\[[\w.,-]+\])?((===?|~=|!=|<=?|>=?)[\w.*+!-]+(,(===?|~=|!=|<=?|>=?)[\w.*+!-]+)*)?",
    re.ASCII,
)
SEPARATORS = re.compile(r"[-_.]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackageRequests:
    """The parts of a job that need packages."""

    task: str | None = None
    """A task's reference."""
    script: Path | None = None
    """A Python script of the user's own."""
    features: tuple[str, ...] = ()
    """Engines and loggers: names of extras, where they have packages of their own."""
    requested: tuple[str, ...] = ()
    file: Path | None = None


def prepare(needs: PackageRequests, house: Wheelhouse, *, ask_pip: bool) -> tuple[Packages, str]:
    """Returns the packages of a job's environment, and the reason why they are not resolved; "" if they are.

    Args:
        ask_pip: resolve them against the wheelhouse.

    Raises:
        UsageError: a request is malformed, or the wheelhouse lacks packages.
    """
    wheel = own_wheel()
    extras = sorted({feature for feature in needs.features if feature in _extras()})
    lines = requirements(needs)
    why = "the script is only shown"
    if ask_pip:
        try:
            resolved = resolve(wheel, extras, lines, house)
        except Unresolvable as error:
            why = str(error)
        else:
            depends = [resolved.python, *house.modules, str(house.on_modules)]
            return packages(wheel, resolved.requirements, depends, locked=True), ""
    loose = [*_own(extras), *lines]
    depends = [*house.modules, str(house.on_modules)]
    return packages(wheel, loose, depends, locked=False), why


def requirements(needs: PackageRequests) -> list[str]:
    """Lists the requirements besides grappe and its extras; a request of the user replaces an import's package.

    Raises:
        UsageError: a request is malformed, or its file is missing.
    """
    for requirement in needs.requested:
        if not REQUIREMENT.fullmatch(requirement):
            raise UsageError(
                f"--with {requirement}: give a package's name, NAME==VERSION, or 'NAME>=VERSION'"
            )
    read = packages_of_task(needs.task) if needs.task else []
    read += packages_of_file(needs.script) if needs.script else []
    asked = {_plain(requirement) for requirement in needs.requested}
    own = {_plain(requirement) for requirement in _own(())} | {"grappe"}
    lines = [requirement for requirement in dict.fromkeys(read) if _plain(requirement) not in asked | own]
    lines += needs.requested
    if needs.file is not None:
        if not needs.file.is_file():
            raise UsageError(f"--requirements={needs.file}: there is no such file")
        lines.append(f"-r {needs.file.absolute()}")
    return lines


def _extras() -> Sequence[str]:
    return importlib.metadata.metadata("grappe").get_all("Provides-Extra") or ()


def _own(extras: Iterable[str]) -> list[str]:
    """Returns the requirements in grappe's metadata, with those of these extras."""
    lines = importlib.metadata.requires("grappe") or []
    conditions = [f"extra == {quote}{extra}{quote}" for extra in extras for quote in "'\""]
    return [
        text.strip()
        for text, _, marker in (line.partition(";") for line in lines)
        if not marker or any(condition in marker for condition in conditions)
    ]


def _plain(requirement: str) -> str:
    """Returns a package's name in the form that pip compares."""
    match = REQUIREMENT.match(requirement.replace(" ", ""))
    return SEPARATORS.sub("-", match["name"]).lower() if match else requirement
