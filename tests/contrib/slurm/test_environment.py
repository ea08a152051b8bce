"""The commands that make an environment, in a real bash: made once, kept, and unpacked where it is needed again."""

import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from grappe.contrib.slurm.environment import PACKAGE, Packages, own_wheel, packages, packed
from grappe.contrib.slurm.script import FUNCTIONS
from tests.patience import PATIENCE_SECONDS

WHEEL = packed("grappe", "1.0", {"METADATA": "Metadata-Version: 2.1\nName: grappe\nVersion: 1.0\n"}, {"grappe.py": b""})


def run(content: Packages, folder: Path, *, node: str, job: str) -> subprocess.CompletedProcess[str]:
    environment = folder / node / f"grappe-{os.getuid()}" / content.key
    words = ["make_environment", str(environment), "module", sys.executable, *(["--no-deps"] if content.locked else [])]
    return subprocess.run(
        ["bash", str(folder / "runs" / "run" / "logs" / "job.sh"), *words],
        capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS,
        env={**os.environ, "SLURM_JOB_ID": job, "PIP_CONFIG_FILE": os.devnull},
    )  # fmt: skip


@pytest.fixture
def content(tmp_path: Path) -> Packages:
    found = packages(WHEEL, [], ["3.11"], locked=True)
    folder = tmp_path / "runs" / "run" / "logs" / found.folder_name
    folder.mkdir(parents=True)
    for name, data in found.files.items():
        (folder / name).write_bytes(data)
    shutil.copy(FUNCTIONS, folder.parent)
    return found


@pytest.mark.slow
def test_it_is_made_once_and_kept_for_other_nodes(content: Packages, tmp_path: Path) -> None:
    kept = tmp_path / "runs" / ".environments" / f"{content.key}.tar"
    kept.parent.mkdir()
    kept.write_text("damaged")  # and made anew
    assert run(content, tmp_path, node="n0", job="1").returncode == 0
    before = kept.stat().st_mtime_ns
    # The next job has no pip to install with, on the same node and on another.
    for file in (tmp_path / "runs" / "run" / "logs" / content.folder_name).iterdir():
        file.write_text("damaged")
    for node in ("n0", "n1"):
        done = run(content, tmp_path, node=node, job="2")
        assert done.returncode == 0, done.stderr
        place = tmp_path / node / f"grappe-{os.getuid()}"
        assert [one.name for one in place.iterdir()] == [content.key]
        python = place / content.key / "bin" / "python"
        subprocess.run([str(python), "-c", "import grappe"], check=True, timeout=PATIENCE_SECONDS, cwd=place)
    assert kept.stat().st_mtime_ns == before


def test_a_script_that_was_only_shown_says_what_it_lacks(content: Packages, tmp_path: Path) -> None:
    (tmp_path / "runs" / "run" / "logs" / content.folder_name).rename(tmp_path / "gone")
    done = run(content, tmp_path, node="n0", job="1")
    assert done.returncode == 1
    assert "grappe submit writes it" in done.stderr


def test_pip_installs_it_and_every_file_is_there(tmp_path: Path) -> None:
    name, content = own_wheel()
    (tmp_path / name).write_bytes(content)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    done = subprocess.run(
        [*command, str(tmp_path / "site"), str(tmp_path / name)],
        capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = [one for one in PACKAGE.rglob("*") if one.is_file() and "__pycache__" not in one.parts]
    for file in files:
        assert (tmp_path / "site" / file.relative_to(PACKAGE.parent)).read_bytes() == file.read_bytes()
    assert (tmp_path / "site" / "bin" / "grappe").exists()


def test_it_has_the_packages_needs_and_is_the_same_each_time() -> None:
    name, content = own_wheel()
    assert own_wheel() == (name, content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        metadata = next(one for one in archive.namelist() if one.endswith("METADATA"))
        assert "Requires-Dist: torch" in archive.read(metadata).decode()
