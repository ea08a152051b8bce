"""Augments whole batches on the device, by each sample's key: the functions that `Task.augment` is composed of.

The same bits for the same key under every plan. So no sum depends on its order: pixels that are averaged are bytes,
whose sums are exact. Logarithms and sines are computed in float64, where the libraries' different last bits do not
reach the result.
"""

from grappe.data.augment.colour import colour_jitter
from grappe.data.augment.geometry import erase, flip, pad_and_crop, random_resized_crop
from grappe.data.augment.mixing import cutmix, mixup, mixup_or_cutmix
from grappe.data.augment.policies import auto_augment, rand_augment, trivial_augment

__all__ = [
    "auto_augment", "colour_jitter", "cutmix", "erase", "flip", "mixup", "mixup_or_cutmix", "pad_and_crop",
    "rand_augment", "random_resized_crop", "trivial_augment",
]  # fmt: skip
