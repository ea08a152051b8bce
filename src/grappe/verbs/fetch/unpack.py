"""Takes named files out of a downloaded archive, each of the size that is named; nothing else of it is written."""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path
from typing import BinaryIO

from grappe.errors import DataError
from grappe.launch import files
from grappe.task import Download


def take_out(archive: BinaryIO, download: Download, place: Path) -> None:
    """Writes the members of a tar archive below `place`, each whole or not at all.

    Raises:
        DataError: it is no such archive, or lacks a member of that name and size.
    """
    missing = dict(download.members)
    try:
        with tarfile.open(fileobj=archive, mode="r:*") as tar:
            for member in tar:
                if not member.isreg() or missing.get(member.name) != member.size:
                    continue
                stream = tar.extractfile(member)
                assert stream is not None
                target = place / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                files.replace(target, stream.read(), durable=True)
                del missing[member.name]
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{download.url}: it cannot be unpacked: {error}") from None
    if missing:
        raise DataError(
            f"{download.url}: it has no {next(iter(missing))} of {next(iter(missing.values())):,} bytes"
        )
