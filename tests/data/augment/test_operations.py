"""Operations on images against Pillow's, which RandAugment and its relatives were published with."""

import math

import numpy as np
import pytest
import torch
from benchmarks.photos import photographs
from PIL import Image, ImageEnhance, ImageOps

from grappe.data.augment.colour import turned
from grappe.data.augment.policies import Operation, apply_operations


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    """Photographs and noise, uint8 [3, 3, 48, 56]; the last one is of 40 dark levels alone."""
    picture = photographs()[0][1].resize((56, 48))
    photo = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    noise = torch.randint(0, 256, (3, 48, 56), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return torch.stack([photo, noise, noise // 7 + 20])


def pillow(image: torch.Tensor, function) -> torch.Tensor:
    result = function(Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()))
    return torch.from_numpy(np.array(result)).permute(2, 0, 1)


def affine(*rows: float):
    return lambda picture: picture.transform(picture.size, Image.Transform.AFFINE, rows, Image.Resampling.NEAREST)


def ours(images: torch.Tensor, operation: Operation, amount: float) -> torch.Tensor:
    count = len(images)
    return apply_operations(images, torch.full((count,), operation), torch.full((count,), float(amount)))


@pytest.mark.parametrize(
    ("operation", "amount", "function"),
    [
        (Operation.IDENTITY, 0, lambda p: p),
        (Operation.POSTERIZE, 3, lambda p: ImageOps.posterize(p, 3)),
        (Operation.POSTERIZE, 8, lambda p: ImageOps.posterize(p, 8)),
        (Operation.SOLARIZE, 127.5, lambda p: ImageOps.solarize(p, 128)),
        (Operation.SOLARIZE, 0, lambda p: ImageOps.solarize(p, 0)),
        (Operation.AUTOCONTRAST, 0, ImageOps.autocontrast),
        (Operation.EQUALIZE, 0, ImageOps.equalize),
        (Operation.INVERT, 0, ImageOps.invert),
        *((Operation.BRIGHTNESS, a, lambda p, a=a: ImageEnhance.Brightness(p).enhance(1 + a)) for a in (-0.9, 0.37)),
        *((Operation.COLOUR, a, lambda p, a=a: ImageEnhance.Color(p).enhance(1 + a)) for a in (-0.9, 0.37)),
        *((Operation.CONTRAST, a, lambda p, a=a: ImageEnhance.Contrast(p).enhance(1 + a)) for a in (-0.9, 0.37)),
        *((Operation.SHARPNESS, a, lambda p, a=a: ImageEnhance.Sharpness(p).enhance(1 + a)) for a in (-0.9, 0.37)),
    ],
)
def test_levels_are_pillows(images, operation, amount, function):
    result = ours(images, operation, amount).int()
    expected = torch.stack([pillow(image, function) for image in images]).int()
    apart = (result - expected).abs()
    # one level, where Pillow's product of floats is a little below a whole number that is exact here
    assert apart.max() <= 1 and (apart > 0).float().mean() < 0.03


@pytest.mark.parametrize("amount", [-0.3, 0.1, 0.99])
def test_shears_and_translations_are_pillows(images, amount):
    for operation, rows in (
        (Operation.SHEAR_X, (1, amount, 0, 0, 1, 0)),
        (Operation.SHEAR_Y, (1, 0, 0, amount, 1, 0)),
        (Operation.TRANSLATE_X, (1, 0, -int(20 * amount), 0, 1, 0)),
        (Operation.TRANSLATE_Y, (1, 0, 0, 0, 1, -int(20 * amount))),
    ):
        scale = 20 if "TRANSLATE" in operation.name else 1
        result = ours(images, operation, scale * amount)
        expected = torch.stack([pillow(image, affine(*rows)) for image in images])
        assert (result == expected).float().mean() > 0.995  # Pillow's places are multiples of 1/65536


@pytest.mark.parametrize("degrees", [-135.0, -10.0, 9.0, 45.0])
def test_rotations_are_pillows(images, degrees):
    result = ours(images, Operation.ROTATE, degrees)
    expected = torch.stack([pillow(image, lambda p: p.rotate(degrees)) for image in images])
    assert (result == expected).float().mean() > 0.98  # as above, and many lie between two pixels


def test_pixels_from_outside_are_filled(images):
    moved = apply_operations(images, torch.full((3,), Operation.TRANSLATE_X), torch.full((3,), 10.9), 77)
    assert (moved[..., :10] == 77).all() and torch.equal(moved[..., 10:], images[..., :-10])


def test_each_image_has_its_own_operation(images):
    kind, amount = (torch.tensor([Operation.INVERT, Operation.ROTATE, Operation.SHARPNESS]), torch.tensor([0, 30, 0.9]))
    mixed = apply_operations(images, kind, amount)
    for row in range(3):
        alone = apply_operations(images[row : row + 1], kind[row : row + 1], amount[row : row + 1])
        assert torch.equal(mixed[row : row + 1], alone)


def test_hues_turn_as_colorsys_says(images):
    import colorsys

    for turn in (-0.4, 0.0, 0.1, 0.5):
        result = turned(images[:2, :, :6, :6], torch.full((2,), turn)).int()
        for before, after in zip(
            images[:2, :, :6, :6].permute(0, 2, 3, 1).reshape(-1, 3),
            result.permute(0, 2, 3, 1).reshape(-1, 3),
            strict=True,
        ):
            hue, saturation, value = colorsys.rgb_to_hsv(*(before / 255).tolist())
            expected = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
            assert all(math.isclose(a, 255 * b, abs_tol=1) for a, b in zip(after.tolist(), expected, strict=True))
