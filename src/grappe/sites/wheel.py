"""Packs the running installation of grappe as a wheel, without its sources, a build backend or the network."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from grappe.errors import UsageError

PACKAGE = Path(__file__).parents[1]
SAME_DATE = (1980, 1, 1, 0, 0, 0)  # so that the same files are the same wheel
KIND = "Wheel-Version: 1.0\nGenerator: grappe\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def own_wheel() -> tuple[str, bytes]:
    """Packs this installation, editable or not; returns the wheel's file name and content.

    Raises:
        UsageError: the package was never installed, so that nobody knows what it needs.
    """
    try:
        distribution = importlib.metadata.distribution(PACKAGE.name)
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "this grappe was never installed, so nobody knows which packages it needs: pip install it, or use --env"
        ) from None
    files = {
        str(file.relative_to(PACKAGE.parent)): file.read_bytes()
        for file in sorted(PACKAGE.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }
    metadata = {name: distribution.read_text(name) for name in ("METADATA", "entry_points.txt")}
    return packed(
        PACKAGE.name, distribution.version, {k: v for k, v in metadata.items() if v is not None}, files
    )


def packed(
    name: str, version: str, metadata: Mapping[str, str], files: Mapping[str, bytes]
) -> tuple[str, bytes]:
    """Packs a wheel of pure Python in the format of PEP 427; returns its file name and content.

    Args:
        metadata: the files of its folder `.dist-info`, without WHEEL and RECORD.
        files: by their paths in site-packages.
    """
    folder = f"{name}-{version}.dist-info"
    content = dict(files) | {f"{folder}/{key}": text.encode() for key, text in metadata.items()}
    content[f"{folder}/WHEEL"] = KIND.encode()
    record = "".join(f"{path},sha256={_hash(data)},{len(data)}\n" for path, data in content.items())
    content[f"{folder}/RECORD"] = f"{record}{folder}/RECORD,,\n".encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in content.items():
            entry = zipfile.ZipInfo(path, SAME_DATE)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return f"{name}-{version}-py3-none-any.whl", stream.getvalue()


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
