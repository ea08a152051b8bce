"""Draws: the random numbers that a model draws while it trains, written down or switched off, whoever draws them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LEAST_NUMBERS = 64  # of a step's draws: fewer can be alike by chance

Op = Any


class Draws(TorchDispatchMode):
    """Sees every operator that draws from a generator: torch tags them, so no layer's class need be known.

    Args:
        off: whether each draw gives what it gives on average: dropout then keeps everything as it is.
    """

    def __init__(self, off: bool) -> None:
        super().__init__()
        self._off = off
        self._paused = False
        self._hash, self._numbers = xxhash.xxh3_64(), 0
        self.seen: set[str] = set()
        """The operators that drew."""

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        given = _named(func, args, kwargs)
        if not _draws(given):
            return func(*args, **kwargs)
        self.seen.add(name)
        if self._off:
            return _expected(func, name, given)
        result = func(*args, **kwargs)
        self._note(result)
        return result

    def take(self) -> str:
        """A hash of what was drawn since the last call; empty where too little was to tell two steps apart."""
        text = self._hash.hexdigest() if self._numbers >= LEAST_NUMBERS else ""
        self._hash, self._numbers = xxhash.xxh3_64(), 0
        return text

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, draws are left alone: those of loading and augmentation are not the model's."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _note(self, result: Any) -> None:
        # Attention gives its seed in place of a mask; it stands for it.
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if isinstance(leaf, Tensor) and not isinstance(leaf, torch.distributed.tensor.DTensor):
                self._hash.update(
                    leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                )
                self._numbers += leaf.numel()


def _named(func: Op, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _draws(given: dict[str, Any]) -> bool:
    """Some operators carry the tag whether they draw something or not."""
    off = (given.get(name) is False for name in ("train", "training"))
    return all(given.get(name) != 0.0 for name in ("dropout_p", "dropout")) and not any(off)


def _expected(func: Op, name: str, given: dict[str, Any]) -> Any:
    """What `func` gives on average, in its form."""
    if name in _MEANS:
        return _MEANS[name](given)
    for rate in ("dropout_p", "dropout"):
        if rate in given:
            return _called(func, {**given, rate: 0.0})
    return _called(func, given)


def _called(func: Op, given: dict[str, Any]) -> Any:
    keyword = {argument.name for argument in func._schema.arguments if argument.kwarg_only}
    positional = [value for key, value in given.items() if key not in keyword]
    return func(*positional, **{key: value for key, value in given.items() if key in keyword})


def _fill(value: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Tensor]:
    return lambda given: given["self"].fill_(value(given))


def _bernoulli(given: dict[str, Any]) -> Tensor:
    chance = given.get("p", 0.5)
    return given["self"].copy_(chance) if isinstance(chance, Tensor) else given["self"].fill_(chance)


def _made(value: float) -> Callable[[dict[str, Any]], Tensor]:
    def make(given: dict[str, Any]) -> Tensor:
        options = {name: given[name] for name in ("dtype", "device", "layout") if given.get(name) is not None}
        if "self" in given:
            return torch.full_like(given["self"], value, **options)
        return torch.full(given["size"], value, **options)

    return make


def _whole(given: dict[str, Any]) -> int:
    return (given.get("low", 0) + given["high"] - 1) // 2


def _normal(given: dict[str, Any]) -> Tensor:
    mean, std = given["mean"], given.get("std", 1.0)
    if isinstance(mean, Tensor) or isinstance(std, Tensor):
        return mean + torch.zeros_like(std if isinstance(std, Tensor) else mean)
    return _made(mean)(given)


def _likeliest(given: dict[str, Any]) -> Tensor:
    order = given["self"].argsort(dim=-1, descending=True)
    places = torch.arange(given["num_samples"], device=order.device) % order.shape[-1]
    return order[..., places]


def _leaky(given: dict[str, Any]) -> Tensor:
    slope = (given["lower"] + given["upper"]) / 2
    # backward multiplies by what forward has written there
    given["noise"].copy_(torch.where(given["self"] <= 0, slope, 1.0))
    return given["self"] * given["noise"]


_MEANS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "bernoulli_": _bernoulli,
    "bernoulli": lambda given: given["self"].clone(),
    "native_dropout": lambda given: (
        given["input"].clone(),
        torch.ones_like(given["input"], dtype=torch.bool),
    ),
    "uniform_": _fill(lambda given: (given.get("from", 0.0) + given.get("to", 1.0)) / 2),
    "normal_": _fill(lambda given: given.get("mean", 0.0)),
    "normal": _normal,
    "log_normal_": _fill(lambda given: math.exp(given.get("mean", 1.0) + given.get("std", 2.0) ** 2 / 2)),
    "exponential_": _fill(lambda given: 1 / given.get("lambd", 1.0)),
    "geometric_": _fill(lambda given: round(1 / given["p"])),
    "cauchy_": _fill(lambda given: given.get("median", 0.0)),  # it has no mean
    "poisson": lambda given: given["self"].clone(),
    "_standard_gamma": lambda given: given["self"].clone(),
    "binomial": lambda given: given["count"] * given["prob"],
    "multinomial": _likeliest,
    "rrelu_with_noise": _leaky,
    "rrelu_with_noise_": lambda given: given["self"].copy_(_leaky(given)),
    "randint": lambda given: _made(_whole(given))(given),
    "randint_like": lambda given: _made(_whole(given))(given),
    "random_": _fill(lambda given: given.get("from", 0)),
    "rand": _made(0.5),
    "rand_like": _made(0.5),
    "randn": _made(0.0),
    "randn_like": _made(0.0),
    "randperm": lambda given: torch.arange(given["n"], device=given.get("device")),
}
