"""Holds plans of every engine to one plain loop and writes what came of it to docs/parity.json, for the README's table.

python docs/parity.py        # two minutes on two cores; engines that are not installed keep their last figures
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).with_name("parity.json")
STEPS = 6
PLANS = (
    "replicate=2", "replicate=4", "shard=2,zero=1", "shard=2,zero=2", "shard=2", "replicate=2,shard=2",
    "shard=2,offload=cpu", "microbatches=4", "recompute", "tensor=2", "tensor=2,replicate=2",
    "pipeline=2,microbatches=4", "pipeline=2,microbatches=4,schedule=gpipe",
    "pipeline=2,microbatches=4,schedule=zero_bubble", "pipeline=2,microbatches=4,replicate=2",
    "exact=2,replicate=2", "exact=2,shard=2",
    "engine=textbook,replicate=2", "engine=textbook,replicate=3",
    "engine=lightning,replicate=2", "engine=lightning,shard=2",
    "engine=horovod,replicate=2",
    "engine=deepspeed,replicate=2", "engine=deepspeed,shard=2,zero=1", "engine=deepspeed,shard=2,zero=2",
    "engine=deepspeed,shard=2", "engine=deepspeed,shard=2,offload=cpu",
)  # fmt: skip


def measure() -> dict[str, float]:
    """By plan: the largest |plan - plain| / |plain| of any tensor after six steps."""
    sys.path.insert(0, str(ROOT))
    import torch
    from tests.parity import reference
    from tests.parity.cell import difference
    from tests.parity.tasks import Tokens
    from tests.processes import Pool

    from grappe import engines
    from grappe.errors import PlanError
    from grappe.plan import Plan

    torch.set_num_threads(1)  # the same sums on any machine
    task = Tokens()
    wanted = reference.train(task, STEPS)["weights"]
    pool = Pool(4)
    found = {}
    for text in PLANS:
        plan = Plan.parse(text)
        try:
            engines.check(plan)
        except PlanError as error:
            print(f"{text}: {error}", file=sys.stderr)
            continue
        given = pool.run("tests.parity.cell:train", plan.processes, task, text, STEPS)[0]["weights"]
        found[text] = difference(wanted, given)[0]
        print(f"{text}: {found[text]:.1e}", file=sys.stderr)
    pool.close()
    return found


def markdown() -> str:
    """The README's table, from the file."""
    known = json.loads(FILE.read_text())
    lines = ["| engine | plan | largest difference |", "|---|---|---|"]
    for text in PLANS:
        engine, _, rest = (
            text.removeprefix("engine=").partition(",") if "engine=" in text else ("native", "", text)
        )
        if text in known["gaps"]:
            lines.append(f"| {engine} | `{rest}` | {known['gaps'][text]:.0e} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, and writes beside what was there before."""
    known = json.loads(FILE.read_text())["gaps"] if FILE.exists() else {}
    gaps = {**known, **measure()}
    FILE.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "gaps": gaps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
