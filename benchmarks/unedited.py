"""Public scripts for one process, unedited, on one process and on two: `python -m benchmarks.unedited FOLDER`.

FOLDER has each repository of `unedited.toml` as owner+name. Each script runs 20 steps alone, then by `grappe launch`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import machine, table

STEPS, TOLERATED = 20, 1e-5
LIST = Path(__file__).with_suffix(".toml")
NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:[eE][-+]?\d+)?")
GRAPPE = str(Path(sys.executable).with_name("grappe"))
"""The command as it is installed: `python -m grappe` finds modules in another order."""
SETTINGS = {
    "PYTHONUNBUFFERED": "1",
    "STEPS": str(STEPS),
    "MPLBACKEND": "Agg",
    "WANDB_MODE": "offline",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
}
HEAD = ("repository", "revision", "script", "plan", "outcome", "weights apart", "lines the same", "seconds")
SITE = """
import os, random, secrets, sys
if "WEIGHTS" in os.environ and "resource_tracker" not in sys.orig_argv[-1]:
    import numpy, torch
    torch.manual_seed(0); random.seed(0); numpy.random.seed(0); secrets.randbits = lambda bits: 0
    counts, every, moved, reached = {}, {}, os.environ.get("MOVED"), 0
    if "FP64" in os.environ:
        torch.set_default_dtype(torch.float64)
        torch.FloatTensor, torch.Tensor.float = torch.DoubleTensor, torch.Tensor.double
        made_of, wide = torch.tensor, {torch.float: torch.double}
        torch.tensor = lambda *a, dtype=None, **options: made_of(*a, dtype=wide.get(dtype, dtype), **options)

    def add(optimizer, *_):
        every.setdefault(id(optimizer), optimizer)

    def parameters():
        found = (p for o in every.values() for g in o.param_groups for p in g["params"])
        return [*{id(p): p.detach() for p in found}.values()]

    def before(optimizer, *_):
        global moved
        if moved:
            generator = torch.Generator().manual_seed(0)
            for each in parameters():
                each.mul_(1 + float(moved) * torch.randn(each.shape, generator=generator))
            moved = None

    def after(optimizer, *_):
        global reached
        counts[id(optimizer)] = count = counts.get(id(optimizer), 0) + 1
        file = os.environ["WEIGHTS"]
        if reached < count <= int(os.environ["STEPS"]) and count in (1, 2, 5, 10, 15, 20):
            reached = count
            SAVE(parameters(), f"{file}.{os.getpid()}")
            os.rename(f"{file}.{os.getpid()}", file)
        if count == int(os.environ["LAST"]):
            raise SystemExit

    SAVE, made = torch.save, torch.optim.Optimizer.__init__

    def init(self, *arguments, **options):
        made(self, *arguments, **options)
        add(self)

    torch.optim.Optimizer.__init__ = init
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """A public script, and how it is started."""

    repository: str
    revision: str
    script: str
    arguments: str = ""
    keys: str = ""
    """Of the plan, beyond replicate=2."""
    last: int = STEPS
    """The step after which it ends: later than 20 where it prints seldom."""
    path: str = ""
    """A folder of modules that it imports, from its own."""
    timed: str = ""
    """A regular expression of what differs by the clock in its lines."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a script: what one and two processes did."""

    word: str
    """same, same in fp64, same but for rounding, refused, ended (with the cause), different, or failed alone."""
    why: str
    apart: float = 0.0
    """The most of |a - b| / |a| over the weight tensors."""
    by_rounding: float = 0.0
    """The same between one process and one whose weights were moved before the first step: as far as one and two
    processes are apart after two steps, at least by 1e-7 (fp64: 1e-15)."""
    lines: int = 0
    same_lines: int = 0
    by_rounding_lines: int = 0
    in_fp64: float | None = None
    """The same as `apart` where the script and torch compute in fp64; None: not tried, or not possible."""
    seconds: tuple[float, ...] = ()
    """Of one process, and of two."""


def main() -> None:
    """Runs each script of the list that is named, or all, and prints a markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unedited", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="parts of the names of scripts")
    parser.add_argument("--site", type=Path, help="a folder of packages and data sets that the scripts import")
    parser.add_argument("--json", type=Path, help="add each outcome to this file")
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], text=True, capture_output=True, check=True
    ).stdout
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for each in tomllib.loads(LIST.read_text())["script"]:
        script = Script(**each)
        name = f"{script.repository}/{script.script}"
        if options.names and not any(part in name for part in options.names):
            continue
        outcome = compare(script, options.folder / script.repository.replace("/", "+"), options.site)
        known[name] = {**dataclasses.asdict(script), **dataclasses.asdict(outcome), "commit": commit.strip()}
        print(f"{name}: {outcome}", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(known, indent=1) + "\n")
    print(f"{machine()}\n\n{table(HEAD, [row(each) for each in known.values()])}")


def compare(script: Script, repository: Path, site: Path | None) -> Outcome:
    """Runs a script on one process and on two, and compares weights and lines."""
    file = repository / script.script
    arguments = shlex.split(script.arguments)
    alone = ",".join(filter(None, ("device=cpu,threads=1", script.keys)))
    plan, seconds = f"replicate=2,{alone}", list[float]()
    with tempfile.TemporaryDirectory(prefix="grappe-unedited-") as temporary:
        folder = Path(temporary)
        (folder / "sitecustomize.py").write_text(SITE)
        _, terminal = pty.openpty()  # whose width some ask for

        def run(name: str, plan: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
            launch = [GRAPPE, "launch", "--runs", str(folder / "runs"), "--plan", plan] if plan else [sys.executable]
            paths = (folder, site, script.path and file.parent / script.path, os.environ.get("PYTHONPATH"))
            environment = os.environ | SETTINGS | {"LAST": str(script.last), "WEIGHTS": str(folder / name)} | variables
            environment |= {"PYTHONPATH": ":".join(str(path) for path in paths if path)}
            environment["PATH"] = f"{site}/bin:{environment['PATH']}"
            command, began = [*launch, file.name, *arguments], time.perf_counter()
            try:
                return subprocess.run(
                    command, cwd=file.parent, env=environment, stdin=terminal, text=True, capture_output=True,
                    timeout=1200, check=False,
                )  # fmt: skip
            finally:
                seconds.append(round(time.perf_counter() - began, 1))

        one = run("one")
        if one.returncode:
            return Outcome(word="failed", why=" ".join(one.stderr.splitlines()[-1:]))
        two = run("two", plan)
        taken = tuple(seconds)
        if two.returncode or not (folder / "two").exists():
            word = "refused" if "would not learn what one" in two.stderr else "ended"
            said = [line for line in two.stderr.splitlines() if not line.startswith("  |   ")]  # frames, with paths
            why = "\n".join(said[-1 if word == "refused" else -3 :])
            return Outcome(word=word, why=why, seconds=taken)
        weights = [torch.load(folder / name) for name in ("one", "two")]
        apart = distance(*weights)
        lines, others = (printed(each.stdout, script.timed) for each in (one, two))
        alike = lines_alike(lines, others)
        word, by_rounding, least, in_fp64 = "same", 0.0, len(lines), None
        if apart > TOLERATED or alike < least:
            word = "different"
            exact = [run("one64", FP64="1"), run("two64", plan, FP64="1")]
            pair, least_by, setting = (apart, alike), 1e-7, dict[str, str]()
            if (folder / "one64").exists() and (folder / "two64").exists():
                weights = [torch.load(folder / name) for name in ("one64", "two64")]
                in_fp64 = distance(*weights)
                lines64, others64 = (printed(each.stdout, script.timed) for each in exact)
                pair, least_by, setting = (in_fp64, lines_alike(lines64, others64)), 1e-15, {"FP64": "1"}
                word = "same in fp64" if in_fp64 <= TOLERATED and pair[1] == least else word
            if word == "different":
                run("early", **setting | {"LAST": "2"})
                run("early2", plan, **setting | {"LAST": "2"})
                by = distance(*(torch.load(folder / name) for name in ("early", "early2")))
                moved = run("moved", MOVED=str(max(by, least_by)), **setting)
                by_rounding = distance(weights[0], torch.load(folder / "moved"))
                least = lines_alike(lines64 if setting else lines, printed(moved.stdout, script.timed))
                if pair[0] <= max(TOLERATED, 3 * by_rounding) and pair[1] >= least:
                    word = "same but for rounding"
    difference = "".join(f"{a!r} {b!r}" for a, b in list(zip(lines, others, strict=False)) if not same_line(a, b))
    return Outcome(
        word=word,
        why=difference[:400],
        apart=apart,
        by_rounding=by_rounding,
        lines=len(lines),
        same_lines=alike,
        by_rounding_lines=least,
        in_fp64=in_fp64,
        seconds=taken,
    )


def distance(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """The most of |a - b| / |a| over tensors."""
    return max(
        float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-30))
        for a, b in zip(one, other, strict=True)
    )


def lines_alike(one: Sequence[str], other: Sequence[str]) -> int:
    """Counts the lines that are the same, less those that only one has."""
    return sum(same_line(*pair) for pair in zip(one, other, strict=False)) - abs(len(one) - len(other))


def printed(text: str, timed: str) -> list[str]:
    """The lines of an output, without what differs by the clock."""
    return [re.sub(timed, "", line) if timed else line for line in text.splitlines()]


def same_line(one: str, other: str) -> bool:
    """Whether two lines are the same, but for the last digits of their numbers."""
    numbers, others = NUMBER.findall(one), NUMBER.findall(other)
    if one == other or NUMBER.sub("", one) != NUMBER.sub("", other):
        return one == other
    return all(
        abs(float(a) - float(b)) <= 1e-5 * abs(float(a)) + 10.0 ** -len(a.partition(".")[2].partition("e")[0])
        for a, b in zip(numbers, others, strict=True)
    )


def row(outcome: dict[str, Any]) -> tuple[str, ...]:
    """The table's row of an outcome."""
    apart, by_rounding = float(str(outcome["apart"])), float(str(outcome["by_rounding"]))
    ran = bool(outcome["lines"] or apart)
    rounding = f" (by rounding {by_rounding:.0e})" if by_rounding else ""
    return (
        str(outcome["repository"]),
        str(outcome["revision"])[:8],
        f"`{outcome['script']}`",
        f"`{outcome['keys']}`" if outcome["keys"] else "",
        f"{outcome['word']}" + ("" if ran else f": {str(outcome['why']).split(': ', 2)[-1].partition('. Or')[0]}"),
        f"{apart:.0e}{rounding}" if ran else "",
        f"{outcome['same_lines']} of {outcome['lines']}" if ran else "",
        ", ".join(map(str, outcome.get("seconds", ()))),
    )


if __name__ == "__main__":
    main()
