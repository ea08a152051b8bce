"""Tasks of all kinds learn the same under every plan, and benchmarks/results/gallery.json has them all."""

import functools
from typing import Any

import pytest
from benchmarks import gallery_files

from tests import needs
from tests.gallery import shipped, table, tasks
from tests.gallery.cell import seen
from tests.parity.cell import TOLERANCE, difference
from tests.processes import Pool

needs.library("transformers", "peft", "torch_geometric")

STEPS = 3
PLANS = ("replicate=2", "shard=2", "replicate=2,microbatches=2", "exact=2,replicate=2",
         "engine=lightning,replicate=2")  # fmt: skip
FURTHER = {"causal_lm": ["recompute", "engine=textbook,replicate=2"], "unet": ["pipeline=2,microbatches=2"],
           "tabular": ["pipeline=2,microbatches=2"], "lora": ["recompute"], "pinn": ["recompute"],
           "masked_lm": ["engine=deepspeed,replicate=2"]}  # fmt: skip
NORMALISED = {"image_classification"}
"""Tasks with batch normalisation: the plan must ask for the global batch's statistics, which microbatches have not."""
GOING_ON = {"language_model"}
"""Tasks whose batches go on from each other, which plans with several forwards a step refuse."""
CLOSURES = {"pinn", "sam"}
"""Tasks whose optimizer calls a closure, which the native engine alone gives it."""
CELLS = [(name, plan) for name in gallery_files.NAMES for plan in (*PLANS, *FURTHER.get(name, []))
         if not (name in NORMALISED | GOING_ON and "microbatches" in plan)
         and not (name in GOING_ON and "exact" in plan)
         and not (name in CLOSURES and "engine" in plan)]  # fmt: skip


@functools.cache
def _plain(pool: Pool, name: str, plan: str) -> dict[str, Any]:
    return pool.run("tests.gallery.cell:train", 1, gallery_files.file(name), plan, STEPS, tasks.folder(name))[0]


@pytest.mark.parametrize(("name", "plan"), CELLS)
def test_every_plan_learns_the_same(pool: Pool, name: str, plan: str) -> None:
    exact = "exact" in plan  # pieces have dropout and statistics of their own
    alone = _plain(pool, name, "exact=2" if exact else "")
    asked = f"{plan},batchnorm=sync" if name in NORMALISED and not exact else plan
    size, folder = 1 if plan == "recompute" else 2, tasks.folder(name)
    found = pool.run("tests.gallery.cell:train", size, gallery_files.file(name), asked, STEPS, folder)[0]
    gap, worst = difference(seen(alone["weights"]), seen(found["weights"]))
    assert gap <= TOLERANCE, f"{worst} is {gap:.1e} away"
    assert found["scores"].loss == pytest.approx(alone["scores"].loss, rel=1e-5)


@pytest.mark.slow
def test_verify_takes_outputs_that_are_padded_to_the_longest_of_a_batch(pool: Pool) -> None:
    [(_, found)] = table.verified(pool, "ctc", ("replicate=2",))
    assert found["verdict"] == "same"


def test_the_order_of_sums_of_channels_last_is_rounding(pool: Pool) -> None:
    [(_, found)] = table.verified(pool, "detection", ("channels_last",))
    assert found["verdict"] == "same"


def test_every_task_and_plan_is_in_the_table() -> None:
    found = gallery_files.known()["verify"]
    large = [name for name in shipped.STEPS if name not in found]
    assert tuple(found) == tuple(name for name in table.TASKS if name not in large)
    for name, plans in found.items():
        assert tuple(plans) == table.PLANS
        for plan, one in plans.items():
            assert one["verdict"] in ("same", "same but for these", "failed"), f"{name} {plan}"
            assert one["verdict"] == "same" or one["why"], f"{name} {plan}"
