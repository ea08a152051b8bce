"""Measures how grappe's source hangs together: entries, import circles, layers, and the files that a training crosses.

    python -m benchmarks.structure            # a table
    python -m benchmarks.structure --json     # the figures, and the lists behind them

It measures the checkout that it stands in, and knows no module of grappe but the shipped task `digits`, so that it
runs unchanged when modules are renamed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts import lint

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "grappe"
KEY = "recompute"
"""The key of a plan whose mentions are counted."""
TASK_FILE = "tasks/digits.py"
"""The traced training's task, which is not counted:"""
FIRST, LAST = 8, 18
"""The steps that are traced, of the 23 of an epoch: none of them evaluates or saves."""
LIMIT_SECONDS = 300

# Imported at the start of each Python that the traced program starts; processes forked from it go on with it.
TRACE = '''
import atexit, json, os, sys, time

PACKAGE, OUT = os.environ["TRACED_PACKAGE"] + os.sep, os.environ["TRACED_OUT"]
calls, steps = {}, []  # when each file was first entered; each traced step's files


def entries(frame, event, argument):
    """Notes when a function of each file was entered for the first time; what importing runs does not count."""
    file = file_of(frame)
    if event == "call" and file.startswith(PACKAGE) and file not in calls and not importing(frame):
        calls[file] = time.monotonic()


def importing(frame):
    """Whether a module is being imported: its body runs, the bodies of its classes, and their decorators."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


def file_of(frame):
    """The file whose function this is: a dataclass's own methods are compiled from a text, and belong to it, too."""
    return frame.f_globals.get("__file__") or ""


def write(name, **more):
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    loaded = [file for file in files if file.startswith(PACKAGE)]
    with open(f"{OUT}/{name}.json", "w") as stream:
        json.dump({"calls": calls, "loaded": loaded, "at": time.monotonic(), **more}, stream)


def write_caller():
    if sys.argv[1:] == ["caller"]:
        write("caller")


sys.setprofile(entries)
atexit.register(write_caller)
os.register_at_fork(after_in_child=calls.clear)
'''
# Line by line, since a loop that runs for the whole training is neither called again nor returned to by an event.
TASK = '''
import sys

import sitecustomize as trace
import torch

from grappe.tasks.digits import Digits

count, files = [0], set()


class Traced(Digits):
    """The shipped task, whose loss traces from one step's loss to the next one's."""

    def loss(self, output, target):
        if torch.is_grad_enabled():
            next_step()
        return super().loss(output, target)


def next_step():
    count[0] += 1
    if count[0] == 1:
        sys.setprofile(None)
        trace.write("training")
    if FIRST < count[0] <= LAST:
        trace.steps.append(sorted(files))
        files.clear()
    if count[0] == FIRST:
        sys.settrace(note)
        frame = sys._getframe()
        while frame := frame.f_back:  # those that have begun
            frame.f_trace = note
    elif count[0] == LAST:
        sys.settrace(None)
        trace.write("steps", steps=trace.steps)


def note(frame, event, argument):
    name = trace.file_of(frame)
    if name.startswith(trace.PACKAGE):
        files.add(name)
    return note
'''

CALLER = "import grappe; grappe.train('traced.py', 'device=cpu,threads=1', 'run', fields={'epochs': '1'})"

Graph = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Each module's file, by its dotted name; a package's is its __init__.py."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """The modules that each module imports, at its top, in functions or for type checking alone.

    An import of `package.module` counts as one of the module, not of its package.
    """
    return {name: {target for target in _targets(name, file, files) if target != name} for name, file in files.items()}


def _targets(name: str, file: Path, files: Mapping[str, Path]) -> Iterator[str]:
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                if whole in files or base in files:
                    yield whole if whole in files else base


def between_rooms(graph: Graph) -> dict[str, set[str]]:
    """The same between the entries at the package's root; its own __init__ is `grappe`."""
    found: dict[str, set[str]] = {}
    for name, targets in graph.items():
        mine = _room(name)
        found.setdefault(mine, set()).update(_room(target) for target in targets if _room(target) != mine)
    return found


def _room(name: str) -> str:
    return name.split(".")[1] if "." in name else name


def circles(graph: Graph) -> list[list[str]]:
    """The strongly connected components of more than one node."""
    ahead = {name: _reached(graph, name) for name in graph}
    found = {tuple(sorted({name, *(other for other in ahead[name] if name in ahead[other])})) for name in graph}
    return sorted(list(one) for one in found if len(one) > 1)


def _reached(graph: Graph, start: str) -> set[str]:
    found, waiting = set[str](), [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def layers() -> int:
    """Counts the layers in import-linter's contract."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = told["tool"]["importlinter"]["contracts"]
    return sum(len(one["layers"]) for one in contracts if one["type"] == "layers")


def trace() -> dict[str, Any]:
    """Traces the files that a training of `digits` on one process crosses: before its first step, and in one step."""
    with tempfile.TemporaryDirectory(prefix="grappe-structure-") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(TRACE)
        (folder / "traced.py").write_text(f"{TASK}\n\nFIRST, LAST = {FIRST}, {LAST}\n")
        paths = [str(folder), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
        variables = {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "TRACED_PACKAGE": str(PACKAGE),
            "TRACED_OUT": name,
        }
        done = subprocess.run(
            [sys.executable, "-c", CALLER, "caller"], cwd=folder, env={**os.environ, **variables},
            timeout=LIMIT_SECONDS, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"the traced training failed:\n{done.stdout}")
        return {part: json.loads((folder / f"{part}.json").read_text()) for part in ("caller", "training", "steps")}


def step_files(traced: Mapping[str, Any]) -> list[str]:
    """The files of the most common set among the traced steps."""
    counted = Counter(tuple(_relative(files)) for files in traced["steps"]["steps"])
    return list(counted.most_common(1)[0][0])


def start_files(traced: Mapping[str, Any]) -> dict[str, list[str]]:
    """Lists the files entered until the first training loss, by process."""
    training, caller = traced["training"], traced["caller"]
    by_caller = [file for file, at in caller["calls"].items() if at <= training["at"]]
    return {
        "files entered before the first step": _relative([*training["calls"], *by_caller]),
        "... of them in the training process": _relative(training["calls"]),
        "files imported there before the first step": _relative(training["loaded"]),
    }


def _relative(files: Iterable[str]) -> list[str]:
    found = {Path(file).relative_to(PACKAGE).as_posix() for file in files}
    return sorted(found - {TASK_FILE})


def sizes() -> dict[str, Any]:
    """Figures of the source's text: lines, files, names, and helpers that are called once."""
    texts = {file: file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
    trees = {file: list(ast.walk(ast.parse(text))) for file, text in texts.items()}
    lines = {file: len(text.splitlines()) for file, text in texts.items()}
    total = sum(lines.values())
    once = [name for file, tree in trees.items() for name in _called_once(file, tree)]
    imported = sum(
        node.end_lineno - node.lineno + 1
        for tree in trees.values()
        for node in tree
        if isinstance(node, ast.Import | ast.ImportFrom)
    )
    return {
        "lines of Python in src": total,
        "files of Python in src": len(lines),
        "median lines of a file": int(statistics.median(lines.values())),
        "private functions called once, per 1,000 lines": round(1000 * len(once) / total, 1),
        "import lines per 1,000 lines": round(1000 * imported / total),
        "names that say nothing": list(lint.forbidden_names(trees)),
        "class names that stand more than once": list(lint.doubled_classes(trees)),
        f"modules below {lint.SMALL} lines with one importer": list(lint.small_modules(trees)),
    }


def _called_once(file: Path, tree: list[ast.AST]) -> Iterator[str]:
    """Private functions and methods to which their file refers exactly once."""
    uses = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in tree
        if isinstance(node, ast.Name | ast.Attribute)
    )
    for node in tree:
        is_private = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match(r"_[^_]", node.name)
        if is_private and uses[node.name] == 1:
            yield f"{file.relative_to(PACKAGE).as_posix()}:{node.name}"


def measure() -> dict[str, Any]:
    """Each figure's count or list, by what it is."""
    graph = imports(modules())
    rooms = between_rooms(graph)
    traced = trace()
    mentions = [
        file.relative_to(PACKAGE).as_posix()
        for file in modules().values()
        if re.search(rf"\b{KEY}\b", file.read_text())
    ]
    return {
        **sizes(),
        "entries at the root of src/grappe": sorted(
            entry.name for entry in PACKAGE.iterdir() if entry.name != "__pycache__"
        ),
        "import circles of modules": circles(graph),
        "import circles of rooms": circles(rooms),
        "rooms": sorted(rooms),
        "arrows between rooms": sum(map(len, rooms.values())),
        "layers that import-linter needs": layers(),
        "files that a steady step crosses": step_files(traced),
        **start_files(traced),
        f"files that mention {KEY}": mentions,
        "lines of README.md": len((ROOT / "README.md").read_text().splitlines()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the figures, and the lists behind them, as JSON")
    request = parser.parse_args()
    found = measure()
    counts = {name: len(value) if isinstance(value, list) else value for name, value in found.items()}
    if request.json:
        lists = {name: value for name, value in found.items() if isinstance(value, list)}
        print(json.dumps({"figures": counts, "lists": lists}, indent=1))
        return
    width = max(map(len, counts))
    for name, count in counts.items():
        print(f"{name:{width}}  {count:>7,}")
    for kind in ("modules", "rooms"):
        for circle in found[f"import circles of {kind}"]:
            print(f"circle of {kind}: {', '.join(circle)}")


if __name__ == "__main__":
    main()
