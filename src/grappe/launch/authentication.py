"""Has processes prove to each other that they belong to one start, over the same connections that they use.

A port is open to all who reach the machine, and torch's stores and gloo ask nobody who they are. So each process shows
each other one that it knows a secret: the command's, or one in a file that only the user can read
(docs/decisions/launch.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from grappe.errors import ProcessDied, RunError
from grappe.launch import files

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

    from grappe.launch.rank import ProcessRank

PATIENCE = timedelta(seconds=120)
KEY = "grappe/secret"  # key of the store: the name of the file with the secret
BYTES = hashlib.sha256().digest_size


def shared_secret(process: ProcessRank, store: Store, folder: Path) -> str:
    """Returns a secret of process 0's, through a file in `folder` that no other user can read.

    Raises:
        ProcessDied: the file cannot be written, or does not come.
    """
    if process.rank == 0:
        name, secret = f".secret-{secrets.token_hex(16)}", secrets.token_hex(32)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files.replace(folder / name, secret.encode(), mode=files.PRIVATE)
        except (OSError, RunError) as error:
            name, secret = "none", f"{folder} cannot be written: {error}"
        store.set(KEY, name)
    else:
        name = store.get(KEY).decode(errors="replace")
        secret = ""
        deadline = time.monotonic() + PATIENCE.total_seconds()
        if name.startswith(".secret-") and Path(name).name == name:
            while time.monotonic() < deadline:  # a network's file system may show it late
                with contextlib.suppress(OSError, RunError):
                    secret = files.read_text(folder / name)
                    break
                time.sleep(0.05)
    if name == "none" or not secret:
        raise ProcessDied(
            f"the processes of this start share no secret: {secret or 'process 0 wrote none that can be read'}"
        )
    # Process 0 removes the file once all have read it.
    if process.rank:
        store.set(f"{KEY}/{process.rank}", "read")
    else:
        store.wait([f"{KEY}/{rank}" for rank in range(1, process.size)], PATIENCE)
        with contextlib.suppress(OSError, RunError):
            files.remove(folder / name)
    return secret


def authenticate(process: ProcessRank, secret: str, group: ProcessGroup | None = None) -> None:
    """Exchanges proofs with every other process of a group, by default of all, and checks theirs. Collective over it.

    Raises:
        ProcessDied: a process has no valid proof: it does not belong to this start.
    """
    import torch
    import torch.distributed as dist

    members = list(range(process.size)) if group is None else dist.get_process_group_ranks(group)
    size, rank = len(members), members.index(process.rank)
    nonces = [torch.empty(BYTES, dtype=torch.uint8) for _ in range(size)]
    challenge = torch.frombuffer(bytearray(secrets.token_bytes(BYTES)), dtype=torch.uint8)
    _finished(process, dist.all_gather(nonces, challenge, group=group, async_op=True))
    words = [bytes(row.tolist()) for row in nonces]

    def shown(prover: int, other: int) -> bytes:
        """Returns the digest that process `prover` shows to process `other`."""
        text = f"{prover} to {other} of {members} ".encode() + words[prover] + words[other]
        return hmac.digest(secret.encode(), text, "sha256")

    digests = bytearray(b"".join(shown(rank, other) for other in range(size)))
    answer = torch.frombuffer(digests, dtype=torch.uint8)
    taken = torch.empty_like(answer)
    _finished(process, dist.all_to_all_single(taken, answer, group=group, async_op=True))
    for other, row in enumerate(taken.view(size, BYTES)):
        if not hmac.compare_digest(bytes(row.tolist()), shown(other, rank)):
            raise ProcessDied(
                f"process {process.rank} of {process.size} is connected to a program that is not process "
                f"{members[other]} of this start: "
                "somebody else on this machine or its network has answered in its place. Start again; if it comes "
                "again, tell those who run the machine"
            )


def _finished(process: ProcessRank, work: object) -> None:
    try:
        work.wait(PATIENCE)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise ProcessDied(
            f"process {process.rank} of {process.size} could not prove to the others that it is of this start: {error}"
        ) from error
