"""Lists the policies that AutoAugment's authors found: 25 pairs of operations each.

Cubuk et al. 2019, "AutoAugment: Learning augmentation policies from data", tables 7 and 9, as torchvision has them.
"""

from __future__ import annotations

from grappe.data.augment.operations import Operation as O

Step = tuple[int, float, int]
"""An operation, its probability, and its strength from 0 to 9."""
POLICIES: dict[str, tuple[tuple[Step, Step], ...]] = {
    "imagenet": (
        ((O.POSTERIZE, 0.4, 8), (O.ROTATE, 0.6, 9)),
        ((O.SOLARIZE, 0.6, 5), (O.AUTOCONTRAST, 0.6, 0)),
        ((O.EQUALIZE, 0.8, 0), (O.EQUALIZE, 0.6, 0)),
        ((O.POSTERIZE, 0.6, 7), (O.POSTERIZE, 0.6, 6)),
        ((O.EQUALIZE, 0.4, 0), (O.SOLARIZE, 0.2, 4)),
        ((O.EQUALIZE, 0.4, 0), (O.ROTATE, 0.8, 8)),
        ((O.SOLARIZE, 0.6, 3), (O.EQUALIZE, 0.6, 0)),
        ((O.POSTERIZE, 0.8, 5), (O.EQUALIZE, 1.0, 0)),
        ((O.ROTATE, 0.2, 3), (O.SOLARIZE, 0.6, 8)),
        ((O.EQUALIZE, 0.6, 0), (O.POSTERIZE, 0.4, 6)),
        ((O.ROTATE, 0.8, 8), (O.COLOUR, 0.4, 0)),
        ((O.ROTATE, 0.4, 9), (O.EQUALIZE, 0.6, 0)),
        ((O.EQUALIZE, 0.0, 0), (O.EQUALIZE, 0.8, 0)),
        ((O.INVERT, 0.6, 0), (O.EQUALIZE, 1.0, 0)),
        ((O.COLOUR, 0.6, 4), (O.CONTRAST, 1.0, 8)),
        ((O.ROTATE, 0.8, 8), (O.COLOUR, 1.0, 2)),
        ((O.COLOUR, 0.8, 8), (O.SOLARIZE, 0.8, 7)),
        ((O.SHARPNESS, 0.4, 7), (O.INVERT, 0.6, 0)),
        ((O.SHEAR_X, 0.6, 5), (O.EQUALIZE, 1.0, 0)),
        ((O.COLOUR, 0.4, 0), (O.EQUALIZE, 0.6, 0)),
        ((O.EQUALIZE, 0.4, 0), (O.SOLARIZE, 0.2, 4)),
        ((O.SOLARIZE, 0.6, 5), (O.AUTOCONTRAST, 0.6, 0)),
        ((O.INVERT, 0.6, 0), (O.EQUALIZE, 1.0, 0)),
        ((O.COLOUR, 0.6, 4), (O.CONTRAST, 1.0, 8)),
        ((O.EQUALIZE, 0.8, 0), (O.EQUALIZE, 0.6, 0)),
    ),
    "cifar10": (
        ((O.INVERT, 0.1, 0), (O.CONTRAST, 0.2, 6)),
        ((O.ROTATE, 0.7, 2), (O.TRANSLATE_X, 0.3, 9)),
        ((O.SHARPNESS, 0.8, 1), (O.SHARPNESS, 0.9, 3)),
        ((O.SHEAR_Y, 0.5, 8), (O.TRANSLATE_Y, 0.7, 9)),
        ((O.AUTOCONTRAST, 0.5, 0), (O.EQUALIZE, 0.9, 0)),
        ((O.SHEAR_Y, 0.2, 7), (O.POSTERIZE, 0.3, 7)),
        ((O.COLOUR, 0.4, 3), (O.BRIGHTNESS, 0.6, 7)),
        ((O.SHARPNESS, 0.3, 9), (O.BRIGHTNESS, 0.7, 9)),
        ((O.EQUALIZE, 0.6, 0), (O.EQUALIZE, 0.5, 0)),
        ((O.CONTRAST, 0.6, 7), (O.SHARPNESS, 0.6, 5)),
        ((O.COLOUR, 0.7, 7), (O.TRANSLATE_X, 0.5, 8)),
        ((O.EQUALIZE, 0.3, 0), (O.AUTOCONTRAST, 0.4, 0)),
        ((O.TRANSLATE_Y, 0.4, 3), (O.SHARPNESS, 0.2, 6)),
        ((O.BRIGHTNESS, 0.9, 6), (O.COLOUR, 0.2, 8)),
        ((O.SOLARIZE, 0.5, 2), (O.INVERT, 0.0, 0)),
        ((O.EQUALIZE, 0.2, 0), (O.AUTOCONTRAST, 0.6, 0)),
        ((O.EQUALIZE, 0.2, 0), (O.EQUALIZE, 0.6, 0)),
        ((O.COLOUR, 0.9, 9), (O.EQUALIZE, 0.6, 0)),
        ((O.AUTOCONTRAST, 0.8, 0), (O.SOLARIZE, 0.2, 8)),
        ((O.BRIGHTNESS, 0.1, 3), (O.COLOUR, 0.7, 0)),
        ((O.SOLARIZE, 0.4, 5), (O.AUTOCONTRAST, 0.9, 0)),
        ((O.TRANSLATE_Y, 0.9, 9), (O.TRANSLATE_Y, 0.7, 9)),
        ((O.AUTOCONTRAST, 0.9, 0), (O.SOLARIZE, 0.8, 3)),
        ((O.EQUALIZE, 0.8, 0), (O.INVERT, 0.1, 0)),
        ((O.TRANSLATE_Y, 0.7, 9), (O.AUTOCONTRAST, 0.9, 0)),
    ),
}
