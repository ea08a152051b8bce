"""Environments in one file, made without network: of a uv.lock, and of a virtual environment's folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grappe.contrib.slurm.environment import own_wheel
from grappe.training.run import Run
from tests.commands import SLOW
from tests.patience import PATIENCE_SECONDS
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import submit, waited
from tests.wheelhouse import wheel, wheelhouse

PROJECT = """
[project]
name = "thesis"
version = "0"
requires-python = ">=3.11"
dependencies = ["grappe", "extra"]
[tool.uv]
no-index = true
find-links = ["../wheels"]
"""
PLAN = "replicate=2,threads=1,workers=0,device=cpu"


@pytest.fixture
def project(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task that imports a package of the wheels; no network, an empty HOME, a local disk."""
    folder = tmp_path / "project"
    for path in (folder, tmp_path / "home"):
        path.mkdir()
    wheels = wheelhouse(tmp_path / "wheels")
    wheel(wheels, "extra", "1.0", files={"extra.py": "NAME = 'extra'"})
    name, content = own_wheel()
    (wheels / name).write_bytes(content)
    (folder / "mine.py").write_text(
        f"{Path(SLOW).read_text()}\nimport extra\nprint('has', extra.NAME, extra.__file__)\n"
    )
    variables = {"HOME": str(tmp_path / "home"), "UV_OFFLINE": "1", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    variables |= {"PIP_FIND_LINKS": str(tmp_path / "wheels"), "TMPDIR": str(tmp_path / "local")}
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where pip install puts uv
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "local").mkdir()
    return folder


def trained(project: Path, env: str, run: str) -> str:
    """Submits a training in this environment on two nodes, and returns its log."""
    words = ("--nodes", "2", "--env", env, "--", "train", "mine.py", "epochs=1", "pause=0", "--plan", PLAN)
    _, log = waited(submit(*words, "--run", f"runs/{run}", cwd=project), project)
    assert Run(project / "runs" / run).is_finished(), log
    return log


def test_an_environment_of_a_lock_is_packed_once(project: Path, tmp_path: Path) -> None:
    if shutil.which("uv") is None:
        pytest.skip("there is no uv: pip install uv")
    (project / "pyproject.toml").write_text(PROJECT)
    log = trained(project, "uv", "first")
    local = tmp_path / "local" / f"grappe-{os.getuid()}"
    assert f"has extra {local}" in log
    place = project / "runs" / ".environments"
    files = {file.name: file.stat().st_mtime_ns for file in place.iterdir()}
    assert len(files) == 1, "nothing but the one file is left"
    assert not list((tmp_path / "home").iterdir()), "no cache in HOME"
    shutil.rmtree(local)
    (tmp_path / "wheels").rename(tmp_path / "gone")
    assert f"has extra {local}" in trained(project, "uv", "second")
    assert {file.name: file.stat().st_mtime_ns for file in place.iterdir()} == files, "it is not made anew"


def test_a_virtual_environment_works_where_it_was_not_made(project: Path, tmp_path: Path) -> None:
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", env], check=True, timeout=PATIENCE_SECONDS)
    pip = [env / "bin" / "pip", "install", "--quiet", "grappe", "extra"]
    subprocess.run(pip, check=True, timeout=PATIENCE_SECONDS)
    log = trained(project, f"pack:{env}", "first")
    (local,) = (tmp_path / "local").glob("grappe-*/*/bin")
    assert f"has extra {local.parent}" in log
    env.rename(tmp_path / "gone")
    subprocess.run([local / "grappe", "--version"], check=True, timeout=PATIENCE_SECONDS)
