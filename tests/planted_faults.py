"""Plants each fault of planted_faults.toml in a clone of the last commit, and says which test of `make test` sees it.

    python -m tests.planted_faults [NUMBER ...]    # two at a time; all without a number

The test file that mirrors the fault's comes first, then its room, parity and trainings, then all others; the first test
that fails ends the run. At the end all tests that have failed run without a fault: what fails then has seen nothing.
"""

import os
import queue
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_suffix(".toml")
COMMIT = "not nightly and not artefact and not soak"
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
AT_ONCE = 2


class Fault(NamedTuple):
    """A line that is replaced."""

    file: str
    before: str
    after: str
    does: str  # to a user


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


def failing(clone: Path, *arguments: str) -> list[str]:
    """Runs tests of the commit; returns those that fail."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-rfE", "--tb=no", "-m", COMMIT, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(clone / "src")}
    ended = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False)
    failed = FAILED.findall(ended.stdout)
    assert failed or ended.returncode in (0, 5), ended.stdout[-2000:] + ended.stderr[-2000:]  # 5: there is none
    return failed


def killer(clone: Path, fault: Fault) -> str:
    """Returns the first test that fails with a fault, "" if none does."""
    file = clone / fault.file
    text = file.read_text()
    assert text.count(fault.before) == 1, f"{fault.file} has {text.count(fault.before)} times: {fault.before}"
    file.write_text(text.replace(fault.before, fault.after))
    try:
        return next((test for paths in groups(clone, fault) for test in failing(clone, "-x", *paths)), "")
    finally:
        file.write_text(text)


def main(numbers: Sequence[str]) -> int:
    """Returns the number of the faults that no test sees."""
    all_faults, clones, killers = faults(), queue.Queue[Path](), dict[int, str]()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        for each in range(AT_ONCE):
            clones.put(place := Path(folder, str(each), "grappe"))
            subprocess.run(["git", "clone", "--quiet", LIST.parents[1], place], check=True)

        def tried(number: int) -> None:
            clone, began, fault = clones.get(), time.monotonic(), all_faults[number - 1]
            killers[number] = killer(clone, fault)
            clones.put(clone)
            verdict = f"killed by {killers[number]}" if killers[number] else f"SURVIVED: {fault.does}"
            print(f"{number:2} {fault.file} {verdict} ({time.monotonic() - began:.0f} s)", flush=True)

        list(pool.map(tried, map(int, numbers) if numbers else range(1, len(all_faults) + 1)))
        tests = sorted(set(killers.values()) - {""})
        doubtful = ["", *(failing(place, *tests) if tests else [])]
    left = sorted(number for number, test in killers.items() if test in doubtful)
    print(f"not seen: {', '.join(map(str, left)) or 'none'}; failed without a fault: {doubtful[1:] or 'none'}")
    return len(left)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
