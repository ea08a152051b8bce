"""Records what a piece of code does to the file system, and rebuilds what a crash may leave of it."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

Tree = dict[str, "bytes | Tree"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """A change to one inode: a name in a folder, or half of a file's bytes."""

    kind: str
    """"set" or "unset" a name, "move" one, "write" bytes; "sync" makes what was done to the inode last."""
    inode: int
    name: str = ""
    other: str = ""
    """The name that a "move" takes away."""
    target: int = 0
    """The inode that the name means from now on."""
    at: int = 0
    content: bytes = b""
    when: int = 0
    """By the clock that all processes of a machine share, in ns: by then it was done, or what it needs was."""


class Recorder:
    """Inodes are real ones; only what happens under `root` is recorded."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self.start: list[Operation] = []
        self.is_folder: dict[int, bool] = {}
        self._scan(root)

    def _scan(self, folder: Path) -> None:
        inode = self._inode(folder)
        for entry in sorted(folder.iterdir()):
            self.start.append(Operation(kind="set", inode=inode, name=entry.name, target=self._inode(entry)))
            if entry.is_dir():
                self._scan(entry)
            else:
                self.start.append(Operation(kind="write", inode=self._inode(entry), content=entry.read_bytes()))

    def _inode(self, path: Path) -> int:
        status = path.lstat()
        self.is_folder[status.st_ino] = path.is_dir()
        return status.st_ino

    def add(self, **of: Any) -> None:
        self.operations.append(Operation(**of))

    def made(self, path: Path, when: int) -> None:
        if self._inside(path):
            inode, target = self._inode(path.parent), self._inode(path)
            self.add(kind="set", inode=inode, name=path.name, target=target, when=when)

    def gone(self, path: Path, inode: int) -> None:
        if self._inside(path):
            self.add(kind="unset", inode=inode, name=path.name, when=time.monotonic_ns())

    def moved(self, old: Path, new: Path, when: int) -> None:
        if self._inside(new):
            assert old.parent == new.parent
            inode, target = self._inode(new.parent), self._inode(new)
            self.add(kind="move", inode=inode, name=new.name, other=old.name, target=target, when=when)

    def synced(self, path: Path) -> None:
        if not self._inside(path) and path != self.root:
            return
        inode, when = self._inode(path), time.monotonic_ns()
        if not path.is_dir():
            content = path.read_bytes()
            half = len(content) // 2
            self.add(kind="write", inode=inode, content=content[:half], when=when)
            self.add(kind="write", inode=inode, at=half, content=content[half:], when=when)
        self.add(kind="sync", inode=inode, when=when)

    def _inside(self, path: Path) -> bool:
        return self.root in path.parents


def merged(recorders: Sequence[Recorder]) -> Recorder:
    """Merges the operations of several processes on one folder, in order of time."""
    first, *others = recorders
    for other in others:
        first.is_folder |= other.is_folder
        first.operations = sorted(first.operations + other.operations, key=lambda one: one.when)
    return first


def _path(path: Any, dir_fd: int | None = None) -> Path:
    base = Path(f"/proc/self/fd/{dir_fd}").readlink() if dir_fd is not None else Path.cwd()
    return base / os.fspath(path)


@contextlib.contextmanager
def recording(root: Path) -> Iterator[Recorder]:
    """Inside, every change under `root` made through os is recorded, and really made."""
    recorder = Recorder(root)
    real = {name: getattr(os, name) for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "open")}
    kept = []  # open handles, so that no inode's number is given twice

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        when = time.monotonic_ns()  # before: another process may build on it before it is noted
        real["mkdir"](path, mode, dir_fd=dir_fd)
        recorder.made(_path(path, dir_fd), when)

    def remove(name: str) -> Any:
        def removing(path: Any, *, dir_fd: int | None = None) -> None:
            place = _path(path, dir_fd)
            parent = place.parent.stat().st_ino
            kept.append(os.open(place, os.O_RDONLY))
            real[name](path, dir_fd=dir_fd)
            recorder.gone(place, parent)

        return removing

    def rename(name: str) -> Any:
        def renaming(old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            when = time.monotonic_ns()
            real[name](old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            recorder.moved(_path(old, src_dir_fd), _path(new, dst_dir_fd), when)

        return renaming

    def fsync(handle: int) -> None:
        real["fsync"](handle)
        recorder.synced(Path(f"/proc/self/fd/{handle}").readlink())

    def opening(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        place, when = _path(path, dir_fd), time.monotonic_ns()
        new = flags & os.O_CREAT and not place.exists()
        handle = real["open"](path, flags, mode, dir_fd=dir_fd)
        if new:
            recorder.made(place, when)
        return handle

    shims = {"mkdir": mkdir, "rename": rename("rename"), "replace": rename("replace"), "fsync": fsync}
    shims["open"] = opening
    shims |= {"unlink": remove("unlink"), "rmdir": remove("rmdir")}
    with contextlib.ExitStack() as stack:
        for name, shim in shims.items():
            stack.enter_context(patch.object(os, name, shim))
        yield recorder
    for handle in kept:
        os.close(handle)


def unsynced(operations: list[Operation]) -> list[int]:
    """Finds the operations that are not yet flushed: a crash may keep or drop each."""
    last = {one.inode: index for index, one in enumerate(operations) if one.kind == "sync"}
    return [index for index, one in enumerate(operations) if one.kind != "sync" and index > last.get(one.inode, -1)]


def left(recorder: Recorder, operations: Iterable[Operation]) -> Tree:
    """The tree that these operations leave, whatever others between them were dropped."""
    names: dict[int, dict[str, int]] = {}
    bytes_of: dict[int, bytearray] = {}
    for one in (*recorder.start, *operations):
        entries = names.setdefault(one.inode, {})
        if one.kind == "write":
            content = bytes_of.setdefault(one.inode, bytearray())
            content.extend(bytes(max(0, one.at + len(one.content) - len(content))))
            content[one.at : one.at + len(one.content)] = one.content
        elif one.kind == "unset":
            entries.pop(one.name, None)
        elif one.kind in ("set", "move"):
            entries[one.name] = one.target
            entries.pop(one.other, None)

    def tree(inode: int) -> Tree:
        return {
            name: tree(target) if recorder.is_folder[target] else bytes(bytes_of.get(target, b""))
            for name, target in names.get(inode, {}).items()
        }

    return tree(recorder.root.stat().st_ino)


def rebuild(tree: Tree, folder: Path) -> None:
    """Makes the tree in a new folder."""
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            rebuild(content, folder / name)
