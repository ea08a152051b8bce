"""Packages of a job: what its imports need, resolved against the cluster's wheelhouse by pip before anything is queued.

A Python file's imports are read from its text: nothing of the file is run.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from grappe import finder
from grappe.contrib.slurm import environment
from grappe.contrib.slurm.resources import Submission
from grappe.contrib.slurm.script import Script
from grappe.errors import GrappeError, UsageError
from grappe.errors.remedies import remedy
from grappe.launch import command
from grappe.launch.terminal import progress
from grappe.plan import Plan
from grappe.sites.sbatch import TUNE
from grappe.sites.schema import Site
from grappe.training.run import Run

PIP_SECONDS = 300.0
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


class Unresolvable(Exception):
    """Nothing can be resolved on this machine; the message says why."""


def resolve(
    wheel: tuple[str, bytes], extras: Sequence[str], requirements: Sequence[str], house: Wheelhouse
) -> tuple[list[str], str]:
    """Resolves the versions that pip would install on a node; returns them, sorted, and the node's Python.

    Args:
        wheel: grappe's own, whose requirements are resolved.
        requirements: further ones, each as pip writes it, or `-r FILE`.

    Raises:
        UsageError: packages are missing, all named with what to do, or they do not fit each other.
        Unresolvable: this machine has no modules, or an old pip.
    """
    with tempfile.TemporaryDirectory(prefix="grappe-packages-") as name:
        folder = Path(name)
        (folder / wheel[0]).write_bytes(wheel[1])
        own = f"{folder / wheel[0]}[{','.join(extras)}]" if extras else str(folder / wheel[0])
        missing: dict[str, re.Match[str]] = {}
        while (output := _pip(folder, [own, *requirements], house, len(missing))) is not None:
            match = MISSING.search(output)
            if match is None or match["what"] in missing:
                if missing:
                    break
                lines = output.replace(f"{folder}/", "").splitlines()
                lines = [line.partition("ERROR: ")[2] or line for line in lines]
                words = "\n".join(f"  {line}" for line in lines if line.strip() and "[notice]" not in line)
                raise UsageError(f"these packages are not compatible with each other (pip):\n{words}")
            missing[match["what"]] = match
            if not _stand_in(folder, match["what"]):
                break
        if missing:
            raise UsageError(_message(missing, house))
        report = json.loads((folder / "report.json").read_text())
    installed = [(entry["metadata"]["name"], entry["metadata"]["version"]) for entry in report["install"]]
    machine = report["environment"]
    python = f"{machine['python_full_version']} {machine['platform_machine']}"
    return sorted(f"{name}=={version}" for name, version in installed if name != "grappe"), python


def _pip(folder: Path, requirements: list[str], house: Wheelhouse, lacking: int) -> str | None:
    """Returns pip's error message; None if pip would install the packages."""
    progress(f"asking pip which packages the wheels of {house.site} have ({lacking} missing so far)")
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
    try:
        run_in(house.modules, words)
    except command.Failed as error:
        output = str(error)
        if error.code == NO_MODULES:
            raise Unresolvable(f"there are no modules on this machine ({house.site}'s login node has)") from None
        if error.code == NO_SUCH_MODULE:
            raise UsageError(
                f"--modules {','.join(house.modules)}: {output.removeprefix('bash: ')}\n  module avail lists them"
            ) from None
        for why in TOO_OLD:
            if why in output:
                raise Unresolvable(f"pip of {python} is too old ({why})") from None
        return output
    finally:
        progress("")
    return None


def run_in(modules: Sequence[str], words: Sequence[str], seconds: float = PIP_SECONDS, **variables: str) -> str:
    """Runs a program as the job does: with these modules, without the user's own packages or another Python's."""
    if modules:
        words = ["bash", "-c", WITH_MODULES, "bash", str(len(modules)), *modules, *words]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return command.run(*words, seconds=seconds, environment={**clean, "PYTHONNOUSERSITE": "1", **variables})


PINNED = re.compile(r"^torch===?(\S+)$", re.MULTILINE)
INSTALLED = "print(__import__('importlib.metadata').metadata.version('torch'))"


def torch_of(script: Script) -> str:
    """Says which torch a job gets, and from where; "" if that is not known before the job."""
    kind, content = script.environment, script.packages
    if content is None:
        places = Path(kind.removeprefix("pack:")).glob("lib/python3*/site-packages")
        folders = sys.path if kind == "here" else map(str, places)
        distributions = importlib.metadata.distributions(name="torch", path=list(folders))
        return next((f"torch {torch.version}, as installed" for torch in distributions), "")
    if pinned := PINNED.search(content.files[environment.REQUIREMENTS].decode()):
        return f"torch {pinned[1]}, from wheels"
    if kind != "module" or not content.locked:
        return ""
    with contextlib.suppress(GrappeError):
        return f"torch {run_in(script.modules, ['python', '-c', INSTALLED]).strip()}, of the modules"
    return ""


def _stand_in(folder: Path, what: str) -> bool:
    """Replaces a missing package by an empty one, so that pip names the next one; returns whether it could."""
    name, *_ = NAME.findall(what)
    version = match[1] if (match := VERSION.search(what)) else "0"
    needs: list[str] = []
    for here in importlib.metadata.distributions(name=name):
        needs = [requirement for requirement in here.requires or () if "extra ==" not in requirement]
        version = here.version.partition("+")[0] if "==" not in what else version
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in needs)
    file, content = environment.packed(re.sub(r"[-_.]+", "_", name), version, {"METADATA": metadata}, {})
    if (folder / file).exists():
        return False
    (folder / file).write_bytes(content)
    return True


def _message(missing: Mapping[str, re.Match[str]], house: Wheelhouse) -> str:
    count = f"{len(missing)} packages" if len(missing) > 1 else "a package"
    where = f"{house.site} ({', '.join(house.modules)})" if house.modules else house.site
    lines = [f"the wheels of {where} lack {count}, and nothing was submitted:"]
    for what, match in missing.items():
        by, versions = match["by"], match["versions"]
        needed = f", which {by} needs" if by else ""
        lines.append(f"  {what}{needed}: there is {versions}")
    names = " ".join(shlex.quote(what.replace(" ", "")) for what in missing)
    folder = shlex.quote(str(house.wheels or "wheels"))
    lines += [
        f"Fetch them once, where there is internet (the login node, often), and submit again with --wheels {folder}:",
        f"  python -m pip download --no-deps --dest {folder} {names}",
    ]
    if any(match["versions"] != "none" for match in missing.values()):
        lines.append("Or take a version that is there (--with NAME==VERSION), or other --modules.")
    return "\n".join(lines)


# Modules whose package has another name, for those that are not installed here.
RENAMED = {
    "PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python", "skimage": "scikit-image",
    "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip
OPTIONAL = {"ImportError", "ModuleNotFoundError", "Exception"}


def packages_of_task(reference: str) -> list[str]:
    """Returns the packages that a task's file and its neighbours import, sorted."""
    place, colon, _ = reference.partition(":")
    if place.endswith(".py"):
        return packages_of_file(Path(place))
    if "." in place or colon:
        near = _beside(place, [Path.cwd()])
        if near:
            return sorted({package for file in near for package in packages_of_file(file)})
        return [package_of(place.partition(".")[0])]
    return packages_of_file(finder.SHIPPED / f"{place}.py")


def packages_of_file(file: Path) -> list[str]:
    """Returns the packages that a file and its imported neighbours import; sorted."""
    return sorted({package_of(name) for name in modules_of_file(file) - {"grappe"}})


def modules_of_file(file: Path) -> set[str]:
    """Returns the top-level modules of others that a file and its imported neighbours import."""
    places = [file.resolve().parent, Path.cwd()]
    modules: set[str] = set()
    files = [file.resolve()]
    for current in files:  # which grows by the neighbours
        for name in imported(current):
            near = _beside(name, places)
            files += [path for path in near if path not in files]
            top = name.partition(".")[0]
            if not near and top not in sys.stdlib_module_names:
                modules.add(top)
    return modules


_distributions = functools.cache(importlib.metadata.packages_distributions)  # which takes 1.5 seconds


def package_of(module: str) -> str:
    """Returns the package of a top-level module: as installed here, or by its usual name."""
    distributions = _distributions().get(module)
    return distributions[0] if distributions else RENAMED.get(module, module)


def imported(file: Path) -> list[str]:
    """Returns the modules that a file imports and cannot do without; relative imports are left out.

    A file that is not Python has none: Python will report it.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []
    return list(_names(tree))


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
        elif isinstance(node, ast.Try) and any(map(_forgives, node.handlers)):
            yield from _names(ast.Module([*node.orelse, *node.finalbody], []))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _names(node)


def _forgives(handler: ast.ExceptHandler) -> bool:
    """Returns whether the file goes on without the module."""
    if any(isinstance(statement, ast.Raise) for statement in handler.body):
        return False
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in OPTIONAL) for kind in kinds)


def _beside(name: str, places: list[Path]) -> list[Path]:
    """Returns the files of a module that lies next to the task's file."""
    parts = name.split(".")
    for place in places:
        for depth in range(len(parts), 0, -1):
            path = place.joinpath(*parts[:depth])
            files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
            if files:
                return files
            if path.is_dir() and depth == 1:
                return sorted(path.glob("*.py"))
    return []


REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)(\[[\w.,-]+\])?((===?|~=|!=|<=?|>=?)[\w.*+!-]+(,(===?|~=|!=|<=?|>=?)[\w.*+!-]+)*)?",
    re.ASCII,
)
SEPARATORS = re.compile(r"[-_.]+")
TORCH = (2, 8)
"""The oldest torch that grappe takes, as in pyproject.toml."""
ENDED = remedy("No module named 'torchtext'")
OF_TORCH = re.compile(r"torch(?:===?|<=?)(\d+)\.(\d+)|pytorch[\w-]*/(?:[^/]+/)*(\d+)\.(\d+)")
"""A torch of one version, or up to one: of --with, or of a cluster's module (pytorch-gpu/py3/2.8.0)."""


def requirements(submission: Submission) -> list[str]:
    """Lists a job's requirements beyond grappe and its extras; a request of the user replaces an import's package.

    Raises:
        UsageError: a request is malformed, or its file is missing.
    """
    job, task = submission.job, submission.task
    for requirement in job.with_:
        if not REQUIREMENT.fullmatch(requirement):
            raise UsageError(f"--with {requirement}: give a package's name, NAME==VERSION, or 'NAME>=VERSION'")
        if _plain(requirement) == "torchtext":
            raise UsageError(f"--with {requirement}: {ENDED}")
    for option, text in (*(("with", text) for text in job.with_), *(("modules", text) for text in job.modules)):
        version = OF_TORCH.match(text)
        if version and tuple(map(int, filter(None, version.groups()))) < TORCH:
            raise UsageError(f"--{option} {text}: grappe takes torch from 2.8 on: name such a version, or leave it out")
    if task is None and submission.file is None and submission.run is not None:
        name = str(Run(submission.run).read_description().get("task") or "")
        task = None if name.startswith("__main__") else name  # a notebook's module
    read = packages_of_task(task) if task else []
    read += packages_of_file(submission.file) if submission.file else []
    asked = {_plain(requirement) for requirement in job.with_}
    own = {_plain(requirement) for requirement in _own(())} | {"grappe"}
    lines = [requirement for requirement in dict.fromkeys(read) if _plain(requirement) not in asked | own]
    lines += job.with_
    if job.requirements is not None:
        if not job.requirements.is_file():
            raise UsageError(f"--requirements={job.requirements}: there is no such file")
        lines.append(f"-r {job.requirements.absolute()}")
    return lines


def _own(extras: Iterable[str]) -> list[str]:
    """Returns the requirements in grappe's metadata, with the requirements of these extras."""
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


def job_packages(
    submission: Submission, site: Site, plan: Plan, *, show: bool
) -> tuple[environment.Packages | None, str]:
    """Returns the packages of an environment that is made on the nodes, and the reason why they were not checked.

    Args:
        show: the script is only shown: they are not resolved against the wheelhouse.

    Raises:
        UsageError: a request is malformed, or the wheelhouse lacks packages.
    """
    job, kind = submission.job, submission.job.env or site.job.environment
    if kind not in environment.MADE_ON_NODES:
        for name, value in (("with", job.with_), ("requirements", job.requirements)):
            if value:
                raise UsageError(
                    f"--{name} is for an environment that is made on the nodes: add --env virtualenv (or module). "
                    f"This job's is '{kind}': install it there"
                )
        return None, ""
    if job.wheels is not None and not show and not job.wheels.is_dir():
        raise UsageError(f"--wheels={job.wheels}: there is no such folder")
    house = Wheelhouse(
        modules=environment.modules_of(site, job.modules, plan),
        wheels=job.wheels and job.wheels.absolute(),
        on_modules=kind == "module",
        site=site.name,
    )
    wheel = environment.own_wheel()
    features = {*environment.libraries(plan), *submission.loggers, *(["tune"] if submission.command == TUNE else [])}
    extras = sorted(features & {*(importlib.metadata.metadata("grappe").get_all("Provides-Extra") or ())})
    lines = requirements(submission)
    why = "the script is only shown"
    if not show:
        try:
            resolved, python = resolve(wheel, extras, lines, house)
        except Unresolvable as error:
            why = str(error)
        else:
            depends = [python, *house.modules, str(house.on_modules)]
            return environment.packages(wheel, resolved, depends, locked=True), ""
    depends = [*house.modules, str(house.on_modules)]
    return environment.packages(wheel, [*_own(extras), *lines], depends, locked=False), why
