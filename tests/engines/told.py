"""Function for a pool's processes that returns the user's message about an impossible training."""

from pathlib import Path

import torch.distributed as dist

from grappe.errors import GrappeError
from grappe.launch.rank import ProcessRank
from grappe.task import Task
from tests.parity.cell import train


def told(process: ProcessRank, rendezvous_folder: Path, task: Task, text: str, steps: int) -> str:
    """The error's class and words; empty without one."""
    try:
        train(process, rendezvous_folder, task, text, steps)
    except GrappeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"
    return ""
