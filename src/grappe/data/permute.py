"""Permutes range(length) by a key, evaluated only at the positions that are asked for."""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

from grappe.data.draw import mix

_ROUNDS = 8
_ROUNDS_SMALL = 24  # a grid of few rows and columns has few round functions to choose from
_SMALL = 64
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


def permute(positions: NDArray[np.int64], *, key: int, length: int) -> NDArray[np.int64]:
    """Evaluates a permutation of range(length), chosen by `key`, at `positions`: int64 (n,) to int64 (n,).

    A Feistel network over the cells of a nearly square grid that holds `length` (1 to 2^62), walked along its
    cycle until it is back in range (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
    One cell in sqrt(length) is out of range, so few walk, and the cost depends on neither position nor length; over
    a power of two up to half would. The permutation shuffles; it is no encryption.
    """
    columns = isqrt(length - 1) + 1
    rows = -(-length // columns)
    rounds = _ROUNDS if length > _SMALL else _ROUNDS_SMALL
    keys = [np.uint64(mix(key, index)) for index in range(rounds)]
    image = _feistel(positions.astype(np.uint64), keys, rows, columns)
    outside = np.flatnonzero(image >= length)
    while outside.size:
        walked = _feistel(image[outside], keys, rows, columns)
        image[outside] = walked
        outside = outside[walked >= length]
    return image.view(np.int64)


def _feistel(cells: NDArray[np.uint64], keys: list[np.uint64], rows: int, columns: int) -> NDArray[np.uint64]:
    """Evaluates a permutation of range(rows * columns) at `cells`, uint64 (n,); the number of `keys` is even."""
    width, other_width = np.uint64(rows), np.uint64(columns)
    half = cells // other_width
    other = cells - half * other_width
    hashed, spare = np.empty_like(half), np.empty_like(half)
    for key in keys:
        # in place throughout: new arrays would take longer than the arithmetic
        np.add(other, key, out=hashed)
        hashed *= _FIRST
        np.right_shift(hashed, _HALF, out=spare)
        hashed ^= spare
        hashed *= _SECOND
        hashed >>= _HALF
        hashed *= width
        hashed >>= _HALF
        half += hashed
        # modulo the width: the subtraction wraps to something huge where it was not due
        np.subtract(half, width, out=spare)
        np.minimum(half, spare, out=half)
        half, other, width, other_width = other, half, other_width, width
    half *= other_width
    half += other
    return half
