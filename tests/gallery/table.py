"""Runs `grappe verify` on every task of the gallery and writes docs/gallery.json, which docs/gallery.md shows.

python -m tests.gallery.table [TASK …]        # half a minute a task on two cores
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from benchmarks.gallery_files import NAMES, file, write

import grappe
from tests.gallery.cell import runner
from tests.processes import Pool

PLANS = (
    "replicate=2", "shard=2", "microbatches=2", "pipeline=2,microbatches=2", "exact=2,replicate=2",
    "engine=lightning,replicate=2", "engine=deepspeed,replicate=2",
)  # fmt: skip


def verified(pool: Pool, name: str, plans: tuple[str, ...] = PLANS) -> dict[str, dict[str, Any]]:
    """By plan: verify's verdict, why, and by how much the losses differ."""
    found = {}
    asked = [f"{plan},threads=1,device=cpu" for plan in plans]
    for plan, one in zip(plans, grappe.verify(file(name), asked, run=runner(pool)), strict=True):
        gap = one.difference.loss if one.difference else None
        found[plan] = {"verdict": one.verdict, "why": [*one.causes, *one.notes], "loss": gap}
        print(f"{name} {plan}: {one}", file=sys.stderr, flush=True)
    return found


def main(names: list[str]) -> None:
    """Verifies the tasks of these names, or all."""
    torch.set_num_threads(1)
    pool = Pool(2)
    for name in names or NAMES:
        write("verify", {name: verified(pool, name)})
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1:])
