"""Opens, makes, replaces and removes files below a run, and makes the folders that all processes of a start share.

No link below a run is followed (docs/decisions/security.md). A run may come from somebody else, or lie where others
write. So the last names of a path are each opened from the folder before, without following links: as many of them as
`levels` says. What stands before them is the user's to choose, and may be a link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, BinaryIO

from grappe.errors import RunError
from grappe.launch.rank import ProcessRank, rank_from_environment

IN_RUN = 1
"""Levels of `RUN/run.json`, and of the files next to it."""
IN_PART = 2
"""Levels of `RUN/logs/rank-0.log`, and of what else stands in a folder of a run."""
IN_CHECKPOINT = 3
"""Levels of `RUN/checkpoints/step-000020/state.json`, and of a job's packages in `RUN/logs`."""
PRIVATE = 0o600
LARGEST = 1 << 30
"""Most bytes of a file that is read whole; a sparse file takes no room on the disk."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


def reader(file: Path, levels: int = IN_RUN) -> BufferedReader:
    """Opens a regular file for reading.

    Raises:
        RunError: the file, or a folder on the way, is a link; or it is a pipe or a device, which may have no end.
        OSError: it cannot be opened.
    """
    # Without O_NONBLOCK, opening a pipe would wait before it can be seen that it is a pipe.
    handle = _open(file, os.O_RDONLY | os.O_NONBLOCK, levels)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise RunError(f"{file} is not a file")
    return os.fdopen(handle, "rb")


def read_bytes(file: Path, levels: int = IN_RUN, *, largest: int = LARGEST) -> bytes:
    """Reads a regular file whole; raises as `reader` does, and RunError if it has more than `largest` bytes."""
    with reader(file, levels) as stream:
        if os.fstat(stream.fileno()).st_size > largest:
            raise RunError(f"{file} is larger than any that grappe writes")
        return stream.read()


def read_text(file: Path, levels: int = IN_RUN) -> str:
    """Reads a regular file whole, as text; bytes that are no text are shown as �. Raises as `reader` does."""
    return read_bytes(file, levels).decode(errors="replace")


def appender(file: Path, levels: int = IN_RUN) -> BinaryIO:
    """Opens a file for appending without a buffer, and makes the file where there is none.

    A file with a second name (a hard link) is copied first: the file of the other name stays as it is.

    Raises:
        RunError: as `reader` does.
        OSError: it cannot be opened.
    """
    handle = _open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, levels)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise RunError(f"{file} is not a file")
    if status.st_nlink > 1:
        os.close(handle)
        replace(file, read_bytes(file, levels), levels)
        handle = _open(file, os.O_WRONLY | os.O_APPEND, levels)
    return os.fdopen(handle, "ab", buffering=0)


def new_file(file: Path, levels: int = IN_RUN, mode: int = 0o666) -> BinaryIO:
    """Makes a file that nobody has made before, and opens the file for writing without a buffer.

    Raises:
        FileExistsError: there is something of that name, even a link.
        RunError: a folder on the way is a link.
    """
    handle = _open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, levels, mode)
    return os.fdopen(handle, "wb", buffering=0)


def replace(
    file: Path, content: bytes, levels: int = IN_RUN, *, durable: bool = False, new: bool = False, mode: int = 0o666
) -> None:
    """Makes or replaces a file in one step, so that nobody ever reads half of it; a link is replaced, not followed.

    Args:
        durable: whether to wait until it is on disk.
        new: whether the file must not exist yet: another process may have made it a moment ago.

    Raises:
        FileExistsError: with `new`, there is something of that name.
    """
    with _parent(file, levels) as (folder, name):
        # A name that nobody can foresee, made exclusively: a link cannot wait there.
        temporary = f".{name}.{secrets.token_hex(4)}"
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, mode, dir_fd=folder)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
                stream.flush()
                if durable:
                    os.fsync(stream.fileno())
            if new:
                _rename_to_new(temporary, name, folder)
            else:
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        if durable:
            os.fsync(folder)


def _rename_to_new(old: str, new: str, folder: int) -> None:
    try:
        os.link(old, new, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        # A file system without hard links: two processes that look at the same moment both find nothing.
        with contextlib.suppress(FileNotFoundError):
            os.stat(new, dir_fd=folder, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new) from error
        os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)
    else:
        os.unlink(old, dir_fd=folder)


def make_folder(folder: Path, levels: int = IN_RUN) -> bool:
    """Makes a folder; returns whether this call made the folder, and False where there was one.

    Raises:
        RunError: it, or a folder on the way, is a link.
        OSError: it cannot be made, or something else has the name.
    """
    with _parent(folder, levels) as (parent, name):
        try:
            os.mkdir(name, dir_fd=parent)
        except FileExistsError as error:
            try:
                os.close(_opened(name, _FOLDER, parent, folder))
            except NotADirectoryError:
                raise FileExistsError(error.errno, error.strerror, str(folder)) from error
            return False
    return True


def rename(old: Path, new: Path, levels: int = IN_RUN) -> None:
    """Renames within a folder, in one step; a file or an empty folder of the new name is replaced."""
    assert old.parent == new.parent, (old, new)
    with _parent(old, levels) as (folder, name):
        os.rename(name, new.name, src_dir_fd=folder, dst_dir_fd=folder)


def remove(file: Path, levels: int = IN_RUN) -> None:
    """Removes a file, or a link but not what it names; does nothing where there is none."""
    with contextlib.suppress(FileNotFoundError), _parent(file, levels) as (folder, name):
        os.unlink(name, dir_fd=folder)


def remove_empty(folder: Path, levels: int = IN_RUN) -> bool:
    """Removes a folder that holds nothing; returns whether it did."""
    try:
        with _parent(folder, levels) as (parent, name):
            os.rmdir(name, dir_fd=parent)
    except OSError:
        return False
    return True


def remove_tree(folder: Path, levels: int = IN_RUN) -> None:
    """Removes a folder with all that it holds; links in it are removed, never followed.

    For folders that grappe alone has filled: the caller knows that, or has checked.
    """
    with contextlib.suppress(FileNotFoundError), _parent(folder, levels) as (parent, name):
        shutil.rmtree(name, dir_fd=parent)


def names(folder: Path, levels: int = IN_RUN) -> list[str]:
    """Lists what a folder holds, in order.

    Raises:
        RunError: it, or a folder on the way, is a link.
        OSError: there is none, or it cannot be read.
    """
    handle = _open(folder, _FOLDER, levels)
    try:
        return sorted(os.listdir(handle))  # noqa: PTH208 (pathlib opens by name)
    finally:
        os.close(handle)


def kind(path: Path) -> str:
    """Returns "file", "folder", "link", "other" (a pipe, a device), or "" where there is nothing."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ""
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(mode), "other")


def refuse_link(path: Path) -> None:
    """Raises RunError where `path` is a link."""
    if path.is_symlink():
        raise RunError(_link(path))


def flush(folder: Path, levels: int = IN_RUN) -> None:
    """Waits until what was created, renamed or removed in `folder` is on disk."""
    handle = _open(folder, _FOLDER, levels)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open(path: Path, flags: int, levels: int, mode: int = 0o666) -> int:
    with _parent(path, levels) as (folder, name):
        return _opened(name, flags, folder, path, mode)


@contextlib.contextmanager
def _parent(path: Path, levels: int) -> Iterator[tuple[int, str]]:
    """Opens the folder that `path` lies in; gives its handle, and the last name."""
    path = path.absolute()
    levels = max(1, min(levels, len(path.parts) - 1))
    place = path.parents[levels - 1]
    handle = os.open(place, _FOLDER)
    try:
        for name in path.parts[len(path.parts) - levels : -1]:
            place /= name
            below = _opened(name, _FOLDER, handle, place)
            os.close(handle)
            handle = below
        yield handle, path.name
    finally:
        os.close(handle)


def _opened(name: str, flags: int, folder: int, path: Path, mode: int = 0o666) -> int:
    try:
        return os.open(name, flags | _NO_LINK, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
            with contextlib.suppress(OSError):
                if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
                    raise RunError(_link(path)) from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def _link(path: Path) -> str:
    return (
        f"{path} is a link, and grappe follows none in a run: it would read or write where the link leads. "
        "Remove it, or put there what it names"
    )


RUNS = Path("runs")
"""The folder of runs; all nodes of a job see the same folder."""


def rendezvous_folder_of(process: ProcessRank, run: Path | None) -> Path:
    """Returns the rendezvous folder: the run's folder for several nodes, else a private folder of the user's.

    Never in the machine's /tmp: names that all processes of a start know can be foreseen by others, too.
    """
    if process.size > process.local_size:
        return run or RUNS
    return private_folder() or run or RUNS


def private_folder() -> Path | None:
    """Makes or finds a folder in which nobody but the user can make anything; None where there is no room for one.

    It is in XDG_RUNTIME_DIR, which a login makes for its user, or in the user's state folder.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    for base in (Path(runtime) if runtime.startswith("/") else None, state_base()):
        if base is not None and (folder := own_folder(base / "grappe")) is not None:
            return folder
    return None


def state_base() -> Path | None:
    """Returns XDG_STATE_HOME, ~/.local/state where it is not set, None where there is no home."""
    state_home = os.environ.get("XDG_STATE_HOME", "")
    if state_home.startswith("/"):  # the standard asks to ignore a relative path
        return Path(state_home)
    try:
        return Path.home() / ".local/state"
    except RuntimeError:
        return None


def own_folder(folder: Path) -> Path | None:
    """Makes `folder`, readable by the user alone; returns None if that fails, or others can write in it."""
    try:
        if not folder.parent.exists():  # with the same mode: mkdir leaves parents to the umask
            own_folder(folder.parent)
        folder.mkdir(exist_ok=True, mode=0o700)
        status = folder.lstat()
    except OSError:
        return None
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if ours and os.access(folder, os.W_OK | os.X_OK) else None


def state_folder(name: str, *, make: bool) -> Path | None:
    """Returns the user's own folder `name` of grappe's state; None: it cannot be, or is not there and not made."""
    base = state_base()
    if base is None:
        return None
    folder = base / "grappe"
    if not make and not (folder / name).is_dir():
        return None
    return own_folder(folder / name) if own_folder(folder) is not None else None


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Context that processes enter one after the other, where the file can be written and its disk has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(file.open("w")), fcntl.LOCK_EX)
        yield


def take_lock(stream: IO[Any]) -> bool:
    """Locks an open file without waiting; returns False if another process has it. A disk without locks has none."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@contextlib.contextmanager
def scratch(name: str, base: Path | None = None) -> Iterator[Path]:
    """Names a folder that all processes of this start share; process 0 removes it in the end.

    Args:
        base: a folder that all nodes see; None: RUNS.
    """
    process = rank_from_environment()
    if process is None:
        with tempfile.TemporaryDirectory(prefix=f"grappe-{name}-") as folder:
            yield Path(folder)
        return
    shared = rendezvous_folder_of(process, base) / f"{name}-{process.job}"
    if process.rank == 0:
        remove_tree(shared)
    try:
        yield shared
    finally:
        if process.rank == 0:
            remove_tree(shared)
