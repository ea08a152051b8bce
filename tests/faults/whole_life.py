"""SIGKILL at random instants of a training's whole life, under every engine: the end is the same to the bit.

    python -m tests.faults.whole_life 500            # kills; number 0 to N are the seeds of trainings
    python -m tests.faults.whole_life 5 12 1         # from training 12 on, one at a time

A training that nobody kills is timed first, under each plan. Then a training gets a SIGKILL at an instant that is
uniform over that time, is started again by the same command, killed again perhaps, and ends by itself. What was learned
is compared to the bit, what was said is searched for mistakes of grappe's own, and what lives on is counted.
"""

import collections
import dataclasses
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from grappe.checkpoint.format import latest
from grappe.cli.exit import BUG
from grappe.training.run import Run
from tests.commands import GRAPPE, TORCHRUN, Command, send
from tests.faults.pressure import waited
from tests.faults.resume_cell import curves, hashes_of

ROLES = {"command": 3, "fork server": 3, "one rank": 3, "all": 3, "another": 1}
"""What is killed, and how often; of those that live then."""


SERVERS = ("multiprocessing.forkserver", "tests.warm")
"""Parts of the command line of the server that ranks are forked from, started cold or warm."""


def roles(one: Command) -> dict[str, list[int]]:
    """The living processes of a command, by what they are."""
    main = one.process.pid
    members = {pid: _status(pid) for pid in one.members()}
    found = collections.defaultdict(list)
    for pid, (parent, words) in members.items():
        parents = members.get(parent, (0, ""))[1]
        if pid == main:
            role = "command"
        elif parent == main and any(name in words for name in SERVERS):
            role = "fork server"
        elif "resource_tracker" not in words and (parent == main or any(name in parents for name in SERVERS)):
            role = "one rank"
        else:
            role = "another"
        found[role].append(pid)
    found["all"] = list(members)
    return dict(found)


def _status(pid: int) -> tuple[int, str]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(stat[1]), Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except (OSError, IndexError):
        return 0, ""


ROOT = Path(__file__).parents[2]
COLD = True
"""Whether interpreters start as a user's do, and are killed while they import, too."""
TASK = f"{Path(__file__).with_name('life.py')}:Life"
LOOP = str(ROOT / "tests/training/gan.py")
GONE_SECONDS = 10.0
"""Until no process is left, on a quiet machine: seconds in which somebody waits for a core are not counted."""
LEFT_SECONDS = 300.0
"""What lives as long as this lives for ever."""
MISTAKES = (BUG, "Traceback", "EOFError")
AGAIN = 0.75  # how likely one more kill is
PLANS = (
    "", "replicate=2", "shard=2", "replicate=2,shard=2", "pipeline=2,microbatches=2", "tensor=2", "shard=2,offload=cpu",
    "exact=2,replicate=2", "replicate=2,workers=1", "engine=textbook,replicate=2", "engine=deepspeed,shard=2",
    "engine=horovod,replicate=2", "engine=lightning,replicate=2", "own loop", "own loop,replicate=2",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill, and what came of it."""

    plan: str
    role: str
    phase: str
    code: int
    """The command's exit code."""
    quiet: float
    """Seconds until no process was left, without those in which a process of the machine waited for a core."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """A training that nobody killed."""

    folder: Path
    seconds: float
    end: dict[str, object]


def command(plan: str, folder: Path) -> Command:
    """Starts, or goes on with, the training in `folder`."""
    own, _, rest = plan.partition("own loop")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    more: dict[str, Any] = {"PYTHONPATH": path, "OMP_WAIT_POLICY": "passive", "cold": COLD or "own loop" in plan}
    if not own and "own loop" in plan:
        rest = rest.lstrip(",")
        starter = (TORCHRUN, "--nproc-per-node", "2", "--standalone") if rest else (sys.executable,)
        text = ",".join(filter(None, [rest, "threads=1", "device=cpu"]))
        return Command(*starter, LOOP, text, "out.safetensors", "run", cwd=folder, **more)
    workers = "" if "workers" in plan else "workers=0"
    text = ",".join(filter(None, [plan, workers, "threads=1", "device=cpu"]))
    fields = [] if workers else ["apart=yes"]
    options = ["--log-samples", "--save-every", "4", "--evaluate-every", "7", "--run", "run"]
    return Command(GRAPPE, "train", TASK, *fields, "--plan", text, *options, cwd=folder, **more)


def end_of(folder: Path) -> dict[str, object]:
    """Reads what a training leaves: its newest checkpoint's hashes, curves, samples, and the names in its folder."""
    run = folder / "run"
    newest = latest(run / "checkpoints")
    found: dict[str, object] = {"step": newest.step, **hashes_of(newest)}
    # The lease of a process that is dead holds nobody back: one killed behind the mark of the end leaves it.
    found["files"] = sorted(one.name for one in run.iterdir() if one.name != "lease.json")
    if Run.is_run(run):
        logs = {one.name: one.read_text() for one in (run / "samples").iterdir()}  # evaluations, too
        found |= {"curves": curves(run), "samples": logs, "finished": Run(run).is_finished()}
    return found


def whole(plan: str, folder: Path) -> Whole:
    """Trains from the first instant to the last, and takes the time."""
    folder.mkdir()
    began = time.monotonic()
    one = command(plan, folder)
    try:
        code, _, err = one.end()
    finally:
        one.close()
    assert code == 0, f"{plan}: {err}"
    return Whole(folder=folder, seconds=time.monotonic() - began, end=end_of(folder))


class Life:
    """A training through some kills."""

    def __init__(self, plan: str, unkilled: Whole, folder: Path, generator: random.Random) -> None:
        self._plan, self._whole, self._folder, self._random = plan, unkilled, folder, generator
        self.kills: list[Kill] = []
        self.findings: list[str] = []
        folder.mkdir()

    def through(self) -> None:
        """Trains to the end, after some kills."""
        more = True
        while True:
            one = command(self._plan, self._folder)
            try:
                struck = more and self._struck(one)
                code, out, err = one.end()
            finally:
                one.close()
            self.search(f"{out}\n{err}", own=code if not struck else None)
            if not struck:
                break
            more = self._random.random() < AGAIN
        self.compare()

    def _struck(self, one: Command) -> bool:
        """Kills at a random instant; returns whether there was still something to kill."""
        try:
            one.process.wait(self._random.random() * self._whole.seconds)
            return False
        except subprocess.TimeoutExpired:
            pass
        living = roles(one)
        names = [name for name in ROLES if living.get(name)]
        if not names:
            return False
        role = self._random.choices(names, [ROLES[name] for name in names])[0]
        victims = living[role] if role == "all" else [self._random.choice(living[role])]
        phase = _phase(self._folder / "run")
        if not send(victims, signal.SIGKILL):
            return False
        began, before = time.monotonic(), waited()
        self._wait(one, role)
        gone = time.monotonic() - began
        quiet = max(0.0, gone - (waited() - before))
        code = one.process.returncode
        self.kills.append(Kill(plan=self._plan, role=role, phase=phase, code=code, quiet=quiet))
        # What a training bears (the loss of a resource tracker) does not end it.
        if quiet > GONE_SECONDS and code != 0:
            self.findings.append(f"{role} killed {phase}: it took {gone:.1f} s ({quiet:.1f} quiet) until none was left")
        return code != 0

    def _wait(self, one: Command, role: str) -> None:
        until = time.monotonic() + LEFT_SECONDS
        while one.process.poll() is None or one.members():
            if time.monotonic() > until:
                left = roles(one)
                self.findings.append(f"{role} killed: {left} lived on for {LEFT_SECONDS:.0f} s")
                send(one.members(), signal.SIGKILL)  # they would keep the output open
                one.process.wait()
                return
            time.sleep(0.1)

    def search(self, said: str, own: int | None) -> None:
        """Looks for what a user must never read; `own` is the exit code of a start that was not killed."""
        if own not in (None, 0):
            self.findings.append(f"the start that nobody killed ended with {own}: {said[-3000:]}")
        wrong = MISTAKES[:1] if "own loop" in self._plan else MISTAKES  # the loop is a script, with Python's own words
        kill = self.kills[-1] if self.kills else None
        named = kill is None or kill.code != 1 or "own loop" in self._plan or "SIGKILL" in said
        if own is None and not named:
            self.findings.append(f"no signal is named after {kill}: {said[-3000:]}")
        self.findings += [f"{word!r} after {kill}: {said[-3000:]}" for word in wrong if word in said][:1]

    def compare(self) -> None:
        """Finds what is other than without kills."""
        ends = end_of(self._folder)
        wrong = sorted(name for name in {*ends, *self._whole.end} if ends.get(name) != self._whole.end.get(name))
        if wrong:
            some = {name: (self._whole.end.get(name), ends.get(name)) for name in wrong[:2]}
            self.findings.append(f"after {self.kills}: other {wrong}: {str(some)[:2000]}")


def _phase(run: Path) -> str:
    if not (run / "checkpoints").is_dir() or (newest := latest(run / "checkpoints")) is None:
        return "before there was a checkpoint"
    if (run / "done").exists():
        return "after the end"
    return "before the first save of a step" if newest.step == 0 else "between the first save and the end"


def one_life(number: int, plan: str, unkilled: Whole, base: Path) -> tuple[list[Kill], list[str]]:
    """Trains through some kills, which `number` decides; returns them, and what was found."""
    folder = base / f"life-{number}"
    life = Life(plan, unkilled, folder, random.Random(number))
    life.through()
    shutil.rmtree(folder)
    return life.kills, [f"{plan or 'one process'} {number}: {one}" for one in life.findings]


def attack(kills: int, first: int, side_by_side: int, plans: tuple[str, ...] = PLANS) -> tuple[list[Kill], list[str]]:
    """Trains through `kills` kills and some more; returns them, and what was found."""
    done: list[Kill] = []
    findings: list[str] = []
    # Processes, since only a main thread may set signals as a terminal does.
    context = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory(prefix="grappe-life-") as folder,
        ProcessPoolExecutor(side_by_side, context) as pool,
    ):
        base = Path(folder)
        places = [base / f"whole-{index}" for index in range(len(plans))]
        wholes = dict(zip(plans, pool.map(whole, plans, places), strict=True))
        print("seconds of a whole life:", {plan: round(one.seconds, 1) for plan, one in wholes.items()}, flush=True)
        numbers, under_way = itertools.count(first), set[Future]()
        while len(done) < kills or under_way:
            while len(done) < kills and len(under_way) < side_by_side:
                plan = plans[(number := next(numbers)) % len(plans)]
                under_way.add(pool.submit(one_life, number, plan, wholes[plan], base))
            ready, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for one in ready:
                more, found = one.result()
                done += more
                findings += found
                print("".join(f"FOUND {line}\n" for line in found), end="", flush=True)
                print(f"{len(done)} of {kills}, {len(findings)} findings: {more}", file=sys.stderr, flush=True)
    return done, findings


def main(kills: int = 500, first: int = 0, side_by_side: int = 2) -> int:
    """Attacks, and prints what was killed."""
    done, findings = attack(kills, first, side_by_side)
    for name in ("plan", "role", "phase"):
        print(name, dict(collections.Counter(getattr(kill, name) for kill in done)))
    longest = max((kill.quiet for kill in done), default=0.0)
    print(f"{len(done)} kills, {len(findings)} findings; at most {longest:.1f} quiet seconds until none was left")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
