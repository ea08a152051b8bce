"""Describes the generic site: reads a cluster's nodes from its own sinfo."""

from __future__ import annotations

import dataclasses
import re

from grappe.errors import UsageError, nearest
from grappe.sites.schema import PARTITION, Node, Queue, Site

FORMAT = "%P|%c|%m|%G|%l|%D"
DAY_SECONDS = 86400
MODEL = re.compile(r"[\w.-]*", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionRow:
    """Nodes of one kind in one partition."""

    partition: str
    default: bool
    cores: int
    megabytes: int
    gpus: int
    model: str
    hours: float | None
    nodes: int


def rows(text: str) -> list[PartitionRow]:
    """Parses the output of `sinfo -h -o FORMAT`, one row per line; skips lines of another form."""
    partitions = []
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) != len(FORMAT.split("|")):
            continue
        name, cores, megabytes, gres, limit, nodes = parts
        numbers = [re.match(r"\d{1,9}", text, re.ASCII) for text in (cores, megabytes, nodes)]
        gpus, model = _gpus(gres)
        if not all(numbers) or not PARTITION.fullmatch(name.rstrip("*")) or not MODEL.fullmatch(model):
            continue
        values = [int(match[0]) for match in numbers if match]
        partitions.append(
            PartitionRow(
                partition=name.rstrip("*"),
                default=name.endswith("*"),
                cores=values[0],
                megabytes=values[1],
                gpus=gpus,
                model=model,
                hours=_hours(limit),
                nodes=values[2],
            )
        )
    return partitions


def probed(site: Site, text: str, partition: str | None, *, wants_gpus: bool) -> Site:
    """Completes `site` with a partition's node and limits: the named, the default, or the first fitting partition.

    Raises:
        UsageError: there is no such partition, or no partition with GPUs.
    """
    partition_rows = rows(text)
    if not partition_rows:
        raise UsageError(
            "sinfo names no partition here: is Slurm running? Or give --site NAME (grappe sites)"
        )
    names = {row.partition for row in partition_rows}
    if partition is not None and partition not in names:
        raise UsageError(f"there is no partition '{partition}' here: {nearest(partition, names)}")
    candidates = [row for row in partition_rows if partition in (None, row.partition)]
    able = [row for row in candidates if row.gpus] if wants_gpus else candidates
    if not able:
        where = f"partition {partition}" if partition else "this cluster"
        raise UsageError(
            f"no node of {where} has a GPU (sinfo): add device=cpu to the plan, or give another --queue"
        )
    # The default partition first; of several kinds of node the one with the most GPUs.
    row = max(able, key=lambda row: (row.default, row.gpus * row.nodes, row.cores))
    node = Node(
        gpus=row.gpus,
        gpu=row.model or "GPU",
        cores=row.cores,
        memory_gb=max(1, row.megabytes // 1024) if row.megabytes > 1 else None,
        count=row.nodes,
    )
    options = (f"--partition={row.partition}",)
    gpus = f"--gres=gpu:{row.model}:{{gpus}}" if row.model else site.ask.gpus
    ask = dataclasses.replace(site.ask, gpus=gpus, max_hours=row.hours)
    return dataclasses.replace(site, node=node, ask=ask, queue=(Queue(name=row.partition, options=options),))


def _gpus(gres: str) -> tuple[int, str]:
    """Parses `gpu:a100:4(S:0-1),tmp:1` to 4 and "a100"."""
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *rest = part.split(":")
        if kind == "gpu" and rest and re.fullmatch(r"\d{1,4}", rest[-1], re.ASCII):
            return int(rest[-1]), rest[0] if len(rest) > 1 else ""
    return 0, ""


def _hours(limit: str) -> float | None:
    """Parses `7-00:00:00` to 168 hours; None for no limit."""
    match = re.fullmatch(r"(?:(\d{1,6})-)?(?:(\d{1,6}):)?(\d{1,6}):(\d{1,6})", limit, re.ASCII)
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return (days * DAY_SECONDS + hours * 3600 + minutes * 60 + seconds) / 3600 or None
