"""Makes an exported folder, which appears whole or not at all."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from grappe.errors import UsageError
from grappe.launch import files


def check_target(folder: Path) -> None:
    """Raises UsageError where `folder` cannot become an exported folder: only what is new or empty can."""
    found = files.kind(folder)
    if found not in ("", "folder") or (found and files.names(folder)):
        what = "holds something" if found == "folder" else "is no folder"
        raise UsageError(f"--to {folder}: it {what}, and grappe overwrites nothing: give a new folder")
    if not folder.absolute().parent.is_dir():
        raise UsageError(f"--to {folder}: there is no folder {folder.absolute().parent}")


@contextlib.contextmanager
def whole_or_nothing(folder: Path) -> Iterator[Path]:
    """Gives a folder beside `folder` to write in, which becomes `folder` in the end, or is removed after an error."""
    check_target(folder)
    target = folder.absolute()
    staged = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    files.make_folder(staged)
    try:
        yield staged
        try:
            files.rename(staged, target)  # replaces an empty folder, and no other
        except OSError as error:
            raise UsageError(f"--to {folder}: {error.strerror}: give a new folder") from error
        files.flush(target.parent)
    finally:
        files.remove_tree(staged)
