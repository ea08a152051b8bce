"""Plants 60 causes of slowness, and compares the sentence of each training with what its remedy brings.

    python -m benchmarks.causes --out causes.jsonl                # the 60
    python -m benchmarks.causes --out healthy.jsonl --healthy 200 # trainings of which nothing shall be said
    python -m benchmarks.causes --cost                            # microseconds of a step that the meter takes
    python -m benchmarks.causes --out traceml.jsonl --traceml BIN # TraceML's command on the 20 that a script shows

Each training is a process of its own of about three seconds (`planted.py`): it is run as it is, then with the remedy
that its sentence names, for as long. A case that is in the file of --out is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import machine, table
from benchmarks.planted import BUSY
from grappe.training.bottleneck import WORTH

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "planted_script.py"
LOOP = ROOT / "benchmarks" / "planted.py"
TASK = [sys.executable, "-c", "from benchmarks.planted import main; main()"]
BURNING = "while True: pass"
LIMIT = 300.0  # seconds of a training on a busy machine
NEAR = 0.2
Knobs = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A planted cause."""

    kind: str
    """The kind that its sentence must have; "" for a healthy training."""
    way: str
    """"task", "loop" or "script"."""
    knobs: Knobs
    plan: str = ""
    mask: tuple[int, ...] = ()
    """The cores on which it may run; () for all."""
    burning: tuple[int, ...] = ()
    """The cores on which another program computes."""

    @property
    def name(self) -> str:
        """The name, alike in each run of the benchmark."""
        knobs = " ".join(f"{name}={value}" for name, value in self.knobs.items())
        places = (f"mask={self.mask}" if self.mask else "") + (f" burning={self.burning}" if self.burning else "")
        return " ".join(filter(None, [self.kind or "healthy", self.way, self.plan, knobs, places]))


def cases() -> list[Case]:
    """Makes the 60."""
    made: list[Case] = []

    def add(kind: str, ways: str, knobs: Knobs, **places: Any) -> None:
        made.extend(Case(kind=kind, way=way, knobs=knobs, **places) for way in ways.split())

    every = "task loop script"
    add("storage", every, {"nap": 0.0005, "steps": 250})
    add("storage", every, {"nap": 0.003, "steps": 60})
    add("storage", "task script", {"nap": 0.003, "workers": 1, "steps": 60, "width": 128})
    add("input", every, {"work": 0.0005, "steps": 250, "threads": 1})
    add("input", every, {"work": 0.002, "steps": 80})
    add("input", "task", {"work": 0.002, "steps": 80, "threads": 1, "workers": 1})
    add("evaluation", every, {"evaluate_every": 5, "validation": 256, "steps": 250})
    add("evaluation", every, {"evaluate_every": 20, "validation": 2048, "steps": 200})
    add("saving", every, {"save_every": 1, "disk": 0.02, "steps": 40})
    add("saving", every, {"save_every": 5, "disk": 0.05, "steps": 80})
    for sending, steps in ((0.01, 150), (0.03, 80), (0.1, 30)):
        add("communication", "task", {"sending": sending, "steps": steps}, plan="replicate=2")
    add(
        "communication", every, {"width": 2048, "layers": 2, "tokens": 1, "batch_size": 64, "steps": 25},
        plan="replicate=2",
    )  # fmt: skip
    add("slow process", every, {"late": 20, "steps": 150}, plan="replicate=2")
    add("slow process", "task loop", {"late": 8, "width": 512, "steps": 60}, plan="replicate=2")
    add("binding", every, {"steps": 200, "tokens": 32}, plan="replicate=2", mask=(0,))
    add("binding", "task loop", {"steps": 60, "width": 512}, plan="replicate=2", mask=(1,))
    add("other programs", every, {"steps": 300, "tokens": 32}, mask=(0,), burning=(0,))
    add("other programs", "task script", {"steps": 100, "width": 512, "tokens": 32}, burning=(0, 1))
    add("small batches", every, {"adam": True, "width": 1024, "layers": 3, "tokens": 1, "batch_size": 64, "steps": 60})
    add("small batches", "task script", {"adam": True, "width": 512, "layers": 4, "batch_size": 2, "steps": 150})
    add("watching", "task", {"watching": 0.005, "steps": 300})
    add("watching", "task", {"watching": 0.02, "steps": 120})
    add("watching", "task", {"watching": 0.01, "steps": 200}, plan="replicate=2")
    add("threads", every, {"threads": 1, "width": 512, "tokens": 64, "steps": 40})
    add("threads", "task", {"threads": 1, "width": 1024, "tokens": 32, "steps": 30})
    return made


def healthy(number: int) -> list[Case]:
    """Makes trainings of which nothing shall be said: of several sizes, on one process and on two."""
    made: list[Case] = []
    sizes = [(width, layers, tokens) for width in (256, 384, 512) for layers in (2, 4) for tokens in (16, 32, 64)]
    shipped = (
        {"shipped": "digits", "epochs": 20, "batch_size": 128, "steps": 200},
        {"shipped": "digits", "epochs": 25, "batch_size": 256, "steps": 140},
        {"shipped": "pysource", "megabytes": 0.2, "steps": 20},
    )
    for knobs in shipped:
        made += [Case(kind="", way="task", knobs=knobs, plan=plan) for plan in ("", "replicate=2")]
    for index in range(number - len(made)):
        width, layers, tokens = sizes[index % len(sizes)]
        batch = (32, 48, 64)[index // len(sizes) % 3]
        cost = 1.0 + 0.6 * layers * (width / 256) ** 2 * (tokens / 16) * (batch / 16)  # about that in ms, on two cores
        knobs = {
            "width": width, "layers": layers, "tokens": tokens, "batch_size": batch,
            "steps": max(12, math.ceil(2000 / cost)),
        }  # fmt: skip
        way = ("task", "task", "script", "task", "loop")[index % 5]
        plan = "replicate=2" if index // 5 % 2 else ""
        made.append(Case(kind="", way=way, knobs=knobs, plan=plan))
    return made


# ---- One training ------------------------------------------------------------------------------------------


def trained(case: Case, folder: Path) -> dict[str, Any]:
    """Trains it; returns the last sentence that the meter found, with its times."""
    written, tried = folder / "written", 0
    while (folder / f"run{tried}").exists():
        tried += 1
    for file in folder.glob("written.*"):
        file.unlink()
    run = folder / f"run{tried}"
    knobs = {"way": case.way, "plan": case.plan, "folder": str(run), **case.knobs}
    plan = ["--plan", case.plan] if case.plan else []
    launch = [sys.executable, "-m", "grappe", "launch", *plan]
    if case.way == "script":
        saves = ["--save-every", str(case.knobs["save_every"])] if "save_every" in case.knobs else []
        command = [*launch, "--run", str(run), *saves, str(SCRIPT)]
    elif case.way == "loop" and case.plan:
        command = [*launch, str(LOOP)]
    else:
        command = TASK
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "GRAPPE_CAUSES": str(written), "GRAPPE_KNOBS": json.dumps(knobs),
        "OMP_WAIT_POLICY": "passive", BUSY: "" if case.burning else os.environ.get(BUSY, ""),
    }  # fmt: skip
    done = run_masked(command, case, environment, folder)
    rows = [json.loads(file.read_text().splitlines()[-1]) for file in sorted(folder.glob("written.*"))]
    if done.returncode or not rows:
        raise RuntimeError(f"{case.name}: {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
    return rows[0]


def run_masked(
    command: Sequence[str], case: Case, environment: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Runs a command on the cores of a case, beside the other programs of the case."""
    taskset = ["taskset", "-c", ",".join(map(str, case.mask))] if case.mask else []
    burning = [
        subprocess.Popen(["taskset", "-c", str(core), sys.executable, "-c", BURNING]) for core in case.burning
    ]  # fmt: skip
    try:
        return subprocess.run(
            [*taskset, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT,
            check=False,
        )  # fmt: skip
    finally:
        for process in burning:
            process.kill()
            process.wait()


def remedied(case: Case, kind: str, sentence: str, faster: float) -> Case:
    """Returns the case with what its sentence asks for."""
    knobs, plan, mask, burning = dict(case.knobs), case.plan, case.mask, case.burning
    batch = knobs.get("batch_size", 16)
    number = re.search(r"(workers|threads)=(\d+)", sentence)
    if kind in ("input", "storage"):
        knobs |= {"workers": int(number[2])} if number and "no wait" not in sentence else {"nap": 0.0, "work": 0.0}
    elif kind == "threads" and number:
        knobs["threads"] = int(number[2])
    elif kind == "evaluation":
        knobs["evaluate_every"] = 2 * knobs.get("evaluate_every", 1_000_000)
    elif kind == "saving":
        knobs["save_every"] = 10 * knobs.get("save_every", 1_000_000)
    elif kind == "watching":
        knobs["watch_every"] = 10
    elif kind in ("communication", "small batches"):
        knobs["batch_size"] = 2 * batch
    elif kind == "slow process":
        knobs["late"] = 0
    elif kind == "binding":
        mask = ()
    elif kind == "other programs":
        burning = ()
    knobs["steps"] = math.ceil(knobs["steps"] * min(10, faster) * batch / knobs.get("batch_size", 16))
    return dataclasses.replace(case, knobs=knobs, plan=plan, mask=mask, burning=burning)


def rate(case: Case, row: dict[str, Any]) -> float:
    """Computes the samples/s of a training."""
    others = min(each["delayed"] for each in row["times"]) if os.environ.get(BUSY) and not case.burning else 0.0
    return row["times"][0]["steps"] * case.knobs.get("batch_size", 16) / (row["seconds"] - others)


def compared(case: Case) -> dict[str, Any]:
    """Trains a case with and without the remedy that its sentence names."""
    with tempfile.TemporaryDirectory() as folder:
        row = trained(case, Path(folder))
        brought = 0.0
        if row["kind"] and "shipped" not in case.knobs:
            better = remedied(case, row["kind"], row["sentence"], row["faster"])
            brought = rate(better, trained(better, Path(folder))) / rate(case, row)
    return {
        "name": case.name, "planted": case.kind, "named": row["kind"], "said": row["faster"], "brought": brought,
        "sentence": row["sentence"], "load": os.getloadavg()[0], "phases": [each["phases"] for each in row["times"]],
        "clocks": [{name: value for name, value in each.items() if name != "phases"} for each in row["times"]],
    }  # fmt: skip


# ---- TraceML -----------------------------------------------------------------------------------------------

VERDICTS = {
    "storage": "INPUT", "input": "INPUT", "evaluation": "RESIDUAL", "saving": "RESIDUAL", "watching": "RESIDUAL",
    "communication": "COMM", "slow process": "STRAGGLER",
}  # fmt: skip
"""A part of TraceML's verdict that is right; its table gives logging, checkpointing and validation as residual."""
EDITED = 3
"""Lines that a script for one process gets for TraceML: an import, init(), and trace_step() around a step."""
SMALL = Case(kind="overhead", way="script", knobs={"width": 64, "tokens": 1, "batch_size": 8, "steps": 4000})


def traced(case: Case, command: str) -> dict[str, Any]:
    """Trains a case's script, edited for TraceML, under its command; returns its verdict and the seconds of a step.

    A case of two processes is a script with DistributedDataParallel; without a command it runs without TraceML.
    """
    with tempfile.TemporaryDirectory() as folder:
        knobs = {"way": "traced" if command else "script", "plan": "", "folder": folder, **case.knobs}
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "GRAPPE_KNOBS": json.dumps(knobs),
            "GRAPPE_CAUSES": f"{folder}/written", "OMP_WAIT_POLICY": "passive",
        }  # fmt: skip
        processes = ["--nproc-per-node", "2"] if case.plan else []
        words = [command, "run", "--run-name", "case", *processes] if command else [sys.executable]
        done = run_masked([*words, str(SCRIPT)], case, environment, Path(folder))
        summary, step = Path(folder) / "logs" / "case" / "final_summary.json", Path(folder) / "written-step"
        if not step.exists() or (command and not summary.exists()):
            raise RuntimeError(f"{case.name}: {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
        verdict = json.loads(summary.read_text())["primary_diagnosis"] if command else {}
        return {
            "name": case.name, "planted": case.kind, "seconds": float(step.read_text()),
            "verdict": str(verdict.get("kind") or verdict.get("status") or ""), "diagnosis": verdict,
        }  # fmt: skip


def of_script() -> list[Case]:
    """Returns the 20 causes that a single script shows: the cases that are scripts, and watchers as lines of a loop."""
    return [case for case in cases() if case.way == "script" or case.kind == "watching"]


def beside(command: str, out: Path, *, only: Sequence[str] | None) -> None:
    """Writes and prints what TraceML says of them, and what a step of a small network takes with it and without."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for case in of_script():
        asked = not only or any(each in case.name for each in only)
        if case.name not in {row["name"] for row in rows} and asked:
            try:
                rows.append(traced(case, command))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{case.name}: {error}", file=sys.stderr, flush=True)
                continue
            with out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(f"{rows[-1]['name']}: {rows[-1]['verdict']}", file=sys.stderr, flush=True)
    pairs = [] if only else [(traced(SMALL, command)["seconds"], traced(SMALL, "")["seconds"]) for _ in range(3)]
    more = statistics.median([with_it - without for with_it, without in pairs] or [math.nan]) * 1e6
    right = [row for row in rows if row["planted"] in VERDICTS and VERDICTS[row["planted"]] in row["verdict"].upper()]
    print(f"TraceML: {len(right)} of {len(rows)} right, {EDITED} lines of edit, {more:+.0f} µs a step\n")
    print(table(
        ("planted", "TraceML's verdict", "right"),
        [(row["name"], row["verdict"], "yes" if row in right else "no") for row in rows],
    ))  # fmt: skip


# ---- Cost --------------------------------------------------------------------------------------------------


def cost() -> str:
    """Measures the microseconds of a step that the meter takes: to count it, and to read the CPU time around data."""
    from unittest.mock import Mock

    import torch

    from grappe.launch.rank import ProcessRank
    from grappe.launch.world import World
    from grappe.profiling import chronometer, phases
    from grappe.training.bottleneck import BottleneckMeter

    world = World(process=ProcessRank(), device=torch.device("cpu"))
    clock, plain = chronometer.Chronometer(world.device, time.perf_counter()), time.process_time
    meter = BottleneckMeter(clock, world, Mock())

    def steps(count: Callable[[], bool], number: int = 20_000) -> float:
        began = time.thread_time()  # which other programs do not change
        for _ in range(number):
            for phase in (phases.DATA, phases.FORWARD, phases.BACKWARD, phases.UPDATE):
                clock.switch(phase)
            clock.end_step()
            count()
        return (time.thread_time() - began) / number * 1e6

    differences = []
    for _ in range(15):
        taken = steps(meter.stepped)
        time.process_time = lambda: 0.0
        try:
            differences.append(taken - steps(lambda: False))
        finally:
            time.process_time = plain
    low, middle, high = statistics.quantiles(differences, n=4)
    return f"the meter takes {middle:.1f} µs of a step (quartiles {low:.1f} to {high:.1f})"


# ---- Tables ------------------------------------------------------------------------------------------------


def is_near(row: dict[str, Any]) -> bool:
    """Returns whether the remedy of a right sentence brings what it says, within 20 %."""
    return row["named"] == row["planted"] and abs(row["said"] / max(0.01, row["brought"]) - 1) <= NEAR


def shown(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of the tables."""
    planted, others = [row for row in rows if row["planted"]], [row for row in rows if not row["planted"]]
    if planted:
        right, near = sum(row["named"] == row["planted"] for row in planted), sum(map(is_near, planted))
        yield f"{len(planted)} causes, {right} named, {near} of them with a gain within 20 %.\n"
        yield table(
            ("planted", "named", "said", "brought", "within 20 %"),
            [
                (row["name"], row["named"] or "nothing", f"{row['said']:.2f}", f"{row['brought']:.2f}",
                 "yes" if is_near(row) else "no")
                for row in planted
            ],
        )  # fmt: skip
        yield ""
        kinds = list(dict.fromkeys(row["planted"] for row in planted))
        of_kind = {kind: [row for row in planted if row["planted"] == kind] for kind in kinds}
        yield table(
            ("kind", "planted", "named", "gain within 20 %"),
            [
                (kind, str(len(each)), str(sum(row["named"] == kind for row in each)), str(sum(map(is_near, each))))
                for kind, each in of_kind.items()
            ],
        )
    if others:
        spoken = [row for row in others if row["named"]]
        false = sum(row["brought"] < WORTH for row in spoken)
        yield f"\n{len(others)} healthy trainings, {len(spoken)} sentences, {false} whose remedy brings no tenth.\n"
        yield table(
            ("training", "sentence", "brought", "load"),
            [(row["name"], row["sentence"], f"{row['brought']:.2f}", f"{row['load']:.1f}") for row in spoken],
        )


def main() -> None:
    """Runs the cases that are not in the file yet, and prints tables of all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.causes", description=__doc__)
    parser.add_argument("--only", nargs="*", help="kinds, or parts of a case's name")
    parser.add_argument("--healthy", type=int, metavar="N", help="N healthy trainings instead of the causes")
    parser.add_argument("--out", type=Path, default=Path("causes.jsonl"), help="a line for each case; those stay")
    parser.add_argument("--traceml", metavar="BIN", help="TraceML's command: what it says of 20 of them")
    parser.add_argument("--busy", action="store_true", help="do not judge this machine's other programs: a try")
    parser.add_argument("--cost", action="store_true", help="only what the meter takes of a step")
    arguments = parser.parse_args()
    if arguments.cost:
        print(cost())
        return
    if arguments.traceml:
        beside(arguments.traceml, arguments.out, only=arguments.only)
        return
    if arguments.busy:
        os.environ[BUSY] = "1"
    before = machine()
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    todo = healthy(arguments.healthy) if arguments.healthy else cases()
    done = {row["name"] for row in rows}
    for number, case in enumerate(todo, 1):
        name = f"{case.name} #{number}" if not case.kind else case.name
        if name in done or (arguments.only and not any(each in name for each in arguments.only)):
            continue
        began = time.monotonic()
        try:
            row = compared(case) | {"name": name}
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{number}/{len(todo)} {name}: {error}", file=sys.stderr, flush=True)
            continue
        rows.append(row)
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        says = f"{row['named'] or 'nothing'}, said {row['said']:.2f}, brought {row['brought']:.2f}"
        print(f"{number}/{len(todo)} {name}: {says} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
    print(f"From {before}\nto {machine()}.\n")
    print("\n".join(shown(rows)))


if __name__ == "__main__":
    main()
