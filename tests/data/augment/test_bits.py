"""Every augmentation of a slice is that of the batch, bit by bit, and draws apart from every other."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from grappe.data import augment
from grappe.data.augment.numbers import numbers
from grappe.data.draw import sample_keys
from grappe.data.sampling import cut
from grappe.errors import TaskError

CLASSES = 7
OF_BYTES: dict[str, Callable] = {
    "flip": lambda images, targets, keys: augment.flip(images, keys),
    "pad_and_crop": lambda images, targets, keys: augment.pad_and_crop(images, keys),
    "random_resized_crop": lambda images, targets, keys: augment.random_resized_crop(images, keys, 24),
    "colour_jitter": lambda images, targets, keys: augment.colour_jitter(images, keys, hue=0.2),
    "rand_augment": lambda images, targets, keys: augment.rand_augment(images, keys),
    "trivial_augment": lambda images, targets, keys: augment.trivial_augment(images, keys),
    "auto_augment": lambda images, targets, keys: augment.auto_augment(images, keys),
    "erase": lambda images, targets, keys: augment.erase(images, keys, fill=(1, 2, 3)),
    "mixup": lambda images, targets, keys: augment.mixup(images, targets, keys, CLASSES, 0.2),
    "cutmix": lambda images, targets, keys: augment.cutmix(images, targets, keys, CLASSES),
    "mixup_or_cutmix": lambda images, targets, keys: augment.mixup_or_cutmix(images, targets, keys, CLASSES),
}
OF_FLOATS = ("flip", "pad_and_crop", "erase", "mixup", "cutmix", "mixup_or_cutmix")


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 30, 33), dtype=torch.uint8, generator=generator)
    keys = torch.from_numpy(sample_keys(3, 1, np.arange(count)))
    return images, torch.randint(0, CLASSES, (count,), generator=generator), keys


def parts(result: object) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_all_are_here():
    assert sorted(OF_BYTES) == sorted(augment.__all__)


@pytest.mark.parametrize("name", OF_BYTES)
@pytest.mark.parametrize("count", [1, 2, 7, 24])
def test_slices_of_any_number_make_the_batch(name, count):
    columns = batch(count)
    together = parts(OF_BYTES[name](*columns))
    for pieces in (2, 3, 12):
        bounds = [cut(count, pieces, piece) for piece in range(pieces)]
        apart = [parts(OF_BYTES[name](*(column[a:b] for column in columns))) for a, b in bounds if a < b]
        for whole, *pieces_of_it in zip(together, *apart, strict=True):
            assert torch.equal(torch.cat(pieces_of_it), whole)


@pytest.mark.parametrize("name", OF_FLOATS)
def test_normalised_images_may_be_given(name):
    images, targets, keys = batch(9)
    images = images / 255
    together = parts(OF_BYTES[name](images, targets, keys))[0]
    apart = [parts(OF_BYTES[name](images[a:b], targets[a:b], keys[a:b]))[0] for a, b in ((0, 4), (4, 6), (6, 9))]
    assert torch.equal(torch.cat(apart), together) and together.dtype == torch.float32


@pytest.mark.parametrize("name", OF_BYTES)
def test_nothing_is_changed_in_place_and_threads_change_no_bit(name):
    columns = batch(8)
    before = [column.clone() for column in columns]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(parts(OF_BYTES[name](*columns)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert all(torch.equal(*pair) for pair in zip(before, columns, strict=True))
    assert not torch.equal(results[0][0].float(), columns[0].float())


@pytest.mark.parametrize("name", OF_BYTES)
def test_a_gpu_is_never_waited_for(name):
    """A meta tensor has no values: what asked for one, to choose a branch or a shape, would fail here."""
    columns = batch(6)
    expected = parts(OF_BYTES[name](*columns))
    found = parts(OF_BYTES[name](*(column.to("meta") for column in columns)))
    assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in expected]


def test_grey_images_may_be_given():
    images, targets, keys = batch(6)
    for name, function in OF_BYTES.items():
        if name != "erase":
            assert parts(function(images[:, :1], targets, keys))[0].shape[1] == 1


def test_no_augmentation_draws_anothers_numbers():
    keys = torch.from_numpy(sample_keys(0, 0, np.arange(4000)))
    drawn = torch.stack([numbers(keys, name, 1)[:, 0] for name in augment.__all__])
    correlation = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert correlation.abs().max() < 0.06  # 4 / sqrt(4000)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda i, t, k: augment.flip(i[0], k), r"flip: images are \[B, C, H, W\]"),
        (lambda i, t, k: augment.flip(i, k, p=2), "p=2: it must be from 0 to 1"),
        (lambda i, t, k: augment.pad_and_crop(i, k, padding=-1), "padding=-1"),
        (lambda i, t, k: augment.random_resized_crop(i / 255, k, 8), "takes bytes.*Normalise"),
        (lambda i, t, k: augment.random_resized_crop(i, k, 0), "size=0"),
        (lambda i, t, k: augment.random_resized_crop(i, k, 8, area=(0.5, 2.0)), "area="),
        (lambda i, t, k: augment.colour_jitter(i, k, hue=0.7), "hue=0.7"),
        (lambda i, t, k: augment.colour_jitter(i.float(), k), "takes bytes"),
        (lambda i, t, k: augment.rand_augment(i, k, magnitude=31), "magnitude=31"),
        (lambda i, t, k: augment.auto_augment(i, k, policy="svnh"), "imagenet, cifar10"),
        (lambda i, t, k: augment.trivial_augment(i[:, :2], k), "1 or 3"),
        (lambda i, t, k: augment.erase(i, k, fill=(1, 2)), "3 channels"),
        (lambda i, t, k: augment.erase(i, k, ratio=(3.0, 0.3)), "lower one first"),
        (lambda i, t, k: augment.mixup(i, t, k, CLASSES, alpha=0), "alpha=0"),
        (lambda i, t, k: augment.mixup(i, t, k, CLASSES, most=1.5), "most=1.5"),
        (lambda i, t, k: augment.cutmix(i, torch.ones(4, 2), k, CLASSES), "no probabilities"),
    ],
)
def test_what_is_wrong_is_said(call, said):
    with pytest.raises(TaskError, match=said):
        call(*batch(4))
