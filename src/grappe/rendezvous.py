"""Rendezvous: how the processes of a world find each other, without any port fixed in advance."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from grappe.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from grappe.place import Place

TIMEOUT = timedelta(minutes=30)
PATIENCE_SECONDS = 120.0  # the nodes of a job may start far apart
GRACE_SECONDS = 3.0
SERVING_SECONDS = 1.0


def start(place: Place, backend: str, device: torch.device, meet: Path, timeout: timedelta = TIMEOUT) -> None:
    """Makes torch's default process group. Collective.

    Args:
        meet: a folder that every process sees, where process 0 publishes its address.
        timeout: of every wait for another process, now and in the collectives that follow.

    Raises:
        UsageError: process 0 did not publish it in time.
    """
    import torch.distributed as dist

    if place.size == place.local_size:
        # A laptop's hostname often resolves to nowhere; processes of one node meet on the loopback interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if Path("/sys/class/net/lo").exists() else "lo0")
    address = meet / f"rendezvous-{place.job or 'local'}"
    if place.size == 1:
        store: dist.Store = dist.HashStore()  # FSDP2 offloads through a group, of one process too
    else:
        store = (
            _env_store(place) if place.launcher == "torchrun" else _published_store(place, address, timeout)
        )
    # FSDP's offload and our own objects need CPU collectives beside NCCL's.
    backends = f"cpu:gloo,cuda:{backend}" if device.type == "cuda" else backend
    dist.init_process_group(
        backends,
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    if place.rank == 0:
        with contextlib.suppress(OSError):
            address.unlink(missing_ok=True)  # all are connected, so all have read it


def may_speak(place: Place) -> bool:
    """Whether this process is the one to tell the user of an error; the others have the same, or its consequence."""
    import torch.distributed as dist

    if place.size == 1:
        return True
    if not dist.is_initialized():
        if place.rank:
            time.sleep(GRACE_SECONDS)  # process 0 most likely says the same, and the launcher then ends us
        return True
    try:
        with _without_warnings():
            first = dist.distributed_c10d._get_default_store().add("grappe/spoken", 1) == 1
    except RuntimeError:
        return False  # process 0, which serves the store, has ended, and has said why
    if place.rank == 0 and place.launcher != "torchrun":
        time.sleep(SERVING_SECONDS)  # so that the others can ask, too
    return first


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """torch writes a stack trace to standard error where a store has gone, before it raises."""
    error, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(error, 2)
        os.close(error)
        os.close(nowhere)


def _env_store(place: Place) -> Store:
    import torch.distributed as dist

    # torchrun's agent may already serve a store at MASTER_PORT; env:// knows how to share it.
    store, _, _ = next(iter(dist.rendezvous("env://")))
    # It outlives a training, and the next one in the same processes must not find this one's addresses.
    starts = store.add(f"grappe/starts/{place.rank}", 1)
    return dist.PrefixStore(f"grappe/{starts}", store)


def _published_store(place: Place, address: Path, timeout: timedelta) -> Store:
    """A TCP store on a port of the system's choice, its address published by process 0."""
    import torch.distributed as dist

    if place.rank == 0:
        alone = place.size == place.local_size
        host = "127.0.0.1" if alone else socket.gethostname()
        store = dist.TCPStore(host, 0, place.size, True, timeout, wait_for_workers=False)
        address.parent.mkdir(parents=True, exist_ok=True)
        beside = address.with_suffix(f".{os.getpid()}")
        beside.write_text(f"{host} {store.port}")
        beside.replace(address)
        return store
    host, port = _wait_for(lambda: address.read_text().split(), f"process 0's address in {address.parent}")
    return dist.TCPStore(host, int(port), place.size, False, timeout, wait_for_workers=False)


def _wait_for(read: Callable[[], list[str]], what: str) -> list[str]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            found = read()
        except OSError:
            found = []
        if found:
            return found
        time.sleep(0.02)
    raise UsageError(
        f"waited {PATIENCE_SECONDS:.0f} s for {what}: is process 0 running, and do all nodes share that folder?"
    )
