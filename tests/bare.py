"""Runs `make train` and tests as on a bare machine: Python, git and make, in a clone named grappe.

    python -m tests.bare [EXPRESSION]    # as pytest's -k takes it; by default the tests that what is hidden affects

Hidden are Slurm, a browser, compilers, shellcheck, libaio and Horovod: the search path leads to links to all other
programs, and the clone's environment has links to all other packages of this one.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
HIDDEN = re.compile(
    r"(s(acct|alloc|batch|cancel|control|info|queue|run)|slurm.*|munge.*|maria.*|mysql.*"
    r"|chrom.*|google-chrome.*|firefox.*|(.*-)?(c\+\+|g\+\+|cpp|gcc|cc|clang\+*)(-\d+)?|c?make-gui|cmake|ninja|shellcheck)"
)
"""Programs that Python, git and make do not bring."""
PACKAGES = re.compile(r"horovod.*|__editable__.*|grappe.*")
AFFECTED = (
    "slurm or horovod or nvme or compile or compiler or extension or test_script or test_report"
    " or one_file_of_profiling or (export and not onnx and not transformers) or (deepspeed and offload)"
)
"""The tests, by their names and plans, that may need what is hidden."""


def links(place: Path) -> str:
    """Makes a folder of links to the programs that a bare machine has."""
    place.mkdir()
    for folder in map(Path, [*os.environ["PATH"].split(os.pathsep), "/usr/sbin", "/sbin"]):
        for program in folder.iterdir() if folder.is_dir() else ():
            if not HIDDEN.fullmatch(program.name) and not (place / program.name).is_symlink():
                (place / program.name).symlink_to(program)
    return str(place)


def clone(place: Path) -> None:
    """Clones this repository with an environment that needs no network."""
    subprocess.run(["git", "clone", "--quiet", ROOT, place], check=True)
    venv.create(place / ".venv", with_pip=False, symlinks=True)
    here = Path(shutil.__file__).parent.name
    packages = Path(".venv", "lib", here, "site-packages")
    for package in (ROOT / packages).iterdir():
        if not PACKAGES.fullmatch(package.name):
            (place / packages / package.name).symlink_to(package.resolve())
    (place / packages / "grappe.pth").write_text(f"{place / 'src'}\n")
    shutil.copytree(next((ROOT / packages).glob("grappe-*.dist-info")), place / packages / "grappe.dist-info")
    for name in ("grappe", "torchrun"):
        program = place / ".venv" / "bin" / name
        program.write_text((ROOT / ".venv" / "bin" / name).read_text().replace(str(ROOT), str(place)))
        program.chmod(0o755)
    for mark in ("bin/pip", "train", "test"):
        (place / ".venv" / mark).touch()


def main(expression: str = AFFECTED) -> int:
    """Returns the exit code of what failed first."""
    folder = Path(tempfile.mkdtemp(prefix="bare-", dir="/tmp"))
    try:
        place = folder / "grappe"
        clone(place)
        environment = {**os.environ, "PATH": links(folder / "bin"), "PYTEST_ADDOPTS": f"-rs -k '{expression}'"}
        environment.pop("GRAPPE_NO_SKIPS", None)
        for target in ("train", "test"):
            if code := subprocess.run(["make", target], cwd=place, env=environment, check=False).returncode:
                return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
