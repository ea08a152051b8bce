"""grappe launch: runs a training script on a plan's processes, started here or by torchrun or srun.

A grappe.Loop in it gets the plan. A script for one process runs whole on each, and its tensors hold a process's rows.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import dataclasses
import faulthandler
import functools
import importlib.machinery
import itertools
import os
import secrets
import shlex
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType

from grappe.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    GrappeError,
    PlanError,
    ProcessDied,
    ReplayError,
    UsageError,
)
from grappe.errors.causes import broken_package, refused_process
from grappe.errors.remedies import SCRIPTS, remedy
from grappe.errors.user_line import PACKAGE, is_users_file
from grappe.launch import files, imports, local
from grappe.launch.files import IN_PART, RUNS
from grappe.launch.imports import LIGHTNING
from grappe.launch.rank import ProcessRank, is_main_process, rank_from_environment
from grappe.launch.start import start
from grappe.launch.terminal import complain, redirected, write
from grappe.plan import AnyPlan, Plan, as_plan
from grappe.private_api.multiprocessing import start_as_python_does
from grappe.training.run import Run, new_folder
from grappe.words import count_of

INTERRUPTED = 130
"""The exit code of a Python script that Ctrl-C ends."""
RECORDED = "grappe.contrib.script.recorded:run_recorded"  # which imports this module
LOOP = "grappe"
ITS_OWN = (
    "torch.distributed", "accelerate", "deepspeed", "horovod", "lightning", "pytorch_lightning",
    "transformers.Trainer", "transformers.Seq2SeqTrainer", "transformers.TrainingArguments",
)  # fmt: skip
"""Packages, and classes of them, by which a script spreads its training itself."""
SLOW_IMPORTS = ("torchvision", "matplotlib.pyplot", "timm", "transformers")
"""Libraries that start no threads, which a script's processes import once, together."""
PROCESS_KEYS = frozenset({"replicate", "batchnorm", "dropout", "device", "backend", "threads", "per_device"})
"""Keys of a plan that change no model of a script for one process."""
UNEDITED_KEYS = PROCESS_KEYS | {"precision", "recompute", "compile", "channels_last", "shard", "zero"}
"""Keys of a plan that a script for one process can have."""
LATER_SECONDS = 0.5
"""Seconds after which another process than the first reports the script's error: if all fail alike, process 0 does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """A script and the plan of the processes that run it."""

    script: Path
    arguments: Sequence[str]
    plan: str
    """"" for one process."""
    rendezvous: Mapping[str, str]
    """MASTER_ADDR and MASTER_PORT, for a script that calls torch.distributed itself."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of every process."""
    seed: int = 0
    """Seed of what the script draws before it seeds itself, the same in all processes."""
    is_loop: bool = False
    """Whether it has a grappe.Loop, and so draws from that seed, too."""
    run: Path | None = None
    """Folder of the run of a script for one process; None: it becomes none."""
    steps: int | None = None
    """Steps after which it ends, as a measurement does, which leaves no file; None: it ends by itself."""
    save_every: int | None = None
    """Steps between checkpoints; None: a minute."""
    idle: float = 0.0
    """Seconds without any work after which the processes save and end; 0: never."""
    catches: bool = False
    """Whether the script does something of its own on Ctrl-C."""


def launch(
    script: Path | str,
    arguments: Sequence[str] = (),
    plan: AnyPlan = "",
    *,
    run: Path | None = None,
    base: Path = RUNS,
    save_every: int | None = None,
    idle: float = 0.0,
) -> int:
    """Runs a script on the processes of a plan, and waits for them; process 0 has the terminal.

    Args:
        arguments: the script's own.
        plan: for its grappe.Loop. A script that spreads itself, by torch.distributed say, gets the processes alone,
            with torchrun's variables.
        run: the folder of the run that a script for one process becomes, once it trains; a run in it is resumed.
            None: a new one under `base`.
        save_every: steps between checkpoints; None: a minute.
        idle: seconds in which no process computes, after which they save and end; 0: never.

    Returns:
        The script's exit code: 75 if it was interrupted and saved.

    Raises:
        UsageError: there is no such script.
        ProcessDied: a process failed.
    """
    chosen, script = as_plan(plan), Path(script)
    tree = parsed(script)
    imported = set(imports_of(tree))
    spread_by = spreader(imported)
    if spread_by and run is not None:
        raise UsageError(f"--run is for a script for one process: {script} writes its own, so leave it out")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    request = ScriptRequest(
        script=script,
        arguments=tuple(arguments),
        plan=str(chosen),
        rendezvous={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        seed=secrets.randbits(31),
        idle=idle,
        is_loop=LOOP in imported,
        # Lightning then neither requeues the job nor replaces signal handlers.
        variables={} if imported.isdisjoint(LIGHTNING) else {"SLURM_JOB_NAME": "interactive"},
    )
    if not spread_by:
        refuse_plan(chosen)
        run = run or new_folder(base, script.name)
        caught = (ast.dump(node.type) for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.type)
        catches = any("KeyboardInterrupt" in each for each in caught)
        request = dataclasses.replace(request, run=run, save_every=save_every, catches=catches)
        if Run.is_run(run):
            if Run(run).is_finished():
                if is_main_process():
                    complain(f"grappe: {run} is finished: nothing to do")
                return EXIT_OK
            request = dataclasses.replace(request, seed=Run(run).read_description().get("seed", 0))
        if chosen.processes > 1:
            start_server(script, chosen)
    if is_main_process():
        if run is not None:
            complain(f"grappe: {count_of(chosen.processes, 'process')}, run in {run}")
        elif spread_by == LOOP or chosen.processes == 1:
            complain(f"grappe: {count_of(chosen.processes, 'process')}")
        else:
            complain(
                f"grappe: {script} uses {spread_by}: it is started as it is, on {chosen.processes} processes, each of "
                "which trains all of it unless the script spreads itself"
            )
    sys.stdout.flush()
    shared = base if run is None else run.parent  # before it trains there is no run
    code = _begun(functools.partial(start, f"{__name__}:run_script", request, chosen, run=shared, saves=True))
    if not spread_by and code == EXIT_INTERRUPTED and rank_from_environment() is None:
        options = [*(["--plan", str(chosen)] if str(chosen) else []), "--run", str(run)]
        options += [] if save_every is None else ["--save-every", str(save_every)]
        options += ["--idle", f"{idle:g}"] if idle else []
        complain(f"grappe: resume: {shlex.join(['grappe', 'launch', *options, str(script), *arguments])}")
    return code


def _begun(begin: Callable[[], int]) -> int:
    """Begins the processes, and once more where the script fails on its way back to a checkpoint."""
    try:
        return begin()
    except ReplayError as error:
        if rank_from_environment() is not None:  # srun or torchrun begins them
            raise
        complain(f"grappe: {error}")
        return begin()


def parsed(script: Path) -> ast.Module:
    """Parses a script.

    Raises:
        UsageError: there is no such script.
    """
    try:
        return ast.parse(files.read_text(script))
    except OSError as error:
        raise UsageError(f"{script}: {error.strerror}: give a Python script") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{script} is not a Python script: {error}") from error


def spreader(imported: Collection[str]) -> str:
    """Returns what spreads a script of these imports: LOOP, or one of ITS_OWN; "" for a script for one process."""
    return next((name for name in (LOOP, *ITS_OWN) if name in imported), "")


def request_for_one(script: Path, arguments: Sequence[str], plan: Plan, seed: int) -> ScriptRequest:
    """Makes the request of a script for one process.

    Raises:
        UsageError: the script is none for one process.
    """
    if own := spreader(set(imports_of(parsed(script)))):
        raise UsageError(f"{script} uses {own}: give a script for one process, as it is")
    return ScriptRequest(script=script, arguments=tuple(arguments), plan=str(plan), rendezvous={}, seed=seed)


def refuse_plan(plan: Plan) -> None:
    """Raises PlanError for a key that an unedited script cannot have."""
    beyond = sorted(plan.changed_keys() - UNEDITED_KEYS) or ["dropout=local"] * (plan.dropout == "local")
    if beyond:
        from grappe.training.own_loop import SUPPORTED_KEYS, by_hand

        of_tasks = [key for key in beyond if key.partition("=")[0] not in SUPPORTED_KEYS]
        key = (of_tasks or beyond)[0]
        start = f"an unedited script can have {', '.join(sorted(UNEDITED_KEYS))} in its plan, and no {key}"
        if of_tasks:
            raise PlanError(f"{start}: describe it as a task (docs/from-a-script.md){by_hand(plan)}")
        raise PlanError(f"{start}: write it around grappe.Loop (docs/own-loop.md), or describe it as a task")
    if plan.compile and plan.processes > 1:
        raise PlanError(
            "compile on several processes is not for an unedited script, whose tensors hold a process's rows: leave it "
            "out, or write it around grappe.Loop (docs/own-loop.md)"
        )


def start_server(script: Path, plan: Plan) -> None:
    """Starts the server that the processes of a script for one are forked from, with what they all import."""
    if rank_from_environment() is not None:
        return
    if plan.shard > 1:
        local.start_server()
        return
    imported = set(imports_of(ast.parse(files.read_text(script))))

    def is_own(name: str) -> bool:
        place = script.parent / name.partition(".")[0]
        return place.is_dir() or place.with_suffix(".py").exists()

    # Without torch._dynamo, a second of imports that few scripts need.
    libraries = (name for name in SLOW_IMPORTS if name in imported and not is_own(name))
    local.start_server("grappe.contrib.script.recorded", *libraries)


def imports_of(script: ast.Module) -> Iterator[str]:
    """Yields what a script imports, packages, modules and their names: `torch` and `torch.distributed`.

    Of transformers the classes that it uses, too, since few of them spread a training.
    """
    named: dict[str, str] = {}
    for node in ast.walk(script):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            named |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"transformers.{node.attr}"] if named.get(node.value.id) == "transformers" else []
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: count + 1]) for count in range(len(parts)))


# ---- In each process ----


_MEETS_ROWS = {"__torch_dispatch__", "__torch_function__", "handle_torch_function"}


def script_traceback(error: Exception) -> str:
    """Formats a script's own error as Python does; "" where it is none, or another message says more.

    The frames that run the script, and grappe's between its own and torch's, are left out; not where one of them raised
    the error.
    """
    if isinstance(error, GrappeError) or refused_process(error) or broken_package(error):
        return ""
    shown = traceback.TracebackException.from_exception(error)
    if not any(is_users_file(frame.filename) for frame in shown.stack):
        return ""
    chain: list[traceback.TracebackException | None] = [shown]
    while chain:
        if (part := chain.pop()) is None:
            continue
        first = next((number for number, frame in enumerate(part.stack) if is_users_file(frame.filename)), 0)
        # What meets rows calls torch again, for a process's own: torch's error is that of the first call.
        frames = list(itertools.takewhile(lambda frame: frame.name not in _MEETS_ROWS, part.stack[first:]))
        # A function of Python's that is replaced has no frame of its own: the call of the plain one is the last.
        if frames and (not frames[-1].filename.startswith(str(PACKAGE)) or "plain(" in (frames[-1].line or "")):
            frames = [frame for frame in frames if not frame.filename.startswith(str(PACKAGE))]
        part.stack = traceback.StackSummary.from_list(frames)
        chain += [part.__cause__, part.__context__]
    return "".join(shown.format())


def seed_all(seed: int) -> None:
    """Seeds what every process draws from, until the script does."""
    import random

    import numpy as np
    import torch

    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def run_as_main(script: Path, arguments: Sequence[str]) -> None:
    """Runs a script as `python SCRIPT ARGUMENTS` does, in this process."""
    start_as_python_does()
    sys.argv = [str(script), *arguments]
    file = str(script.absolute())  # as Python has it in tracebacks
    sys.path.insert(0, str(script.absolute().parent))
    sys.modules["__main__"] = module = ModuleType("__main__")
    module.__file__ = file
    _ScriptLoader("__main__", file).exec_module(module)


class _ScriptLoader(importlib.machinery.SourceFileLoader):
    """Loads a script, in the encoding that its first lines declare, and keeps no bytecode of it."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _launchers_variables(process: ProcessRank) -> dict[str, str]:
    """Returns the variables by which torchrun and srun tell a program its place, and those of idr_torch.py."""
    from grappe.launch.world import own_cores

    numbers = dict.fromkeys(("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"), process.rank)
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
    numbers |= dict.fromkeys(sizes, process.size)
    numbers |= {"SLURM_NODEID": 0, "SLURM_CPUS_PER_TASK": own_cores(process)}
    # In a job they are there already.
    of_job = {"SLURM_JOB_NODELIST": "localhost", "SLURM_STEP_GPUS": ",".join(map(str, range(process.size)))}
    return of_job | os.environ | {name: str(number) for name, number in numbers.items()}


def run_script(request: ScriptRequest, process: ProcessRank, rendezvous_folder: Path) -> int:
    """Runs the script as `python SCRIPT ARGUMENTS` would; returns its exit code.

    On other processes than the first a failure is raised.
    """
    from grappe.training.own_loop_world import PLAN, as_a_program, leave
    from grappe.training.watchdog import watch_idle

    os.environ.update({PLAN: request.plan, **request.variables})
    is_local = process.launcher == "grappe"
    if is_local and request.run is None:  # else the script is for one process, and must not tell them apart
        os.environ.update(_launchers_variables(process), **request.rendezvous)
    code = EXIT_FAILURE
    with _own_folder(request, process, rendezvous_folder) as folder, as_a_program(process, folder):
        watch_idle(request.idle, process, folder)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                code = INTERRUPTED
                if request.is_loop:
                    seed_all(request.seed)
                if request.run is None:
                    run_as_main(request.script, request.arguments)
                else:
                    imports.function(RECORDED)(request, process, folder)
                code = EXIT_OK
        except SystemExit as end:
            if isinstance(end.code, str):
                write(end.code, sys.stderr)  # as Python does
            code = end.code if isinstance(end.code, int) else EXIT_OK if end.code is None else EXIT_FAILURE
        except Exception as error:
            sys.last_value = error  # as the interpreter does before its exit functions
            atexit.unregister(leave)  # a launcher's processes agree upon which one reports the error, then end at once
            shown = script_traceback(error)
            if not shown or local.lost_another(str(error)):
                raise
            write(shown, sys.stderr, end="")  # the user's terminal on process 0, a log on the others
            who = f" in process {process.rank} of {process.size}" if process.size > 1 else ""
            message = f"{request.script} failed{who} with {type(error).__name__}"
            if process.rank:
                time.sleep(LATER_SECONDS)
                message = f"{message}\n{shown}"
                if isinstance(error, OSError) and request.run is not None:
                    message += _OTHER_NODE if process.size > process.local_size else _OTHER_NAME
            if request.run is not None and any(text in str(error) for text in _OF_SHARDS):
                message = f"{message}\n{_SHARDED}"
            older = remedy(str(error), SCRIPTS)
            raise ProcessDied(f"{message}\n{older}" if older else message) from error
    if process.rank and request.run is None and code not in (EXIT_OK, EXIT_INTERRUPTED, INTERRUPTED):
        raise SystemExit(code)
    return code


@contextlib.contextmanager
def _own_folder(request: ScriptRequest, process: ProcessRank, rendezvous_folder: Path) -> Iterator[Path]:
    """Gives this start a folder that its processes share, as a local one has; of a script for one process, 0 is heard.

    What another one writes goes to its log, where a job has made the run's folder. The stack of a crash is shown.
    """
    with contextlib.ExitStack() as stack:
        if process.launcher != "grappe":
            rendezvous_folder = stack.enter_context(files.scratch(".launch", rendezvous_folder.absolute()))
        if request.run is not None and process.rank and process.launcher != "grappe":
            faulthandler.enable(stack.enter_context(os.fdopen(os.dup(2), "w")))
            stack.callback(faulthandler.disable)
            logs, log = request.run / "logs", None
            if logs.is_dir():
                log = stack.enter_context(files.appender(logs / f"rank-{process.rank}.log", IN_PART))
            stack.enter_context(redirected(1, 2, to=None if log is None else log.fileno()))
        yield rendezvous_folder


_OF_SHARDS = ("got mixed torch.Tensor and DTensor", "not supported for tensor subclasses")
_SHARDED = (
    "Outside of its model a parameter is in parts under shard: use replicate instead, or take parameter.full_tensor()"
)


_OTHER_NAME = (
    "A file's name by id() is another one in each process: make it by time.time(), which is process 0's in all"
)
_OTHER_NODE = (
    "A file on a node's own disk, as in /tmp, is on the node of process 0 alone, and a name by id() is another one in "
    "each process: write to a folder that all nodes see, by a name made of time.time()"
)
