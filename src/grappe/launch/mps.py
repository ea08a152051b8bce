"""MPS: starts and ends NVIDIA's service through which processes share a GPU, in private folders."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from grappe.errors import PlanError, UsageError
from grappe.launch import command, files
from grappe.launch.files import own_folder, private_folder
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan

PROGRAM = "nvidia-cuda-mps-control"
CLIENTS = 48  # of one GPU; 60 from CUDA 13.1
READY = "ready"
PATIENCE_SECONDS = 30.0
OWNER = "owner"
_starts: Counter[tuple[str, int]] = Counter()
DEVICES = "CUDA_VISIBLE_DEVICES"


@contextlib.contextmanager
def shared_gpus(
    plan: Plan, process: ProcessRank | None, environment: MutableMapping[str, str] = os.environ
) -> Iterator[None]:
    """Context in which the service runs, if processes of `plan` share GPUs on this node.

    The process that starts the others starts the service, or under a launcher the first of each node, before any
    of them uses a GPU. If the service is not installed, processes take turns on the GPU.

    Raises:
        PlanError: more processes on a GPU than the service supports.
        UsageError: the service does not start.
    """
    if not is_needed(plan):
        yield
        return
    if plan.per_device > CLIENTS:
        raise PlanError(f"per_device={plan.per_device}: MPS takes {CLIENTS} processes a GPU: use fewer")
    folder = _folder(process)
    first = process is None or process.local_rank == 0
    if first:
        # Daemons whose owner was killed before it could end them.
        for owner in folder.parent.glob(f"*/{OWNER}"):
            with contextlib.suppress(ValueError, OSError):
                if not Path(f"/proc/{int(files.read_text(owner))}").exists():
                    stop(owner.parent)
        start(folder, environment)
    else:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (folder / READY).exists():
            if time.monotonic() > deadline:
                raise UsageError(f"MPS was not started in {PATIENCE_SECONDS:.0f} s by the first process of this node")
            time.sleep(0.05)
    before = {name: environment.get(name) for name in (*variables(folder), DEVICES)}
    environment.update(variables(folder))
    environment.pop(DEVICES, None)  # the daemon has numbered the devices that it names from 0
    try:
        yield
    finally:
        for name, value in before.items():  # for a notebook
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        if first:
            stop(folder)


def is_needed(plan: Plan) -> bool:
    """Returns whether processes of `plan` share GPUs of this machine, and the service is installed."""
    on_gpu = plan.device == "cuda" or (plan.device == "auto" and bool(list(Path("/dev").glob("nvidia[0-9]*"))))
    return plan.per_device > 1 and on_gpu and shutil.which(PROGRAM) is not None


def variables(folder: Path) -> dict[str, str]:
    """Returns the variables by which the daemon and its clients find each other, separate from other users'."""
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}


def start(folder: Path, environment: MutableMapping[str, str]) -> None:
    """Starts the daemon: `nvidia-cuda-mps-control -d`.

    Raises:
        UsageError: the daemon does not start; the message is the daemon's own.
    """
    files.remove_tree(folder)  # of an earlier start with this number
    for name in ("pipe", "log"):
        (folder / name).mkdir(parents=True, mode=0o700)
    files.replace(folder / OWNER, str(os.getpid()).encode())
    try:
        command.run(PROGRAM, "-d", environment={**environment, **variables(folder)})
    except command.Failed as error:
        files.remove_tree(folder)
        raise UsageError(f"MPS does not start: {error}. per_device=1 does not need it") from None
    files.replace(folder / READY, b"")


def stop(folder: Path) -> None:
    """Ends the daemon (`quit` on the standard input of `nvidia-cuda-mps-control`), and removes its folders."""
    with contextlib.suppress(command.Failed, command.Missing):  # it may have ended with its GPU
        command.run(PROGRAM, words="quit\n", environment={**os.environ, **variables(folder)})
    files.remove_tree(folder)


def _folder(process: ProcessRank | None) -> Path:
    """Returns a folder for this user, node and start; short, since a socket's path has at most 108 characters."""
    private = private_folder()
    base = None if private is None else own_folder(private / f"mps-{os.uname().nodename}")
    if base is None:
        raise UsageError(
            "the service that shares GPUs needs a folder that only you can write in, and found none: "
            "set XDG_RUNTIME_DIR or HOME to a folder of yours"
        )
    if process is None or not process.job:
        return base / str(os.getpid())
    # The same processes may train twice, and must not find the service that is just ending.
    _starts[process.job, process.rank] += 1
    return base / f"{process.job}-{_starts[process.job, process.rank]}"
