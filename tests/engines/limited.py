"""A training in a process that may have only so much more memory than it has: what a process of a pool does."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

from grappe.launch.rank import ProcessRank
from grappe.task import Task
from grappe.training.options import Options
from tests.faults.resume_cell import part

REFUSED = "out of memory: "


def train(
    process: ProcessRank, rendezvous_folder: Path, task: Task, text: str, run: Path, options: Options, room: int
) -> str:
    """Returns the message for the user, or REFUSED and the way in which memory was refused.

    Args:
        room: bytes of data beside what the process has when it begins.
    """
    import deepspeed  # noqa: F401  # what it takes itself is not what is measured

    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + room, hard))
    try:
        return part(process, rendezvous_folder, task, text, run, options, None)
    except Exception as error:
        if "memory" not in str(error):
            raise
        return f"{REFUSED}{error}"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(line for line in lines if line.startswith("VmData:"))
    return int(found.split()[1]) * 1024
