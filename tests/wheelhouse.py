"""A folder of wheels, as a cluster has: the packages that grappe needs, which borrow their modules from this Python."""

import importlib.metadata
import re
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from grappe.contrib.slurm.environment import packed

NAME = re.compile(r"[\w.-]+")
SEPARATORS = re.compile(r"[-_.]+")


def plain(name: str) -> str:
    return SEPARATORS.sub("-", name).lower()


def wheel(folder: Path, name: str, version: str, needs: Iterable[str] = (), files: Mapping[str, str] = {}) -> None:
    """One wheel with these files, by their paths in site-packages."""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {one}\n" for one in needs)
    content = {path: text.encode() for path, text in files.items()}
    file, data = packed(SEPARATORS.sub("_", name), version, {"METADATA": metadata}, content)
    (folder / file).write_bytes(data)


def wheelhouse(folder: Path, *, lacks: Iterable[str] = (), extra: Iterable[str] = ("scikit-learn",)) -> Path:
    """Wheels with the names, versions and needs of what is installed here. They are empty, but for torch's: a .pth
    file names this Python's folders, whose own .pth files, such as the checkout's, are not read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting, seen = ["grappe", *extra], set()
    while waiting:
        name = plain(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        found = importlib.metadata.distribution(name)
        needs = [one for one in found.requires or () if ";" not in one]
        waiting += [NAME.findall(one)[0] for one in needs]
        if name == "grappe" or name in lacks:
            continue
        places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        files = {"borrowed.pth": f"import sys; sys.path += {sorted(places)}"} if name == "torch" else {}
        wheel(folder, found.metadata["Name"], found.version, needs, files)
    return folder
