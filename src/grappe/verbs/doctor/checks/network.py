"""Check of the network: host names, interfaces named by variables, a shared rendezvous folder, unused fast links."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from grappe.verbs.doctor.checks import Finding, Machine, error, note, warning

INTERFACES = Path("/sys/class/net")
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def check(machine: Machine) -> Iterator[Finding]:
    """Checks host names and interfaces, once per node."""
    if not machine.is_node_leader:
        return
    several = machine.process.size > machine.process.local_size
    try:
        address = socket.gethostbyname(socket.gethostname())
        if several and address.startswith("127."):
            yield warning(
                f"this node's name {socket.gethostname()} resolves to {address}",
                why="processes on other nodes cannot reach it there",
                do="set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network's interface (ip addr)",
            )
    except OSError:
        yield (error if several else note)(
            f"this node's name {socket.gethostname()} does not resolve",
            why="processes on several nodes find each other by host name",
            do="tell the site",
        )
    interfaces = [entry.name for entry in INTERFACES.iterdir()] if INTERFACES.is_dir() else []
    yield from of_variables(machine.environment, interfaces)
    if several and list(Path("/sys/class/infiniband").glob("*")) and machine.environment.get("NCCL_IB_DISABLE") == "1":
        yield warning(
            "NCCL_IB_DISABLE=1 where there is InfiniBand", why="gradients take a slower network", do="unset it"
        )


def of_variables(environment, interfaces: Iterable[str]) -> Iterator[Finding]:  # noqa: ANN001
    """Returns findings for variables that name a missing interface, which makes every start fail."""
    existing = list(interfaces)
    for variable in VARIABLES:
        text = environment.get(variable, "")
        names = [name.partition(":")[0] for name in text.lstrip("^=").split(",") if name]
        if (
            existing
            and names
            and not text.startswith("^")
            and not any(name.startswith(tuple(names)) for name in existing)
        ):
            yield error(
                f"{variable}={text}, and this node has {', '.join(sorted(existing))}",
                why="no process will find the others",
                do=f"unset {variable}",
            )
