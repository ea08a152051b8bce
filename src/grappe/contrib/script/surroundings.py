"""Makes a script's surroundings the same on all processes: files, clocks, and numbers that the system draws.

Process 0 alone writes; every process reads what process 0 has written before, in the order of the script.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import datetime
import functools
import gc
import io
import os
import platform
import random
import secrets
import shutil
import socket
import sqlite3
import sys
import tempfile
import time
import timeit
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from grappe.errors import TaskError
from grappe.errors.user_line import is_users_file
from grappe.launch.world import World
from grappe.rows.context import NOW
from grappe.training.interception import MainThread, replaced

T = TypeVar("T")
TORCH = f"{Path(torch.__file__).parent}/"
process_id = os.getpid
COMPILERS = (f"{TORCH}_inductor", f"{TORCH}_dynamo", f"{Path(TORCH).parent}/triton")
CLOCKS = (
    *((time, name) for name in ("time", "perf_counter", "monotonic", "process_time")),
    *((time, f"{name}_ns") for name in ("time", "perf_counter", "monotonic", "process_time")),
    (timeit, "default_timer"),
)  # fmt: skip
THROUGH = frozenset({
    "genericpath", "glob", "grappe.training.plan_keys", "grappe.contrib.script.replay",
    "grappe.contrib.script.surroundings", "json", "numpy", "os",
    "pandas", "pathlib", "PIL", "posixpath", "shutil", "torch.serialization", "uuid",
})  # fmt: skip
"""Packages and modules through which a script reads and writes files. Others are left out: what a library keeps in a
cache of its own differs between processes, which would wait for each other in vain."""
READING = ((os, "stat"), (os, "scandir"), (os, "listdir"))
CHANGING = (
    *((os, name) for name in ("remove", "unlink", "rmdir", "rename", "replace", "symlink", "link", "truncate")),
    *((shutil, name) for name in ("rmtree", "move", "copy", "copy2", "copyfile", "copytree")),
)  # fmt: skip


def by_script(frame: FrameType | None) -> bool:
    """Returns whether a call at a frame is the script's own, or is made for it by a library of THROUGH."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name not in THROUGH and name.partition(".")[0] not in THROUGH:
            break
        frame = frame.f_back
    return frame is not None and is_users_file(frame.f_code.co_filename)


@contextlib.contextmanager
def surroundings_shared(world: World, shared: Path) -> Iterator[None]:
    """Context in which all processes of a script for one process see what process 0 sees. Collective.

    Args:
        shared: a folder for the script's temporary files, where its processes are on several nodes.
    """
    if world.size == 1:
        yield
        return
    # For processes that a script spawns instead of forking: sets of texts have one order in data workers, too.
    os.environ.setdefault("PYTHONHASHSEED", str(world.share(secrets.randbits(32))))
    first, main = world.share(process_id()), MainThread()

    def getpid(plain: Callable[[], int]) -> Callable[[], int]:
        return lambda: first if by_script(sys._getframe(1)) and main else plain()

    def naming_node(plain: Callable[[], str]) -> Callable[[], str]:
        name = world.share(plain())
        return lambda: name if by_script(sys._getframe(1)) else plain()

    nodes = ((socket, "gethostname", naming_node), (platform, "node", naming_node))
    hidden = replaced((dist, "is_initialized", _hidden), (os, "getpid", getpid), *nodes)
    temporary = shared if world.size > world.process.local_size else None
    with hidden, _files_ordered(world, temporary), _entropy_shared(world.share(secrets.randbits(256))):
        yield


def _hidden(plain: Callable[[], bool]) -> Callable[[], bool]:
    """Shows one process to what asks for several, as a library that would sum counts which are all rows' already."""

    def is_initialized() -> bool:
        asking = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return asking in ("torch", "grappe") and plain()

    return is_initialized


# ---- Files -------------------------------------------------------------------------------------------------


class _Order:
    """Lets process 0 write once all have read, and all read once process 0 has written."""

    def __init__(self, world: World) -> None:
        self._world, self._main = world, MainThread()
        self._has_read = self._has_written = False
        self._changes = False
        """Whether a change runs, whose own reads and writes are process 0's alone."""

    def asks(self, frame: FrameType) -> bool:
        """Returns whether a call at a frame is the script's, in the thread that sends messages."""
        return not self._changes and by_script(frame) and bool(self._main)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Context in which what is read and written is this process's own."""
        self._changes = True
        try:
            yield
        finally:
            self._changes = False

    def read(self, frame: FrameType) -> None:
        """Waits until process 0 has written all that the script has before this. Collective after a write."""
        if self.asks(frame):
            if self._has_written:
                self._world.barrier()
            self._has_read, self._has_written = True, False

    def write(self, frame: FrameType, change: Callable[[], T], instead: Callable[[], T]) -> T:
        """Runs a change on process 0, once all have read what the script has before this. Collective.

        Args:
            instead: run on the other processes, unless the change raised an error, which all then raise.
        """
        if not self.asks(frame):
            return change()
        if self._has_read:
            self._world.barrier()
        self._has_read, self._has_written = False, True
        if self._world.rank:
            if (error := self._world.share(None)) is not None:
                raise error
            return instead()
        try:
            with self.alone():
                value = change()
        except OSError as error:
            self._world.share(error)
            raise
        self._world.share(None)
        return value


@contextlib.contextmanager
def _files_ordered(world: World, temporary: Path | None) -> Iterator[None]:
    order = _Order(world)

    def reading(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def read(*arguments: Any, **options: Any) -> Any:
            order.read(sys._getframe(1))
            return plain(*arguments, **options)

        return read

    def changing(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def change(*arguments: Any, **options: Any) -> Any:
            copied = arguments[1] if len(arguments) > 1 else None  # as shutil.copy
            return order.write(sys._getframe(1), lambda: plain(*arguments, **options), lambda: copied)

        return change

    def opening(plain: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            def run() -> Any:
                return plain(file, mode, *arguments, **options)

            if isinstance(file, int):
                return run()
            if set(mode) & set("wax+"):
                return order.write(sys._getframe(1), run, run)
            order.read(sys._getframe(1))
            return plain(file, mode, *arguments, **options)

        return opened

    def saving(plain: Callable[..., None]) -> Callable[..., None]:
        def saved(*arguments: Any, **options: Any) -> None:
            order.write(sys._getframe(1), lambda: None, lambda: None)
            plain(*arguments, **options)  # rows in it are gathered: each process takes part

        return saved

    def naming(plain: Callable[..., Any]) -> Callable[..., Any]:
        def make(suffix: Any = None, prefix: Any = None, dir: Any = None, *arguments: Any, **options: Any) -> Any:
            if dir is None and temporary is not None:  # a node's own is none of the others'
                temporary.mkdir(parents=True, exist_ok=True)
                dir = str(temporary)
            return plain(suffix, prefix, dir, *arguments, **options)

        def named(*arguments: Any, **options: Any) -> Any:
            frame = _past_tempfile(sys._getframe(1))
            if not order.asks(frame):
                return plain(*arguments, **options)
            made: Any = order.write(frame, lambda: make(*arguments, **options), lambda: None)
            shared = world.share(made)
            return (os.open(os.devnull, os.O_RDWR), shared[1]) if made is None and plain is mkstemp else made or shared

        return named

    def cleaning(plain: Callable[..., None]) -> Callable[..., None]:
        return lambda folder: order.write(_past_tempfile(sys._getframe(1)), lambda: plain(folder), lambda: None)

    def mapping(plain: Any) -> Callable[..., Any]:
        def mapped(
            kind: Any, file: Any, dtype: Any = np.uint8, mode: str = "r+", *arguments: Any, **options: Any
        ) -> Any:
            if mode in ("r+", "w+", "readwrite", "write") and order.asks(sys._getframe(1)):
                raise TaskError(
                    f"{NOW.context.line()} writes a file by np.memmap, which each process would do: np.save an array, "
                    'and read it by np.load(file, mmap_mode="r")'
                )
            return plain(kind, file, dtype, mode, *arguments, **options)

        return mapped

    mkstemp = tempfile.mkstemp
    with contextlib.ExitStack() as inside:
        connecting = functools.partial(_connecting, world, order, inside)
        if world.rank:
            inside.enter_context(writing_nothing())
        inside.enter_context(
            replaced(
                *((owner, name, reading) for owner, name in READING),
                *((owner, name, changing) for owner, name in (*CHANGING, (os, "mkdir"))),
                *((owner, "open", opening) for owner in (builtins, io)),
                (torch, "save", saving),
                *((tempfile, name, naming) for name in ("mkdtemp", "mkstemp")),
                (tempfile.TemporaryDirectory, "cleanup", cleaning),
                (np.memmap, "__new__", mapping),
                (sqlite3, "connect", connecting),
                (sqlite3.dbapi2, "connect", connecting),
            )
        )
        yield


def _past_tempfile(frame: FrameType) -> FrameType:
    while frame.f_globals.get("__name__") == "tempfile" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _connecting(
    world: World, order: _Order, inside: contextlib.ExitStack, plain: Callable[..., Any]
) -> Callable[..., Any]:
    """Has other processes than the first, which alone writes a database, work on a copy of it."""
    copies: dict[Path, Path] = {}
    folder = functools.cache(lambda: Path(inside.enter_context(tempfile.TemporaryDirectory())))

    def connected(database: Any, *arguments: Any, **options: Any) -> Any:
        file, frame = os.fsdecode(database), sys._getframe(1)
        if file in ("", ":memory:") or not order.asks(frame):
            return plain(database, *arguments, **options)
        if options.get("uri") and file.startswith("file:"):
            raise TaskError(f"{NOW.context.line()} gives sqlite3.connect a URI: give it the file's path")
        path = Path(file).absolute()
        world.barrier()
        with order.alone():
            if world.rank and path.parent.is_dir():  # else all have process 0's error
                if path not in copies or not path.exists():
                    copies[path] = folder() / str(secrets.randbits(64))
                    if path.exists():
                        with contextlib.closing(plain(path)) as source, contextlib.closing(plain(copies[path])) as copy:
                            source.backup(copy)
                path = copies[path]
            world.barrier()
            return plain(path, *arguments, **options)

    return connected


class _Nowhere(io.FileIO):
    """The null device with the places and the length of a file."""

    _at = _length = 0

    def write(self, written: Any) -> int:
        count = super().write(written)
        self._at += count
        self._length = max(self._length, self._at)
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int | None = None) -> int:
        self._length = self._at if size is None else size
        return self._length


@contextlib.contextmanager
def writing_nothing(*, until_left: bool = False) -> Iterator[None]:
    """Context of a process that leaves files to another: what it opens for writing goes nowhere.

    Args:
        until_left: whether a file that is still open at the end is written from then on, after what it holds.
    """
    plain, make = builtins.open, os.mkdir
    left: list[tuple[Any, str]] = []

    def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        written = not isinstance(file, int) and set(mode) & set("wax+") and os.fspath(file) != os.devnull
        callers = (each.f_code.co_filename for each, _ in traceback.walk_stack(sys._getframe(1)))
        # each process needs what it compiles
        if is_left or not written or any(each.startswith(COMPILERS) for each in callers):
            return plain(file, mode, *arguments, **options)
        if "b" in mode:  # it may be an archive's, which asks where it is
            nowhere = _Nowhere(os.devnull, "r+")
            stream: Any = io.BufferedRandom(nowhere) if "+" in mode else io.BufferedWriter(nowhere)
        else:
            stream = plain(os.devnull, mode.replace("x", "w"), *arguments, **options)
        left.append((stream, os.path.abspath(os.fspath(file))))  # noqa: PTH100 - of any kind
        return stream

    def made(*arguments: Any, **options: Any) -> None:
        with contextlib.suppress(*[] if is_left else [FileExistsError]):
            make(*arguments, **options)

    save = torch.save  # which opens files in C++
    is_left = False  # what has been put around these functions meanwhile stays, and by way of it they are plain

    def saved(value: Any, file: Any, *arguments: Any, **options: Any) -> None:
        if is_left:
            save(value, file, *arguments, **options)
            return
        with _Nowhere(os.devnull, "r+") as nowhere:
            save(value, file if hasattr(file, "write") else nowhere, *arguments, **options)

    builtins.open = io.open = opened  # type: ignore[assignment]
    os.mkdir, torch.save = made, saved  # type: ignore[assignment]
    try:
        yield
    finally:
        is_left = True
        originals = ((builtins, "open", opened, plain), (io, "open", opened, plain), (os, "mkdir", made, make))
        for owner, name, own, original in (*originals, (torch, "save", saved, save)):
            if getattr(owner, name) is own:
                setattr(owner, name, original)
        for stream, file in left if until_left else ():
            if not stream.closed:
                stream.flush()
                handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                os.dup2(handle, stream.fileno())
                os.close(handle)


# ---- Clocks, and numbers that the system draws -------------------------------------------------------------


@contextlib.contextmanager
def dates_of_clock() -> Iterator[None]:
    """Context in which the moment of now is time.time()'s in all of Python: dates, and times as texts."""

    def now(kind: type[datetime.datetime], tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return kind.fromtimestamp(time.time(), tz)

    def utcnow(kind: type[datetime.datetime]) -> datetime.datetime:
        return kind.fromtimestamp(time.time(), datetime.UTC).replace(tzinfo=None)

    def converting(plain: Callable[..., T]) -> Callable[..., T]:
        return lambda seconds=None: plain(time.time() if seconds is None else seconds)

    def formatting(plain: Callable[..., str]) -> Callable[..., str]:
        return lambda form, moment=None: plain(form, time.localtime() if moment is None else moment)

    def writing(plain: Callable[..., str]) -> Callable[..., str]:
        return lambda moment=None: plain(time.localtime() if moment is None else moment)

    # A class of C's takes no attributes. Its own dictionary does; today() asks time.time() already.
    attributes = gc.get_referents(vars(datetime.datetime))[0]
    before = {name: attributes[name] for name in ("now", "utcnow")}
    conversions = ((time, name, converting) for name in ("localtime", "gmtime", "ctime"))
    try:
        attributes |= {"now": classmethod(now), "utcnow": classmethod(utcnow)}
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
        with replaced(*conversions, (time, "strftime", formatting), (time, "asctime", writing)):
            yield
    finally:
        attributes |= before
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))


@contextlib.contextmanager
def _entropy_shared(seed: int) -> Iterator[None]:
    """Context in which seeds that the system would draw are drawn from one seed, in data workers from torch's."""
    process, stream = process_id(), random.Random(seed)
    in_workers: dict[int, random.Random] = {}

    def drawn(bits: int) -> int:
        if process_id() == process:
            return stream.getrandbits(bits)
        if get_worker_info() is None:
            return secrets.randbits(bits)
        return in_workers.setdefault(process_id(), random.Random(torch.initial_seed())).getrandbits(bits)

    def urandom(plain: Callable[[int], bytes]) -> Callable[[int], bytes]:
        return lambda size: drawn(8 * size).to_bytes(size, "little") if by_script(sys._getframe(1)) else plain(size)

    def seeding(plain: Callable[..., None]) -> Callable[..., None]:
        def seeded(*arguments: Any, **options: Any) -> None:
            # tempfile's names differ between processes: each removes its own folder.
            is_seed = arguments and arguments[0] is not None
            if is_seed or options or sys._getframe(1).f_globals.get("__name__") in ("tempfile", "random"):
                plain(*arguments, **options)
            else:
                plain(drawn(32))

        return seeded

    def seeding_its_own(plain: Callable[..., None]) -> Callable[..., None]:
        def seeded(self: random.Random, seed: Any = None, *arguments: Any) -> None:
            callers = (each for each, _ in traceback.walk_stack(sys._getframe(1)))
            frame = next((each for each in callers if each.f_globals.get("__name__") != "random"), None)
            plain(self, drawn(32) if seed is None and by_script(frame) else seed, *arguments)

        return seeded

    def uuid4(plain: Callable[[], uuid.UUID]) -> Callable[[], uuid.UUID]:
        return lambda: uuid.UUID(int=drawn(128), version=4) if by_script(sys._getframe(1)) else plain()

    def torchs(_: Callable[[], int]) -> Callable[[], int]:
        def seed() -> int:
            torch.manual_seed(value := drawn(63))
            return value

        return seed

    with replaced(
        (os, "urandom", urandom),
        (uuid, "uuid4", uuid4),
        (uuid, "uuid1", uuid4),
        (random, "seed", seeding),
        (random.Random, "seed", seeding_its_own),
        (np.random.bit_generator, "randbits", lambda _: drawn),  # seeds all of NumPy's generators
        (torch, "seed", torchs),
        (torch.random, "seed", torchs),
    ):
        yield
