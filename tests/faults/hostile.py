"""Feeds grappe thousands of hostile or damaged files, each in a process of its own, and counts how it ends.

    python -m tests.faults.hostile 2000        # numbers 0 to 1999, each the seed of its file
    python -m tests.faults.hostile 1 202       # number 202 again

Counted: refused with exit code 2, harmless (the command did its work), and what must never be: another exception,
more than 5 seconds, memory of more than twice the model's (beside what libraries take), a file elsewhere that
is new or changed. A finding is printed at once, and the next file is tried; the exit code is then 1.
"""

import collections
import dataclasses
import io
import json
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from grappe.errors import GrappeError
from tests.faults.hostile_files import KINDS_OF_FILES, Kind, make_honest
from tests.faults.pressure import waited

SECONDS = 5.0
LOOKS = 3  # at a command that took longer: another program may have had the disk, or the cores
HANG_SECONDS = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """Ends of the commands that were given one file."""

    ends: list[str]
    """"refused", "harmless", or a finding; one for each command, and more findings."""
    seconds: float
    """Of the longest command."""
    memory: float
    """Bytes at most, beside the file itself, which may be mapped."""


def attempt(kind: Kind, seed: int, honest: Path) -> Attempt:
    """Runs each command of a case on files made from those in `honest`."""
    rng = random.Random(seed)
    ends, longest = [], 0.0
    with tempfile.TemporaryDirectory(prefix="grappe-case-") as folder:
        place = Path(folder)
        (place / "here").mkdir()
        (place / "outside").mkdir()
        (place / "outside/kept").write_text("kept")
        os.chdir(place / "here")
        before, files = _peak(), 0
        for verb in kind.case(rng, honest, place):
            files = files or sum(one.stat().st_size for one in Path().iterdir() if one.is_file())
            end, seconds = _look(verb)
            ends.append(end)
            longest = max(longest, seconds)
            if seconds > SECONDS:
                ends.append(f"slow: {seconds:.1f} s")
        taken = max(_peak() - before - files, 0)
        if taken > 2 * kind.model + kind.own:
            ends.append(f"memory: {taken / 1e6:.0f} MB")
        outside = [(one.name, one.read_text()) for one in (place / "outside").iterdir()]
        if outside != [("kept", "kept")] or list(place.rglob("ran")):
            ends.append("wrote outside")
        os.chdir("/")
    return Attempt(ends=ends, seconds=longest, memory=taken)


def _look(verb: Callable[[], object]) -> tuple[str, float]:
    """Returns how the command ends, and after how many seconds: the least of some looks where that is too many."""
    times = []
    while True:
        began, computed, before = time.monotonic(), _computed(), waited()
        end = _ended(verb)
        # On a busy machine, without the seconds in which a process waited for a core.
        quiet = time.monotonic() - began - (waited() - before)
        times.append(max(quiet, _computed() - computed))
        if times[-1] <= SECONDS or len(times) == LOOKS:
            return end, min(times)


def _computed() -> float:
    """Seconds that this process and those that it forked have computed."""
    return sum(os.times()[:4])


def _ended(verb: Callable[[], object]) -> str:
    try:
        verb()
    except GrappeError as error:
        return "refused" if error.exit_code == 2 else f"exit code {error.exit_code}: {error}"
    except OSError as error:
        return "refused" if error.filename or error.strerror else f"OSError {error}"
    except BaseException:
        return "exception: " + "".join(traceback.format_exc().splitlines(keepends=True)[-5:])
    return "harmless"


def _peak() -> int:
    """The most memory of this process and of those that it forked."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(one).ru_maxrss for one in who) * 1024


def in_fork(work: Callable[[], Any], seconds: float = HANG_SECONDS) -> Any:
    """The result of `work`, JSON, from a forked process whose output is dropped.

    Raises:
        RuntimeError: it ended without one, in time or not; with its traceback.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        sys.stdout = io.StringIO()
        try:
            said = {"result": work()}
        except BaseException:
            said = {"failed": traceback.format_exc()[-3000:]}
        os.write(writer, json.dumps(said).encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        in_time = select.select([stream], [], [], seconds)[0]
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        said = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found = json.loads(said) if said else {"failed": f"the process ended with {status}, in time: {bool(in_time)}"}
    if "failed" in found:
        raise RuntimeError(found["failed"])
    return found["result"]


@dataclasses.dataclass
class Row:
    """The table's row of a kind."""

    files: int = 0
    ends: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    seconds: tuple[float, int] = (0.0, 0)  # the longest command, and its file's number
    memory: tuple[float, int] = (0.0, 0)

    def add(self, kind: Kind, number: int, honest: Path, seconds: float = HANG_SECONDS) -> list[str]:
        """Tries a file; returns what must never be."""
        self.files += 1
        try:
            found = Attempt(**in_fork(lambda: dataclasses.asdict(attempt(kind, number, honest)), seconds))
        except RuntimeError as error:
            found = Attempt(ends=[f"died: {error}"], seconds=0.0, memory=0.0)
        self.seconds = max(self.seconds, (found.seconds, number))
        self.memory = max(self.memory, (found.memory, number))
        bad = [end for end in found.ends if end not in ("refused", "harmless")]
        self.ends.update(end if end not in bad else "BAD" for end in found.ends)
        return bad

    def text(self, model: float) -> str:
        """The row, one line."""
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        ratio = f", {self.memory[0] / model:.2f} times the model's" if model > 1e7 else ""
        return (
            f"{self.files} files: {ends}; longest {self.seconds[0]:.1f} s (number {self.seconds[1]}); "
            f"most memory {self.memory[0] / 1e6:.0f} MB{ratio} (number {self.memory[1]})"
        )


def main(count: int, first: int = 0, kinds: Mapping[str, Kind] = KINDS_OF_FILES, seconds: float = HANG_SECONDS) -> int:
    """Tries `count` files from number `first` on, and prints the table."""
    torch.set_num_threads(1)
    names = [name for name, kind in kinds.items() for _ in range(kind.share)]
    table = {name: Row() for name in kinds}
    bad = 0
    with tempfile.TemporaryDirectory(prefix="grappe-hostile-") as folder:
        honest = Path(folder)
        in_fork(lambda: make_honest(honest))
        for number in range(first, first + count):
            name = names[number % len(names)]
            for finding in table[name].add(kinds[name], number, honest, seconds):
                bad += 1
                print(f"FOUND {name} {number}: {finding}", flush=True)
            if number % 100 == 99:
                print(f"{number + 1 - first} of {count}, {bad} findings", file=sys.stderr, flush=True)
    for name, row in table.items():
        print(f"{name:<14}{row.text(kinds[name].model)}", flush=True)
    print(f"{count} files, {bad} findings")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) if sys.argv[1:] else main(2000))
