"""Packs an environment into one file, which each node unpacks: a folder's, or the one that uv makes of a project."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import stat
import tempfile
import tomllib
from pathlib import Path
from urllib.parse import unquote

from grappe.contrib.slurm.environment import Pack
from grappe.contrib.slurm.packages import run_in
from grappe.errors import GrappeError, UsageError
from grappe.errors.foreign_text import printable
from grappe.launch import command
from grappe.launch.terminal import complain, progress
from grappe.sites.schema import Site

UV, PACK = "uv", "pack:"
LOCK, PROJECT = Path("uv.lock"), Path("pyproject.toml")
PACK_SECONDS = 3600.0
COMPRESSION = {".zst": ("-I", "zstd -q -T0"), ".gz": ("-z",), ".tar": ()}
"""Options of tar, by the file's ending."""
UV_RULES = {"UV_LINK_MODE": "copy", "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}


def pack_of(kind: str, site: Site, modules: tuple[str, ...], runs: Path, *, show: bool) -> Pack | None:
    """Returns the environment to pack, if UV or PACK is its kind; nothing is packed yet, with `show` nothing locked.

    Raises:
        UsageError: the site asks for pip, there is no uv or project, or the environment cannot be packed.
    """
    if kind == UV:
        key, python = _project(site, modules, show=show)
        return Pack(file=_file(site, runs, key), source=None, modules=modules, python=python)
    if kind.startswith(PACK):
        source = Path(kind.removeprefix(PACK))
        refuse_unpackable(source)
        return Pack(file=_file(site, runs, tree_key(source)), source=source)
    return None


def _file(site: Site, runs: Path, key: str) -> Path:
    """Returns the packed file of a key: the one that is there, or else the one to make."""
    scratch = Path(os.path.expandvars(site.job.scratch))
    place = scratch / ".grappe-environments" if scratch.is_absolute() else runs / ".environments"
    files = [place / f"{key}.tar{ending}" for ending in (".zst", ".gz", "")]
    return next((file for file in files if file.exists()), files[0 if shutil.which("zstd") else 1])


def _project(site: Site, modules: tuple[str, ...], *, show: bool) -> tuple[str, str]:
    """Returns a hash of all that uv's environment depends on, and its interpreter."""
    if site.job.environment == "virtualenv":
        raise UsageError(
            f"--env uv: {site.name} asks for pip, with wheels that are built for its modules; uv takes others "
            f"({site.source}). Leave --env out, or make an environment yourself and give --env pack:FOLDER"
        )
    if not PROJECT.is_file():
        raise UsageError(f"--env uv: there is no pyproject.toml in {Path.cwd()}: submit from the project's folder")
    if not LOCK.is_file() and not show:
        complain("grappe: there is no uv.lock: uv lock writes it from pyproject.toml")
        _uv(modules, "lock")
        if not LOCK.is_file():
            raise UsageError("--env uv: uv.lock is in the folder of the workspace: submit from there")
    python = _uv(modules, "python", "find", "--system").strip()
    lock = LOCK.read_text() if LOCK.is_file() else ""
    parts = [lock, PROJECT.read_text(), python, run_in(modules, [python, "-VV"]), platform.machine(), *modules]
    try:
        sources = {package["name"]: package["source"] for package in tomllib.loads(lock).get("package", ())}
    except (tomllib.TOMLDecodeError, KeyError, TypeError):
        raise UsageError("--env uv: uv.lock is damaged: remove it, and uv lock writes it again") from None
    if lock and "grappe" not in sources:
        raise UsageError("--env uv: uv.lock has no grappe, which the job starts: uv add grappe")
    for name, source in sources.items():
        if "directory" in source:
            raise UsageError(
                f"--env uv: uv.lock shows no change of {source['directory']}, of which {name} is built: write "
                f"editable = true for it in pyproject.toml, [tool.uv.sources]"
            )
    parts += [str(Path.cwd())] if any("editable" in source for source in sources.values()) else []
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12], python


def _uv(modules: tuple[str, ...], *words: str, **variables: str) -> str:
    """Runs uv in the project's folder, with the job's modules; nothing of it stays in HOME."""
    cache = {} if "UV_CACHE_DIR" in {**os.environ, **variables} else {"UV_NO_CACHE": "1"}
    try:
        return run_in(modules, ["uv", *words], PACK_SECONDS, **UV_RULES, **cache, **variables)
    except command.Missing:
        raise UsageError("--env uv: uv is not on the PATH: pip install uv, or take pip with --env virtualenv") from None
    except command.Failed as error:
        raise UsageError(f"--env uv: {error}") from None


def tree_key(folder: Path) -> str:
    """Returns a hash of the paths, sizes and times of a folder's files, without compiled ones."""
    lines = []
    for path in folder.rglob("*"):
        status = path.lstat()
        if "__pycache__" not in path.parts and not stat.S_ISDIR(status.st_mode):
            lines.append(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(lines)).encode(errors="surrogateescape")).hexdigest()[:12]


def refuse_unpackable(source: Path) -> None:
    """Refuses an environment that would not work on another disk, by the name of what would not.

    An editable package below the current folder works: a job reads it there, as it reads a task's file.

    Raises:
        UsageError: a package or link lies elsewhere, the interpreter is gone, or grappe is missing.
    """
    if not (source / "bin" / "python").exists():
        raise UsageError(f"{source} cannot be packed: its interpreter {source}/bin/python is gone: make it anew")
    places = list(map(str, source.glob("lib/python3*/site-packages")))
    names = set()
    for package in importlib.metadata.distributions(path=places):
        names.add(package.name)
        origin = json.loads(package.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            folder = unquote(origin["url"].removeprefix("file://"))
            _check_inside(source, folder, f"the editable package {package.name}")
    for file in (file for place in places for file in Path(place).glob("*.pth")):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith("/"):
                _check_inside(source, line.strip(), file.name)
    if "grappe" not in names:
        raise UsageError(f"{source} has no grappe, which the job starts: {source}/bin/python -m pip install grappe")
    for path in source.rglob("*"):
        interpreter = path.parent == source / "bin" and path.name.startswith("python")
        if path.is_symlink() and not interpreter:
            _check_inside(source, str(path.resolve()), f"the link {path.relative_to(source)}")


def _check_inside(source: Path, place: str, what: str) -> None:
    if not any(Path(place).is_relative_to(folder) for folder in (source, source.resolve(), Path.cwd())):
        raise UsageError(
            f"{source} cannot be packed: {what} lies in {printable(place, 300)}, outside of it and of "
            f"{Path.cwd()}: install it without --editable, or submit from a folder above it"
        )


def make_pack(pack: Pack) -> None:
    """Packs an environment, unless a job or another command has done so; the file is complete, or not there.

    Raises:
        GrappeError: uv or the packing program failed, or the folder cannot be written.
    """
    place = pack.file.parent
    if pack.file.exists():
        return
    try:
        place.mkdir(parents=True, exist_ok=True)
        start = f"making-{socket.gethostname()}-"
        for left in place.glob(f"{start}*"):
            if not Path("/proc", left.name.removeprefix(start).partition("-")[0]).exists():
                complain(f"grappe: removing what a packing that was killed left: {left}")
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"{start}{os.getpid()}-", dir=place) as name:
            folder, source = Path(name), pack.source
            if source is None:
                progress("uv sync --locked: installing the project's packages, once")
                source, cache = folder / "env", os.environ.get("UV_CACHE_DIR", str(folder / "cache"))
                words = ("sync", "--quiet", "--locked", "--compile-bytecode", "--python", pack.python)
                _uv(pack.modules, *words, UV_CACHE_DIR=cache, UV_PROJECT_ENVIRONMENT=str(source))
                refuse_unpackable(source)
            progress(f"packing the environment in {pack.file}, once")
            part = folder / pack.file.name
            words = ("tar", *COMPRESSION[part.suffix], "-cf", str(part), "-C", str(source), ".")
            if (source / "conda-meta").is_dir():
                words = ("conda-pack", "--prefix", str(source), "--output", str(part))
            command.run(*words, seconds=PACK_SECONDS)
            part.replace(pack.file)
    except command.Missing as error:
        raise UsageError(f"{error}, and it packs this environment: pip install conda-pack") from None
    except (OSError, command.Failed) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise GrappeError(
            f"the environment cannot be packed in {place}: {why}: free space there, or give another folder with --runs"
        ) from error
    finally:
        progress("")
