"""Packages of a Python environment that a job makes on its nodes from wheels, or unpacks there; grappe's own wheel."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.metadata
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from grappe.errors import UsageError
from grappe.plan import Plan
from grappe.sites.schema import Site

REQUIREMENTS = "requirements.txt"
MADE_ON_NODES = ("virtualenv", "module")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packages:
    """The packages of an environment: files in the run's logs, which jobs install without network."""

    files: Mapping[str, bytes]
    """The wheel of grappe, and the requirements; by name."""
    key: str
    """A hash of all that the environment depends on: equal ones are one environment."""
    locked: bool
    """Whether every package stands in the requirements with its version, resolved before the queue."""

    @property
    def folder_name(self) -> str:
        """Returns the name of the folder in the run's logs that holds the files."""
        return f"environment-{self.key}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pack:
    """An environment in one file, named by a hash of all that it depends on."""

    file: Path
    source: Path | None
    """The environment's folder; None: uv makes it of the project in the current folder."""
    modules: tuple[str, ...] = ()
    python: str = ""
    """The interpreter of uv's environment."""


def libraries(plan: Plan) -> set[str]:
    """Returns the libraries other than torch that a plan's engine trains with; native and textbook need none."""
    offloaded = plan.engine == "lightning" and plan.offload != "none"
    return {plan.engine, "deepspeed"} if offloaded else {plan.engine}


def modules_of(site: Site, own: tuple[str, ...], plan: Plan) -> tuple[str, ...]:
    """Returns the modules that a job loads: the user's `own`, or else the site's, with CUDA's for DeepSpeed."""
    compiles = plan.device != "cpu" and "deepspeed" in libraries(plan)
    return own or (*site.job.modules, *(site.job.deepspeed_modules if compiles else ()))


def packages(wheel: tuple[str, bytes], requirements: list[str], depends: list[str], *, locked: bool) -> Packages:
    """Makes the packages of an environment, with their key.

    Args:
        depends: what else tells two environments apart: the modules, Python's version.
    """
    name, content = wheel
    text = "".join(f"{requirement}\n" for requirement in requirements)
    content_key = "\n".join([*depends, text, hashlib.sha256(content).hexdigest()])
    key = hashlib.sha256(content_key.encode()).hexdigest()[:12]
    return Packages(files={name: content, REQUIREMENTS: text.encode()}, key=key, locked=locked)


PACKAGE = Path(__file__).parents[2]
SAME_DATE = (1980, 1, 1, 0, 0, 0)  # so that the same files are the same wheel
KIND = "Wheel-Version: 1.0\nGenerator: grappe\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def own_wheel() -> tuple[str, bytes]:
    """Packs this installation, editable or not; returns the wheel's file name and content.

    Raises:
        UsageError: the package was never installed, so that its requirements are unknown.
    """
    try:
        distribution = importlib.metadata.distribution(PACKAGE.name)
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "this copy of grappe was never installed, so its packages are unknown: pip install it, or use --env"
        ) from None
    files = {
        str(file.relative_to(PACKAGE.parent)): file.read_bytes()
        for file in sorted(PACKAGE.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }
    metadata = {name: distribution.read_text(name) for name in ("METADATA", "entry_points.txt")}
    return packed(PACKAGE.name, distribution.version, {k: v for k, v in metadata.items() if v is not None}, files)


def packed(name: str, version: str, metadata: Mapping[str, str], files: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Packs a wheel of pure Python in the format of PEP 427; returns its file name and content.

    Args:
        metadata: the files of its folder `.dist-info`, without WHEEL and RECORD.
        files: by their paths in site-packages.
    """
    folder = f"{name}-{version}.dist-info"
    content = dict(files) | {f"{folder}/{key}": text.encode() for key, text in metadata.items()}
    content[f"{folder}/WHEEL"] = KIND.encode()
    record = ""
    for path, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    content[f"{folder}/RECORD"] = f"{record}{folder}/RECORD,,\n".encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in content.items():
            entry = zipfile.ZipInfo(path, SAME_DATE)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return f"{name}-{version}-py3-none-any.whl", stream.getvalue()
