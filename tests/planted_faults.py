"""Plants each fault of planted_faults.toml in a clone of the last commit, and says which test of `make test` sees it.

    python -m tests.planted_faults [NUMBER ...]    # two at a time; all without a number

The test file that mirrors the fault's comes first, then its room, parity and trainings, then all others; the first test
that fails ends the run. It counts only if it passes in the same clone without the fault.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
COMMIT = "not nightly and not artefact and not soak"
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
AT_ONCE = 2


class Fault(NamedTuple):
    """A line that is replaced."""

    file: str
    before: str
    after: str
    does: str
    """What it would do to a user."""

    @contextlib.contextmanager
    def planted(self, clone: Path) -> Iterator[None]:
        """Context in which a clone has the fault."""
        file = clone / self.file
        text = file.read_text()
        assert text.count(self.before) == 1, f"{self.file} has {text.count(self.before)} times: {self.before}"
        file.write_text(text.replace(self.before, self.after))
        try:
            yield
        finally:
            file.write_text(text)


def faults() -> list[Fault]:
    """Returns the faults, in the list's order."""
    return [Fault(**entry) for entry in tomllib.loads(LIST.read_text())["fault"]]


def groups(clone: Path, fault: Fault) -> list[list[str]]:
    """Returns the paths of the tests, from near to far."""
    room, *folders, name = Path(fault.file).parts[2:]
    mirror = Path("tests", room, *folders, f"test_{name}")
    near = [[f"tests/{room}"], ["tests/parity", "tests/training"]]
    entries = (path for path in sorted((clone / "tests").iterdir()) if path.is_dir() or path.match("test_*.py"))
    others = [f"tests/{path.name}" for path in entries if path.name not in ("__pycache__", room, "parity", "training")]
    return [*([[str(mirror)]] if (clone / mirror).exists() else []), *near, others]


def failing(clone: Path, *tests: str) -> str:
    """Runs tests; returns the first that fails, "" if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-rfE", "--tb=no", "-m", COMMIT, *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(clone / "src")}
    ended = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode in (0, 5):  # 5: none of them is of the commit
        return ""
    seen = FAILED.search(ended.stdout)
    assert seen is not None, ended.stdout[-2000:] + ended.stderr[-2000:]
    return seen[1]


def killer(clone: Path, fault: Fault) -> str:
    """Returns the test that sees a fault, "" if none does."""
    for paths in groups(clone, fault):
        doubtful: list[str] = []
        while True:
            with fault.planted(clone):
                test = failing(clone, *paths, *(f"--deselect={each}" for each in doubtful))
            if not test:
                break
            if not failing(clone, test):
                return test
            doubtful.append(test)
    return ""


def main(numbers: Sequence[str]) -> int:
    """Returns the number of the faults that no test sees."""
    all_faults, clones, survived = faults(), queue.Queue[Path](), list[int]()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        for each in range(AT_ONCE):
            place = Path(folder, str(each), "grappe")
            subprocess.run(["git", "clone", "--quiet", ROOT, place], check=True)
            clones.put(place)

        def tried(number: int) -> None:
            clone, began, fault = clones.get(), time.monotonic(), all_faults[number - 1]
            test = killer(clone, fault)
            clones.put(clone)
            survived.extend([number] * (not test))
            verdict = f"killed by {test}" if test else f"SURVIVED: {fault.does}"
            print(f"{number:2} {fault.file} {verdict} ({time.monotonic() - began:.0f} s)", flush=True)

        list(pool.map(tried, map(int, numbers) if numbers else range(1, len(all_faults) + 1)))
    print(f"survived: {', '.join(map(str, sorted(survived))) or 'none'}")
    return len(survived)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
