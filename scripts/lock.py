"""Turns pip's report of what it would install here into requirements with hashes.

    pip install --dry-run --ignore-installed --report report.json -c constraints.txt '.[demo]'
    python scripts/lock.py report.json > locked.txt     (or both: make locked.txt)
    pip install --require-hashes -r locked.txt

A list is for one kind of machine: torch has a build for each kind of processor and GPU, and clusters build their own.
With --versions the lines are those of constraints.txt (make constraints): versions alone, of every kind of machine.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def lines(report: dict[str, Any]) -> Iterator[str]:
    """A requirement with its hash for each package of the report but the project itself, which has none.

    Raises:
        SystemExit: a package comes from a place for which pip knows no hash.
    """
    for one in sorted(report["install"], key=lambda one: one["metadata"]["name"].lower()):
        if "dir_info" in one["download_info"]:
            continue
        name, version = one["metadata"]["name"], one["metadata"]["version"]
        digest = one["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest is None:
            raise SystemExit(f"{name}=={version}: pip knows no sha256 of it")
        yield f"{name}=={version} --hash=sha256:{digest}"


HEAD = "# Exact versions of everything that `make` installs. To renew them: `make constraints`, then run the tests."
OF_CUDA = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton)")
"""Packages that only torch's build for GPUs requires."""


def versions(report: dict[str, Any]) -> Iterator[str]:
    """constraints.txt: each package's version, without those of torch's build for GPUs."""
    yield HEAD
    for one in sorted(report["install"], key=lambda one: one["metadata"]["name"].lower()):
        if "dir_info" not in one["download_info"] and not OF_CUDA.match(one["metadata"]["name"].lower()):
            yield f"{one['metadata']['name']}=={one['metadata']['version'].partition('+')[0]}"


if __name__ == "__main__":
    print("\n".join((versions if "--versions" in sys.argv else lines)(json.loads(Path(sys.argv[1]).read_text()))))
