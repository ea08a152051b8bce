"""Draws of augmentations against the distributions that their papers and torchvision's documentation state.

The references are written here from the formulas: torchvision's wheel needs a torch of another build.
`benchmarks/augmentations.py` compares with torchvision itself. Keys are fixed, so nothing here fails by chance.
"""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from scipy import stats

from grappe.data import RandomResizedCrop, augment
from grappe.data.augment import geometry
from grappe.data.augment.mixing import _beta
from grappe.data.augment.numbers import numbers
from grappe.data.augment.policies import POLICIES, Operation, _amount, _amounts, _Space
from grappe.data.draw import sample_keys

COUNT = 4000
ENOUGH = 0.01  # probability of a statistic as large, below which a distribution is another


def keys(count: int = COUNT, epoch: int = 0) -> torch.Tensor:
    return torch.from_numpy(sample_keys(7, epoch, np.arange(count)))


def alike(ours: torch.Tensor, reference: list[float]) -> None:
    assert stats.ks_2samp(ours.numpy(), np.array(reference)).pvalue > ENOUGH


def uniformly(values: torch.Tensor, cells: int) -> None:
    assert stats.chisquare(torch.bincount(values, minlength=cells).numpy()).pvalue > ENOUGH


def reference_boxes(height, width, area, ratio, tall):
    """As torchvision's RandomResizedCrop.get_params and (tall) RandomErasing.get_params are documented."""
    draw = random.Random(1)
    for _ in range(COUNT):
        for _ in range(10):
            pixels = height * width * draw.uniform(*area)
            shape = math.exp(draw.uniform(math.log(ratio[0]), math.log(ratio[1])))
            h, w = round(math.sqrt(pixels / shape)), round(math.sqrt(pixels * shape))
            h, w = (w, h) if tall else (h, w)
            if (0 < h < height and 0 < w < width) if tall else (0 < h <= height and 0 < w <= width):
                yield draw.randint(0, height - h), draw.randint(0, width - w), h, w
                break


@pytest.mark.parametrize(
    ("height", "width", "area", "ratio", "tall"),
    [
        (64, 64, (0.08, 1.0), (3 / 4, 4 / 3), False),
        (40, 90, (0.3, 0.9), (3 / 4, 4 / 3), False),
        (64, 64, (0.02, 0.33), (0.3, 3.3), True),
    ],
)
def test_boxes_are_torchvisions(height, width, area, ratio, tall):
    found = geometry.draw_boxes(numbers(keys(), "some", geometry.DRAWS), (height, width), area, ratio, tall=tall)
    reference = list(reference_boxes(height, width, area, ratio, tall))
    assert found.fits.float().mean() == pytest.approx(len(reference) / COUNT, abs=0.01)
    for column, other in zip(found[:4], zip(*reference, strict=True), strict=True):
        alike(column[found.fits], list(other))


def test_boxes_are_those_of_the_view_of_files():
    view, uniform = RandomResizedCrop(size=32), numbers(keys(50), "some", geometry.DRAWS)
    found = geometry.draw_boxes(uniform, (50, 70), view.area, view.ratio, tall=False)
    drawn = [[view.box(50, 70, key)[i] for key in range(COUNT)] for i in range(4)]
    many = geometry.draw_boxes(numbers(keys(), "some", geometry.DRAWS), (50, 70), view.area, view.ratio, tall=False)
    for column, other in zip(many[:4], drawn, strict=True):
        alike(column, other)
    assert found.fits.all()


def test_crops_are_resized_as_torch_does():
    photo = torch.randint(0, 256, (1, 3, 40, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    photo = torch.nn.functional.interpolate(photo, (80, 90), mode="bilinear", antialias=True)
    for size, number in itertools.product((16, 64, 100), range(20)):
        key = keys(1, number)
        box = geometry.draw_boxes(
            numbers(key, "random_resized_crop", geometry.DRAWS), (80, 90), (0.08, 1.0), (3 / 4, 4 / 3), tall=False
        )
        top, left, height, width = (int(column) for column in box[:4])
        part = photo[..., top : top + height, left : left + width]
        expected = torch.nn.functional.interpolate(part, (size, size), mode="bilinear", antialias=True)
        ours = augment.random_resized_crop(photo, key, size)
        assert (ours.int() - expected.int()).abs().max() <= 2  # rounded twice, as Pillow's


def test_a_part_that_fits_nowhere_is_the_middle():
    strip = torch.arange(200, dtype=torch.uint8).expand(1, 1, 4, 200).contiguous()
    found = augment.random_resized_crop(strip, keys(1), 4, area=(0.9, 1.0))
    assert 95 < found.float().mean() < 105  # 5 of 200 columns


def test_flips_and_shifts():
    ramp = torch.arange(8, dtype=torch.uint8).expand(COUNT, 1, 8, 8).contiguous()
    mirrored = augment.flip(ramp, keys(), 0.3)[:, 0, 0, 0] == 7
    assert stats.binomtest(int(mirrored.sum()), COUNT, 0.3).pvalue > ENOUGH
    places = torch.arange(64, dtype=torch.float32).view(1, 1, 8, 8).expand(COUNT, 1, 8, 8) + 1
    centre = augment.pad_and_crop(places, keys(), 3)[:, 0, 4, 4].long() - 1
    uniformly((centre // 8 - 1) * 7 + centre % 8 - 1, 49)


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.8, 1.0, 2.0, 8.0])
def test_weights_are_of_beta(alpha):
    uniform = (torch.arange(20_000) + 0.5) / 20_000
    ours = _beta(uniform, alpha, "mixup").double().numpy()
    levels = stats.beta(alpha, alpha).cdf(ours)
    # float32 has no numbers between 1 - 6e-8 and 1, where much of Beta(0.1, 0.1) lies
    assert np.abs(levels - uniform.numpy()).max() < (0.12 if alpha < 0.2 else 0.03 if alpha < 0.8 else 2e-3)
    inner = slice(10, -10)  # beyond, a table of 4,096 steps is coarse for alpha=8
    assert np.abs(ours - stats.beta(alpha, alpha).ppf(uniform.double().numpy()))[inner].max() < 0.02


def test_mixup_mixes_pairs_alike():
    images, targets = torch.rand(5, 3, 4, 4), torch.tensor([0, 1, 2, 2, 3])
    mixed, shares = augment.mixup(images, targets, keys(5), 6, most=0.5)
    share = shares[0, 1]
    assert shares.shape == (5, 6) and 0 < share < 0.5 and shares[1, 0] == share
    torch.testing.assert_close(shares.sum(1), torch.ones(5))
    torch.testing.assert_close(mixed[0], images[0] * (1 - share) + images[1] * share)
    assert shares[2, 2] == shares[3, 2] == 1 and torch.equal(mixed[4], images[4])


def test_cutmix_is_as_published():
    side = 32
    images = torch.zeros(2 * COUNT, 1, side, side)
    images[1::2] = 1
    mixed, shares = augment.cutmix(images, torch.arange(2 * COUNT) % 2, keys(2 * COUNT), 2)
    pasted = mixed[::2].mean((1, 2, 3))
    torch.testing.assert_close(shares[::2, 1], pasted)  # what is mixed in is what is counted
    torch.testing.assert_close(mixed[::2] + mixed[1::2], torch.ones(COUNT, 1, side, side))
    draw, reference = random.Random(2), []
    for _ in range(COUNT):
        half = 0.5 * math.sqrt(1 - draw.betavariate(1, 1))
        sides = []
        for _ in range(2):
            middle, reach = draw.randrange(side), int(half * side)
            sides.append(min(middle + reach, side) - max(middle - reach, 0))
        reference.append(sides[0] * sides[1] / side**2)
    alike(pasted, reference)


def test_half_of_the_pairs_are_cut():
    images = torch.zeros(2 * COUNT, 1, 8, 8)
    images[1::2] = 1
    mixed, _ = augment.mixup_or_cutmix(images, torch.zeros(2 * COUNT, dtype=torch.int64), keys(2 * COUNT), 2, 1.0)
    blended = ((mixed[::2] > 0) & (mixed[::2] < 1)).flatten(1).any(1)
    assert stats.binomtest(int(blended.sum()), COUNT, 0.5).pvalue > ENOUGH


def test_erased_share():
    images = torch.ones(COUNT, 3, 32, 32)
    erased = (augment.erase(images, keys(), p=0.5, fill=(0.0, 2.0, 3.0)) != 1).float()
    assert torch.equal(erased[:, 0], erased[:, 1])
    share = erased[:, 0].mean((1, 2))
    assert stats.binomtest(int((share > 0).sum()), COUNT, 0.5).pvalue > ENOUGH
    reference = [h * w / 1024 for _, _, h, w in reference_boxes(32, 32, (0.02, 0.33), (0.3, 3.3), True)]
    alike(share[share > 0], reference)


def test_jitters_factors_are_uniform_and_in_any_order():
    grey = torch.full((COUNT, 3, 2, 2), 100, dtype=torch.uint8)
    bright = augment.colour_jitter(grey, keys(), brightness=0.3, contrast=0, saturation=0)[:, 0, 0, 0]
    alike(bright, [int(100 * (0.7 + 0.6 * (i + 0.5) / COUNT)) for i in range(COUNT)])
    dim = augment.colour_jitter(grey, keys(), brightness=2.0, contrast=0, saturation=0)[:, 0, 0, 0]
    alike(dim, [min(255, int(100 * 3 * (i + 0.5) / COUNT)) for i in range(COUNT)])
    order = numbers(keys(), "colour_jitter", 8)[:, 4:].argsort(dim=1)
    uniformly((order * torch.tensor([64, 16, 4, 1])).sum(1).unique(return_inverse=True)[1], 24)


def test_amounts_are_torchvisions():
    """The tables of its documentation: `_augmentation_space` of RandAugment and TrivialAugmentWide."""
    space = _Space(0.3, (150 / 331 * 64, 150 / 331 * 48), 30.0, 0.9, 4.0, 31)
    table = _amounts(space, torch.device("cpu"))
    at = {operation: table[operation, 9].item() for operation in Operation}
    assert at[Operation.SHEAR_X] == at[Operation.SHEAR_Y] == pytest.approx(0.09)
    assert at[Operation.TRANSLATE_X] == pytest.approx(0.3 * 150 / 331 * 64)
    assert at[Operation.TRANSLATE_Y] == pytest.approx(0.3 * 150 / 331 * 48)
    assert at[Operation.ROTATE] == pytest.approx(9) and at[Operation.COLOUR] == pytest.approx(0.27)
    assert at[Operation.POSTERIZE] == 7 and at[Operation.SOLARIZE] == pytest.approx(255 * 0.7)
    assert table[Operation.POSTERIZE].unique().tolist() == [4, 5, 6, 7, 8]
    assert not table[[Operation.IDENTITY, Operation.AUTOCONTRAST, Operation.EQUALIZE, Operation.INVERT]].any()
    kind = torch.tensor([Operation.ROTATE, Operation.ROTATE, Operation.SOLARIZE])
    amounts = _amount(space, kind, torch.full((3,), 9), torch.tensor([0.4, 0.6, 0.4]))
    assert amounts.tolist() == pytest.approx([-9, 9, 178.5])


def test_policies_that_were_found():
    for policy in POLICIES.values():
        assert len(policy) == 25
        assert all(0 <= p <= 1 and 0 <= strength <= 9 for pair in policy for _, p, strength in pair)
    images = torch.randint(0, 256, (400, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    changed = [
        (augment.auto_augment(images, keys(400), name) != images).flatten(1).any(1).float().mean() for name in POLICIES
    ]
    assert min(changed) > 0.5  # most have a probability of 0.4 or more
