"""Starts Python programs by forking a process that has torch imported: an interpreter of its own takes seconds for it.

A program that is started so is a process with a session, an environment, a folder and pipes of its own. It skips the
imports, and so do the server that it forks its training processes from, and the workers of torchrun. What depends on
the imports themselves (variables that libraries read, limits of memory, what /proc shows as the command line) is tested
by programs that start cold.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import uuid
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

ENVIRONMENT = dict(os.environ)  # without what fixtures add: a cluster's end kills all that have its variable
MARK = "GRAPPE_TEST"  # the variable by which all that descends from a command is found
BLANK = "0" * 36  # as long as a mark
GRAPPE = str(Path(sys.executable).with_name("grappe"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
# What the server for training processes imports, and what tests start most.
MODULES = (
    "torchmetrics",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "grappe.engines.native",
    "grappe.training.worker",
    "grappe.launch.preload",
    "grappe.cli.commands",
    "grappe.verbs.train",
)


class WarmProcess(subprocess.Popen):
    """A Popen of a console script, of `python file.py` or of `python -m module`, in a session of its own."""

    _connection: socket.socket | None = None

    # The steps of Popen that differ: the template is the parent, and sends the exit status.
    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        cwd, env, ends, new_session = rest[4], rest[5], rest[9:15], rest[20]
        program = _program(args)
        if program is None or not new_session:
            super()._execute_child(args, *rest)
            return
        pipes = [end if end >= 0 else number for number, end in enumerate((ends[0], ends[3], ends[5]))]
        request = [*program, os.fspath(cwd or Path.cwd()), dict(os.environ if env is None else env)]
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(_address())
        socket.send_fds(self._connection, [json.dumps(request).encode()], pipes)
        self.pid = int(self._connection.recv(32))
        self._child_created = True
        self._close_pipe_fds(*ends)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(wait_flags)
        if wait_flags & os.WNOHANG and not select.select([self._connection], [], [], 0)[0]:
            return 0, 0
        status = int(self._connection.recv(32))
        self._connection.close()
        return self.pid, status

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*arguments, **options)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def _program(args: Sequence[str]) -> tuple[str, list[str]] | None:
    """Returns a script's path or "-m", and sys.argv; None for what is no Python program."""
    words = [word for word in args if word != "-u"]
    if words[0] in (GRAPPE, TORCHRUN):
        return words[0], words
    if words[0] != sys.executable:
        return None
    if words[1] == "-m":
        return "-m", words[2:]
    return (words[1], words[1:]) if words[1].endswith(".py") else None


@functools.cache
def _address() -> str:
    """Starts the process that is forked, one for each process of pytest; returns the name of its socket."""
    name = f"\0grappe-warm-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(listener.fileno()), name[1:]],
            env={**ENVIRONMENT, MARK: BLANK, "OMP_WAIT_POLICY": "passive"},
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,  # closed when this process ends, however it does
            cwd=Path(__file__).parents[1],
        )
    atexit.register(process.wait)
    atexit.register(process.kill)
    return name


def _serve(listener: socket.socket, name: str) -> tuple[str, list[str]]:
    """Forks a process for each connection, until that of pytest ends; returns in each what `_run` is to run."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    mark = getenv(MARK.encode())  # in the memory that /proc/PID/environ shows
    sys.path[:] = [entry for entry in sys.path if entry not in ("", str(Path.cwd()))]
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    assert threading.active_count() == 1
    gc.freeze()
    gc.enable()
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno())
    running: dict[int, socket.socket] = {}
    while True:
        ready = select.select([listener, wake, 0], [], [])[0]
        if 0 in ready:
            os._exit(0)
        if wake in ready:
            wake.recv(4096)
            _tell_ends(running)
            continue
        connection = listener.accept()[0]
        request, pipes, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if pid := os.fork():
            running[pid] = connection
            for descriptor in pipes:
                os.close(descriptor)
            continue
        os.setsid()
        signal.set_wakeup_fd(-1)
        path, argv, cwd, env = json.loads(request)
        ctypes.memmove(mark, env.get(MARK, BLANK).encode(), len(BLANK))
        connection.send(str(os.getpid()).encode())
        global _address  # noqa: PLW0603
        _address = lambda: name  # noqa: E731
        for end in (listener, wake, woken, connection, *running.values()):
            end.detach()  # closed below, after which their numbers are the program's
        _begin(pipes, cwd, env)
        return path, argv


def _tell_ends(running: dict[int, socket.socket]) -> None:
    """Sends the status of each process that has ended to who has started it."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with running.pop(pid) as connection, contextlib.suppress(OSError):  # who has started it may have ended
            connection.send(str(status).encode())


def _begin(pipes: Sequence[int], cwd: str, env: Mapping[str, str]) -> None:
    """Makes this process what an interpreter is that has just been started."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    for descriptor, pipe in enumerate(pipes):
        os.dup2(pipe, descriptor)
    os.closerange(3, 1 << 12)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # libraries have asked for it
    _reset_signals()
    text = {"encoding": "utf-8", "closefd": False}
    sys.stdin = sys.__stdin__ = os.fdopen(0, errors="surrogateescape", **text)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", errors="surrogateescape", **text)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", errors="backslashreplace", buffering=1, **text)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    util.spawnv_passfds = functools.partial(_spawn, util.spawnv_passfds)
    subprocess.Popen = subprocess_handler.Popen = WarmProcess


def _reset_signals() -> None:
    """Gives signals the handlers of a new interpreter, whatever was ignored where the tests were started."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(path: str, argv: list[str]) -> NoReturn:
    """Runs the program, and ends this process as an interpreter ends."""
    sys.argv = argv
    code = 1
    try:
        if path == "-m":
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(path).absolute().parent))
            runpy.run_path(str(Path(path).absolute()), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        _print_traceback(error)
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _print_traceback(error: BaseException) -> None:
    """Shows an error from the program's first frame on, as its interpreter does."""
    own = (__file__, runpy.__file__, runpy.run_path.__code__.co_filename)
    while (frame := error.__traceback__) is not None and frame.tb_frame.f_code.co_filename in own:
        error.__traceback__ = frame.tb_next
    traceback.print_exception(error)


def _spawn(cold: Any, path: bytes, args: Sequence[str], passed: Sequence[int]) -> int:
    """Starts an interpreter for multiprocessing; the server for training processes is forked, with all its imports."""
    if "multiprocessing.forkserver" not in args[-1]:
        return cold(path, args, passed)
    pid = os.fork()
    if pid:
        return pid
    _reset_signals()
    begin = 3
    for descriptor in [*sorted(passed), 1 << 12]:
        os.closerange(begin, descriptor)
        begin = descriptor + 1
    forkserver._forkserver.__init__()
    resource_tracker._resource_tracker.__init__()
    util._finalizer_registry.clear()
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["-c"]
    code = 0
    try:
        exec(args[-1], {})
    except SystemExit:
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    os._exit(code)


if __name__ == "__main__":
    # A script that resumes compares the variables of all functions that run: those of `_run` are the same each time.
    _run(*_serve(socket.socket(fileno=int(sys.argv[1])), "\0" + sys.argv[2]))
