"""Sketches what operators compute: sums in float64 with random signs, which two machines can compare.

Signs and drawn inputs are bits of Philox, the same everywhere (Salmon et al. 2011). A sketch is computed by NumPy,
since torch's kernels are what is judged.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from grappe.private_api.torch import TorchDispatchMode, call_in_mode, tree_leaves, tree_map

Numbers = NDArray[np.float64]
WIDTH = 8
"""Sums of a sketch; the norm follows them. The distance of two sketches is about that of what they are of."""
BLOCK = 1 << 14
PERTURBED = 2
"""Times that the same is computed from numbers that are moved by about their last bit."""
LARGEST = 1 << 24
"""Numbers in the arguments of a call above which it is not drawn again."""
LITERAL = 20_000
"""Whole numbers that a script may list."""


@functools.cache
def units(bits: int) -> Numbers:
    """Draws 2**bits uniform numbers of (-1, 1)."""
    return (np.random.Philox(key=2).random_raw(1 << bits) >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1


def drawn(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, sign: int, place: int) -> Tensor:
    """Draws uniform numbers: of (-1, 1), or with a sign of [0.05, 1.05) times it; others for each place."""
    size = 0 if 0 in shape else 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    first = 127 * place
    unit = units((first + size).bit_length())[first : first + size]
    numbers = sign * (unit / 2 + 0.55) if sign else unit.copy()
    return torch.from_numpy(numbers).to(dtype).as_strided(shape, stride)


@functools.cache
def signs(count: int, seed: int) -> Numbers:
    """Draws random signs."""
    return (np.random.Philox(key=seed).random_raw(count) & np.uint64(1)).astype(np.float64) * 2.0 - 1


def sketched(arrays: Iterable[Numbers]) -> Numbers:
    """Gives all numbers random signs, and sums them in WIDTH groups; the norm follows."""
    total, square = np.zeros(BLOCK), 0.0
    for place, numbers in enumerate(array.reshape(-1) for array in arrays):
        blocks = len(numbers) // BLOCK
        of_blocks = signs(blocks + 1, 3 + place % 64)
        total += np.einsum("b,bn->n", of_blocks[:blocks], numbers[: blocks * BLOCK].reshape(blocks, BLOCK))
        rest = numbers[blocks * BLOCK :]
        total[: len(rest)] += of_blocks[blocks] * rest
        square += float(np.einsum("n,n->", numbers, numbers))  # BLAS would start threads for each tensor
    return np.append((total * signs(BLOCK, 1)).reshape(-1, WIDTH).sum(0), square**0.5)


def sketch(tensors: Iterable[Tensor]) -> Numbers:
    """Sketches tensors together: float64 (WIDTH + 1,)."""
    reals = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors)
    with np.errstate(all="ignore"):
        return sketched([real.detach().to("cpu", torch.float64).contiguous().numpy() for real in reals])


def gaps(a: Numbers, b: Numbers) -> Numbers:
    """Estimates |a - b| / max(|a|, |b|) of what pairs of sketches (..., WIDTH + 1) are of; NaN equals itself."""
    norm = np.maximum(a, b)[..., WIDTH]  # of a gradient that is 0 but for rounding, any of the two may be nearer to 0
    with np.errstate(all="ignore"):
        away = np.sqrt(np.square(a - b)[..., :WIDTH].sum(-1)) / np.where(norm > 0, norm, 1.0)
    finite = np.isfinite(a).all(-1), np.isfinite(b).all(-1)
    return np.where(finite[0] & finite[1], away, np.where(finite[0] == finite[1], 0.0, np.inf))


def moved(tensor: Tensor, seed: int) -> Tensor:
    """Moves each number by about its last bit."""
    unit = drawn(tensor.shape, torch.empty(tensor.shape, device="meta").stride(), tensor.dtype, 0, 32 + seed)
    return tensor * (1 + unit.to(tensor.device) * (2 * torch.finfo(tensor.dtype).eps))  # an infinity stays one


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnTensor:
    """A tensor argument: numbers that are drawn, or whole numbers that are kept."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sign: int
    """1 or -1: no number of the argument has another sign; 0: both are there."""
    kept: Tensor | None

    def __repr__(self) -> str:
        plain = self.stride == torch.empty(self.shape, device="meta").stride()
        layout = "" if plain else f"|{','.join(map(str, self.stride))}"
        sign = "-+"[self.sign > 0] if self.sign else ""
        # Whole numbers may come from rounded ones, as those of a maximum do: then it is another call.
        kept = None if self.kept is None else self.kept.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        values = "" if kept is None else f":{xxhash.xxh3_64_hexdigest(kept.tobytes())}"
        return f"{str(self.dtype)[6:]}{sign}[{','.join(map(str, self.shape))}{layout}]{values}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnCall:
    """A call of an operator, whose inputs can be drawn again anywhere."""

    operator: Any
    arguments: tuple[Any, Any]
    """Positional and keyword arguments; tensors are DrawnTensors."""

    def __str__(self) -> str:
        shown = tree_map(lambda leaf: f"{leaf:.9g}" if isinstance(leaf, float) else leaf, self.arguments)
        return f"{self.operator.name()}{shown}"

    @property
    def numbers(self) -> int:
        """Returns how many numbers its tensors have."""
        return sum(math.prod(leaf.shape) for leaf in self._tensors())

    def _tensors(self) -> list[DrawnTensor]:
        return [leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, DrawnTensor)]

    def sketch(self, seed: int | None = None) -> Numbers:
        """Calls the operator with drawn inputs, which `seed` moves by their last bit; sketches all that it writes."""
        places = iter(range(1 << 20))

        def made(leaf: Any) -> Any:
            if not isinstance(leaf, DrawnTensor):
                return leaf
            if leaf.kept is not None:
                return leaf.kept.clone()
            place = next(places)
            tensor = drawn(leaf.shape, leaf.stride, leaf.dtype, leaf.sign, place)
            if seed is not None and 0 not in leaf.stride:
                tensor.copy_(moved(tensor, 8 * seed + place))
            return tensor.to(leaf.device)

        args, kwargs = tree_map(made, self.arguments)
        with torch.no_grad():
            results = self.operator(*args, **kwargs)
        # An operator in place returns its argument, which must not stand there twice with other signs.
        written = {id(tensor): tensor for tensor in floats((results, args, kwargs))}
        return sketch(written.values())  # native_batch_norm does not say that it writes its statistics

    def script(self, expected: Numbers, where: str, here: str) -> str:
        """Returns a program that shows the call's difference; "": it would have to list too many whole numbers."""
        kept = [leaf.kept for leaf in self._tensors() if leaf.kept is not None]
        if sum(tensor.numel() for tensor in kept) > LITERAL:
            return ""
        places = iter(range(1 << 20))

        def text(leaf: Any) -> str:
            if isinstance(leaf, (list, tuple)):
                return "[" + ", ".join(map(text, leaf)) + "]"
            if isinstance(leaf, dict):
                return "{" + ", ".join(f"{name!r}: {text(value)}" for name, value in leaf.items()) + "}"
            if not isinstance(leaf, DrawnTensor):
                return f"torch.device({str(leaf)!r})" if isinstance(leaf, torch.device) else repr(leaf)
            if leaf.kept is not None:
                return f"torch.tensor({leaf.kept.tolist()}, dtype={leaf.dtype}, device={str(leaf.device)!r})"
            form = f"drawn({leaf.shape}, {leaf.stride}, {leaf.dtype}, {leaf.sign}, {next(places)})"
            return form if leaf.device.type == "cpu" else f"{form}.to({str(leaf.device)!r})"

        functions = "\n\n".join(inspect.getsource(part) for part in (units, drawn, signs, sketched))
        packet, overload = self.operator.name().removeprefix("aten::").partition(".")[::2]
        # What a record says stands in a comment of one line: it cannot end the comment.
        return f'''"""{self.operator.name()} computes something else here than there."""

# There: {where}
# Here: {here}

from __future__ import annotations

import functools

import numpy as np
import torch

WIDTH, BLOCK = {WIDTH}, {BLOCK}


{functions}
args, kwargs = {text(self.arguments[0])}, {text(self.arguments[1])}
result = torch.ops.aten.{packet}.{overload or "default"}(*args, **kwargs)
leaves = torch.utils._pytree.tree_leaves([result, args, kwargs])
tensors = {{id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()}}.values()
here = sketched([leaf.to("cpu", torch.float64).contiguous().numpy() for leaf in tensors])
there = np.array({expected.tolist()})
print("there:", there)
print("here: ", here)
print("relative difference:", np.sqrt(np.square(here - there)[:WIDTH].sum()) / there[WIDTH])
'''


def floats(tree: Any) -> list[Tensor]:
    """Lists the tensors of real numbers in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


class CallLog(TorchDispatchMode):
    """Mode that notes each call of an operator of aten on numbers, forward, backward and in the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, DrawnCall] = {}
        self.order: list[str] = []
        self.keeps = True
        """Whether calls of new kinds are kept."""
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = not self.paused and func.namespace == "aten" and not func.is_view and "empty" not in func.name()
        if aten and torch.Tag.nondeterministic_seeded not in func.tags and floats((args, kwargs)):
            call = DrawnCall(operator=func, arguments=tree_map(_described, (tuple(args), kwargs)))
            name = str(call)
            if self.keeps and name not in self.calls and call.numbers <= LARGEST:
                self.calls[name] = call
            self.order.append(name)
        return call_in_mode(func, args, kwargs)

    def sketches(self) -> dict[str, tuple[Numbers, float]]:
        """Sketches each call that was noted, with the largest difference that moved inputs make."""
        sketches = {}
        for name, call in self.calls.items():
            try:
                plain = call.sketch()
                noise = max(float(gaps(plain, call.sketch(seed))) for seed in range(PERTURBED))
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
                continue  # an operator that takes no numbers of any kind
            sketches[name] = plain, noise
        return sketches


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    sign = 0
    if (real := leaf.is_floating_point()) and leaf.numel():
        low, high = leaf.detach().aminmax()
        sign = 1 if low >= 0 else -1 if high <= 0 else 0
    return DrawnTensor(
        shape=tuple(leaf.shape),
        stride=tuple(leaf.stride()),
        dtype=leaf.dtype,
        device=leaf.device,
        sign=sign,
        kept=None if real else leaf.detach().clone(),
    )
