"""The loss of a whole batch: on one process, and the rows that several gather."""

from pathlib import Path

import pytest
import torch

from grappe.data.batch import Batch, Microbatch
from grappe.errors import TaskError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World, joined
from grappe.plan import Plan
from grappe.step.whole_batch_loss import SharedRows, WholeBatchLosses
from tests.parity.contrastive import Views
from tests.processes import Pool


def batch(rows: list[torch.Tensor], step: int = 0) -> Batch:
    micros = tuple(Microbatch(None, torch.zeros(len(one)), len(one), None) for one in rows)
    samples = sum(map(len, rows))
    return Batch(0, step, micros, samples, float(samples), torch.arange(samples).numpy())


def losses() -> WholeBatchLosses:
    world = World(process=ProcessRank(launcher="test"), device=torch.device("cpu"))
    return WholeBatchLosses(Views(), Plan(), world)


def test_a_microbatch_that_is_left_out_is_not_taken_for_a_later_one() -> None:
    """Engines may leave out a microbatch without samples; Python gives its identity to another one."""
    whole, generator = losses(), torch.Generator().manual_seed(0)
    outputs = [torch.randn(4, 2, 3, generator=generator) for _ in range(2)]
    first = batch(outputs)
    whole.look_ahead(first, outputs, 1.0)
    left_out = id(first.microbatches[1])
    del first
    later = [Microbatch(None, torch.zeros(4), 4, None) for _ in range(1000)]
    assert left_out not in map(id, later)


def test_the_gradient_in_parts_is_that_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 2, 3, generator=generator)
    alone = rows.clone().requires_grad_()
    Views().loss(alone, torch.zeros(7)).mean().backward()
    parts = [one.clone().requires_grad_() for one in rows.split([4, 3])]
    several, whole = batch(parts), losses()
    whole.look_ahead(several, [one.detach() for one in parts], 1.0)
    found = [whole(part, micro, several) for part, micro in zip(parts, several.microbatches, strict=True)]
    for one in found:
        one.scalar().backward()
    assert torch.allclose(torch.cat([one.grad for one in parts]), alone.grad, atol=1e-7)
    total = sum(float(one.total) for one in found)
    assert abs(total / 7 - float(Views().loss(rows, torch.zeros(7)).mean())) < 1e-6


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_a_whole_batch_in_one_piece_has_the_gradient_of_the_plain_loop(scale: float) -> None:
    """In each step to the bit: a resumed training begins with what was an uninterrupted one's later step."""
    rows, whole = torch.randn(7, 2, 3, generator=torch.Generator().manual_seed(0)), losses()
    alone = rows.clone().requires_grad_()
    (Views().loss(alone, torch.zeros(7)) * (scale / 7)).sum().backward()
    gradients = []
    for step in range(3):
        output = rows.clone().requires_grad_()
        one = batch([output], step)
        found = whole(output, one.microbatches[0], one, scale)
        found.values.backward(found.output_gradient)
        gradients.append(output.grad)
        assert abs(float(found.total) / 7 - float(Views().loss(rows, torch.zeros(7)).mean())) < 1e-6
    assert torch.allclose(gradients[0], alone.grad, rtol=1e-6, atol=1e-7)
    assert all(torch.equal(one, gradients[0]) for one in gradients)


def test_one_process_refuses_what_several_cannot_gather() -> None:
    output = torch.randn(4, 2, 3, requires_grad=True)
    micro = Microbatch(None, ["a", "b", "c", "d"], 4, None)
    with pytest.raises(TaskError, match="whole_batch_loss needs the target as tensors"):
        losses()(output, micro, batch([output])._replace(microbatches=(micro,)))
    short = batch([output[:3]])
    with pytest.raises(TaskError, match="takes tensors with a row for each sample"):
        losses()(output, short.microbatches[0], short)


def test_a_loss_that_needs_no_weight_is_refused() -> None:
    output = torch.randn(4, 2, 3)
    one = batch([output])
    with pytest.raises(TaskError, match="does not depend on the model's weights"):
        losses()(output, one.microbatches[0], one)


def gathered(place: ProcessRank, meet: Path, plan: str) -> list[list[float]]:
    """The rows of batches of several sizes, of which each process has given its own."""
    parsed = Plan.parse(plan)
    with joined(parsed, place, Path(meet)) as world:
        slices, results = SharedRows(parsed, world), []
        for samples in (1, 2, 5, 8, 13):
            slices.begin(samples)
            everyone = torch.arange(samples, dtype=torch.float32)
            with slices.shared():
                results.append(slices.of_all(slices.own_rows(everyone)).tolist())
        return results


@pytest.mark.parametrize(("plan", "size"), [("replicate=3", 3), ("exact=4,replicate=2", 2)])
def test_rows_of_uneven_slices_are_gathered_in_the_batchs_order(pool: Pool, plan: str, size: int) -> None:
    found = pool.run("tests.step.test_whole_batch_loss:gathered", size, f"{plan},device=cpu,threads=1")
    assert found == [[[float(row) for row in range(samples)] for samples in (1, 2, 5, 8, 13)]] * size


class Padded(Views):
    def collate(self, samples):
        return super().collate(samples)


def test_parts_of_other_lengths_are_refused_with_the_reason() -> None:
    world = World(process=ProcessRank(launcher="test"), device=torch.device("cpu"))
    outputs = [torch.randn(4, 2, 3), torch.randn(3, 2, 5)]
    with pytest.raises(TaskError, match=r"tensors \[2, 3\] a sample, another \[2, 5\]: collate\(\) pads each part"):
        WholeBatchLosses(Padded(), Plan(), world).look_ahead(batch(outputs), outputs, 1.0)
