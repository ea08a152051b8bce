"""Two trainings of one run from two nodes that share its disk: one writes, nothing is lost.

The other node is this machine with a host name and process ids of its own (namespaces of UTS and PID).
"""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grappe.checkpoint.lease import FILE, STALE_SECONDS
from grappe.training.run import Run
from tests.commands import GRAPPE, SLOW, Command, send, until
from tests.faults.resume_cell import hashes

OTHER = ("unshare", "--map-root-user", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c")
TRAIN = (GRAPPE, "train", SLOW, "epochs=4", "--save-every", "4", "--plan", "replicate=2,threads=1,device=cpu")
LAST = 32
Start = Callable[..., Command]


@pytest.fixture
def start(start: Start) -> Start:
    """Starts a training of the run, here or on the other node, in steps of some seconds."""

    def begin(*, other: bool, pause: float, run: str = "run") -> Command:
        words = (*TRAIN, f"pause={pause}", "--run", run)
        return start(*(*OTHER, f"hostname elsewhere; {' '.join(words)}; exit $?") if other else words)

    return begin


def step_of(run: Path) -> int:
    """The step of the newest checkpoint."""
    found = Run(run).latest() if (run / "run.json").exists() else None
    return found.step if found is not None else -1


def a_minute_passes(run: Path) -> None:
    """Makes the lease's last heartbeat older, as if the holder had been silent."""
    file = run / FILE
    held = json.loads(file.read_text())
    file.write_text(json.dumps({**held, "beat": time.time() - STALE_SECONDS - 1}))


def whole(start: Start, tmp_path: Path) -> dict[str, str]:
    """The last checkpoint of a training that nobody disturbs."""
    code, _, err = start(other=False, pause=0, run="whole").end()
    assert (code, err) == (0, "")
    return hashes(tmp_path / "whole", LAST)


def test_the_second_is_refused_and_the_first_goes_on(start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start(other=True, pause=0.2)
    until(lambda: step_of(run) >= 4, "the other node has saved")
    code, _, err = start(other=False, pause=0).end()
    assert code != 0
    assert "is being written by process" in err and "on elsewhere" in err and "Traceback" not in err
    assert first.end()[0] == 0
    assert hashes(run, LAST) == whole(start, tmp_path)


def test_a_node_that_fell_silent_is_replaced_after_a_minute(start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start(other=True, pause=0.2)
    until(lambda: step_of(run) >= 4, "the other node has saved")
    send(first.members(), signal.SIGKILL)
    code, _, err = start(other=False, pause=0).end()
    assert code != 0 and "wait a minute if it is dead" in err  # its pid means nothing here
    a_minute_passes(run)
    code, _, err = start(other=False, pause=0).end()
    assert (code, err) == (0, "")
    assert hashes(run, LAST) == whole(start, tmp_path)


def test_a_node_that_wakes_up_writes_nothing_more(start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start(other=True, pause=0.2)
    until(lambda: step_of(run) >= 4, "the other node has saved")
    stopped = first.members()
    send(stopped, signal.SIGSTOP)
    a_minute_passes(run)
    second = start(other=False, pause=0.2)
    before = step_of(run)
    until(lambda: step_of(run) > before, "this node has saved")
    send(stopped, signal.SIGCONT)
    code, _, err = first.end()
    assert code not in (0, 75) and "this process writes nothing more" in err and "Traceback" not in err
    code, _, err = second.end()
    assert (code, err) == (0, "")
    assert hashes(run, LAST) == whole(start, tmp_path)
