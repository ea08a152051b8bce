"""The wheel of this installation: all files of the package, taken by pip, the same bytes each time."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path

from grappe.sites.wheel import PACKAGE, own_wheel
from tests.patience import PATIENCE_SECONDS


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
