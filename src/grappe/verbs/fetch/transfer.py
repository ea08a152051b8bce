"""Downloads a file over https into a partial file, and goes on where an earlier download stopped."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from grappe.errors import DataError
from grappe.errors.foreign_text import printable
from grappe.launch import files
from grappe.task import Download

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
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{partial}: another grappe fetch is downloading it: wait for it") from None
        except OSError:
            pass  # a file system without locks
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
                    "file. What had come was removed"
                ) from None
            raise DataError(
                f"{download.url} cannot be downloaded: {_reason(error)}. {partial.stat().st_size:,} of "
                f"{download.size:,} bytes are there: the same command goes on from there. A compute node "
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
    with _opener(schemes).open(request, timeout=_SECONDS) as answer:
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


def _opener(schemes: tuple[str, ...]) -> urllib.request.OpenerDirector:
    """Opens these schemes alone: by default urllib knows files and FTP, too, and a redirection could name them."""
    opener = urllib.request.OpenerDirector()
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
    return opener


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


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code} {printable(error.reason)}"
    return printable(getattr(error, "reason", None) or error)
