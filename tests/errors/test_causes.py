"""A process or thread that the system does not start is told from other errors."""

import errno
import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from grappe.cli.exit import BUG
from grappe.errors.causes import broken_package, hiding, refused_process, unfit_packages


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
        RuntimeError("can't start new thread"),
        RuntimeError("Resource temporarily unavailable"),
    ],
)
def test_it_is_said_in_one_line(error: Exception) -> None:
    said = refused_process(error)
    assert said is not None and "ulimit -u" in said and "\n" not in said


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), "a file"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("shapes differ"),
        ValueError("can't start new thread"),
    ],
)
def test_other_errors_are_none(error: Exception) -> None:
    assert refused_process(error) is None


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """An environment with a torchvision whose import fails as one made for an older torch fails."""
    pytest.importorskip("torchmetrics")
    site = tmp_path / "site"  # not the working folder, where modules are not looked for
    (site / "torchvision").mkdir(parents=True)
    (site / "torchvision/__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    about = site / "torchvision-0.15.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.15.2\n")
    (about / "RECORD").touch()
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize(
    "command",
    [["train", "digits", "epochs=1"], ["train", "digits", "epochs=1", "--plan", "replicate=2"], ["doctor"]],
    ids=" ".join,
)
def test_it_is_named_in_one_line(broken: dict[str, str], tmp_path: Path, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "grappe", *command],
        env=broken, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "torchvision 0.15.2 cannot be" in line]
    assert len(lines) == 1, done.stderr
    assert "operator torchvision::nms does not exist" in lines[0]
    assert BUG not in done.stderr and "Traceback" not in done.stderr
    assert done.returncode == (1 if command == ["doctor"] else 2)


def test_what_does_not_evaluate_works_without_it(broken: dict[str, str], tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "grappe", "tasks"], env=broken, cwd=tmp_path, check=True)


def test_a_users_own_error_is_no_broken_package() -> None:
    try:
        raise RuntimeError("mine")
    except RuntimeError as error:
        assert broken_package(error) is None


@pytest.mark.parametrize(
    ("requirement", "fits"),
    [
        ("torch==2.0.1", False),
        ("torch (==2.0.1)", False),
        ("torch==OWN", True),
        ("torch>=1", True),
        ("torch==2.0.*", True),
        ("torch==2.0.1.dev20250801 ; python_version>'3'", False),
    ],
)
def test_a_torchvision_for_another_torch_is_named(requirement: str, fits: bool, tmp_path: Path, monkeypatch) -> None:
    about = tmp_path / "torchvision-0.15.2.dist-info"
    about.mkdir()
    own = importlib.metadata.version("torch").partition("+")[0]
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.15.2\nRequires-Dist: numpy\n"
        f"Requires-Dist: {requirement.replace('OWN', own)}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = [line for line in unfit_packages() if line.startswith("torchvision 0.15.2")]
    assert bool(lines) is not fits
    assert fits or "is made for torch 2.0.1" in lines[0]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ModuleNotFoundError: No module named 'numpy.linalg'; 'numpy' is not a package", True),
        ("ImportError: cannot import name 'array' from 'numpy'", True),
        ("AttributeError: module 'numpy' has no attribute 'array'", True),
        ("AttributeError: partially initialized module 'mine' has no attribute 'x'", False),
        ("AttributeError: 'Net' object has no attribute 'numpy'", False),
        ("grappe.errors.UsageError: no such field", False),
    ],
)
def test_a_folder_of_pythonpath_is_named_where_it_can_be_why(text: str, named: bool, tmp_path: Path) -> None:
    for name in ("numpy.py", "mine.py"):
        (tmp_path / name).touch()
    installed = tmp_path / "installed"
    installed.symlink_to(sysconfig.get_path("purelib"))
    paths = os.pathsep.join([str(tmp_path), str(installed)])
    assert hiding(text, paths) == ({str(tmp_path): "numpy"} if named else {})
