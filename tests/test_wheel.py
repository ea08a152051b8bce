"""Installed as users do: a wheel in an environment of its own, away from the checkout, started by its command."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.tasks.error_corpus import TASK

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "grappe"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist of a copy of the sources, as building leaves files beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    shutil.copytree(ROOT / "src", sources / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    build = f"from setuptools import build_meta as build; build.build_sdist({str(folder)!r})"
    run([sys.executable, "-c", build], cwd=sources, env=dict(os.environ))
    [sdist] = folder.glob("grappe-*.tar.gz")
    run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index",
         "--no-build-isolation", "--wheel-dir", str(folder), str(sdist)],
        cwd=folder, env=dict(os.environ),
    )  # fmt: skip
    return next(folder.glob("grappe-*.whl"))


@pytest.fixture(scope="module")
def grappe(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, in an environment that has the wheel, and borrows from this one what the wheel depends on."""
    folder = tmp_path_factory.mktemp("user") / "environment"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python), "install",
         "--no-deps", "--no-index", str(wheel)],
        cwd=folder, env=dict(os.environ),
    )  # fmt: skip
    # A folder that a .pth names comes last, and .pth files in it, such as the checkout's, are not read.
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    inside = next(folder.glob("lib/python*/site-packages"))
    (inside / "borrowed.pth").write_text("\n".join(sorted(borrowed)))
    command = folder.parent / "grappe"  # as pipx and uv put it on the PATH: a link, and nothing is activated
    command.symlink_to(folder / "bin" / "grappe")
    return command


@pytest.fixture
def user(grappe: Path, tmp_path: Path):
    """Runs the command in an empty folder, with a home that is empty, too; what it printed."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    return lambda *words: run([str(grappe), *words], cwd=tmp_path / "work", env=environment)


def run(command: list[str], *, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if name.startswith("grappe/")}
    files = (one for one in PACKAGE.rglob("*") if one.is_file() and "__pycache__" not in one.parts)
    files = (one for one in files if one.suffix != ".po")  # the .mo file beside it is compiled from it
    assert found == {str(one.relative_to(PACKAGE.parent)) for one in files}


def test_the_licence_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [licence] = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        lines = archive.read(metadata).decode().splitlines()
        assert {"License-Expression: Apache-2.0", "License-File: LICENSE"} <= set(lines)


def test_the_wheel_is_what_runs(grappe: Path, tmp_path: Path) -> None:
    python = grappe.resolve().with_name("python")
    said = run([str(python), "-c", "import grappe; print(grappe.__file__)"], cwd=tmp_path, env={})
    assert Path(said.strip()).is_relative_to(grappe.parent)


@pytest.mark.slow
def test_a_shipped_task_trains_and_is_reported(user, tmp_path: Path) -> None:
    assert "digits" in user("tasks")
    plan = ("--plan", "replicate=2,device=cpu,threads=1")
    said = user("train", "digits", "--run", "run", "--steps", "3", *plan)
    assert "3 steps" in said
    user("report", "run")
    assert "digits" in (tmp_path / "work/run/report.html").read_text().lower()


def test_a_task_of_ones_own_trains(user, tmp_path: Path) -> None:
    (tmp_path / "work/mine.py").write_text(TASK)
    said = user("train", "mine.py", "epochs=2", "--run", "run", "--plan", "device=cpu,threads=1")
    assert "finished, 4 steps" in said
    assert "finished" in user("runs", "run")


@pytest.mark.slow
def test_a_job_is_shown(user, tmp_path: Path) -> None:
    words = ("--site", "narval", "--account", "def-someone", "--time", "1h", "--dry-run")
    said = user("submit", *words, "--", "train", "digits")
    assert "#SBATCH --account=def-someone" in said
    assert not list((tmp_path / "work").iterdir())
