"""Remarks at a training's end on random numbers and evaluations that were not those of one process."""

from pathlib import Path

import pytest
import torch
from torch import nn

from grappe.data.batch import BatchRows
from grappe.data.whole_batch_draws import OWN_DRAWS, SAME_DRAWS, whole_batch_draws
from grappe.engines.shared.microbatch import remarks_on_draws
from grappe.engines.shared.watched_forward import writes_seen
from grappe.plan import Plan
from grappe.step.fast_paths import seed_dropout
from tests.faults import resuming
from tests.processes import Pool
from tests.training.test_checked_steps import Centred

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("", ""),
        ("replicate=2", ""),
        ("replicate=8", "dropout=whole makes it so"),
        ("pipeline=2,microbatches=8", "dropout=whole makes it so"),
        ("replicate=2,compile", "compile"),
        ("tensor=2,replicate=8", "dropout=whole makes it so"),
        ("replicate=8,dropout=local", ""),
        ("exact=8,replicate=8", ""),
    ],
)
def test_dropout_that_is_not_one_processs_is_said_where_something_was_drawn(plan: str, words: str) -> None:
    OWN_DRAWS.clear()
    seed_dropout(1, 2, CPU, 0)
    assert remarks_on_draws(Plan.parse(plan), CPU) == []
    torch.rand(1)
    found = remarks_on_draws(Plan.parse(plan), CPU)
    assert (words in found[0]) if words else not found


def test_draws_without_rows_are_named() -> None:
    OWN_DRAWS.add("multinomial")
    try:
        [found] = remarks_on_draws(Plan.parse("replicate=2"), CPU)
    finally:
        OWN_DRAWS.clear()
    assert "multinomial" in found


@torch.library.custom_op("grappe_tests::kernel_noise", mutates_args=())
def kernel_noise(x: torch.Tensor) -> torch.Tensor:
    """Draws from torch's generator as a kernel in C++ does: by no operator of torch."""
    generator = torch.default_generator.clone_state()
    drawn = torch.rand(x.numel(), generator=generator).view_as(x)  # in one row: no draw of a user's for rows
    torch.default_generator.set_state(generator.get_state())
    return drawn


@torch.library.custom_op("grappe_tests::torchs_noise", mutates_args=())
def torchs_noise(x: torch.Tensor) -> torch.Tensor:
    """Draws by an operator of torch."""
    return torch.rand(x.shape)


def test_a_kernel_that_draws_by_itself_is_named() -> None:
    OWN_DRAWS.clear()
    SAME_DRAWS.clear()
    x, rows = torch.zeros(2, 3), BatchRows(0, 2, 4)
    try:
        with whole_batch_draws(rows), writes_seen(nn.Linear(1, 1), lambda *_: None):
            torchs_noise(x)
            assert not SAME_DRAWS
            kernel_noise(x)
        [remark] = remarks_on_draws(Plan.parse("replicate=2"), CPU)
    finally:
        SAME_DRAWS.clear()
    assert "grappe_tests.kernel_noise drew some in a kernel of its own" in remark


class Normalised(nn.Linear):
    """A layer that in evaluation standardises its inputs over the batch."""

    def __init__(self, over: bool) -> None:
        super().__init__(3, 1)
        self.over = over

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.over and not self.training:
            inputs = (inputs - inputs.mean(0)) / inputs.std(0)
        return super().forward(inputs)


class Evaluated(Centred):
    """A linear task, whose evaluation may depend on the batch."""

    over: bool = True

    def model(self) -> nn.Module:
        return Normalised(self.over)


OF_PLANS = ["replicate=2", "shard=2", "shard=2,engine=lightning", "shard=2,zero=3,engine=deepspeed", "microbatches=2"]


@pytest.mark.parametrize("plan", OF_PLANS)
@pytest.mark.parametrize("over", [True, False])
def test_an_evaluation_that_depends_on_the_batch_is_said(pool: Pool, plan: str, over: bool, tmp_path: Path) -> None:
    text = resuming.run(pool, Evaluated(over=over), plan, tmp_path / "run", steps=1)
    assert ("gives a sample another output when the batch has other samples" in text) is over
