"""Check of other Pythons' packages: the user's own (~/.local), PYTHONPATH's, and a conda base that is active."""

from __future__ import annotations

import importlib.metadata
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from grappe.errors.causes import WATCHED, hidden_modules
from grappe.verbs.doctor.checks import Finding, Machine, note, warning
from grappe.words import and_more

SHOWN = 5


def check(machine: Machine) -> Iterator[Finding]:
    """Compares the packages of the folders that Python looks in, once per node."""
    if not machine.is_node_leader:
        return
    own = packages_in({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    user = site.getusersitepackages()
    if site.ENABLE_USER_SITE and user in sys.path:
        yield from of_user_site(user, packages_in({user}), own)
    yield from of_pythonpath(machine.environment.get("PYTHONPATH", ""))
    yield from of_conda(machine.environment, sys.prefix)


def packages_in(folders: Set[str]) -> set[str]:
    """Lists the names of the packages that are installed in folders."""
    distributions = importlib.metadata.distributions(path=sorted(folders))
    return {
        str(distribution.metadata["Name"]).lower().replace("_", "-")
        for distribution in distributions
        if distribution.metadata["Name"]
    }


def of_user_site(folder: str, user: Set[str], own: Set[str]) -> Iterator[Finding]:
    """Returns findings for packages that the user installed for all of their Pythons of this version."""
    if twice := user & own:
        yield warning(
            f"{_some(twice)}: installed in this environment, and in {folder} as well",
            why="Python takes the user's own where it looks there first, and the two need not fit each other",
            do="export PYTHONNOUSERSITE=1 (jobs of grappe submit have it), or pip uninstall them there",
        )
    elif user:
        yield note(f"{len(user)} packages come from {folder}, which all of your Pythons of this version share")


def of_pythonpath(text: str) -> Iterator[Finding]:
    """Returns findings for folders of PYTHONPATH that hide installed modules."""
    for entry in filter(None, text.split(":")):
        if not Path(entry).is_dir():
            yield note(f"PYTHONPATH names {entry}, which is not a folder")
    for entry, names in hidden_modules(text).items():
        yield warning(
            f"PYTHONPATH={entry} hides installed modules: {and_more(names, SHOWN)}",
            why="Python imports from there first, whatever is installed",
            do="unset PYTHONPATH (a module may have set it: module list)",
        )


def of_conda(environment: Mapping[str, str], prefix: str) -> Iterator[Finding]:
    """Returns findings for an active conda environment that is not this Python's, and for conda's base."""
    active, name = environment.get("CONDA_PREFIX", ""), environment.get("CONDA_DEFAULT_ENV", "")
    if not active:
        return
    if Path(prefix).resolve() != Path(active).resolve():
        yield warning(
            f"conda's environment {name or active} is active, and this Python is another ({prefix})",
            why="programs and libraries of both are mixed",
            do="conda deactivate; and once: conda config --set auto_activate_base false",
        )
    elif name == "base":
        yield note(
            "this Python is conda's base",
            why="updating conda changes it",
            do="conda create --name grappe, and submit with --env conda:grappe",
        )


def _some(names: Set[str]) -> str:
    return and_more(sorted(names, key=lambda name: (name not in WATCHED, name)), SHOWN)
