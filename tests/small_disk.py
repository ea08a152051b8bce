"""A disk of 2 MB, which a test may fill, as a fixture."""

import errno
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    while folder.is_mount():  # a test may have mounted it once more
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Writes `ballast` there until not a page is free."""
    try:
        with (folder / "ballast").open("wb", buffering=0) as stream:
            while stream.write(bytes(1 << 12)):
                pass
    except OSError as error:
        assert error.errno == errno.ENOSPC
