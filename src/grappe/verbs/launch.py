"""grappe launch: runs a training script on a plan's processes, as torchrun does; a grappe.Loop in it gets the plan."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grappe.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, UsageError
from grappe.launch import files
from grappe.launch.rank import ProcessRank
from grappe.launch.signals import SIGNALS
from grappe.launch.start import start
from grappe.launch.terminal import complain, say, user_stream
from grappe.plan import AnyPlan, as_plan
from grappe.private_api.multiprocessing import run_exit_functions

LOOP = "grappe"
ITS_OWN = ("torch.distributed", "accelerate", "deepspeed", "horovod", "lightning", "pytorch_lightning", "transformers")
"""Packages by which a script spreads its training itself."""
INTERRUPTED = 130
"""The exit code of a Python script that Ctrl-C ends."""


def launch(script: Path | str, arguments: Sequence[str] = (), plan: AnyPlan = "") -> int:
    """Runs a script on the processes of a plan, and waits for them; process 0 has the terminal.

    Args:
        arguments: the script's own.
        plan: for its grappe.Loop. A script that spreads itself, by torch.distributed say, gets the processes alone,
            with torchrun's variables.

    Returns:
        The script's exit code: 75 if it was interrupted and saved.

    Raises:
        UsageError: there is no such script, or it trains on one process and the plan has several.
        ProcessDied: a process failed.
    """
    chosen, script = as_plan(plan), Path(script)
    try:
        imported = set(_imports(script))
    except OSError as error:
        raise UsageError(f"{script}: {error.strerror}: give a Python script") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{script} is not a Python script: {error}") from error
    its_own = next((name for name in ITS_OWN if name in imported), None)
    if LOOP not in imported and chosen.processes > 1:
        if its_own is None:
            raise UsageError(
                f"{script} trains on one process, and each of {chosen.processes} would do the same: spread it with six "
                "lines of grappe.Loop (docs/own-loop.md), or describe it as a task"
            )
        complain(f"grappe: {script} uses {its_own}: it is started as it is, on {chosen.processes} processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    request = ScriptRequest(
        script=script,
        arguments=tuple(arguments),
        plan=str(chosen),
        rendezvous={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    )
    sys.stdout.flush()
    return start("grappe.verbs.launch:run_script", request, chosen, saves=True)


def _imports(script: Path) -> Iterator[str]:
    """Yields what a script imports, packages and modules: `torch` and `torch.distributed`."""
    for node in ast.walk(ast.parse(files.read_text(script))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: count + 1]) for count in range(len(parts)))


# ---- In each process ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """A script and the plan of the processes that run it."""

    script: Path
    arguments: Sequence[str]
    plan: str
    """"" for one process."""
    rendezvous: Mapping[str, str]
    """MASTER_ADDR and MASTER_PORT, for a script that calls torch.distributed itself."""


def run_script(request: ScriptRequest, process: ProcessRank, rendezvous_folder: Path) -> int:
    """Runs the script as `python SCRIPT ARGUMENTS` would; returns its exit code.

    On other processes than the first a failure is raised.
    """
    from grappe.training import own_loop  # and torch

    os.environ[own_loop.PLAN] = request.plan
    if process.launcher == "grappe":
        own_loop.become(process, rendezvous_folder)
        os.environ.update(_as_torchrun(process), **request.rendezvous)
        stream = user_stream(process)
        if stream is not None:
            for descriptor in (1, 2):
                os.dup2(stream.fileno(), descriptor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    sys.argv = [str(request.script), *request.arguments]
    sys.path[0] = str(request.script.absolute().parent)
    code = EXIT_FAILURE
    try:
        with contextlib.suppress(KeyboardInterrupt):
            code = INTERRUPTED
            runpy.run_path(str(request.script), run_name="__main__")
            code = EXIT_OK
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else EXIT_OK if end.code is None else EXIT_FAILURE
        if code == EXIT_FAILURE and isinstance(end.code, str):
            say(end.code, sys.stderr)
    except BaseException as error:
        sys.last_value = error  # as the interpreter does before its exit functions
        raise
    finally:
        if process.launcher == "grappe":
            run_exit_functions()  # a forked process would leave them out
    if process.rank and code not in (EXIT_OK, EXIT_INTERRUPTED, INTERRUPTED):
        raise SystemExit(code)
    return code


def _as_torchrun(process: ProcessRank) -> dict[str, str]:
    """Returns the variables that torchrun sets, for a script that reads its rank itself."""
    return {
        "RANK": str(process.rank),
        "WORLD_SIZE": str(process.size),
        "LOCAL_RANK": str(process.local_rank),
        "LOCAL_WORLD_SIZE": str(process.local_size),
    }
