"""Runs `grappe verify` on every task, shipped ones too, and writes the results that docs/gallery-parity.md shows.

python -m tests.gallery.table [TASK …] [--missing]    # two minutes a task on two cores; --missing: what has none
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from benchmarks.gallery_files import NAMES, ROOT, file, known, write

import grappe
from tests.gallery import shipped, tasks
from tests.gallery.cell import runner
from tests.processes import Pool

NATIVE = (
    "replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2", "shard=2,offload=cpu", "replicate=2,shard=2",
    "microbatches=2", "recompute", "tensor=2", "pipeline=2,microbatches=2", "pipeline=2,schedule=gpipe,microbatches=2",
    "pipeline=2,schedule=interleaved,microbatches=2", "pipeline=2,schedule=zero_bubble,microbatches=2",
    "exact=2,replicate=2", "exact=2,shard=2", "precision=bf16", "batchnorm=sync,replicate=2", "channels_last",
)  # fmt: skip
ENGINES = ("engine=lightning,replicate=2", "engine=deepspeed,replicate=2")
PLANS = (*NATIVE, *ENGINES)
TASKS = (*NAMES, *shipped.FIELDS)


def verified(pool: Pool, name: str, plans: Sequence[str] = PLANS) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields plans with verify's verdict, why, and by how much the losses differ. What ends verify is a crash."""
    left = list(plans)
    while left:
        try:
            for one in _findings(pool, name, tuple(left)):
                gap = one.difference.loss if one.difference else None
                why = [text.replace(f"{ROOT}/", "") for text in (*one.causes, *one.notes)]
                yield left.pop(0), {"verdict": one.verdict, "why": why, "loss": gap}
        except AssertionError as error:  # a process of the pool ended with a traceback
            print(error, file=sys.stderr)
            yield left.pop(0), {"verdict": "crash", "why": [str(error).strip().splitlines()[-1]], "loss": None}


def _findings(pool: Pool, name: str, plans: Sequence[str]) -> Iterator[Any]:
    asked = [f"{plan},threads=1,device=cpu" for plan in plans]
    if name in NAMES:
        return grappe.verify(file(name), asked, data=tasks.folder(name), run=runner(pool))
    return grappe.verify(
        name, asked, fields=shipped.FIELDS[name], data=shipped.folder(name), run=runner(pool),
        steps=shipped.STEPS.get(name, 8),
    )  # fmt: skip


def main(arguments: list[str]) -> None:
    """Verifies the tasks of these names, or all; each verdict is written as it is found."""
    torch.set_num_threads(1)
    pool = Pool(4)
    missing, names = "--missing" in arguments, [one for one in arguments if not one.startswith("--")]
    for name in names or TASKS:
        found = dict(known()["verify"].get(name, {})) if missing else {}
        for plan, one in verified(pool, name, [plan for plan in PLANS if plan not in found]):
            found[plan] = one
            write("verify", {name: {plan: found[plan] for plan in PLANS if plan in found}}, TASKS)
            print(f"{name} {plan}: {one}", file=sys.stderr, flush=True)
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1:])
