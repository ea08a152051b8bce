"""The gallery: tasks of all kinds learn the same under every plan, as their plain loops do, resume and predict."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import grappe
from tests import gallery
from tests.parity.cell import TOLERANCE, difference
from tests.processes import Pool

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("torch_geometric")

STEPS = 3
RUN_STEPS = 4
PLANS = ("replicate=2", "shard=2", "replicate=2,microbatches=2", "exact=2,replicate=2",
         "engine=lightning,replicate=2")  # fmt: skip
FURTHER = {"causal_lm": ["recompute", "engine=textbook,replicate=2"], "unet": ["pipeline=2,microbatches=2"],
           "tabular": ["pipeline=2,microbatches=2"], "lora": ["recompute"],
           "masked_lm": ["engine=deepspeed,replicate=2"]}  # fmt: skip
NORMALISED = {"image_classification"}
"""Tasks with batch normalisation: the plan must ask for the global batch's statistics, which microbatches have not."""
CELLS = [(name, plan) for name in gallery.NAMES for plan in (*PLANS, *FURTHER.get(name, []))
         if not (name in NORMALISED and "microbatches" in plan)]  # fmt: skip
PLAIN = "threads=1,device=cpu"
TRAINED_ABOVE = {"image_classification": 0.05}


@functools.cache
def _plain(pool: Pool, name: str, plan: str) -> dict[str, Any]:
    return pool.run("tests.gallery_cell:train", 1, gallery.file(name), plan, STEPS)[0]


@pytest.mark.parametrize(("name", "plan"), CELLS)
def test_every_plan_learns_the_same(pool: Pool, name: str, plan: str) -> None:
    exact = "exact" in plan and name in NORMALISED
    alone = _plain(pool, name, "exact=2" if exact else "")
    asked = f"{plan},batchnorm=sync" if name in NORMALISED and not exact else plan
    found = pool.run("tests.gallery_cell:train", 1 if plan == "recompute" else 2, gallery.file(name), asked, STEPS)[0]
    # a softmax does not see the keys' bias: its gradient is rounding alone, and of that Adam makes whole steps
    seen = [
        {key: one for key, one in run["weights"].items() if "key.bias" not in key} for run in (alone, found)
    ]
    gap, worst = difference(*seen)
    assert gap <= TOLERANCE, f"{worst} is {gap:.1e} away"
    assert found["scores"].loss == pytest.approx(alone["scores"].loss, rel=1e-5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By name: the folder of a run of a few steps, trained once."""
    folder = tmp_path_factory.mktemp("gallery")

    @functools.cache
    def run(name: str) -> Path:
        options = grappe.Options(steps=RUN_STEPS, save_every=2, evaluate_every=RUN_STEPS)
        grappe.train(gallery.file(name), PLAIN, folder / name, options=options)
        return folder / name

    return run


@pytest.mark.parametrize("name", gallery.NAMES)
def test_the_plain_loop_learns_the_same(name: str, trained: Any) -> None:
    losses, net = gallery.train_plain(name, RUN_STEPS)
    lines = [json.loads(line) for line in (trained(name) / "metrics.jsonl").read_text().splitlines()]
    told = [one["loss"] for one in lines if one["kind"] == "step"]
    assert told == pytest.approx(losses, rel=1e-5)
    model = grappe.load(trained(name), gallery.file(name))
    both = [
        {key: value for key, value in one.named_parameters() if "key.bias" not in key} for one in (net, model)
    ]
    gap, worst = difference(*both)
    assert gap <= TOLERANCE, f"{worst} is {gap:.1e} away"


@pytest.mark.parametrize("name", gallery.NAMES)
def test_resumes_to_the_bit_and_predicts(name: str, trained: Any, tmp_path: Path) -> None:
    for steps in (2, RUN_STEPS):
        options = grappe.Options(steps=steps, save_every=2, evaluate_every=RUN_STEPS)
        grappe.train(gallery.file(name), PLAIN, tmp_path / "resumed", options=options)
    models = [grappe.load(run, gallery.file(name)) for run in (trained(name), tmp_path / "resumed")]
    both = [model.state_dict() for model in models]
    assert all(torch.equal(both[0][key], both[1][key]) for key in both[0])
    task = gallery.task(name)
    rows = list(grappe.predict(trained(name), "validation", task=gallery.file(name)))
    assert len(rows) == len(task.data("validation", tmp_path))


@pytest.mark.parametrize("name", gallery.NAMES)
def test_each_is_short_and_says_what_it_is(name: str) -> None:
    assert gallery.lines(name) <= 60
    by_hand = (gallery.FOLDER / "plain" / f"{name}.py").read_text()
    assert len(by_hand.splitlines()) <= 80
    assert "grappe" not in by_hand
    texts = [by_hand]
    if (gallery.FOLDER / f"{name}.py").exists():
        texts.append((gallery.FOLDER / f"{name}.py").read_text())
    assert all(text.startswith('"""') for text in texts)
