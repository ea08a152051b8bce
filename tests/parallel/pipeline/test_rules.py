"""Pipelines that cannot be are refused before any process starts, with what to ask for instead."""

import pytest

from grappe import engines
from grappe.engines.native import Native
from grappe.errors import PlanError
from grappe.plan import Plan


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pipeline=4", "1f1b needs at least microbatches=4, not 1: .* try microbatches=16"),
        ("pipeline=4,microbatches=3", "needs at least microbatches=4, not 3"),
        ("pipeline=2,schedule=interleaved,microbatches=5", "in 2 rounds, which must be alike; use microbatches=4"),
        ("pipeline=2,schedule=interleaved,stages=1,microbatches=4", "it needs 2 stages a process"),
        ("pipeline=2,stages=2,microbatches=4", "one stage a process; use schedule=interleaved"),
        ("pipeline=2,schedule=zero_bubble,microbatches=2,compile", "use schedule=1f1b or interleaved"),
        ("pipeline=2,schedule=zero_bubble,microbatches=2,recompute", "recompute each unit twice"),
        ("pipeline=2,schedule=zero_bubble,microbatches=2,shard=2", "use zero=1"),
        ("pipeline=2,schedule=zero_bubble,microbatches=2,offload=cpu", "use schedule=1f1b with offload=cpu"),
        ("stages=2", "add pipeline=2"),
        ("schedule=gpipe", "add pipeline=2"),
        ("engine=textbook,pipeline=2", "textbook has no pipeline: engines that have: native"),
        ("pipeline=2,microbatches=2,offload=nvme:/tmp", "offloads to the CPU only"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        engines.check(Plan.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "pipeline=2,schedule=gpipe",
        "pipeline=4,schedule=interleaved,stages=3,microbatches=10",
        "pipeline=2,schedule=zero_bubble,stages=2,microbatches=4",
        "pipeline=2,schedule=zero_bubble,microbatches=2,shard=2,zero=1",
    ],
)
def test_taken(text: str) -> None:
    assert engines.check(Plan.parse(text)).supported_keys == Native.supported_keys


def test_a_pipeline_is_no_engine_of_its_own() -> None:
    assert "pipeline" not in engines.names()
