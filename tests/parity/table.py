"""Measures plans of every engine against one plain loop and writes the results that docs/parity.md shows.

python -m tests.parity.table [--drawn]   # two minutes on two cores; engines that are not installed keep their last
                                         # figures; --drawn: the column with dropout alone
"""

import json
import sys
import time
from pathlib import Path

import torch

from grappe import engines
from grappe.errors import PlanError
from grappe.plan import Plan
from grappe.task import Task
from tests.parity import reference
from tests.parity.cell import difference
from tests.parity.drawn import Drawn
from tests.parity.optimizers import RULES, TunedTokens
from tests.parity.tasks import Tokens
from tests.processes import Pool

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "parity.json"
STEPS = 6
PLANS = (
    "replicate=2", "replicate=4", "shard=2,zero=1", "shard=2,zero=2", "shard=2", "replicate=2,shard=2",
    "shard=2,offload=cpu", "microbatches=4", "recompute", "tensor=2", "tensor=2,replicate=2",
    "pipeline=2,microbatches=4", "pipeline=2,microbatches=4,schedule=gpipe",
    "pipeline=2,microbatches=4,schedule=zero_bubble", "pipeline=2,microbatches=4,replicate=2",
    "exact=2,replicate=2", "exact=2,shard=2", "domain=2", "domain=2,replicate=2", "domain=2,shard=2",
    "engine=textbook,replicate=2", "engine=textbook,replicate=3",
    "engine=lightning,replicate=2", "engine=lightning,shard=2",
    "engine=horovod,replicate=2",
    "engine=deepspeed,replicate=2", "engine=deepspeed,shard=2,zero=1", "engine=deepspeed,shard=2,zero=2",
    "engine=deepspeed,shard=2", "engine=deepspeed,shard=2,offload=cpu",
)  # fmt: skip
DRAWN_PLANS = tuple(plan for plan in PLANS if "exact" not in plan and "domain" not in plan)
"""With dropout: exact pieces have streams of their own; domain= refuses an LSTM."""
OPTIMIZER_PLANS = (
    "replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2", "replicate=2,shard=2", "tensor=2",
    "pipeline=2,microbatches=4", "exact=2,replicate=2", "exact=2,shard=2", "engine=textbook,replicate=2",
    "engine=lightning,replicate=2", "engine=lightning,shard=2", "engine=horovod,replicate=2",
    "engine=deepspeed,replicate=2", "engine=deepspeed,shard=2,zero=1",
)  # fmt: skip
"""Of grappe's own optimizers, under each: refused where the engine cannot."""


def known(kind: str = "gaps") -> dict[str, float]:
    """By plan, in the order of `PLANS`: the difference that was measured last; "drawn": with dropout."""
    gaps = json.loads(FILE.read_text()).get(kind, {}) if FILE.exists() else {}
    return {plan: gaps[plan] for plan in PLANS if plan in gaps}


def known_optimizers() -> dict[str, dict[str, float | None]]:
    """By optimizer and plan: the difference that was measured last; None: refused."""
    return json.loads(FILE.read_text()).get("optimizers", {}) if FILE.exists() else {}


def measure(pool: Pool, text: str, task: Task | None = None) -> float:
    """The largest |plan - plain| / |plain| of any tensor after six steps."""
    task = task or Tokens()
    plain = reference.train(task, STEPS)["weights"]
    trained = pool.run("tests.parity.cell:train", Plan.parse(text).processes, task, text, STEPS)
    return difference(plain, trained[0]["weights"])[0]


def measure_optimizer(pool: Pool, rule: str, text: str) -> float | None:
    """As `measure`, under one of grappe's optimizers; None where the engine refuses it."""
    task = TunedTokens(by=rule)
    if pool.run("tests.engines.told:told", Plan.parse(text).processes, task, text, 1)[0]:
        return None
    return measure(pool, text, task)


def write(gaps: dict[str, float], drawn: dict[str, float], by_optimizer: dict[str, dict[str, float | None]]) -> None:
    """Writes the differences beside those that were known."""
    ordered = {}
    for kind, found in (("gaps", gaps), ("drawn", drawn)):
        merged = {**known(kind), **found}
        ordered[kind] = {plan: merged[plan] for plan in PLANS if plan in merged}
    before = known_optimizers()
    rules = {rule: {**before.get(rule, {}), **by_optimizer.get(rule, {})} for rule in RULES}
    FILE.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **ordered, "optimizers": rules}, indent=1) + "\n")


def main(only_drawn: bool = False) -> None:
    """Measures every plan whose engine is installed."""
    torch.set_num_threads(1)  # the same sums on any machine
    pool = Pool(4)
    gaps: dict[str, float] = {}
    drawn: dict[str, float] = {}
    by_optimizer: dict[str, dict[str, float | None]] = {rule: {} for rule in RULES}
    for text in dict.fromkeys((*PLANS, *OPTIMIZER_PLANS)):
        try:
            engines.check(Plan.parse(text))
        except PlanError as error:
            print(f"{text}: {error}", file=sys.stderr)
            continue
        if text in DRAWN_PLANS:
            drawn[text] = measure(pool, f"{text},dropout=whole", Drawn())
            print(f"{text} with dropout: {drawn[text]:.1e}", file=sys.stderr)
        if only_drawn:
            continue
        if text in PLANS:
            gaps[text] = measure(pool, text)
            print(f"{text}: {gaps[text]:.1e}", file=sys.stderr)
        for rule in RULES if text in OPTIMIZER_PLANS else ():
            by_optimizer[rule][text] = measure_optimizer(pool, rule, text)
            print(f"{text} {rule}: {by_optimizer[rule][text]}", file=sys.stderr)
    pool.close()
    write(gaps, drawn, by_optimizer)


if __name__ == "__main__":
    main("--drawn" in sys.argv)
