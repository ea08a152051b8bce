"""Losses: what counts in a step's mean, its sum over processes, and that a loss that compares samples is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from grappe.data.batch import Batch, Microbatch
from grappe.errors import TaskError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import joined
from grappe.plan import Plan
from grappe.step.loss import Losses, LossValues, check_independent_samples, loss_reduction
from grappe.task import Task
from tests.processes import Pool

ROWS = 6


class Given(Task):
    """Task with a loss from outside."""

    given: Any = None

    def loss(self, output: Any, target: Any) -> Tensor:
        return self.given(output, target)


class Compared(Given):
    """The loss compares the samples of the whole batch."""

    whole_batch_loss = True


def contrastive(output: Any, target: Tensor) -> Tensor:
    image, text = output
    return functional.cross_entropy(image @ text.T, torch.arange(len(image)), reduction="none")


def normalised(output: Tensor, target: Tensor) -> Tensor:
    """Divides by a number of the whole batch, which has no gradient."""
    return (output - target).square().mean(1) / target.detach().std()


def hard_negatives(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean(1) - output.square().mean(1).max()


def per_token(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(
        output.unsqueeze(2).expand(-1, -1, 3), target.argmax(1, True).expand(-1, 3), reduction="none"
    )


def noisy(output: Tensor, target: Tensor) -> Tensor:
    return (output + torch.randn_like(output) - target).square().mean(1)


def graph(output: Tensor, target: Tensor) -> Tensor:
    """A row for each of 18 nodes; three to a graph."""
    return (output.view(len(target), -1).sum(1) - target.sum(1)) ** 2 / output.abs().max()


def check(loss: Any, output: Any, target: Any, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(0)
    task, micro = Given(given=loss), Microbatch(None, target, ROWS, None)
    check_independent_samples(task, output, micro, LossValues(task.loss(output, target).to(dtype), {}))


def pair() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 4, generator=generator), torch.randn(ROWS, 4, generator=generator)


@pytest.mark.parametrize("loss", [contrastive, normalised, hard_negatives])
def test_a_loss_that_mixes_samples_is_named(loss: Any) -> None:
    output, target = pair()
    with pytest.raises(TaskError, match=r"Given.loss\(\) gives a sample another value.*whole_batch_loss = True"):
        check(loss, (output, target) if loss is contrastive else output, target)


def test_a_value_for_each_pair_of_samples_is_named() -> None:
    output, target = pair()
    with pytest.raises(TaskError, match=r"has a value for each pair of samples, .* an output"):
        check(lambda output, target: functional.mse_loss(output, target, reduction="none"), output[:, :1], target[:, 0])


def test_the_second_half_is_compared_too() -> None:
    output, target = pair()
    with pytest.raises(TaskError, match="gives a sample another value"):
        check(lambda output, target: output[:, 0] * torch.linspace(-1, 1, len(output)).clamp(min=0), output, target)


@pytest.mark.parametrize("loss", [per_token, noisy])
def test_others_pass(loss: Any) -> None:
    check(loss, *pair())


def test_what_has_no_row_for_each_sample_is_not_judged() -> None:
    output, target = pair()
    check(graph, output.repeat(3, 1), target)


def test_rounding_is_no_mixing() -> None:
    output, target = pair()

    def rounded(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).bfloat16().square().mean(1)

    check(rounded, output, target, torch.bfloat16)


def test_the_generators_are_left_as_they_were() -> None:
    output, target = pair()
    task, micro = Given(given=noisy), Microbatch(None, target, ROWS, None)
    values = task.loss(output, target)
    before = torch.get_rng_state()
    check_independent_samples(task, output, micro, LossValues(values, {}))
    assert torch.equal(torch.get_rng_state(), before)


def by_boxes(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Has a value a sample, and one a box, which are in the order of their sizes; a sample may have no box."""
    boxes = (output - target)[target > 1]
    return {"class": (output - target).square().mean(1), "box": boxes.abs().sort().values}


@pytest.mark.parametrize("boxes", [0, 6])
def test_a_loss_without_a_row_for_each_sample_is_left_alone(boxes: int) -> None:
    output, target = pair()
    target = target.clamp(max=1.0)
    target.view(-1)[:boxes] = 2.0
    named = by_boxes(output, target)
    found = LossValues(torch.cat([one.flatten() for one in named.values()]), named)
    check_independent_samples(Given(given=by_boxes), output, Microbatch(None, target, ROWS, None), found)


def test_one_of_several_losses_that_mixes_samples_is_named() -> None:
    output, target = pair()
    given = Given(given=lambda a, b: {"plain": (a - b).square().mean(1), "mixed": normalised(a, b)})
    named = given.loss(output, target)
    with pytest.raises(TaskError, match="gives a sample another value"):
        check_independent_samples(
            given, output, Microbatch(None, target, ROWS, None), LossValues(named["plain"], dict(named))
        )


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("rows", "padding"), [(4, 0), (3, 1), (0, 1)])
def test_each_sample_counts_as_much_and_padding_not_at_all(rows: int, padding: int, tokens: int) -> None:
    output = torch.arange(1.0, 1 + (rows + padding) * tokens).view(-1, tokens).requires_grad_()
    micro = Microbatch(None, torch.zeros(len(output)), rows, None, padding)
    batch = Batch(0, 0, (micro,), 10, 10.0, np.arange(rows))
    loss = Losses(Given(given=lambda output, target: output.square()))(output, micro, batch)
    loss.scalar().backward()
    alone = output.detach()[:rows].requires_grad_()
    (alone.square().mean(1).sum() / 10).backward()
    assert output.grad is not None and alone.grad is not None
    assert torch.allclose(output.grad[:rows], alone.grad)
    assert not output.grad[rows:].any()
    assert float(loss.total) == pytest.approx(float(alone.detach().square().mean(1).sum()))


def test_a_mean_over_the_whole_batch_is_the_value_of_each_of_its_rows() -> None:
    output = torch.arange(1.0, 5.0).requires_grad_()
    micro = Microbatch(None, torch.zeros(4), 4, None)
    loss = Losses(Compared(given=lambda output, target: output.square().mean()))(
        output, micro, Batch(0, 0, (micro,), 4, 4.0, np.arange(4))
    )
    loss.scalar().backward()
    assert output.grad is not None and torch.allclose(output.grad, output.detach() / 2)
    assert float(loss.total) == pytest.approx(4 * 7.5)


def reduced(place: ProcessRank, meet: Path, plan: str) -> list[float]:
    """The sums of a step in which data slice r has the loss r + 1, and the last process raises its flag."""
    with joined(Plan.parse(plan), place, Path(meet)) as world:
        reduction = loss_reduction(world)
        reduction.start(torch.tensor(world.data_rank + 1.0), float(place.rank == place.size - 1))
        return list(reduction.sums().read())


@pytest.mark.parametrize(
    ("plan", "size", "loss"), [("", 1, 1.0), ("shard=2", 2, 3.0), ("replicate=2,tensor=2", 4, 3.0)]
)
def test_a_slices_loss_counts_once_however_many_processes_have_it(
    pool: Pool, plan: str, size: int, loss: float
) -> None:
    found = pool.run("tests.step.test_loss:reduced", size, f"{plan},device=cpu,threads=1".lstrip(","))
    assert found == [[loss, 1.0]] * size
