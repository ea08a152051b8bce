"""Rendezvous: makes torch's process group without a port fixed in advance; its processes prove that they belong to it.

A port is open to all who reach the machine, and torch's stores and gloo ask nobody who they are. So each process shows
each other one that it knows a secret: the command's, or one in a file that only the user can read
(docs/decisions/launch.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from grappe.errors import ProcessDied, RunError, UsageError
from grappe.errors.foreign_text import printable
from grappe.launch import files
from grappe.launch.terminal import complain, redirected
from grappe.words import first_line, host_name

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store

    from grappe.launch.rank import ProcessRank


PATIENCE_SECONDS = 120.0  # the nodes of a job may start far apart
PATIENCE = timedelta(seconds=PATIENCE_SECONDS)
WAIT_SECONDS = 10.0  # after which a process says for whom it waits
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
        deadline = time.monotonic() + PATIENCE_SECONDS
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


TIMEOUT = timedelta(minutes=30)
GRACE_SECONDS = 3.0
THREADS = 8  # three of gloo's first group, two of each further one
SERVING_SECONDS = 1.0


def start(
    process: ProcessRank, backend: str, device: torch.device, rendezvous_folder: Path, timeout: timedelta = TIMEOUT
) -> str:
    """Makes torch's default process group; returns the secret that its processes share, if any. Collective.

    Args:
        rendezvous_folder: a folder shared by all processes, where process 0 publishes its address.
        timeout: of every wait for another process, now and in later collectives.

    Raises:
        UsageError: process 0 did not publish its address in time.
        ProcessDied: another program answers in the place of one of the processes.
    """
    import torch.distributed as dist

    if process.size == process.local_size:
        # A laptop's hostname often resolves to nowhere; processes of one node meet on the loopback interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if "lo" in dict(socket.if_nameindex()).values() else "lo0")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")[: 1 + (backend == "nccl")] if process.size > 1 else ():
        _check_interface(name, os.environ.get(name, ""))
    address = rendezvous_folder / f".rendezvous-{process.job or '0'}"
    if process.size == 1:
        store: dist.Store = dist.HashStore()  # FSDP2 offloads through a group, of one process too
    elif process.launcher == "torchrun":
        store = _env_store(process, timeout)
    elif process.secret:
        # A file in a folder that the command has made for itself alone: there is no port to connect to.
        store = dist.FileStore(str(rendezvous_folder / "store"), process.size)
        store.set_timeout(timeout)
    else:
        store = _published_store(process, address, timeout)
    # FSDP's offload and our own objects need CPU collectives in addition to NCCL's.
    backends = f"cpu:gloo,cuda:{backend}" if device.type == "cuda" else backend
    if process.size > 1:
        _try_threads(process, store, timeout)
    dist.init_process_group(
        backends,
        store=store,
        rank=process.rank,
        world_size=process.size,
        timeout=timeout,
        # No device_id: torch 2.8 then splits NCCL's group for each axis of a mesh, and refuses to where there is gloo
        # next to it (pytorch#159200). Each process has chosen its device, and barriers are gloo's.
    )
    if process.rank == 0:
        with contextlib.suppress(OSError):
            files.remove(address)  # all are connected, so all have read it
    if process.size == 1 or backend == "mpi":  # whose launcher connects the processes itself
        return ""
    secret = process.secret or shared_secret(process, store, rendezvous_folder)
    authenticate(process, secret)
    return secret


def _check_interface(name: str, text: str) -> None:
    """Checks that this machine has the network interfaces of a variable of gloo's or NCCL's.

    NCCL takes prefixes of names, exact ones after "=", and after "^" all others, which are not checked.

    Raises:
        UsageError: it has none of them.
    """
    here = [interface for _, interface in socket.if_nameindex()]
    named = [part.strip() for part in text.removeprefix("=").split(",") if part.strip()]
    by_prefix = name.startswith("NCCL") and not text.startswith("=")
    matches = [each for each in named if any(i == each or (by_prefix and i.startswith(each)) for i in here)]
    if named and not text.startswith("^") and not matches:
        raise UsageError(
            f"{name}={printable(text)}: {host_name()} has no such network interface, but {', '.join(sorted(here))}: "
            f"unset {name}, or name one of these"
        )


def _try_threads(process: ProcessRank, store: Store, timeout: timedelta) -> None:
    """Starts as many threads as the groups take, in all processes at once: gloo waits for ever for one it cannot start.

    Raises:
        RuntimeError: the system starts no further thread.
    """
    over = threading.Event()
    tried = [threading.Thread(target=over.wait, daemon=True) for _ in range(THREADS)]
    try:
        for thread in tried:
            thread.start()
        if store.add("grappe/threads", 1) == process.size:
            store.set("grappe/threads/all", "started")
        store.wait(["grappe/threads/all"], timeout)
    finally:
        over.set()
    for thread in tried:
        thread.join()


def claims_error_report(process: ProcessRank) -> bool:
    """Returns whether this process must report an error: only the first caller; the others' errors are the same."""
    import torch.distributed as dist

    from grappe.private_api.torch import default_store

    if process.size == 1:
        return True
    if not dist.is_initialized():
        if process.rank:
            time.sleep(GRACE_SECONDS)  # process 0 most likely says the same, and the launcher then ends us
        return True
    try:
        with redirected(2):  # for a lost store torch prints a stack trace before it raises
            first = default_store().add("grappe/spoken", 1) == 1
    except RuntimeError:
        return False  # process 0, which serves the store, has ended, and has said why
    if process.rank == 0 and process.launcher != "torchrun":
        time.sleep(SERVING_SECONDS)  # so that the others can ask, too
    return first


def _env_store(process: ProcessRank, timeout: timedelta) -> Store:
    import torch.distributed as dist

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The agent serves its store before it starts processes; one that has ended torch asks for minutes.
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        for pause in (0.2, 1.0, None):
            try:
                socket.create_connection(place, timeout=PATIENCE_SECONDS).close()
                break
            except ConnectionRefusedError as error:
                if pause is None:
                    raise ProcessDied(
                        f"torchrun, which serves the processes' store at {place[0]}:{place[1]}, has ended: start it "
                        "again"
                    ) from error
                time.sleep(pause)
            except OSError:  # a network of its own kind: torch tries, and says what is wrong
                break
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"MASTER_ADDR={printable(host)}: {host_name()} does not know this machine ({error}): give the name or the "
            "address of process 0's node"
        ) from error
    try:
        # torchrun's agent may already serve a store at MASTER_PORT; env:// knows how to share it.
        with os.fdopen(os.dup(2), "w") as errors, redirected(2):  # torch prints a stack trace of each try

            def warn() -> None:
                complain(
                    f"grappe: process {process.rank} of {process.size} waits for the others at {host}:{port}", errors
                )

            waits = threading.Timer(WAIT_SECONDS, warn)
            waits.start()
            try:
                store, _, _ = next(iter(dist.rendezvous("env://", timeout=PATIENCE)))
            finally:
                waits.cancel()
                waits.join()
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise UsageError(
                f"MASTER_PORT={port}: another program of {host_name()} has this port: give all processes another one"
            ) from error
        raise UsageError(
            f"process {process.rank} of {process.size} waited {PATIENCE_SECONDS:.0f} s for the others at "
            f"{host}:{port}: start WORLD_SIZE={process.size} processes at a time, each with the same MASTER_ADDR and "
            f"MASTER_PORT ({first_line(error)})"
        ) from error
    store.set_timeout(timeout)
    # It outlives a training, and the next one in the same processes must not find this one's addresses.
    starts = store.add(f"grappe/starts/{process.rank}", 1)
    return dist.PrefixStore(f"grappe/{starts}", store)


def _published_store(process: ProcessRank, address: Path, timeout: timedelta) -> Store:
    """Makes a TCP store on a port that the system chooses; process 0 publishes the address."""
    import torch.distributed as dist

    if process.rank == 0:
        alone = process.size == process.local_size
        host = "127.0.0.1" if alone else socket.gethostname()
        store = dist.TCPStore(host, 0, process.size, True, timeout, wait_for_workers=False)
        address.parent.mkdir(parents=True, exist_ok=True)
        files.replace(address, f"{host} {store.port}".encode(), mode=files.PRIVATE)
        return store
    what = f"process 0's address in {address.parent}"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if words := files.read_text(address).split():
                break
        time.sleep(0.02)
    else:
        raise UsageError(
            f"waited {PATIENCE_SECONDS:.0f} s for {what}: is process 0 running, and do all nodes share that folder?"
        )
    host, port = words
    return dist.TCPStore(host, int(port), process.size, False, timeout, wait_for_workers=False)
