"""Request to the processes of a launched script; without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

INTERRUPTED = 130
"""The exit code of a Python script that Ctrl-C ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """A script and the plan of the processes that run it."""

    script: Path
    arguments: Sequence[str]
    plan: str
    """"" for one process."""
    rendezvous: Mapping[str, str]
    """MASTER_ADDR and MASTER_PORT, for a script that calls torch.distributed itself."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of every process."""
    seed: int = 0
    """Seed of what the script draws before it seeds itself, the same in all processes."""
    is_loop: bool = False
    """Whether it has a grappe.Loop, and so draws from that seed, too."""
    run: Path | None = None
    """Folder of the run of a script for one process; None: it becomes none."""
    steps: int | None = None
    """Steps after which it ends, as a measurement does, which leaves no file; None: it ends by itself."""
    save_every: int | None = None
    """Steps between checkpoints; None: a minute."""
    catches: bool = False
    """Whether the script does something of its own on Ctrl-C."""
