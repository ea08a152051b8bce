"""Crops are functions of the key, with either decoder, and are drawn as the published recipe draws them."""

import numpy as np
import pytest
import torch
from PIL import Image

from grappe import draw
from grappe.data import CentreCrop, Normalise, RandomResizedCrop
from grappe.data.draw import draw_one, sample_keys
from grappe.data.images.decode import shortened
from grappe.errors import TaskError
from tests.data.images.pictures import jpeg, part, photographs, pixels, png


def test_one_number_is_that_of_the_tensor() -> None:
    keys = sample_keys(3, 1, np.arange(50))
    numbers = draw(torch.from_numpy(keys), 7)
    assert [[draw_one(int(key), place) for place in range(7)] for key in keys] == numbers.tolist()


@pytest.mark.parametrize("size", [16, 64, 224])
def test_crops_are_the_same_bits_with_either_decoder(size: int) -> None:
    view, middle = RandomResizedCrop(size=size), CentreCrop(size=size)
    for seed in range(40):
        data = jpeg(part(seed, 30, 420, "L" if seed % 5 == 0 else "RGB"), quality=85)
        one = view(data, seed)
        assert one.shape == (3, size, size)
        assert one.dtype == torch.uint8
        assert torch.equal(one, view(data, seed, fast=False))
        assert torch.equal(one, view(data, seed))
        assert torch.equal(middle(data), middle(data, fast=False))


def test_half_of_the_samples_are_mirrored() -> None:
    data = jpeg(part(1))
    plain = RandomResizedCrop(size=16, flip=0)
    mixed = RandomResizedCrop(size=16)
    keys = sample_keys(0, 0, np.arange(200)).tolist()
    flipped = sum(torch.equal(mixed(data, key), plain(data, key).flip(2)) for key in keys)
    assert 70 < flipped < 130
    kept = sum(torch.equal(mixed(data, key), plain(data, key)) for key in keys)
    assert flipped + kept == 200


@pytest.mark.parametrize(("height", "width"), [(4, 3000), (3000, 4), (1, 1), (2, 2)])
def test_odd_shapes_have_a_box(height: int, width: int) -> None:
    for key in range(50):
        box = RandomResizedCrop().box(height, width, key)
        assert 0 < box.height <= height
        assert 0 < box.width <= width
        assert 0 <= box.top <= height - box.height
        assert 0 <= box.left <= width - box.width


def test_one_pixel_and_png_become_samples() -> None:
    for data in (jpeg(part(0, 1, 1)), png(part(0, 1, 1)), png(part(1))):
        assert RandomResizedCrop(size=8)(data, 1).shape == (3, 8, 8)
        assert CentreCrop(size=8)(data).shape == (3, 8, 8)


def test_a_resize_is_within_a_level_of_pillows() -> None:
    for seed in range(10):
        data = jpeg(part(seed, 100, 400))
        whole = Image.fromarray(pixels(data))
        height, width = shortened(data, 90).shape[1:]
        if min(whole.size) >= 180:  # scaled while it was decoded
            continue
        theirs = np.asarray(whole.resize((width, height), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
        assert np.abs(shortened(data, 90).numpy().astype(int) - theirs).max() <= 1


def test_what_is_scaled_while_it_is_decoded_looks_the_same() -> None:
    data = jpeg(photographs()[0], quality=95)
    whole = Image.fromarray(pixels(data)).resize((149, 100), Image.Resampling.BILINEAR)
    found = shortened(data, 100).numpy().astype(int)
    assert found.shape == (3, 100, 149)
    assert np.abs(found - np.asarray(whole).transpose(2, 0, 1)).mean() < 3


def test_the_middle_is_the_middle() -> None:
    data = png(part(3, 200, 200))
    whole = shortened(data, 96)
    assert torch.equal(CentreCrop(size=64, short=96)(data), whole[:, 16:80, 16:80])
    assert CentreCrop(size=224).side == 256


def test_views_that_cannot_be_are_refused() -> None:
    for options in ({"size": 0}, {"area": (0.5, 0.2)}, {"ratio": (0, 1)}, {"flip": 2}):
        with pytest.raises(TaskError):
            RandomResizedCrop(**options)
    with pytest.raises(TaskError):
        CentreCrop(size=100, short=50)


def test_pixels_are_normalised_per_channel() -> None:
    images = torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8)
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    found = Normalise()(images)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, (images.float() / 255 - mean) / std)
    last = images.contiguous(memory_format=torch.channels_last)
    assert Normalise()(last).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(Normalise()(last), found)


def test_floats_of_a_mixup_are_not_changed_in_place() -> None:
    images = torch.rand(2, 1, 3, 3) * 255
    before = images.clone()
    found = Normalise((0.5,), (0.5,))(images)
    assert torch.equal(images, before)
    torch.testing.assert_close(found, before / 127.5 - 1)
    assert not list(Normalise().parameters())
    assert not Normalise().state_dict()
