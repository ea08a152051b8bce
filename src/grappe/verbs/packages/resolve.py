"""Resolves packages against the cluster's wheelhouse with pip, on the login node, before anything is queued."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from grappe.errors import UsageError
from grappe.launch import command
from grappe.sites.wheel import packed

PIP_SECONDS = 300.0
MOST_MISSING = 40
MISSING = re.compile(
    r"Could not find a version that satisfies the requirement (?P<what>.+?)"
    r"(?: \(from (?!versions)(?P<by>[^)]*)\))? \(from versions: (?P<versions>[^)]*)\)"
)
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
VERSION = re.compile(r"(?:===?|>=|~=|<=)\s*([\w.+!-]+)")
# Words stay words: modules are loaded by their names, and what follows is started as it is.
WITH_MODULES = """\
command -v module >/dev/null || exit 97
count=$1; shift
module purge && module load "${@:1:count}" || exit 98
shift "$count"
exec "$@\""""
NO_MODULES, NO_SUCH_MODULE = 97, 98
TOO_OLD = ("no such option: --dry-run", "no such option: --report", "No module named pip")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wheelhouse:
    """Source of packages on a cluster."""

    modules: tuple[str, ...]
    wheels: Path | None
    on_modules: bool
    """Whether the environment stands on top of what the modules hold, and lacks only the rest."""
    site: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class MissingPackage:
    """A package that the wheelhouse lacks."""

    what: str
    """With the versions that would do."""
    by: str
    """The package that needs it; "": the user's own request."""
    versions: str
    """Those that there are; "": none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
    """The packages to install, each with its version."""

    requirements: list[str]
    python: str


class Unresolvable(Exception):
    """Nothing can be resolved on this machine; the message says why."""


def resolve(
    wheel: tuple[str, bytes], extras: Sequence[str], requirements: Sequence[str], house: Wheelhouse
) -> Resolved:
    """Resolves the versions that pip would install on a node.

    Args:
        wheel: grappe's own; what it needs is needed.
        requirements: what else is, each as pip writes it, or `-r FILE`.

    Raises:
        UsageError: packages are missing, all named with what to do, or they do not fit each other.
        Unresolvable: this machine has no modules, or an old pip.
    """
    with tempfile.TemporaryDirectory(prefix="grappe-packages-") as name:
        folder = Path(name)
        (folder / wheel[0]).write_bytes(wheel[1])
        own = f"{folder / wheel[0]}[{','.join(extras)}]" if extras else str(folder / wheel[0])
        missing: list[MissingPackage] = []
        while True:
            output = _pip(folder, [own, *requirements], house)
            if output is None:
                break
            match = MISSING.search(output)
            package = match and MissingPackage(
                what=match["what"], by=match["by"] or "", versions=_versions(match["versions"])
            )
            if (
                package is None
                or len(missing) == MOST_MISSING
                or package.what in {other.what for other in missing}
            ):
                if not missing:
                    raise UsageError(f"these packages do not fit each other (pip):\n{_words(output, folder)}")
                break
            missing.append(package)
            if not _stand_in(folder, package.what):
                break
        if missing:
            raise UsageError(_message(missing, house))
        return _report(folder)


def _pip(folder: Path, requirements: list[str], house: Wheelhouse) -> str | None:
    """Returns pip's error message; None if pip would install the packages."""
    python = "python" if house.modules else sys.executable
    words = [python, "-m", "pip", "install", "--dry-run", "--quiet", "--no-index", "--no-cache-dir"]
    words += ["--disable-pip-version-check", "--no-input", "--report", str(folder / "report.json")]
    words += ["--find-links", str(folder)]
    if house.wheels is not None:
        words += ["--find-links", str(house.wheels)]
    if not house.on_modules:
        words.append("--ignore-installed")
    for requirement in requirements:
        words += requirement.split(" ", 1) if requirement.startswith("-r ") else [requirement]
    if house.modules:
        words = ["bash", "-c", WITH_MODULES, "bash", str(len(house.modules)), *house.modules, *words]
    # As in the job: neither the user's own packages nor those of another Python.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        command.run(*words, seconds=PIP_SECONDS, environment={**clean, "PYTHONNOUSERSITE": "1"})
    except command.Failed as error:
        output = str(error)
        if error.code == NO_MODULES:
            raise Unresolvable(
                f"there are no modules on this machine ({house.site}'s login node has)"
            ) from None
        if error.code == NO_SUCH_MODULE:
            raise UsageError(
                f"--modules {','.join(house.modules)}: {output.removeprefix('bash: ')}\n  module avail lists them"
            ) from None
        for why in TOO_OLD:
            if why in output:
                raise Unresolvable(f"pip of {python} is too old ({why})") from None
        return output
    return None


def _stand_in(folder: Path, what: str) -> bool:
    """Replaces a missing package by an empty one, so that pip names the next one; returns whether it could."""
    name, *_ = NAME.findall(what)
    needs: list[str] = []
    version = match[1] if (match := VERSION.search(what)) else "0"
    try:
        here = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        needs = [requirement for requirement in here.requires or () if "extra ==" not in requirement]
        version = here.version.partition("+")[0] if "==" not in what else version
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in needs)
    file, content = packed(re.sub(r"[-_.]+", "_", name), version, {"METADATA": metadata}, {})
    if (folder / file).exists():
        return False
    (folder / file).write_bytes(content)
    return True


def _versions(text: str) -> str:
    return "" if text == "none" else text


def _words(output: str, folder: Path) -> str:
    lines = [line.partition("ERROR: ")[2] or line for line in output.replace(f"{folder}/", "").splitlines()]
    return "\n".join(f"  {line}" for line in lines if line.strip() and "[notice]" not in line)


def _message(missing: Sequence[MissingPackage], house: Wheelhouse) -> str:
    count = f"{len(missing)} packages" if len(missing) > 1 else "a package"
    where = f"{house.site} ({', '.join(house.modules)})" if house.modules else house.site
    lines = [f"the wheels of {where} lack {count}, and nothing was submitted:"]
    for package in missing:
        needed = f", which {package.by} needs" if package.by else ""
        lines.append(f"  {package.what}{needed}: there is {package.versions or 'none'}")
    names = " ".join(shlex.quote(package.what.replace(" ", "")) for package in missing)
    folder = shlex.quote(str(house.wheels or "wheels"))
    lines += [
        f"Fetch them once, where there is internet (the login node, often), and submit again with --wheels {folder}:",
        f"  python -m pip download --no-deps --dest {folder} {names}",
    ]
    if any(package.versions for package in missing):
        lines.append("Or take a version that is there (--with NAME==VERSION), or other --modules.")
    return "\n".join(lines)


def _report(folder: Path) -> Resolved:
    report = json.loads((folder / "report.json").read_text())
    packages = [(entry["metadata"]["name"], entry["metadata"]["version"]) for entry in report["install"]]
    machine = report["environment"]
    return Resolved(
        requirements=sorted(f"{name}=={version}" for name, version in packages if name != "grappe"),
        python=f"{machine['python_full_version']} {machine['platform_machine']}",
    )
