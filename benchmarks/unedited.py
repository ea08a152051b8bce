"""Public scripts for one process, unedited, on one process and on several: `python -m benchmarks.unedited FOLDER`.

FOLDER has each repository of `unedited.toml` as owner+name. Each script runs 20 steps alone, then by `grappe launch`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pty
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import machine, table
from grappe.errors import EXIT_INTERRUPTED

STEPS, TOLERATED, EXACT, LIMIT = 20, 1e-5, 1e-8, 1200
NOISE = (
    0.01  # a tensor that rounding changes by more holds nothing else: a bias before a batch normalisation, from 0 on
)
MOVES = 1e-15, 1e-14  # of each first weight: after two steps, deep networks of two processes are between these apart
LIST = Path(__file__).with_suffix(".toml")
NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:[eE][-+]?\d+)?")
GRAPPE = str(Path(sys.executable).with_name("grappe"))
"""The command as it is installed: `python -m grappe` finds modules in another order."""
SETTINGS = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONHASHSEED": "0",
    "STEPS": str(STEPS),
    "MPLBACKEND": "Agg",
    "WANDB_MODE": "offline",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
}
SITE = """
import os, random, secrets, signal, sys, time
if "WEIGHTS" in os.environ and "resource_tracker" not in sys.orig_argv[-1]:
    import numpy, torch
    torch.manual_seed(0); random.seed(0); numpy.random.seed(0); secrets.randbits = lambda bits: 0
    file, last, every = os.environ["WEIGHTS"], int(os.environ["LAST"]), {}
    class Seeds(numpy.random.SeedSequence):  # of what a script leaves unseeded
        def __init__(self, entropy=None, **options):
            super().__init__(0 if entropy is None else entropy, **options)

    numpy.random.SeedSequence = Seeds
    clock, sleep, rename, exists, SAVE = time.time, time.sleep, os.rename, os.path.exists, torch.save
    before = torch.load(file + ".counts") if "RESUMED" in os.environ and exists(file + ".counts") else []
    counts, reached, parameters_made, backwards = {}, max(before, default=0), {}, 0
    if "FP64" in os.environ:
        torch.set_default_dtype(torch.float64)
        torch.FloatTensor, torch.Tensor.float = torch.DoubleTensor, torch.Tensor.double
        made_of, of_array, to, wide = torch.tensor, torch.from_numpy, torch.Tensor.to, {torch.float: torch.double}
        torch.tensor = lambda *a, dtype=None, **options: made_of(*a, dtype=wide.get(dtype, dtype), **options)
        torch.from_numpy = lambda a: of_array(a.astype(float) if a.dtype == numpy.float32 else a)
        torch.Tensor.to = lambda self, *a, **options: to(
            self, *(wide.get(each, each) for each in a), **{key: wide.get(each, each) for key, each in options.items()}
        )

    def add(optimizer, *_):
        if id(optimizer) not in every:
            counts[id(optimizer)] = before[len(every)] if len(every) < len(before) else 0
            every[id(optimizer)] = optimizer

    def parameters():
        found = (p for o in every.values() for g in o.param_groups for p in g["params"])
        return [*{id(p): p.detach() for p in (found if every else parameters_made.values())}.values()]

    def cpu():  # seconds of all processes of the session
        total = 0
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/stat") as stat:
                    fields = stat.read().rpartition(")")[2].split()
            except OSError:
                continue
            total += sum(map(int, fields[11:15])) if int(fields[3]) == os.getsid(0) else 0
        return total / os.sysconf("SC_CLK_TCK")

    def stepped(count):
        global reached
        if reached < count <= int(os.environ["STEPS"]) and count in (1, 2, 5, 10, 15, 20):
            if not reached and not exists(file + ".first"):
                SAVE((clock(), cpu()), f"{file}.first.{os.getpid()}")
                rename(f"{file}.first.{os.getpid()}", file + ".first")
            reached = count
            SAVE(parameters(), f"{file}.{os.getpid()}")
            rename(f"{file}.{os.getpid()}", file)
        if "STOP" in os.environ and count >= int(os.environ["STOP"]):
            SAVE([*counts.values()], f"{file}.counts.{os.getpid()}")
            rename(f"{file}.counts.{os.getpid()}", file + ".counts")
            if not exists(file + ".stopped"):
                try:
                    os.close(os.open(file + ".stopped", os.O_CREAT | os.O_EXCL))
                    os.kill(os.getsid(0), signal.SIGTERM)
                except FileExistsError:
                    pass
            sleep(0.1)
        if count >= last:
            raise SystemExit

    def move(*_):  # the first weights, by MOVED of each, before the first step
        if by := float(os.environ.pop("MOVED", 0)):
            generator = torch.Generator().manual_seed(0)
            for each in parameters():
                each.mul_(1 + by * torch.randn(each.shape, generator=generator))

    def after(optimizer, *_):
        counts[id(optimizer)] += 1
        stepped(counts[id(optimizer)])

    def init(self, *arguments, **options):
        made(self, *arguments, **options)
        add(self)

    def backward(self, *arguments, **options):
        global backwards
        if not every and backwards:  # a script that updates its weights itself has done so since the last
            stepped(backwards)
        backwards += 1
        return plain_backward(self, *arguments, **options)

    made, torch.optim.Optimizer.__init__ = torch.optim.Optimizer.__init__, init
    plain_backward, torch.Tensor.backward = torch.Tensor.backward, backward
    from torch.nn.modules.module import register_module_parameter_registration_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    register_optimizer_step_pre_hook(move)
    register_optimizer_step_post_hook(after)
    register_module_parameter_registration_hook(lambda _, __, p: parameters_made.update({id(p): p}))
"""
"""sitecustomize.py of each process: saves the weights of some steps, ends the script, and stops it for --resume."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """A public script, and how it is started."""

    repository: str
    revision: str
    script: str
    arguments: str = ""
    last: int = STEPS
    """The step after which it ends: later than 20 where it prints seldom."""
    path: str = ""
    """A folder of modules that it imports, from its own."""
    timed: str = ""
    """A regular expression of what differs by the clock in its lines."""
    chosen: str = ""
    """The day on which it was written down, before it was tried; "" of the first ones."""

    @property
    def name(self) -> str:
        """The repository and the file."""
        return f"{self.repository}/{self.script}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a script on several processes."""

    word: str
    """same, same in fp64, apart by rounding, refused (before it trained), ended (later), different, or failed alone."""
    why: str = ""
    apart: float | None = None
    """The most of |a - b| / |a| over the weight tensors; None: there are none."""
    in_fp64: float | None = None
    """The same where the script and torch compute in fp64; None: not tried, or not possible."""
    moved: float | None = None
    """The same between one process and one whose first weights are moved by `moved_by` of each; None: not needed."""
    moved_by: float | None = None
    lines: int = 0
    same_lines: int = 0
    first: tuple[float, float] | None = None
    """Wall seconds to the first step over those of the script alone; the same of the processes' CPU seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """A run of a script."""

    code: int
    lines: list[str]
    error: str
    weights: list[torch.Tensor]
    first: tuple[float, float]
    """Wall and CPU seconds to the first step."""


class Comparison:
    """Runs of a script in a folder of their own."""

    def __init__(self, script: Script, file: Path, site: Path | None, folder: Path) -> None:
        self._script, self._file, self._site, self._folder = script, file, site, folder
        self._customize = folder / "site-packages"  # a name that tells libraries from scripts
        self._customize.mkdir()
        (self._customize / "sitecustomize.py").write_text(SITE)
        self._terminal = pty.openpty()[1]  # whose width some ask for

    @functools.cache  # noqa: B019 - of a few runs
    def run(self, name: str, processes: int = 1, *options: str, **variables: str) -> Ran:
        """Runs the script once, alone or by `grappe launch` with options; files of `name` have what it leaves."""
        plan = f"replicate={processes},device=cpu,threads=1"
        launch = [GRAPPE, "launch", "--plan", plan, *(options or ("--runs", str(self._folder / "runs")))]
        paths = (self._customize, self._site, self._script.path and self._file.parent / self._script.path)
        weights = self._folder / name
        environment = os.environ | SETTINGS | {"LAST": str(self._script.last), "WEIGHTS": str(weights)} | variables
        environment["PYTHONPATH"] = ":".join(str(path) for path in (*paths, os.environ.get("PYTHONPATH")) if path)
        environment["PATH"] = f"{self._site}/bin:{environment['PATH']}"
        began = time.time()
        done = subprocess.run(
            [*(launch if processes > 1 else [sys.executable]), self._file.name, *shlex.split(self._script.arguments)],
            cwd=self._file.parent, env=environment, stdin=self._terminal, text=True, capture_output=True,
            timeout=LIMIT, check=False, start_new_session=True,
        )  # fmt: skip
        first = weights.with_name(f"{name}.first")
        wall, cpu = torch.load(first) if first.exists() else (began, 0.0)
        return Ran(
            code=done.returncode,
            lines=[re.sub(self._script.timed or "$^", "", line) for line in done.stdout.splitlines()],
            error=done.stderr,
            weights=torch.load(weights) if weights.exists() else [],
            first=(wall - began, cpu),
        )

    def outcome(self, processes: int) -> Outcome:
        """Runs the script on several processes, in fp64 too where rounding takes fp32 apart."""
        one = self.run("1")
        if one.code:
            return Outcome(word="failed alone", why=_last_line(one.error))
        made = self._compared(one, self.run(str(processes), processes))
        if made.word != "different":
            return made
        wide = self.run("1-64", FP64="1")
        if wide.code:
            return dataclasses.replace(made, why=f"in fp64 {_last_line(wide.error)}; {made.why}")
        other = self._compared(wide, self.run(f"{processes}-64", processes, FP64="1"), EXACT)
        made = dataclasses.replace(other, apart=made.apart, in_fp64=other.apart, first=made.first)
        if other.word != "different":
            return dataclasses.replace(made, word={"same": "same in fp64"}.get(other.word, other.word))
        several = distances(wide.weights, self.run(f"{processes}-64", processes, FP64="1").weights)
        for by in MOVES:
            again = self.run(f"1-moved-{by}", FP64="1", MOVED=str(by))
            made = dataclasses.replace(made, moved=distance(wide.weights, again.weights), moved_by=by)
            pairs = zip(several, distances(wide.weights, again.weights), strict=True)
            is_rounding = all(apart <= max(EXACT, 3 * least) or least > NOISE for apart, least in pairs)
            if is_rounding and other.same_lines >= lines_alike(wide.lines, again.lines):
                return dataclasses.replace(made, word="apart by rounding")
        return made

    def _compared(self, one: Ran, other: Ran, tolerated: float = TOLERATED) -> Outcome:
        ratios = tuple(round(b / a, 2) for a, b in zip(one.first, other.first, strict=True) if a)
        first = (ratios[0], ratios[1]) if len(ratios) == 2 else None
        if other.code:
            said = [line for line in other.error.splitlines() if not line.startswith("  |   ")]  # frames, with paths
            word = "ended" if other.weights else "refused"
            return Outcome(word=word, why="\n".join(said[-3:]), first=first)
        apart, alike = distance(one.weights, other.weights), lines_alike(one.lines, other.lines)
        pairs = [*zip(one.lines, other.lines, strict=False)]
        return Outcome(
            word="same" if (apart or 0.0) <= tolerated and alike == len(one.lines) else "different",
            why="".join(f"{a!r} {b!r}" for a, b in pairs if not same_line(a, b))[:400],
            apart=apart,
            lines=len(one.lines),
            same_lines=alike,
            first=first,
        )

    def resumed(self, processes: int, steps: int) -> str:
        """Stops the script after some steps, starts it again, and tells what it did."""
        options = ("--run", str(self._folder / "resumed"), "--save-every", "5")
        plain = self.run(str(processes), processes)
        if plain.code:
            return "not run"
        stopped = self.run("stopped", processes, *options, STOP=str(steps))
        if "no checkpoints: " in stopped.error:
            return "no checkpoint: " + stopped.error.partition("no checkpoints: ")[2].splitlines()[0]
        if stopped.code != EXIT_INTERRUPTED:
            return f"not stopped (code {stopped.code}): {_last_line(stopped.error)}"
        again = self.run("stopped", processes, *options, RESUMED="1")
        if again.code:
            return f"refused: {_last_line(again.error)}"
        apart = distance(plain.weights, again.weights) or 0.0
        both = [*stopped.lines, *again.lines]
        if apart <= 1e-12 and both == plain.lines:
            return "exact"
        pairs = [*zip(plain.lines, both, strict=False)]
        unlike = "".join(f"{a!r} {b!r}" for a, b in pairs if a != b)[:300]
        return f"NEITHER: {apart:.1e} apart, {len(both)} lines of {len(plain.lines)}: {unlike}"


def _last_line(text: str) -> str:
    return " ".join([line for line in text.splitlines() if line.strip()][-1:])


def main() -> None:
    """Runs each script of the list that is named, or all, and prints a markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unedited", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="parts of the names of scripts")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3], help="2 3, as stands; 1 runs it alone")
    parser.add_argument("--resume", action="store_true", help="stop each script and start it again, instead")
    parser.add_argument(
        "--stop", type=int, default=10, metavar="STEPS", help="steps after which --resume stops; %(default)s"
    )
    parser.add_argument("--site", type=Path, help="a folder of packages and data sets that the scripts import")
    parser.add_argument("--json", type=Path, required=True, help="add each outcome to this file")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], text=True, capture_output=True, check=True)
    for each in tomllib.loads(LIST.read_text())["script"]:
        script = Script(**each)
        if options.names and not any(part in script.name for part in options.names):
            continue
        file = options.folder / script.repository.replace("/", "+") / script.script
        with tempfile.TemporaryDirectory(prefix="grappe-unedited-") as temporary:
            comparison = Comparison(script, file, options.site, Path(temporary))
            made: dict[str, Any] = {}
            for processes in options.processes:
                if options.resume:
                    made[f"resumed on {processes}"] = comparison.resumed(processes, options.stop)
                else:
                    made[f"on {processes}"] = dataclasses.asdict(comparison.outcome(processes))
            print(f"{script.name}: {made}", file=sys.stderr, flush=True)
            every = json.loads(options.json.read_text()) if options.json.exists() else {}
            known = every.get(script.name, {})
            commits = known.get("commits", {}) | dict.fromkeys(made, commit.stdout.strip())
            every[script.name] = known | made | dataclasses.asdict(script) | {"commits": commits}
            options.json.write_text(json.dumps(every, indent=1) + "\n")
    every = json.loads(options.json.read_text())
    kinds = sorted({key for values in every.values() for key in values if "on " in key})
    print(f"{machine()}\n\n{table(('outcome', *kinds), counted(every, kinds))}")


def counted(every: Mapping[str, Mapping[str, Any]], kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """The table's rows: how many scripts had each outcome, and the median of the first step's ratios."""
    words = {
        kind: [
            value if isinstance(value, str) else value["word"] for each in every.values() if (value := each.get(kind))
        ]
        for kind in kinds
    }
    counts = {kind: Counter(word.partition(":")[0] for word in words[kind]) for kind in kinds}
    rows = [(word, *(str(counts[kind][word]) for kind in kinds)) for word in sorted(set().union(*counts.values()))]
    for at, what in enumerate(("wall", "CPU")):
        ratios = [[each[kind]["first"][at] for each in every.values() if _has_first(each.get(kind))] for kind in kinds]
        medians = (f"{statistics.median(each):.2f}" if each else "" for each in ratios)
        rows.append((f"first step, {what}, over the script's alone (median)", *medians))
    return rows


def _has_first(outcome: Any) -> bool:
    return isinstance(outcome, dict) and outcome["first"] is not None


def distance(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float | None:
    """The most of |a - b| / |a| over tensors; None: there are none."""
    return float("inf") if len(one) != len(other) else max(distances(one, other), default=None)


def distances(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> list[float]:
    """|a - b| / |a| of each tensor."""
    return [
        float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-30))
        for a, b in zip(one, other, strict=True)
    ]


def lines_alike(one: Sequence[str], other: Sequence[str]) -> int:
    """Counts the lines that are the same, less those that only one has."""
    return sum(same_line(*pair) for pair in zip(one, other, strict=False)) - abs(len(one) - len(other))


def same_line(one: str, other: str) -> bool:
    """Whether two lines are the same, but for the last digits of their numbers."""
    numbers, others = NUMBER.findall(one), NUMBER.findall(other)
    if one == other or NUMBER.sub("", one) != NUMBER.sub("", other):
        return one == other
    return all(
        abs(float(a) - float(b)) <= 1e-5 * abs(float(a)) + 10.0 ** -len(a.partition(".")[2].partition("e")[0])
        for a, b in zip(numbers, others, strict=True)
    )


if __name__ == "__main__":
    main()
