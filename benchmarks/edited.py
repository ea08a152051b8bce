"""Compares public scripts with copies for Accelerate and grappe.Loop: `python -m benchmarks.edited FOLDER EDITS`.

FOLDER is that of `benchmarks.unedited`; EDITS/TOOL/OWNER+NAME+SCRIPT (each / a +) has the files that differ from the
repository, TOOL is accelerate or loop. Two processes with torchrun's variables run 20 steps, in fp64 where they can.
Data come in their own order, since each tool draws another.
"""

from __future__ import annotations

import argparse
import difflib
import json
import multiprocessing
import os
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.unedited import LIST, SETTINGS, SITE, STEPS, TOLERATED, Script, distance
from grappe.training.own_loop_world import PLAN

FORK = multiprocessing.get_context("fork")  # so that torch is loaded once, not 200 times
IN_ORDER = """
from torch.utils.data import RandomSampler
RandomSampler.__iter__ = lambda self: (i % len(self.data_source) for i in range(self.num_samples))
import grappe
drawn, ordered = grappe.Loop.batches, {"sampling": grappe.Sampling(shuffle=False)}
grappe.Loop.batches = lambda *arguments, **options: drawn(*arguments, **ordered | options)
"""
VARIABLES = {"LAST": str(STEPS), "ACCELERATE_USE_CPU": "true", "FP64": "1"}


def main() -> None:
    """Runs each script of the list that is named and has edits, or all, and writes each outcome to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.edited", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("edits", type=Path)
    parser.add_argument("names", nargs="*", help="parts of the names of scripts")
    parser.add_argument("--site", type=Path, help="a folder of packages that the scripts import")
    parser.add_argument("--json", type=Path, required=True, help="add each outcome to this file")
    options = parser.parse_args()
    load(options.site)
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], text=True, capture_output=True, check=True)
    for each in tomllib.loads(LIST.read_text())["script"]:
        script = Script(**each)
        name = f"{script.repository}/{script.script}"
        if options.names and not any(part in name for part in options.names):
            continue
        outcome = compare(script, options.folder, options.edits)
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        known[name] = {"revision": script.revision, **outcome, "commit": commit.stdout.strip()}
        options.json.write_text(json.dumps(known, indent=1) + "\n")
        print(f"{name}: {outcome}", file=sys.stderr, flush=True)


def load(site: Path | None) -> None:
    """Loads what most scripts import, before processes are forked."""
    sys.path[:0] = [str(site)] if site else []
    os.environ.update(SETTINGS)
    torch.set_num_threads(1)
    for name in ("accelerate", "grappe", "grappe.training.own_loop", "torchvision", "matplotlib.pyplot"):
        __import__(name)


def compare(script: Script, folder: Path, edits: Path) -> dict[str, Any]:
    """Runs the script and each tool's copy of it.

    Returns:
        For each tool the lines changed, and how far the weights of two processes are from the script's on one (apart);
        where that is too far, from those of the copy on one, which may draw other noise (from_itself). Or the error.
    """
    outcome: dict[str, Any] = {}
    repository = folder / script.repository.replace("/", "+")
    with tempfile.TemporaryDirectory(prefix="grappe-edited-") as temporary:
        place = Path(temporary)
        alone = place / "script"
        variables = {**VARIABLES, "STEPS": str(STEPS)}
        why = run(script, linked(repository, place / "plain"), alone, 1, variables)
        if not alone.exists():
            del variables["FP64"]
            why = run(script, place / "plain", alone, 1, variables)
        if not alone.exists():
            outcome["why"] = why
        outcome["fp64"] = "FP64" in variables
        variables[PLAN] = "replicate=2,batchnorm=sync,device=cpu,threads=1"
        for tool in ("accelerate", "loop"):
            changed = edits / tool / f"{script.repository}/{script.script}".replace("/", "+")
            if not changed.exists():
                continue
            tree, lines = linked(repository, place / tool), 0
            for each in (file for file in changed.rglob("*") if file.is_file()):
                file = tree / each.relative_to(changed)
                lines += lines_changed(file.read_text(), each.read_text())
                file.unlink()
                shutil.copy(each, file)
            outcome[tool] = found = {"lines": lines}
            two, one = place / f"{tool}-two", place / f"{tool}-one"
            why = run(script, tree, two, 2, variables)
            if not two.exists():
                found["why"] = why
                continue
            if alone.exists():
                found["apart"] = apart(alone, two)
            if found.get("apart", 1.0) > TOLERATED:
                why = run(script, tree, one, 1, {**variables, PLAN: "device=cpu,threads=1"})
                found |= {"from_itself": apart(one, two)} if one.exists() else {"why": why}
    return outcome


def run(script: Script, tree: Path, weights: Path, size: int, variables: Mapping[str, str]) -> str:
    """Runs a script of `tree` on `size` processes, which write the weights; returns the last line of what they said."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        ranks = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(size)}
    said = weights.with_suffix(".said")
    said.unlink(missing_ok=True)
    processes = []
    for rank in map(str, range(size)):
        own = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": str(size), **ranks} if size > 1 else {}
        every = {**variables, **own, "WEIGHTS": str(weights)}
        processes.append(FORK.Process(target=_run, args=(script, tree, said, every)))
        processes[-1].start()
    for process in processes:
        process.join(1200)
        process.kill()
    lines = said.read_text(errors="replace").splitlines()
    return "".join([line for line in lines if line[:1].strip()][-1:])  # without frames, which have paths


def _run(script: Script, tree: Path, said: Path, variables: Mapping[str, str]) -> None:
    """Becomes the script; for a forked process."""
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(variables)
    file = tree / script.script
    os.chdir(file.parent)
    sys.path[:0] = [str(file.parent), *([str(file.parent / script.path)] if script.path else [])]
    sys.argv = [file.name, *shlex.split(script.arguments)]
    exec(SITE + IN_ORDER, {})
    runpy.run_path(file.name, run_name="__main__")


def apart(one: Path, two: Path) -> float:
    """Returns the distance between the weights of two files."""
    return distance(*(torch.load(file, weights_only=True) for file in (one, two)))


def linked(repository: Path, tree: Path) -> Path:
    """Returns a copy of a repository's folders, with links to its files."""
    return Path(shutil.copytree(repository, tree, copy_function=os.symlink, ignore=shutil.ignore_patterns(".git")))


def lines_changed(one: str, other: str) -> int:
    """Counts the lines that are added, changed or removed."""
    blocks = difflib.SequenceMatcher(None, one.splitlines(), other.splitlines(), autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal")


if __name__ == "__main__":
    main()
