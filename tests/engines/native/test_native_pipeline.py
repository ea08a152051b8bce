"""Microbatches of one shape: rows that are filled in count nothing, and are refused where they would count."""

import pytest
import torch

from grappe.data.batch import Batch, Microbatch
from grappe.engines.native_pipeline import check_even, even, largest
from grappe.errors import PlanError
from grappe.plan import Plan
from grappe.step.loss import Losses
from tests.parity.tasks import Images


def micro(rows: int, width: int = 3, weights: torch.Tensor | None = None) -> Microbatch:
    inputs = {"x": torch.arange(float(rows * width)).view(rows, width)}
    return Microbatch(inputs=inputs, targets=torch.arange(rows), rows=rows, weights=weights)


def test_short_microbatches_are_filled_and_keep_their_count() -> None:
    long, short = even([micro(4), micro(2)], 4)
    assert long.inputs["x"].shape == short.inputs["x"].shape == (4, 3)
    assert torch.equal(short.inputs["x"][1:], short.inputs["x"][1].expand(3, 3))
    assert short.rows == 2 and short.targets.tolist() == [0, 1, 1, 1]
    (found,) = even([micro(2, weights=torch.ones(2, 5))], 3)
    assert found.weights is not None and found.weights.sum(1).tolist() == [5.0, 5.0, 0.0]
    (found,) = even([micro(2)._replace(targets=[{"boxes": torch.ones(3, 4)}, {"boxes": torch.ones(1, 4)}])], 3)
    assert [len(one["boxes"]) for one in found.targets] == [3, 1, 1]


class Given(Images):
    """Task whose model's output is the values of its loss."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output


def test_padding_rows_have_neither_loss_nor_gradient() -> None:
    losses, (found,) = Losses(Given()), even([micro(2)], 3)
    batch = Batch(0, 0, (found,), 2, 2.0, torch.zeros(2).numpy())
    for values in (torch.tensor([1.0, 2.0, 100.0]), torch.tensor([[1.0, 3.0], [2.0, 4.0], [9.0, 9.0]])):
        loss = losses(values, found, batch)
        gradient = loss.output_gradient
        assert gradient.sum().item() == pytest.approx(1.0) and not gradient[2:].any()
        assert loss.total.item() == values[:2].sum().item() / (values.numel() // 3)


def test_what_cannot_be_made_alike_is_refused() -> None:
    with pytest.raises(PlanError, match=r"must have one shape, and a step had \[2, 3\], \[2, 4\]: let collate"):
        even([micro(2, 3), micro(2, 4)], 2)
    with pytest.raises(PlanError, match=r"collate\(\) gave cannot be cut so: a tensor has \[5, 3\] for 2 samples"):
        even([micro(2)._replace(inputs=torch.ones(5, 3))], 3)


def test_the_largest_microbatch_is_that_of_any_slice() -> None:
    plan = Plan.parse("pipeline=2,microbatches=3,replicate=2")
    assert largest(plan, 29) == 6
    assert largest(plan, 1) == 1


@pytest.mark.parametrize(
    ("plan", "batch", "samples", "refused"),
    [
        ("pipeline=2,microbatches=4", 64, 640, None),
        ("pipeline=2,microbatches=4", 64, 64 * 3 + 32, None),
        ("pipeline=2,microbatches=4", 64, 64 * 3 + 10, 10),
        ("pipeline=2,microbatches=3", 64, 640, 64),
        ("pipeline=2,microbatches=2,replicate=2", 12, 12, 12),
        ("pipeline=2,microbatches=2", 64, 65, 1),
    ],
)
def test_batch_normalisation_takes_no_rows_that_are_filled_in(plan, batch, samples, refused):
    if refused is None:
        check_even(Plan.parse(plan), batch, samples)
        return
    with pytest.raises(PlanError, match=f"a step of {refused} samples .* batch normalisation's statistics"):
        check_even(Plan.parse(plan), batch, samples)
