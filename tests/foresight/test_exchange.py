"""A step sends as many messages as its time is foreseen from: collectives of 2, 4 and 8 processes, counted by torch."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

from grappe.foresight import links
from grappe.foresight.calibration import Calibration, Machine
from grappe.foresight.exchange import Exchange
from grappe.foresight.sketch import Sketch
from grappe.parallel.shard import uses_shard
from grappe.plan import Plan
from tests.foresight import messages, unusual

NOTHING = ((0.0, 0.0), (1e12, 0.0))
ONE = ((256.0, 0.0), (257.0, 1.0), (1e12, 1.0))
"""A second for each message of more than 256 bytes."""


def foreseen(plan: Plan, *collectives: str) -> float:
    """Counts a step's messages of these kinds: the seconds that they take if each takes one."""
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "send")
    points = {kind: ONE if kind in collectives else NOTHING for kind in kinds}
    points[links.MEETING] = ((1.0, 0.0),)
    calibration = Calibration(
        machine=Machine.here(),
        overheads={},
        links={str(count): points for count in (2, 4, 8)},
        flops={},
        bandwidth={"1": float("inf")},
    )
    sketch = Sketch(unusual.Rows(), Path("data"))
    return Exchange(calibration, sketch.parameters).of(plan, 1.0, 0.0)[1]


SENDS_TO_ITSELF = version("torch").startswith("2.8")
"""Whether FSDP2 of this torch calls collectives in a group of one process, too, which send nothing."""


@pytest.mark.parametrize(
    "text",
    [
        "replicate=2",
        "shard=2",
        "shard=2,zero=1,microbatches=2",
        "shard=2,microbatches=2",
        "replicate=2,shard=2",
        "shard=4",
        "shard=8",
        "replicate=4",
        "offload=cpu",
        "offload=cpu,microbatches=2",
        "replicate=2,offload=cpu",
        "shard=2,offload=cpu",
    ],
)
def test_a_step_sends_as_many_messages_as_are_foreseen(text: str) -> None:
    plan = Plan.parse(f"{text},threads=1")
    sent = Counter(messages.sent("tests/foresight/unusual.py:Rows", str(plan)))
    # Each unit of a group of one process gathers twice there, and reduces once.
    to_itself = sent["all_gather"] if SENDS_TO_ITSELF and plan.shard == 1 else 0
    assert sent["all_gather"] - to_itself == foreseen(plan, "all_gather")
    # gloo reduces and scatters by summing everything; the loss's sum goes with DDP's buckets, or by itself.
    sums = int(plan.processes > 1 and uses_shard(plan))
    assert sent["all_reduce"] - sums - to_itself / 2 == foreseen(plan, "all_reduce", "reduce_scatter")
