"""Renders how a job makes its Python environment from wheels: once on a node, or from the archive of an earlier job."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.metadata
import io
import shlex
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


def libraries(plan: Plan) -> set[str]:
    """Returns the libraries besides torch that a plan's engine trains with, and native or textbook, which need none."""
    offloaded = plan.engine == "lightning" and plan.offload != "none"
    return {plan.engine, "deepspeed"} if offloaded else {plan.engine}


def modules_of(site: Site, own: tuple[str, ...], plan: Plan) -> tuple[str, ...]:
    """Returns the modules that a job loads: the user's `own`, or else the site's, with CUDA's for DeepSpeed."""
    compiles = plan.device != "cpu" and "deepspeed" in libraries(plan)
    return own or (*site.job.modules, *(site.job.deepspeed_modules if compiles else ()))


def packages(
    wheel: tuple[str, bytes], requirements: list[str], depends: list[str], *, locked: bool
) -> Packages:
    """Makes the packages of an environment, with their key.

    Args:
        depends: what else tells two environments apart: the modules, Python's version.
    """
    name, content = wheel
    text = "".join(f"{requirement}\n" for requirement in requirements)
    content_key = "\n".join([*depends, text, hashlib.sha256(content).hexdigest()])
    key = hashlib.sha256(content_key.encode()).hexdigest()[:12]
    return Packages(files={name: content, REQUIREMENTS: text.encode()}, key=key, locked=locked)


def place(local: str, key: str) -> str:
    """Returns the environment's folder on a node, for use between double quotes in bash."""
    return f"{local or '${TMPDIR:-/tmp}'}/grappe-$UID/{key}"


MADE = """\
# An environment with these packages is made once on a node. The first is kept beside the runs for later jobs.
env="{place}"
kept={kept}
packages={packages}
(umask 077 && mkdir -p "${{env%/*}}")
[ -O "${{env%/*}}" ] || {{ echo "${{env%/*}} is not yours: give another folder as TMPDIR" >&2; exit 1; }}
if [ ! -e "$env" ]; then
    [ -d "$packages" ] || {{ echo "there is no $packages: grappe submit without --show writes it" >&2; exit 1; }}
    new=$env.$SLURM_JOB_ID.$$
    mkdir "$new" || exit 1
    if [ ! -e "$kept" ] || ! tar -xf "$kept" -C "$new"; then
        rm -rf -- "$new"
        {create}
        "$new/bin/python" -m pip install {options} || exit 1
        "$new/bin/python" -m pip install --quiet --no-index --no-deps "$packages"/grappe-*.whl || exit 1
        if [ "${{SLURM_NODEID:-0}}" = 0 ]; then
            mkdir -p "${{kept%/*}}"
            tar -cf "$kept.$SLURM_JOB_ID" -C "$new" . && mv -- "$kept.$SLURM_JOB_ID" "$kept"
            rm -f -- "$kept.$SLURM_JOB_ID"
        fi
    fi
    mv -T -- "$new" "$env" 2>/dev/null || rm -rf -- "$new" # another job on this node was first
    [ -e "$env" ] || exit 1
fi"""

VIRTUALENV = """\
if command -v virtualenv >/dev/null; then
            virtualenv --quiet --no-download "$new"
        else
            {python} -m venv "$new"
        fi"""
"""virtualenv where the site has it, as the Alliance asks."""


def made(
    content: Packages, *, kind: str, local: str, run: Path, python: str, modules: bool, wheels: Path | None
) -> str:
    """Renders the commands that make the environment on one node; the last command moves it to its place, complete.

    Args:
        kind: virtualenv, of wheels alone, or module, on top of what the modules hold.
        local: the site's local scratch; "": the system's.
        python: the interpreter of the submitting command, which is used where no module brings one.
        wheels: a folder of wheels besides the site's.
    """
    base = "python" if modules else shlex.quote(python)
    make = f'{base} -m venv --system-site-packages "$new"'
    options = ["--quiet", "--no-index"]
    if wheels is not None:
        options += ["--find-links", shlex.quote(str(wheels))]
    if content.locked:
        options += ["--no-deps"]
    return MADE.format(
        place=place(local, content.key),
        kept=shlex.quote(str(run.parent / ".environments" / f"{content.key}.tar")),
        packages=shlex.quote(str(run / "logs" / content.folder_name)),
        create=make if kind == "module" else VIRTUALENV.format(python=base),
        options=" ".join([*options, f'-r "$packages/{REQUIREMENTS}"']),
    )


PACKAGE = Path(__file__).parents[1]
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
