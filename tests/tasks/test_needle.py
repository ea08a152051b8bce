"""Long texts under domain=: what one process learns, the bytes that causal attention sends, --smoke."""

from pathlib import Path

import pytest
import torch

import grappe
from grappe.tasks.coatnet import CoAtNet, Size, coatnet
from grappe.tasks.needle import IGNORED, NEEDLES, Needle
from grappe.training.options import Options
from grappe.verbs.verify.verify import verify
from tests.commands import GRAPPE, ran
from tests.parity.planted import runner
from tests.processes import Pool

SMALL = {"length": 33, "copies": 3, "texts": 8, "width": 8, "batch_size": 4}


class SmallCoAtNet(CoAtNet):
    """All stages, few channels."""

    batch_size: int = 4
    side: int = 64

    def model(self) -> torch.nn.Module:
        return coatnet(Size(((1, 8), (1, 8), (1, 8)), ((1, 32), (1, 32))), 1, 10, self.side)


def test_the_needle_is_in_the_first_half_and_asked_for_in_the_second() -> None:
    data = Needle(length=32, copies=3, texts=4).data("train", Path())
    assert len(data) == 4
    for text, target in zip(data.inputs, data.targets, strict=True):
        [needle] = set(target[16:].tolist())
        assert 0 <= needle < NEEDLES and set(target[:16].tolist()) == {IGNORED}
        assert set(text[text < NEEDLES].tolist()) == {needle} and (text[16:] >= NEEDLES).all()
    model, text = Needle(**SMALL).model(), data.inputs[:1]
    changed = text.clone()
    changed[:, 20] = 9
    assert torch.equal(model(text)[:, :20], model(changed)[:, :20])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "plans"),
    [
        (Needle(**SMALL), ["domain=2", "domain=3", "domain=2,shard=2,recompute"]),
        (SmallCoAtNet(), ["domain=2"]),
    ],
    ids=["needle", "coatnet"],
)
def test_shipped_tasks_learn_in_parts_what_they_learn_whole(pool: Pool, task: grappe.Task, plans: list[str]) -> None:
    for each in verify(task, [f"{plan},threads=1" for plan in plans], run=runner(pool), steps=2):
        assert each.verdict == "same", each


@pytest.mark.parametrize("parts", [2, 3])
def test_causal_attention_sends_no_key_to_earlier_positions(pool: Pool, parts: int) -> None:
    """Keys and values go to all later parts, again in backward; their gradients come back: two messages each."""
    sizes = [33 // parts + (rank < 33 % parts) for rank in range(parts)]
    for rank, one in enumerate(pool.run("tests.parity.cell:train", parts, Needle(**SMALL), f"domain={parts}", 2)):
        later = parts - 1 - rank
        positions = 2 * sizes[rank] * later + sum(sizes[:rank])
        assert one["sent"]["attention", "messages"] == 2 * (2 * later + rank)
        assert one["sent"]["attention", "bytes"] == 2 * SMALL["batch_size"] * SMALL["width"] * 4 * positions


def test_an_average_of_weights_goes_on_under_domain_and_without(tmp_path: Path) -> None:
    alone, parts = (Needle(**SMALL, epochs=2, ema=0.5) for _ in range(2))
    wanted = grappe.evaluate(grappe.train(alone, "threads=1", tmp_path / "alone"), task=alone)
    run = tmp_path / "parts"
    grappe.train(parts, "domain=2,threads=1", run, options=Options(steps=2))
    grappe.train(parts, "threads=1", run, options=Options(steps=3))
    grappe.train(parts, "domain=2,threads=1", run)
    assert grappe.evaluate(run, task=parts).loss == pytest.approx(wanted.loss, rel=1e-6)
    found = grappe.evaluate(run, "validation", "domain=2,threads=1", task=parts)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)


def test_smoke_tries_all_parts_of_a_training(tmp_path: Path) -> None:
    fields = (f"{name}={value}" for name, value in SMALL.items())
    done = ran(GRAPPE, "train", "needle", *fields, "--plan", "domain=2,threads=1", "--smoke", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step, evaluation, save and resume work under domain=2,threads=1 (2 steps)" in done.stdout
