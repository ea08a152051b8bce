"""The grappe command as a user starts it in a terminal, and whatever it leaves behind."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import warm
from tests.patience import PATIENCE_SECONDS

GRAPPE, MARK, TORCHRUN = warm.GRAPPE, warm.MARK, warm.TORCHRUN
SLOW = str(Path(__file__).with_name("slow.py"))


class Command:
    """A command in a session of its own; `members` finds all that descends from it, orphans too.

    Python programs are started warm, unless `cold` asks for an interpreter of its own.
    """

    def __init__(
        self, *arguments: str, cwd: Path, text: str | None = None, cold: bool = False, **variables: str
    ) -> None:
        self._mark = f"{MARK}={uuid.uuid4()}"
        self.temp = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))  # short, as names of sockets must be
        name, _, value = self._mark.partition("=")
        with _signals_as_in_a_terminal():
            self.process = (subprocess.Popen if cold else warm.WarmProcess)(
                arguments,
                cwd=cwd,
                env={**_plain_environment(), name: value, "TMPDIR": str(self.temp), **variables},
                stdin=subprocess.PIPE if text is not None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        self.text = text

    def end(self, patience: float = PATIENCE_SECONDS) -> tuple[int, str, str]:
        """Exit code, standard output and standard error, once it has ended."""
        out, err = self.process.communicate(self.text, timeout=patience)
        return self.process.returncode, out, err

    def stop_signal(self) -> None:
        """Ctrl-C: the terminal sends SIGINT to the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def has_pending(self, number: int) -> bool:
        """Whether a signal that was sent to its first process has not reached it yet."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        masks = [line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)

    def members(self) -> list[int]:
        """The living processes that it started, itself included."""
        return [pid for pid in _pids() if self._mark in _environment(pid)]

    def left(self) -> list[str]:
        """Lists the files left in the command's temporary folder, without torch's cache, which may stay."""
        return sorted(entry.name for entry in self.temp.iterdir() if not entry.name.startswith("torchinductor_"))

    def close(self) -> None:
        """Ends all of it."""
        send(self.members(), signal.SIGKILL)
        self.process.communicate()
        # One that was killed and is not gone yet holds its run's lease against the next command.
        until(lambda: self.process.pid not in map(_session, _pids()), "all of its session are gone")
        shutil.rmtree(self.temp, ignore_errors=True)


def ran(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python program warm, with these variables besides this process's own, and waits for its end."""
    with warm.WarmProcess(
        arguments,
        cwd=cwd,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def free_port() -> str:
    """A port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def send(pids: list[int], number: signal.Signals) -> bool:
    """Sends a signal to each; returns whether any still lived: the end of one may be the end of others."""
    sent = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            sent = True
    return sent


def until(true: Callable[[], object], what: str) -> None:
    """Waits until `true()`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


def pids_in_training(run: Path, processes: int) -> list[int]:
    """The process ids by rank of a training of tests/slow.py, once each has taken some steps."""

    def found() -> list[int]:
        logs = [run / "logs" / f"rank-{rank}.log" for rank in range(processes)]
        lines = [[one for one in log.read_text().splitlines() if "step in" in one] for log in logs if log.exists()]
        last = [int(mine[-1].split()[-1]) for mine in lines if len(set(mine[-3:])) == 1 and len(mine) > 2]
        return [pid for pid in last if Path(f"/proc/{pid}").exists()]  # not that of a check before

    until(lambda: len(found()) == processes, f"{processes} processes train")
    return found()


def _plain_environment() -> dict[str, str]:
    """Ours, without what a launcher of these tests may have set."""
    launchers = ("SLURM_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "GRAPPE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(launchers)}


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _session(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])
    except OSError:
        return 0


def _environment(pid: int) -> str:
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return ""
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def _signals_as_in_a_terminal() -> Iterator[None]:
    """A test run in the background has some ignored, and its children would too."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
