"""Plans that are refused before any process starts, with what to ask for instead; and some that are taken."""

import tomllib
from pathlib import Path

import pytest

from grappe import engines
from grappe.engines.native import Native
from grappe.engines.textbook import Textbook
from grappe.errors import PlanError
from grappe.plan import Plan

REFUSED = tomllib.loads(Path(__file__).with_name("refused_plans.toml").read_text())


@pytest.mark.parametrize("number", range(len(REFUSED)))  # a cell named after its engine would run at night
def test_what_is_refused_says_what_would_be_right(number: int) -> None:
    text, words = list(REFUSED.items())[number]
    with pytest.raises(PlanError, match=words):
        engines.check(Plan.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "pipeline=2,schedule=gpipe",
        "pipeline=4,schedule=interleaved,stages=3,microbatches=10",
        "pipeline=2,schedule=zero_bubble,stages=2,microbatches=4",
        "pipeline=2,schedule=zero_bubble,microbatches=2,shard=2,zero=1",
        "compile,cuda_graphs,replicate=2,precision=bf16",
    ],
)
def test_what_is_taken(text: str) -> None:
    assert engines.check(Plan.parse(text)).supported_keys == Native.supported_keys
    assert engines.check(Plan.parse("engine=textbook,replicate=3,microbatches=2,threads=1")) is Textbook
    assert "pipeline" not in engines.names()
