"""The living processes of a command by what they are."""

import collections
from pathlib import Path

from tests.commands import Command

ROLES = {"command": 3, "fork server": 3, "one rank": 3, "all": 3, "another": 1}
"""What is killed, and how often; of those that live then."""


def roles(one: Command) -> dict[str, list[int]]:
    """The living processes of a command, by what they are."""
    main = one.process.pid
    members = {pid: _status(pid) for pid in one.members()}
    found = collections.defaultdict(list)
    for pid, (parent, words) in members.items():
        parents = members.get(parent, (0, ""))[1]
        if pid == main:
            role = "command"
        elif parent == main and "multiprocessing.forkserver" in words:
            role = "fork server"
        elif "resource_tracker" not in words and (parent == main or "multiprocessing.forkserver" in parents):
            role = "one rank"
        else:
            role = "another"
        found[role].append(pid)
    found["all"] = list(members)
    return dict(found)


def _status(pid: int) -> tuple[int, str]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(stat[1]), Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except (OSError, IndexError):
        return 0, ""
