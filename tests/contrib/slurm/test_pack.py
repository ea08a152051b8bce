"""Environments in one file: what cannot be packed is named, and what is unfinished or damaged is never used."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grappe import sites
from grappe.contrib.slurm.environment import Pack
from grappe.contrib.slurm.pack import make_pack, pack_of, refuse_unpackable, tree_key
from grappe.contrib.slurm.script import FUNCTIONS
from grappe.errors import GrappeError, UsageError
from tests.patience import PATIENCE_SECONDS
from tests.typed import stand_in

LOCK = 'version = 1\n[[package]]\nname = "grappe"\nversion = "1"\nsource = { registry = "wheels" }\n'


@pytest.fixture
def env(tmp_path: Path) -> Path:
    """A virtual environment of this interpreter that has grappe by name, and a program that pip has written."""
    folder = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=PATIENCE_SECONDS)
    installed(folder, "grappe")
    program = folder / "bin" / "program"
    program.write_text(f"#!{folder}/bin/python\nimport sys\nprint(sys.prefix)\n")
    program.chmod(0o755)
    long = folder / "bin" / "long"
    long.write_text(
        f"#!/bin/sh\n'''exec' \"{folder}/bin/python3\" \"$0\" \"$@\"\n' '''\nimport sys\nprint(sys.prefix)\n"
    )
    long.chmod(0o755)
    return folder


def packages(env: Path) -> Path:
    return next(env.glob("lib/python3*/site-packages"))


def installed(env: Path, name: str, editable: Path | None = None) -> None:
    folder = packages(env) / f"{name}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    if editable is not None:
        origin = {"url": editable.as_uri(), "dir_info": {"editable": True}}
        (folder / "direct_url.json").write_text(json.dumps(origin))


def packed(env: Path, runs: Path) -> Path:
    pack = pack_of(f"pack:{env}", sites.find("generic"), (), runs, show=False)
    assert pack is not None
    make_pack(pack)
    return pack.file


def unpack(file: Path, tmp_path: Path, **variables: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Unpacks as a job does; returns the folder, and what was said."""
    logs = tmp_path / "runs" / "run" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    shutil.copy(FUNCTIONS, logs)
    folder = tmp_path / "node" / "grappe" / "key"
    done = subprocess.run(
        ["bash", str(logs / "job.sh"), "unpack_environment", str(folder), str(file)],
        capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS,
        env={**os.environ, "SLURM_JOB_ID": "5", **variables},
    )  # fmt: skip
    return folder, done


@pytest.mark.slow
@pytest.mark.parametrize("lacks", ["", "zstd"])
def test_it_works_on_another_disk_and_its_programs_too(lacks: str, env: Path, tmp_path: Path, monkeypatch) -> None:
    if lacks:  # a machine with gzip alone
        which = shutil.which
        monkeypatch.setattr(shutil, "which", lambda name: None if name == lacks else which(name))
    file = packed(env, tmp_path)
    assert file.name.endswith(".tar.gz" if lacks else ".tar.zst")
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    shutil.move(env, tmp_path / "elsewhere")
    folder, done = unpack(file, tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("program", "long"):
        prefix = subprocess.run([folder / "bin" / name], capture_output=True, text=True, check=True).stdout.strip()
        assert prefix == str(folder)
    assert not list((folder / "bin").glob("*activate*")), "they name the folder in which it was made"
    file.write_text("damaged")
    _, again = unpack(file, tmp_path)
    assert again.returncode == 0, "it is unpacked once"


def test_a_key_is_of_the_content(env: Path, tmp_path: Path) -> None:
    key = tree_key(env)
    (packages(env) / "__pycache__").mkdir()
    (packages(env) / "__pycache__" / "x.pyc").touch()
    assert tree_key(env) == key, "an environment compiles its files when it is used"
    (packages(env) / "x.py").touch()
    assert tree_key(env) != key


def test_what_lies_elsewhere_is_refused_by_name(env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    inside, elsewhere = tmp_path / "thesis", tmp_path / "library"
    inside.mkdir()
    monkeypatch.chdir(inside)
    installed(env, "thesis", inside / "src")
    refuse_unpackable(env)
    installed(env, "library", elsewhere)
    with pytest.raises(UsageError, match=f"the editable package library lies in {elsewhere}, outside of it and of"):
        refuse_unpackable(env)
    shutil.rmtree(packages(env) / "library-1.0.dist-info")
    (packages(env) / "easy-install.pth").write_text(f"import os\n{elsewhere}\n")
    with pytest.raises(UsageError, match=f"easy-install.pth lies in {elsewhere}"):
        refuse_unpackable(env)
    (packages(env) / "easy-install.pth").unlink()
    (env / "share").symlink_to(elsewhere)
    with pytest.raises(UsageError, match=f"the link share lies in {elsewhere}"):
        refuse_unpackable(env)


def test_an_environment_without_its_interpreter_or_grappe_is_refused(env: Path) -> None:
    shutil.rmtree(packages(env) / "grappe-1.0.dist-info")
    with pytest.raises(UsageError, match=r"has no grappe, which the job starts: .*/bin/python -m pip install grappe"):
        refuse_unpackable(env)
    (env / "bin" / "python").unlink()
    (env / "bin" / "python").symlink_to("/nowhere/python3")
    with pytest.raises(UsageError, match=r"its interpreter .* is gone: make it anew"):
        refuse_unpackable(env)


def test_a_place_that_cannot_be_written_or_is_full(env: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GrappeError, match=r"cannot be packed in .*/file/.environments: Not a directory: free space"):
        packed(env, tmp_path / "file")
    stand_in(tmp_path / "bin", monkeypatch, tar="echo 'tar: -: Cannot write: No space left on device' >&2; exit 2")
    with pytest.raises(GrappeError, match="No space left on device: free space there, or give another folder"):
        packed(env, tmp_path / "runs")
    assert not list((tmp_path / "runs" / ".environments").iterdir())


@pytest.mark.slow
def test_what_a_killed_packing_left_is_removed_and_never_used(env: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    started = tmp_path / "started"
    stand_in(tmp_path / "bin", tar=f'echo half > "$4"; touch {started}; sleep 1000')
    code = "import sys; from pathlib import Path; from tests.contrib.slurm.test_pack import packed; "
    code += f"packed(Path({str(env)!r}), Path({str(tmp_path)!r}))"
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    child = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PATH": path}, cwd=Path(__file__).parents[3],
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    (left,) = (tmp_path / ".environments").iterdir()
    file = packed(env, tmp_path)
    assert f"removing what a packing that was killed left: {left}" in capsys.readouterr().err
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert unpack(file, tmp_path)[1].returncode == 0


def test_a_node_says_in_one_line_why_it_cannot_unpack(env: Path, tmp_path: Path) -> None:
    file = packed(env, tmp_path)
    content = file.read_bytes()

    def said(**variables: str) -> str:
        folder, done = unpack(file, tmp_path, **variables)
        assert done.returncode == 1
        assert not folder.exists(), "nothing half is left"
        (line,) = done.stderr.splitlines()
        return line

    file.write_bytes(content[: len(content) // 2])
    assert f"it is damaged: rm {file}, and submit again, which packs it anew (" in said()
    file.unlink()
    assert "there is no such file: submit again" in said()
    file.write_bytes(content)
    stand_in(tmp_path / "bin", tar="echo 'tar: x: Cannot write: No space left on device' >&2; exit 2")
    assert "free: ask for more local disk" in said(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    programs = tmp_path / "without"
    programs.mkdir()
    for name in ("bash", "mkdir", "rm", "tar", "flock", "hostname", "gzip"):
        (programs / name).symlink_to(str(shutil.which(name)))
    assert f"there is no zstd here: zstd -d --rm {file} on a login node" in said(PATH=str(programs))
    plain = file.with_suffix("")
    subprocess.run(["zstd", "-q", "-d", "--rm", file], check=True)
    assert unpack(plain, tmp_path)[1].returncode == 0
    assert packed(env, tmp_path) == plain, "it is used as it is"


def test_a_node_without_the_interpreter_names_it(env: Path, tmp_path: Path) -> None:
    gone = tmp_path / "module" / "python3"
    gone.parent.mkdir()
    gone.symlink_to(sys.executable)
    (env / "bin" / "python").unlink()
    (env / "bin" / "python").symlink_to(gone)
    file = packed(env, tmp_path)
    gone.unlink()
    _, done = unpack(file, tmp_path)
    assert f"its interpreter {gone} does not run here: load its module (--modules)" in done.stderr


def test_condas_environments_are_packed_by_conda_pack(env: Path, tmp_path: Path, monkeypatch) -> None:
    """conda-pack is a stand-in: its archive has a program that puts paths right."""
    (env / "conda-meta").mkdir()
    with pytest.raises(UsageError, match=r"conda-pack is not on the PATH, .*: pip install conda-pack"):
        packed(env, tmp_path)
    lines = (
        'cp "$0" "$2/bin/was"; echo "open(__file__ + \'.ran\', \'w\')" > "$2/bin/conda-unpack"; tar -cf "$4" -C "$2" .'
    )
    stand_in(tmp_path / "bin", monkeypatch, **{"conda-pack": lines})
    folder, done = unpack(packed(env, tmp_path), tmp_path)
    assert done.returncode == 0, done.stderr
    assert (folder / "bin" / "conda-unpack.ran").exists()


def test_what_uv_cannot_do_is_said_before_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv is a stand-in, which finds this interpreter and refuses the rest."""

    def refusal(site: str = "generic") -> str:
        with pytest.raises(UsageError) as refused:
            pack_of("uv", sites.find(site), (), tmp_path, show=False)
        return str(refused.value)

    monkeypatch.chdir(tmp_path)
    assert "--env uv: narval asks for pip, with wheels that are built for its modules" in refusal("narval")
    assert "there is no pyproject.toml" in refusal()
    (tmp_path / "pyproject.toml").write_text("[project]")
    empty = tmp_path / "empty"
    empty.mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(empty))
        assert "uv is not on the PATH: pip install uv, or take pip with --env virtualenv" in refusal()
    found = (
        f'[ "$1" != python ] || exec echo {sys.executable}; echo "$UV_OFFLINE $UV_LINK_MODE $UV_NO_CACHE" >&2; exit 2'
    )
    stand_in(tmp_path / "bin", monkeypatch, uv=found)
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.delenv("UV_CACHE_DIR", raising=False)
    assert refusal() == "--env uv: uv: 1 copy 1"
    lock = tmp_path / "uv.lock"
    lock.write_text(LOCK.replace("grappe", "torch"))
    assert "uv.lock has no grappe, which the job starts: uv add grappe" in refusal()
    for damaged in ("version = [", '[[package]]\nname = "a"', "package = 1"):
        lock.write_text(damaged)
        assert refusal() == "--env uv: uv.lock is damaged: remove it, and uv lock writes it again"
    lock.write_text(f'{LOCK}[[package]]\nname = "library"\nsource = {{ directory = "../library" }}\n')
    assert "no change of ../library, of which library is built: write editable = true" in refusal()
    lock.write_text(LOCK)
    pack = pack_of("uv", sites.find("generic"), (), tmp_path, show=True)
    assert pack == pack_of("uv", sites.find("generic"), (), tmp_path, show=False) and isinstance(pack, Pack)
    with pytest.raises(UsageError, match="--env uv: uv: 1 copy"):
        make_pack(pack)
    assert not list(pack.file.parent.iterdir())
    lock.write_text(LOCK.replace('"1"', '"2"'))
    other = pack_of("uv", sites.find("generic"), (), tmp_path, show=False)
    assert other is not None and other.file != pack.file


def test_it_lies_on_the_sites_scratch(env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    pack = pack_of(f"pack:{env}", sites.find("narval"), (), tmp_path, show=False)
    assert pack is not None and pack.file.parent == tmp_path / "scratch" / ".grappe-environments"
