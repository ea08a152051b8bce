"""Runs `grappe verify` on every task of the gallery and writes docs/gallery.json, which docs/gallery.md shows.

python -m tests.gallery.table [TASK …]        # half a minute a task on two cores
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import grappe
from tests.gallery import tasks

FILE = Path(__file__).parents[2] / "docs" / "gallery.json"
PLANS = (
    "replicate=2", "shard=2", "microbatches=2", "pipeline=2,microbatches=2", "exact=2,replicate=2",
    "engine=lightning,replicate=2", "engine=deepspeed,replicate=2",
)  # fmt: skip


def known() -> dict[str, Any]:
    """What was measured last."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def write(part: str, found: dict[str, Any]) -> None:
    """Writes a part of the file, beside what was known of other tasks."""
    every = known()
    merged = {**every.get(part, {}), **found}
    every[part] = {name: merged[name] for name in tasks.NAMES if name in merged}
    FILE.write_text(json.dumps(every, indent=1) + "\n")


def verified(name: str, plans: tuple[str, ...] = PLANS) -> dict[str, dict[str, Any]]:
    """By plan: verify's verdict, why, and by how much the losses differ."""
    found = {}
    asked = [f"{plan},threads=1,device=cpu" for plan in plans]
    for plan, one in zip(plans, grappe.verify(tasks.file(name), asked), strict=True):
        gap = one.difference.loss if one.difference else None
        found[plan] = {"verdict": one.verdict, "why": [*one.causes, *one.notes], "loss": gap}
        print(f"{name} {plan}: {one}", file=sys.stderr, flush=True)
    return found


def main(names: list[str]) -> None:
    """Verifies the tasks of these names, or all."""
    for name in names or tasks.NAMES:
        write("verify", {name: verified(name)})


if __name__ == "__main__":
    main(sys.argv[1:])
