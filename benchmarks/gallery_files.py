"""The gallery's tasks by name, the plain loops beside them, and the file of what was measured."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "gallery"
RESULTS = ROOT / "benchmarks" / "results" / "gallery.json"
NAMES = tuple(sorted(path.stem for path in FOLDER.iterdir() if path.suffix in (".py", ".ipynb")))


@functools.cache
def file(name: str) -> str:
    """A task's file; a notebook's cell with the task is written to one."""
    if (FOLDER / f"{name}.py").exists():
        return str(FOLDER / f"{name}.py")
    folder = tempfile.mkdtemp(prefix="grappe-gallery-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    written = Path(folder) / f"{name}.py"
    written.write_text("\n".join(cells(name)[:2]))
    return str(written)


def cells(name: str) -> list[str]:
    """The code cells of a notebook."""
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
    return ["".join(one["source"]) for one in notebook["cells"] if one["cell_type"] == "code"]


def lines(name: str) -> int:
    """The lines of a task's file, blank ones too; of a notebook those of the cell with the task."""
    if (FOLDER / f"{name}.py").exists():
        return len((FOLDER / f"{name}.py").read_text().splitlines())
    return sum(len(one.splitlines()) for one in cells(name)[:2])


def plain(name: str) -> ModuleType:
    """The plain loop that a task replaces, as a module."""
    spec = importlib.util.spec_from_file_location(f"plain_{name}", FOLDER / "plain" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def known() -> dict[str, Any]:
    """Reads the last measurements, by part and task."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write(part: str, found: dict[str, Any], order: tuple[str, ...] = NAMES) -> None:
    """Writes a part of what is known, beside what was known of other tasks."""
    every = known()
    merged = {**every.get(part, {}), **found}
    every[part] = {name: merged[name] for name in order if name in merged}
    RESULTS.write_text(json.dumps(every, indent=1) + "\n")
