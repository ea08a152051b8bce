"""Compares grappe.data.augment with torchvision: the same pixels, and draws of the same distribution.

pip install --no-deps --target FOLDER torchvision==0.28.0
PYTHONPATH=FOLDER:. python benchmarks/torchvision_on_cpu.py benchmarks/augmentations.py
"""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from benchmarks.photos import photographs
from grappe.data import augment
from grappe.data.augment import geometry, policies
from grappe.data.augment.colour import turned
from grappe.data.augment.numbers import numbers
from grappe.data.draw import sample_keys

SIDE, COUNT = 64, 3000
SCORES = {
    "mean": lambda x: x.float().mean((-3, -2, -1)),
    "spread": lambda x: x.float().std((-3, -2, -1)),
    "corner": lambda x: x[..., 0, 0].float().mean(-1),
}


def pixels() -> None:
    """Each operation of RandAugment, AutoAugment and ColorJitter, of the same amount, on photographs."""
    kinds = {
        "ShearX": policies.Operation.SHEAR_X, "ShearY": policies.Operation.SHEAR_Y,
        "TranslateX": policies.Operation.TRANSLATE_X, "TranslateY": policies.Operation.TRANSLATE_Y,
        "Rotate": policies.Operation.ROTATE, "Brightness": policies.Operation.BRIGHTNESS,
        "Color": policies.Operation.COLOUR, "Contrast": policies.Operation.CONTRAST,
        "Sharpness": policies.Operation.SHARPNESS, "Posterize": policies.Operation.POSTERIZE,
        "Solarize": policies.Operation.SOLARIZE, "AutoContrast": policies.Operation.AUTOCONTRAST,
        "Equalize": policies.Operation.EQUALIZE, "Invert": policies.Operation.INVERT,
    }  # fmt: skip
    images = torch.stack(
        [torch.from_numpy(np.array(photo.resize((SIDE, SIDE)))).permute(2, 0, 1) for _, photo in photographs()]
    )
    policy = v2.RandAugment()
    print("operation              equal levels, difference (quantile 99 %)")
    for name, kind in kinds.items():
        table, signed = policy._AUGMENTATION_SPACE.get(name, (lambda *_: None, False))
        amounts = table(31, SIDE, SIDE)
        for strength in (3, 9, 30) if amounts is not None else (0,):
            amount = 0.0 if amounts is None else float(amounts[strength])
            for value in (amount, -amount) if signed else (amount,):
                theirs = policy._apply_image_or_video_transform(images, name, value, v2.InterpolationMode.NEAREST, {})
                mine = 255 * value if name == "Solarize" else value
                ours = policies.apply_operations(
                    images, torch.full((len(images),), kind), torch.full((len(images),), mine)
                )
                report(f"{name} {value:.2f}", ours, theirs)
    for hue in (-0.2, 0.1, 0.5):
        report(f"hue {hue}", turned(images, torch.full((len(images),), hue)), F.adjust_hue(images, hue))
    for number in range(3):
        key = torch.tensor([number * 7919])
        box = geometry.draw_boxes(
            numbers(key, "random_resized_crop", geometry.DRAWS), (SIDE,) * 2, (0.08, 1), (3 / 4, 4 / 3), tall=False
        )
        top, left, height, width = (int(column) for column in box[:4])
        theirs = F.resized_crop(images[:1], top, left, height, width, [48, 48], antialias=True)
        report(f"resized crop {height} x {width}", augment.random_resized_crop(images[:1], key, 48), theirs)


def report(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    apart = (ours.int() - theirs.int()).abs().flatten().float()
    print(f"{name:24} {(apart == 0).float().mean():8.2%} {apart.quantile(0.99):8.0f}")


def distributions() -> None:
    """Compares draws: the probability that two samples of one distribution differ as much (Kolmogorov, Smirnov)."""
    torch.manual_seed(0)
    keys = torch.from_numpy(sample_keys(1, 0, np.arange(COUNT)))
    image = torch.zeros(1, 3, SIDE, SIDE, dtype=torch.uint8)
    ones = torch.ones(2 * COUNT, 1, SIDE, SIDE)
    ones[::2] = 0
    crop = v2.RandomResizedCrop(48)
    theirs = [crop.make_params([image[0]]) for _ in range(COUNT)]
    box = geometry.draw_boxes(numbers(keys, "some", geometry.DRAWS), (SIDE,) * 2, (0.08, 1), (3 / 4, 4 / 3), tall=False)
    for word in ("top", "left", "height", "width"):
        compare(f"crop {word}", getattr(box, word), [one[word] for one in theirs])
    eraser = v2.RandomErasing(p=1)
    erased = (augment.erase(ones[1::2], keys, p=1) == 0).float().mean((1, 2, 3))
    share = [float((eraser(ones[1]) == 0).float().mean()) for _ in range(COUNT)]
    compare("erased share", erased, share)
    for alpha in (0.2, 1.0):
        labels = torch.arange(2 * COUNT) % 2
        pair = torch.from_numpy(sample_keys(2, 0, np.arange(2 * COUNT)))
        for name, ours, other in (
            ("mixup", augment.mixup, v2.MixUp(alpha=alpha, num_classes=2)),
            ("cutmix", augment.cutmix, v2.CutMix(alpha=alpha, num_classes=2)),
        ):
            weight = ours(ones, labels, pair, 2, alpha)[1][::2, 1]
            seen = [float(other(ones[:2], labels[:2])[1][0, 1]) for _ in range(COUNT)]
            compare(f"{name} alpha={alpha}", weight, seen)
    grey = torch.full((COUNT, 3, 2, 2), 100, dtype=torch.uint8)
    jitter = v2.ColorJitter(0.4, 0.4, 0.4)
    for name, start in (("grey", grey), ("red", grey * torch.tensor([2, 1, 0]).view(1, 3, 1, 1).byte())):
        ours = augment.colour_jitter(start, keys).float().mean((1, 2, 3))
        compare(f"jitter of {name}", ours, [float(jitter(one).float().mean()) for one in start], 2)
    picture = torch.from_numpy(np.array(photographs()[0][1].resize((SIDE, SIDE)))).permute(2, 0, 1)
    many = picture.expand(COUNT, -1, -1, -1)
    for name, function, other in (
        ("RandAugment", augment.rand_augment, v2.RandAugment()),
        ("TrivialAugment", augment.trivial_augment, v2.TrivialAugmentWide()),
        ("AutoAugment", augment.auto_augment, v2.AutoAugment()),
    ):
        for word, score in SCORES.items():
            ours = torch.cat([score(function(many[a : a + 100], keys[a : a + 100])) for a in range(0, COUNT, 100)])
            compare(f"{name} {word}", ours, [float(score(other(picture))) for _ in range(COUNT)], 3)


def compare(name: str, ours: torch.Tensor, theirs: list[float], step: float = 0) -> None:
    """Prints the probability; outcomes are rounded to `step`, as grey values that differ by 1 are the same outcome."""
    first, second = (np.asarray(one, dtype=np.float64) for one in (ours, theirs))
    if step:
        first, second = np.round(first / step), np.round(second / step)
    print(f"{name:24} p = {stats.ks_2samp(first, second).pvalue:.3f}")


if __name__ == "__main__":
    pixels()
    distributions()
