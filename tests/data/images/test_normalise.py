"""The first layer: floats of bytes, by the published formula, and its input is left as it was."""

from __future__ import annotations

import torch

from grappe.data import Normalise


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
