"""Draws a sample's random numbers: the same bits on any process, data worker, slice or device.

These functions have no state. Every number is a hash of its purpose: the finaliser of splitmix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) over a key and a counter.

Shapes: B samples of a slice, n numbers per sample.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from math import isqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


_ONE_THREAD = 1 << 15  # numbers: torch's operators take no second thread for fewer
_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
# As arrays, which NumPy takes as they are: a Python number costs a microsecond each time.
_FIRST_FACTOR, _SECOND_FACTOR, _30, _27, _31 = (
    np.array(word, dtype=np.uint64) for word in (_FIRST, _SECOND, 30, 27, 31)
)


def mix(*words: int) -> int:
    """Hashes integers, in order, into [0, 2^63): a key or a seed.

    Words are taken modulo 2^64, so negative ones may be given. If all words but one are the same, no more than
    two values of that word share a hash: the chain is a bijection of each word, and the last bit is dropped.
    """
    return _chain(len(words), words) >> 1


def mix_steps(seed: int, start: int, count: int, *rest: int) -> list[int]:
    """Returns `mix(seed, step, *rest)` for `count` steps from `start`, in a tenth of the time of as many calls."""
    bits = np.full(count, _chain(2 + len(rest), (seed,)), dtype=np.uint64)
    words: list[Any] = [np.arange(start, start + count).astype(np.uint64)]
    words += [np.uint64(word & _WORD) for word in rest]
    for word in words:
        bits = _finalised((bits ^ word) + np.uint64(_GAMMA))
    return (bits >> np.uint64(1)).tolist()


def sample_keys(seed: int, epoch: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the keys of samples: int64 (B,), each `mix(seed, epoch, id)`, for `ids` int64 (B,)."""
    bits = ids.astype(np.uint64)
    bits ^= _head(seed, epoch)
    bits += _GAMMA
    _finalised(bits)
    bits >>= 1
    return bits.view(np.int64)


def draw(keys: torch.Tensor, n: int) -> torch.Tensor:
    """Draws uniform numbers in [0, 1), float32 (B, n), multiples of 2^-24, on the device of `keys` int64 (B,).

    Row i depends on `keys[i]` alone, and its first m numbers equal `draw(keys, m)`. Drawing twice with the
    same keys gives the same numbers: draw once, as many as are needed.
    """
    import torch

    few = len(keys) * n <= _ONE_THREAD or torch.get_num_threads() == 1
    # A subclass has no memory (FakeTensor), or must see each operator itself.
    in_memory = type(keys) is torch.Tensor and keys.device.type == "cpu"
    if few and in_memory and not torch.compiler.is_compiling():
        return torch.from_numpy(drawn(keys.numpy(), n))
    counters = torch.arange(1, n + 1, device=keys.device) * _signed(_GAMMA)
    bits = keys[:, None] + counters
    bits ^= _shifted(bits, 30)
    bits *= _signed(_FIRST)
    bits ^= _shifted(bits, 27)
    bits *= _signed(_SECOND)
    bits ^= _shifted(bits, 31)
    return _shifted(bits, 40).to(torch.float32).mul_(2.0**-24)


def drawn(keys: NDArray[np.int64], n: int) -> NDArray[np.float32]:
    """Draws the same numbers as `draw`, by NumPy: 10 times as quick for a few hundred numbers, twice for 10^5."""
    counters = np.arange(1, n + 1, dtype=np.uint64)
    counters *= _GAMMA
    bits = _finalised(keys.view(np.uint64)[:, None] + counters)
    bits >>= 40
    numbers = bits.astype(np.float32)
    numbers *= 2.0**-24
    return numbers


def draw_one(key: int, index: int) -> float:
    """Draws number `index` of one key, as `draw` does, where no tensor is at hand."""
    bits = (key + (index + 1) * _GAMMA) & _WORD
    bits = ((bits ^ (bits >> 30)) * _FIRST) & _WORD
    bits = ((bits ^ (bits >> 27)) * _SECOND) & _WORD
    return ((bits ^ (bits >> 31)) >> 40) * 2.0**-24


def mixup_pairs(n: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Pairs the `n` rows of a slice for mixup: int64 (n,), rows 2j and 2j+1 with each other.

    The last row of an odd slice is paired with itself. Since `grappe.data.sampling.cut` starts slices at even
    positions, these are the pairs of the global batch, for any number of slices.
    """
    import torch

    return (torch.arange(n, device=device) ^ 1).clamp_(max=n - 1)


@functools.lru_cache(maxsize=64)
def _head(seed: int, epoch: int) -> int:
    """Hashes the part of the keys that an epoch's samples share."""
    return _chain(3, (seed, epoch))


def _finalised(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies the finaliser of splitmix64, in place."""
    bits ^= bits >> _30
    bits *= _FIRST_FACTOR
    bits ^= bits >> _27
    bits *= _SECOND_FACTOR
    bits ^= bits >> _31
    return bits


def _chain(count: int, words: Iterable[int]) -> int:
    """Hashes the first of `count` words; the count keeps a short hash from being the beginning of a longer one."""
    bits = count
    for word in words:
        bits = ((bits ^ (int(word) & _WORD)) + _GAMMA) & _WORD  # NumPy's integers hold no _WORD
        bits = ((bits ^ (bits >> 30)) * _FIRST) & _WORD
        bits = ((bits ^ (bits >> 27)) * _SECOND) & _WORD
        bits ^= bits >> 31
    return bits


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shifts to the right logically: torch's own shift repeats the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    """Returns the int64 with the same bits: torch rejects larger numbers, and its product keeps the low 64 bits."""
    return word - (1 << 64)


_ROUNDS = 8
_ROUNDS_SMALL = 24  # a grid of few rows and columns has few round functions to choose from
_SMALL = 64
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
        hashed *= _FIRST_FACTOR
        np.right_shift(hashed, _HALF, out=spare)
        hashed ^= spare
        hashed *= _SECOND_FACTOR
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
