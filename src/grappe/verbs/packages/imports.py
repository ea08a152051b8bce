"""Reads which packages a Python file imports, from its text: nothing of the file is run."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from grappe import tasks

# Modules whose package has another name, for those that are not installed here.
RENAMED = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
OPTIONAL = {"ImportError", "ModuleNotFoundError", "Exception"}


def packages_of_task(reference: str) -> list[str]:
    """Returns the packages that a task's file and its neighbours import, sorted."""
    place, colon, _ = reference.partition(":")
    if place.endswith(".py"):
        return packages_of_file(Path(place))
    if "." in place or colon:
        return _of_module(place)
    return packages_of_file(Path(tasks.__path__[0]) / f"{place}.py")


def packages_of_file(file: Path) -> list[str]:
    """Returns the packages that a file imports, and those of imported neighbours; sorted."""
    places = [file.resolve().parent, Path.cwd()]
    seen: set[Path] = set()
    packages: set[str] = set()
    waiting = [file.resolve()]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in imported(current):
            near = _beside(name, places)
            waiting += near
            top = name.partition(".")[0]
            if not near and top not in sys.stdlib_module_names and top != "grappe":
                packages.add(package_of(top))
    return sorted(packages)


def package_of(module: str) -> str:
    """Returns the package of a top-level module: as installed here, or by its usual name."""
    distributions = importlib.metadata.packages_distributions().get(module)
    return distributions[0] if distributions else RENAMED.get(module, module)


def imported(file: Path) -> list[str]:
    """Returns the modules that a file imports and cannot do without; relative imports are left out.

    A file that is no Python is left to whoever runs it.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []
    return list(_names(tree.body))


def _names(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
            yield statement.module
        elif isinstance(statement, ast.Try) and any(map(_forgives, statement.handlers)):
            yield from _names([*statement.orelse, *statement.finalbody])
        elif not (isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)):
            inner = (part for _, part in ast.iter_fields(statement) if isinstance(part, list))
            for part in inner:
                yield from _names([statement for statement in part if isinstance(statement, ast.stmt)])
                for case in part:
                    if isinstance(case, ast.ExceptHandler | ast.match_case):
                        yield from _names(case.body)


def _forgives(handler: ast.ExceptHandler) -> bool:
    """Returns whether the file goes on without the module."""
    if any(isinstance(statement, ast.Raise) for statement in handler.body):
        return False
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in OPTIONAL) for kind in kinds)


def _beside(name: str, places: list[Path]) -> list[Path]:
    """Returns the files of a module that lies beside the task's file."""
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


def _of_module(name: str) -> list[str]:
    near = _beside(name, [Path.cwd()])
    if near:
        return sorted({package for file in near for package in packages_of_file(file)})
    return [package_of(name.partition(".")[0])]
