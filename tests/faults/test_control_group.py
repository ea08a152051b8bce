"""A control group with little memory, as a Slurm job has it: a step keeps its room beside checkpoints' copies."""

import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grappe.training.run import Run
from tests.commands import GRAPPE, Command

pytestmark = pytest.mark.slow

TASK = str(Path(__file__).parents[2] / "benchmarks" / "mlp_task.py")
ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # version 1, version 2
MB = 1_000_000


@pytest.fixture
def grouped(start: Callable[..., Command]) -> Iterator[Callable[[int], tuple[int, str]]]:
    """Trains three steps, with a checkpoint after each, in a group of so many bytes; returns exit code and error."""
    made: list[Path] = []

    def train(size: int) -> tuple[int, str]:
        group = _group(size)
        if group is None:
            pytest.skip("control groups of memory cannot be made here")
        made.append(group)
        words = f"{TASK}:Mlp width=3072 --plan device=cpu,threads=1 --steps 3 --save-every 1 --run run"
        line = f'echo $$ > {group}/cgroup.procs; exec "$0" train {words}'
        code, _, err = start("bash", "-c", line, GRAPPE, OMP_NUM_THREADS="1").end()
        return code, err

    yield train
    for group in made:
        _remove(group)


def test_a_kill_at_the_groups_limit_is_named(grouped: Callable[[int], tuple[int, str]], tmp_path: Path) -> None:
    code, err = grouped(800 * MB)
    assert code == 1 and "Traceback" not in err
    assert re.search(r"killed by SIGKILL \(the system did, .* may have 800 MB of memory together", err), err
    assert Run(tmp_path / "run").latest().step == 0, "the model as it was made is there"


def _group(size: int) -> Path | None:
    for root, file in zip(ROOTS, ("memory.limit_in_bytes", "memory.max"), strict=True):
        group = root / f"grappe-test-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(size))
        except OSError:  # not one of memory
            _remove(group)
            continue
        return group
    return None


def _remove(group: Path) -> None:
    for _ in range(100):
        try:
            group.rmdir()
            break
        except OSError:  # its processes are not quite gone
            time.sleep(0.05)
