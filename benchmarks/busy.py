"""Measures training beside other programs, by how OpenMP's threads wait: `python -m benchmarks.busy --loops 0 2`.

torch's threads wait for each other at the end of every parallel section. By default they spin for some
milliseconds first, on a core that another program may need. Each round trains every task once under each way to
wait, one after the other; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import commands
from benchmarks.figures import machine, spread, table

# 300,000 is what libgomp takes when nothing is set; it is written out because grappe sets what is not set.
WAYS: dict[str, Mapping[str, str]] = {
    "spinning": {"GOMP_SPINCOUNT": "300000"},
    "1,000 spins": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
TASKS: dict[str, tuple[str, ...]] = {
    "spiral": ("spiral.py",),  # the README's
    "digits": ("digits",),
    "coatnet": ("coatnet", "batch_size=4"),
}
STEPS = {"spiral": 60, "digits": 60, "coatnet": 10}
FIRST = 5  # steps that are not counted: caches fill
HEAD = ("", "busy loops", "OpenMP's threads", "ms a step", "spinning takes so many times as long", "command, s")


def main() -> None:
    """Trains, and prints a markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loops", type=int, nargs="+", default=[0, 2], help="busy loops beside it")
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS), default=sorted(TASKS))
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=sorted(WAYS), help="beside spinning")
    parser.add_argument("--plan", default="device=cpu")
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    options = parser.parse_args()
    ways = [way for way in WAYS if way == "spinning" or way in options.ways]
    before, rows, found = machine(), [], {}
    for loops in options.loops:
        for task in options.tasks:
            turns = {way: functools.partial(train, task, way, f"{options.plan},workers=0", loops) for way in ways}
            turned = commands.rounds(turns, options.rounds, f"{task} beside {loops} busy loops")
            found[f"{task}, {loops}"] = turned
            rows += [[task, str(loops), way, *cells(way, turned)] for way in ways]
    print(f"\n## Beside busy loops\n\n{options.rounds} rounds, plan {options.plan}.\nFrom {before}\nto {machine()}.\n")
    print(table(HEAD, rows), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def train(task: str, way: str, plan: str, loops: int, _: str) -> tuple[float, float]:
    """Mean seconds of a step, and seconds of the whole command."""
    words = ("--plan", plan, "--steps-only", "--steps", str(STEPS[task]))
    with tempfile.TemporaryDirectory(prefix="grappe-bench-") as folder, company(loops), environment(WAYS[way]):
        code = re.search(r"```python\n(# spiral\.py\n.*?)```", (commands.ROOT / "README.md").read_text(), re.DOTALL)
        assert code, "the README shows no spiral.py"
        (Path(folder) / "spiral.py").write_text(code[1])
        done = commands.grappe(Path(folder), Path(folder) / "run", *TASKS[task], *words)
        return statistics.fmean(done.seconds[FIRST:]), done.command


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets these variables of OpenMP's for a while, and no others."""
    before = dict(os.environ)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)
    os.environ.update(variables, PYTHONPATH=commands.paths(commands.ROOT))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def company(loops: int) -> Iterator[None]:
    """So many programs that use a core each."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for one in others:
            one.kill()
            one.wait()


def cells(way: str, turned: Sequence[Mapping[str, tuple[float, float]]]) -> list[str]:
    """Milliseconds of a step, how many times as long spinning takes, and seconds of the command."""
    steps = [1000 * turn[way][0] for turn in turned]
    ratios = [turn["spinning"][0] / turn[way][0] for turn in turned]
    return [
        spread(steps).text("{:.2f}"),
        "" if way == "spinning" else spread(ratios).text("{:.3g}"),
        spread([turn[way][1] for turn in turned]).text("{:.1f}"),
    ]


if __name__ == "__main__":
    main()
