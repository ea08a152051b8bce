"""The gallery: tasks of other libraries learn the same under every plan, resume to the bit, and predict."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import grappe
from grappe import tasks
from tests.parity.cell import TOLERANCE, difference
from tests.processes import Pool

pytest.importorskip("transformers")
pytest.importorskip("peft")

GALLERY = Path(__file__).parent.parent / "examples" / "gallery"
NAMES = ("causal_lm", "lora", "masked_lm")
STEPS = 3
PLANS = ("replicate=2", "shard=2", "replicate=2,microbatches=2", "recompute", "exact=2,replicate=2",
         "engine=textbook,replicate=2", "engine=lightning,replicate=2")  # fmt: skip
PLAIN = "threads=1,device=cpu"


def file(name: str) -> str:
    return str(GALLERY / f"{name}.py")


@functools.cache
def _plain(pool: Pool, name: str) -> dict[str, Any]:
    return pool.run("tests.gallery_cell:train", 1, file(name), "", STEPS)[0]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_every_plan_learns_the_same(pool: Pool, name: str, plan: str) -> None:
    alone = _plain(pool, name)
    found = pool.run("tests.gallery_cell:train", 1 if plan == "recompute" else 2, file(name), plan, STEPS)[0]
    # a softmax does not see the keys' bias: its gradient is rounding alone, and of that Adam makes whole steps
    seen = [
        {key: one for key, one in run["weights"].items() if "key.bias" not in key} for run in (alone, found)
    ]
    gap, worst = difference(*seen)
    assert gap <= TOLERANCE, f"{worst} is {gap:.1e} away"
    assert found["scores"].loss == pytest.approx(alone["scores"].loss, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_resumes_to_the_bit_and_predicts(name: str, tmp_path: Path) -> None:
    options = [grappe.Options(steps=steps, save_every=2) for steps in (4, 2, 4)]
    for run, some in (("whole", options[0]), ("resumed", options[1]), ("resumed", options[2])):
        grappe.train(file(name), PLAIN, tmp_path / run, options=some)
    models = [grappe.load(tmp_path / run, file(name)) for run in ("whole", "resumed")]
    both = [dict(model.named_parameters()) for model in models]
    assert all(torch.equal(both[0][key], both[1][key]) for key in both[0])
    frozen = [
        key for key, one in tasks.find(file(name))().model().named_parameters() if not one.requires_grad
    ]
    assert bool(frozen) == (name != "causal_lm")
    rows = list(grappe.predict(tmp_path / "whole", "validation", task=file(name)))
    assert len(rows) == len(tasks.find(file(name))().data("validation", tmp_path))
    assert all(row.dtype == torch.int64 and row.dim() == 1 for row in rows)  # a token at each place


@pytest.mark.parametrize("name", NAMES)
def test_each_is_short_and_says_what_it_is(name: str) -> None:
    lines = Path(file(name)).read_text().splitlines()
    assert len(lines) <= 60
    assert lines[0].startswith('"""')
