"""grappe doctor: checks this machine and this allocation, and runs a small collective between all processes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from grappe.contrib.doctor.checks import DoctorRequest, Finding, Machine, error, examine, warning
from grappe.errors import EXIT_FAILURE, GrappeError
from grappe.launch.child import doubt
from grappe.launch.rank import ProcessRank
from grappe.launch.start import start
from grappe.words import VERSION, count_of, first_line, host_name

WORDS = {"error": "ERROR", "warning": "warning", "note": "note"}
CLOCK_SECONDS = 20.0  # leases of runs tell the living from the dead by the clock
SLOW_SECONDS = 0.5
NUMBERS = 1 << 18
PATIENCE_SECONDS = 60.0  # for all processes to connect: the training that follows would wait half an hour


class Unfit(GrappeError):
    """Error that ends the processes: one of them found an error that would end the training."""

    exit_code = EXIT_FAILURE


def doctor(request: DoctorRequest) -> list[Finding]:
    """Examines this machine, or all processes of this job, as the plan would use them. Collective.

    Returns:
        The findings, errors first; the same finding of several nodes once, with their names.

    Raises:
        GrappeError: the plan's processes could not connect; the message gives the reason.
    """
    return start("grappe.contrib.doctor.doctor:worker", request, request.plan, run=request.folder)


def worker(request: DoctorRequest, process: ProcessRank, rendezvous_folder: Path) -> list[Finding]:
    """Runs one process of an examination. Collective."""
    machine = Machine(process=process, environment=dict(os.environ), **vars(request))
    findings = list(examine(machine))
    host = host_name()
    for finding in findings:
        if finding.of_node:
            doubt(host, finding.what, "doctor")
    if process.size == 1:
        return _ordered([findings], [host])
    if failed(findings):  # the others might wait for a process that cannot come
        raise Unfit(f"{host} is not fit for this training\n{text(_ordered([findings], [host]))}")
    from grappe.launch.world import join

    try:
        world = join(request.plan, process, rendezvous_folder, timedelta(seconds=PATIENCE_SECONDS))
        findings += _collective(world)
    except RuntimeError as mistake:
        raise Unfit(
            f"the {process.size} processes did not all meet in {PATIENCE_SECONDS:.0f} s: {first_line(mistake)}. Is "
            "one missing, does each node reach the others by name, do GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name "
            "the right network?"
        ) from mistake
    gathered = world.gather((host, findings, time.time()))
    world.leave()
    clocks = [at for _, _, at in gathered]
    if max(clocks) - min(clocks) > CLOCK_SECONDS:
        clock = warning(
            f"the nodes' clocks are {max(clocks) - min(clocks):.0f} s apart",
            why="a living process may be taken for dead",
            do="tell the site",
        )
        gathered.append(("", [clock], 0.0))
    return _ordered([of_process for _, of_process, _ in gathered], [name for name, _, _ in gathered])


def _collective(world: Any) -> list[Finding]:
    """Runs an all-reduce with the plan's backend: checks the result, and measures the time."""
    import torch
    import torch.distributed as dist

    numbers = torch.full((NUMBERS,), float(world.rank + 1), device=world.device)
    dist.all_reduce(numbers)
    began = time.perf_counter()
    numbers.fill_(world.rank + 1)
    dist.all_reduce(numbers)
    total, took = float(numbers[-1]), time.perf_counter() - began
    right = world.size * (world.size + 1) / 2
    if total != right:
        return [
            error(
                f"a sum over all processes is {total}, not {right}", why="gradients would be wrong", do="tell the site"
            )
        ]
    if took > SLOW_SECONDS and world.rank == 0:
        return [
            warning(
                f"a sum of 1 MB over all processes takes {took:.2f} s",
                why="each step makes several",
                do="is this the fast network? See GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
            )
        ]
    return []


def _ordered(findings: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Sorts findings, errors first; merges the same finding of several nodes."""
    nodes: dict[Finding, list[str]] = {}
    for host, of_process in zip(hosts, findings, strict=True):
        for finding in of_process:
            names = nodes.setdefault(finding, [])
            if host not in names:
                names.append(host)
    everywhere = len(set(hosts))
    merged = [
        dataclasses.replace(finding, host="" if len(names) == everywhere else ", ".join(names))
        for finding, names in nodes.items()
    ]
    return sorted(merged, key=lambda finding: list(WORDS).index(finding.level))


def text(findings: Sequence[Finding]) -> str:
    """Formats findings as text, three lines each."""
    lines = []
    for finding in findings:
        lines.append(f"{WORDS[finding.level]}: {finding.what}{f' (on {finding.host})' if finding.host else ''}")
        lines += [f"  why: {finding.why}"] if finding.why else []
        lines += [f"  do:  {finding.do}"] if finding.do else []
    return "\n".join(lines)


def summary(findings: Sequence[Finding]) -> str:
    """Returns the first line: versions, and whether anything is wrong."""
    wrong = sum(finding.level != "note" for finding in findings)
    version, torch = VERSION, importlib.metadata.version("torch")
    return (
        f"grappe {version}, torch {torch}, Python {platform.python_version()}: "
        f"{count_of(wrong, 'problem') if wrong else 'nothing is wrong here'}"
    )


def failed(findings: Sequence[Finding]) -> bool:
    """Returns whether a training would fail."""
    return any(finding.level == "error" for finding in findings)
