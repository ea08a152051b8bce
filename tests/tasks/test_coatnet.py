"""CoAtNet: the paper's sizes, its relative attention, units that are the model, and steps that learn."""

from pathlib import Path

import pytest
import torch

from grappe.errors import TaskError
from grappe.tasks.coatnet import SIZES, Attention, CoAtNet, Size, coatnet
from tests.parity import reference

# Millions of parameters and billions of multiplications at so many pixels a side: the paper's tables 4, 5 and 13.
PAPER = {
    0: (25, 4.2, 224), 1: (42, 8.4, 224), 2: (75, 15.7, 224), 3: (168, 34.7, 224),
    4: (275, 360.9, 512), 5: (688, 812, 512), 6: (1470, 1521, 512), 7: (2440, 2586, 512),
}  # fmt: skip


@pytest.mark.parametrize("size", PAPER)
def test_it_has_the_papers_parameters_and_operations(size: int) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    millions, billions, side = PAPER[size]
    with torch.device("meta"):
        model = coatnet(SIZES[size], 3, 1000, side).eval()
        image = torch.empty(1, 3, side, side)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.025)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        assert model(image).shape == (1, 1000)
    assert counter.get_total_flops() / 2e9 == pytest.approx(billions, rel=0.03)


def test_attention_adds_the_bias_of_each_offset() -> None:
    torch.manual_seed(0)
    block = Attention(8, 8, 1, 3, 4).eval()
    torch.nn.init.normal_(block.offsets)
    x = torch.randn(2, 9, 8)
    q, k, v = (part.unflatten(2, (2, 4)) for part in block.queries_keys_values(x).split(8, 2))
    expected = torch.zeros(2, 9, 2, 4)
    for head in range(2):
        for i in range(9):
            scores = torch.stack([(q[:, i, head] * k[:, j, head]).sum(1) / 2 for j in range(9)], 1)
            for j in range(9):
                down, right = i // 3 - j // 3 + 2, i % 3 - j % 3 + 2
                scores[:, j] += block.offsets[head, down * 5 + right]
            expected[:, i, head] = torch.einsum("bj,bjc->bc", scores.softmax(1), v[:, :, head])
    assert torch.allclose(block._attend(x), block.out(expected.flatten(2)), atol=1e-6)


@pytest.mark.parametrize("side", [16, 33, 50])
def test_sides_that_do_not_halve_evenly_go_through(side: int) -> None:
    for convolution in (((2, 8), (1, 8), (1, 8)), ((2, 8), (1, 8), (1, 8), (1, 16))):
        model = coatnet(Size(convolution, ((1, 32), (1, 32))), 1, 10, side).eval()
        assert model(torch.randn(2, 1, side, side)).shape == (2, 10)


def test_its_units_one_after_the_other_are_the_model() -> None:
    task = CoAtNet(side=16)
    model = task.model().eval()
    units = task.units(model)
    assert len(units) == 14
    x = image = torch.randn(2, 1, 16, 16)
    for unit in units:
        x = unit(x)
    assert torch.equal(x, model(image))
    owned = [id(p) for unit in units for p in unit.parameters()]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())


def test_a_few_steps_of_size_0_learn() -> None:
    losses = reference.train(_Few(side=16, batch_size=8, lr=1e-3, epochs=6, smoothing=0.0), 6)["losses"]
    assert losses[-1] < 0.7 * losses[0]


class _Few(CoAtNet):
    def data(self, split: str, folder: Path):
        from grappe import Arrays

        whole = super().data("train", folder)
        images, targets = whole.gather(torch.arange(8).numpy(), torch.device("cpu"))
        return Arrays(images, targets)


def test_an_image_that_is_too_small_is_refused() -> None:
    with pytest.raises(TaskError, match="side=8"):
        CoAtNet(side=8)


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_a_pipeline_can_cut_each_of_its_batches_evenly(microbatches: int) -> None:
    task = CoAtNet(side=16)
    samples = len(task.data("train", Path()))
    assert samples % task.batch_size == 0
    assert task.batch_size % (2 * microbatches) == 0  # rows that are mixed with each other stay together
