"""grappe fetch: downloads the files that a task names, each resumed and checked by size and checksum."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import re
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from grappe import finder
from grappe.errors import DataError, UsageError
from grappe.errors.foreign_text import printable
from grappe.launch import files
from grappe.launch.terminal import progress
from grappe.task import Download
from grappe.verbs.data.walk import ProgressMeter

SCHEMES = ("https",)
_CHUNK = 1 << 18  # bytes
_SECONDS = 60.0  # without a byte, until a connection is given up
_PARTIAL = 206
_BEYOND = 416


@contextlib.contextmanager
def received(
    download: Download, partial: Path, tell: Callable[[int], None], schemes: tuple[str, ...] = SCHEMES
) -> Iterator[BinaryIO]:
    """Context with the whole file, open for reading, which lies in `partial`; nobody else downloads it meanwhile.

    Args:
        tell: is called with the bytes that are there.

    Raises:
        DataError: it cannot be downloaded. What has come stays in `partial`, for the next time.
    """
    with files.appender(partial) as stream:
        if not files.take_lock(stream):
            raise DataError(f"{partial}: another grappe fetch is downloading it: wait for it")
        there = partial.stat().st_size
        if there > download.size:
            stream.truncate(there := 0)
        try:
            if there < download.size:
                _append(download, stream, there, tell, schemes)
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == _BEYOND:
                stream.truncate(0)
                raise DataError(
                    f"{download.url} has fewer bytes than the {download.size:,} that the task names: it is another "
                    "file. The part downloaded was removed"
                ) from None
            reason = printable(getattr(error, "reason", None) or error)
            if isinstance(error, urllib.error.HTTPError):
                reason = f"the server answered {error.code} {printable(error.reason)}"
            raise DataError(
                f"{download.url} cannot be downloaded: {reason}. {partial.stat().st_size:,} of "
                f"{download.size:,} bytes are there: the same command continues from there. A compute node "
                "often has no internet: use a login node"
            ) from None
        with files.reader(partial) as archive:
            yield archive


def _append(
    download: Download, stream: BinaryIO, there: int, tell: Callable[[int], None], schemes: tuple[str, ...]
) -> None:
    headers = {"User-Agent": "grappe", "Accept-Encoding": "identity"}
    if there:
        headers["Range"] = f"bytes={there}-"
    request = urllib.request.Request(download.url, headers=headers)
    opener = urllib.request.OpenerDirector()  # of these schemes alone: urllib's own knows files and FTP, too
    handlers = [
        urllib.request.ProxyHandler(),  # the proxy of the environment: clusters' login nodes have one
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        _SameHost(),
        *([urllib.request.HTTPHandler()] if "http" in schemes else []),
    ]
    for handler in handlers:
        opener.add_handler(handler)
    with opener.open(request, timeout=_SECONDS) as answer:
        if there and answer.status != _PARTIAL:  # this server starts from the beginning
            stream.truncate(there := 0)
        elif there and not (answer.headers["Content-Range"] or "").startswith(f"bytes {there}-"):
            raise DataError(f"{download.url} answers with another part of the file than was asked for")
        while chunk := answer.read(_CHUNK):
            there += len(chunk)
            if there > download.size:
                stream.truncate(0)
                raise DataError(
                    f"{download.url} gives more than the {download.size:,} bytes that the task names: it is another "
                    "file"
                )
            stream.write(chunk)
            tell(there)
    if there < download.size:
        raise OSError("the connection ended before the file did")


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows a redirection to the same scheme and host, and no other: the task's file says where data come from."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if (old.scheme, old.netloc) != (new.scheme, new.netloc):
            raise DataError(
                f"{req.full_url} leads on to {printable(newurl)}, which the task does not name: if that address is "
                "the right one, name it in the task's downloads"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_MEGABYTE = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetched:
    """Result for one file."""

    name: str
    size: int
    """Bytes."""
    was_there: bool


def fetch(
    task: str,
    folder: Path,
    show: Callable[[str], None] = progress,
    schemes: tuple[str, ...] = SCHEMES,
    *,
    dry_run: bool = False,
) -> list[Fetched]:
    """Downloads into `folder` what the task names and is not there; an interrupted download goes on.

    Args:
        schemes: of the addresses that are taken.
        dry_run: only look which files are there.

    Raises:
        UsageError: the task names no files, or another kind of address.
        DataError: a file cannot be downloaded, or is another than the task names.
    """
    cls = finder.find(task)
    if not cls.downloads:
        raise UsageError(
            f"{task} has no files to download: its data come with it, or the task makes them. Your own task may name "
            "files: downloads = (grappe.Download(url=…, size=…, sha256=…),)"
        )
    for download in cls.downloads:
        _check(download, schemes)
    are_there = [_is_there(download, folder) for download in cls.downloads]
    if not dry_run:
        folder.mkdir(parents=True, exist_ok=True)
        absent = [download for download, is_there in zip(cls.downloads, are_there, strict=True) if not is_there]
        for download in absent:  # before the first one comes: a Corpus of the folder then knows what it lacks
            _partial(download, folder).parent.mkdir(parents=True, exist_ok=True)
            files.appender(_partial(download, folder)).close()
        for download in absent:
            _fetch_file(download, folder, show, schemes)
    return [
        Fetched(name=_name(download), size=download.size, was_there=is_there)
        for download, is_there in zip(cls.downloads, are_there, strict=True)
    ]


def _check(download: Download, schemes: tuple[str, ...]) -> None:
    """Raises UsageError where an address or a name cannot be right."""
    try:
        parts = urlsplit(download.url)
    except ValueError as error:
        raise UsageError(f"{printable(download.url)} is not an address: {error}") from None
    if not download.url.isascii():
        raise UsageError(f"{printable(download.url)}: write characters outside ASCII as %xx")
    if parts.scheme not in schemes or not parts.hostname:
        raise UsageError(f"{download.url}: files are downloaded over {' or '.join(schemes)} alone")
    for name in (_name(download), *download.members):
        path = PurePosixPath(download.folder, name)
        if not name or path.is_absolute() or ".." in path.parts:
            raise UsageError(f"{download.url}: the name '{path}' leads out of the data folder")
    if not re.fullmatch("[0-9a-f]{64}", download.sha256):
        raise UsageError(f"{download.url}: its sha256 must have 64 hexadecimal digits, in small letters")


def _partial(download: Download, folder: Path) -> Path:
    return folder / download.folder / f".{_name(download)}.part"


def _fetch_file(download: Download, folder: Path, show: Callable[[str], None], schemes: tuple[str, ...]) -> None:
    name, partial = _name(download), _partial(download, folder)
    meter = ProgressMeter(f"fetching {name}", max(1, download.size // _MEGABYTE), show, unit="MB")
    with received(download, partial, lambda done: meter.at(done // _MEGABYTE), schemes) as archive:
        meter.end()
        if (digest := _sha256(partial)) != download.sha256:
            files.remove(partial)
            raise DataError(
                f"{download.url} gave another file than the task names: its sha256 is {digest}, not {download.sha256}. "
                "It was removed. Try once more; if it comes again, the address serves something else now"
            )
        if download.members:
            missing = dict(download.members)
            try:
                with tarfile.open(fileobj=archive, mode="r:*") as tar:
                    for member in tar:
                        if not member.isreg() or missing.get(member.name) != member.size:
                            continue
                        stream = tar.extractfile(member)
                        assert stream is not None
                        target = partial.parent / member.name
                        target.parent.mkdir(parents=True, exist_ok=True)
                        files.replace(target, stream.read(), durable=True)
                        del missing[member.name]
            except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
                raise DataError(f"{download.url}: it cannot be unpacked: {error}") from None
            if missing:
                raise DataError(
                    f"{download.url}: it has no {next(iter(missing))} of {next(iter(missing.values())):,} bytes"
                )
            files.remove(partial)
        else:
            files.rename(partial, partial.with_name(name))


def _is_there(download: Download, folder: Path) -> bool:
    place = folder / download.folder
    if download.members:
        sizes = {name: _size(place / name) for name in download.members}
        return sizes == dict(download.members)
    file = place / _name(download)
    if _size(file) is None:
        return False
    if _size(file) == download.size and _sha256(file) == download.sha256:
        return True
    raise DataError(
        f"{file} is there, and is not the file of {download.size:,} bytes that the task names, by its size or "
        "checksum: move it away"
    )


def _sha256(file: Path) -> str:
    with files.reader(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _name(download: Download) -> str:
    return PurePosixPath(urlsplit(download.url).path).name
