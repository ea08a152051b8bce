"""Rendezvous: makes torch's process group; the processes find each other without a port fixed in advance."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from grappe.errors import ProcessDied, UsageError
from grappe.launch import authentication, files
from grappe.launch.terminal import without_standard_error

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from grappe.launch.rank import ProcessRank

TIMEOUT = timedelta(minutes=30)
PATIENCE_SECONDS = 120.0  # the nodes of a job may start far apart
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
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if Path("/sys/class/net/lo").exists() else "lo0")
    address = rendezvous_folder / f".rendezvous-{process.job or '0'}"
    if process.size == 1:
        store: dist.Store = dist.HashStore()  # FSDP2 offloads through a group, of one process too
    elif process.launcher == "torchrun":
        store = _env_store(process)
    elif process.secret:
        # A file in a folder that the command has made for itself alone: there is no port to connect to.
        store = dist.FileStore(str(rendezvous_folder / "store"), process.size)
        store.set_timeout(timeout)
    else:
        store = _published_store(process, address, timeout)
    # FSDP's offload and our own objects need CPU collectives besides NCCL's.
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
        # beside it (pytorch#159200). Each process has chosen its device, and barriers are gloo's.
    )
    if process.rank == 0:
        with contextlib.suppress(OSError):
            files.remove(address)  # all are connected, so all have read it
    if process.size == 1 or backend == "mpi":  # whose launcher connects the processes itself
        return ""
    secret = process.secret or authentication.shared_secret(process, store, rendezvous_folder)
    authentication.authenticate(process, secret)
    return secret


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
        with without_standard_error():  # for a lost store torch prints a stack trace before it raises
            first = default_store().add("grappe/spoken", 1) == 1
    except RuntimeError:
        return False  # process 0, which serves the store, has ended, and has said why
    if process.rank == 0 and process.launcher != "torchrun":
        time.sleep(SERVING_SECONDS)  # so that the others can ask, too
    return first


def _env_store(process: ProcessRank) -> Store:
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
    # torchrun's agent may already serve a store at MASTER_PORT; env:// knows how to share it.
    store, _, _ = next(iter(dist.rendezvous("env://")))
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
