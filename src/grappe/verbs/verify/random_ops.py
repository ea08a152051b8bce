"""RandomOps: records or switches off the random numbers that a model draws while it trains, in any layer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor

from grappe.data.whole_batch_draws import MeanDraws, own_rows
from grappe.private_api.torch import TorchDispatchMode, call_in_mode, is_dtensor, operator_arguments
from grappe.rows.draws import Probing
from grappe.rows.tensor import Rows

LEAST_NUMBERS = 64  # of a step's draws: fewer can be equal by chance
MOST_NUMBERS = 512  # batches of graphs or texts go on for longer or shorter on the same stream

SEEDINGS = ("_cudnn_init_dropout_state",)
"""Operators that only prepare later draws: cuDNN prepares none for a rate of 0."""

Op = Any


class RandomOps(TorchDispatchMode):
    """Mode that intercepts every operator that draws from a generator: torch tags them, so that any layer is covered.

    Args:
        off: whether each draw is replaced by its mean: dropout then keeps everything as it is.
    """

    def __init__(self, off: bool) -> None:
        super().__init__()
        self._off = off
        self._paused = False
        self._before = False
        self._seed: int | None = None
        self._hash, self._numbers = xxhash.xxh3_64(), 0
        self.seen: set[str] = set()
        """The operators that drew."""

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if Rows in types:
            return NotImplemented  # what is drawn for all rows is seen
        if self._off and (backward := _BACKWARDS.get(func.overloadpacket.__name__)) is not None:
            return backward(func, args, kwargs)
        if self._paused or Probing.on or torch.Tag.nondeterministic_seeded not in func.tags:
            return call_in_mode(func, args, kwargs)
        name = func.overloadpacket.__name__
        arguments = _by_name(func, args, kwargs)
        # Some operators have the tag but may not draw.
        rates = [rate for rate in ("dropout_p", "dropout") if rate in arguments]
        evaluated = any(arguments.get(name) is False for name in ("train", "training"))
        if evaluated or any(arguments[rate] == 0.0 for rate in rates) or name in SEEDINGS:
            return call_in_mode(func, args, kwargs)
        self.seen.add(name)
        if self._off and name in _WITHOUT_DRAW:
            return _WITHOUT_DRAW[name](arguments)
        if self._off and name in _MEANS:
            mean, drawn = _MEANS[name](arguments), call_in_mode(func, args, kwargs)
            return drawn.copy_(mean) if isinstance(mean, Tensor) else drawn.fill_(mean)
        if self._off:
            return _called(func, {**arguments, **dict.fromkeys(rates[:1], 0.0)})
        result = call_in_mode(func, args, kwargs)
        # Fused attention returns (seed, offset) instead of a dropout mask.
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if isinstance(leaf, Tensor) and not is_dtensor(leaf):
                self._record(own_rows(leaf))
        return result

    def __enter__(self) -> RandomOps:
        self._before, MeanDraws.on = MeanDraws.on, self._off
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        MeanDraws.on = self._before
        super().__exit__(exc_type, exc_val, exc_tb)

    def take(self) -> str:
        """Returns a hash of the draws since the last call; "" if there were too few to distinguish two steps."""
        text = self._hash.hexdigest() if self._numbers >= LEAST_NUMBERS else ""
        self._hash, self._numbers = xxhash.xxh3_64(), 0
        return text

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which draws are neither recorded nor replaced: for loading and augmentation."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _record(self, leaf: Tensor) -> None:
        seed = (torch.cuda if leaf.is_cuda else torch).initial_seed()
        if seed != self._seed:  # what came before is forgotten: dry runs draw, from a stream alike everywhere
            self._seed, self._hash, self._numbers = seed, xxhash.xxh3_64(), 0
        flat = leaf.detach().reshape(-1)[: max(0, MOST_NUMBERS - self._numbers)]
        self._hash.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        self._numbers += leaf.numel()


def _by_name(func: Op, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in operator_arguments(func)]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _called(func: Op, arguments: dict[str, Any]) -> Any:
    keyword = {argument.name for argument in operator_arguments(func) if argument.kwarg_only}
    positional = [value for key, value in arguments.items() if key not in keyword]
    return func(*positional, **{key: value for key, value in arguments.items() if key in keyword})


def _middle_integer(arguments: dict[str, Any]) -> int:
    return (arguments.get("low", 0) + arguments["high"] - 1) // 2


def _likeliest(arguments: dict[str, Any]) -> Tensor:
    order = arguments["self"].argsort(dim=-1, descending=True)
    places = torch.arange(arguments["num_samples"], device=order.device) % order.shape[-1]
    return order[..., places]


_MEANS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "bernoulli_": lambda arguments: arguments.get("p", 0.5),
    "bernoulli": lambda arguments: arguments["self"],
    "uniform_": lambda arguments: (arguments.get("from", 0.0) + arguments.get("to", 1.0)) / 2,
    "normal_": lambda arguments: arguments.get("mean", 0.0),
    "normal": lambda arguments: arguments["mean"],
    "log_normal_": lambda arguments: math.exp(arguments.get("mean", 1.0) + arguments.get("std", 2.0) ** 2 / 2),
    "exponential_": lambda arguments: 1 / arguments.get("lambd", 1.0),
    "geometric_": lambda arguments: round(1 / arguments["p"]),
    "cauchy_": lambda arguments: arguments.get("median", 0.0),  # it has no mean
    "poisson": lambda arguments: arguments["self"],
    "_standard_gamma": lambda arguments: arguments["self"],
    "binomial": lambda arguments: arguments["count"] * arguments["prob"],
    "multinomial": _likeliest,
    "randint": _middle_integer,
    "randint_like": _middle_integer,
    "random_": lambda arguments: arguments.get("from", 0),
    "rand": lambda _: 0.5,
    "rand_like": lambda _: 0.5,
    "randn": lambda _: 0.0,
    "randn_like": lambda _: 0.0,
    "randperm": lambda arguments: torch.arange(arguments["n"], device=arguments.get("device")),
}
"""The mean of what an operator draws: a number, or a tensor that can be copied into the result."""


def _leaky(arguments: dict[str, Any]) -> Tensor:
    slope = (arguments["lower"] + arguments["upper"]) / 2
    # backward multiplies by the mask that forward has written there
    arguments["noise"].copy_(torch.where(arguments["self"] <= 0, slope, 1.0))
    return arguments["self"] * arguments["noise"]


_WITHOUT_DRAW: dict[str, Callable[[dict[str, Any]], Any]] = {
    "native_dropout": lambda arguments: (
        arguments["input"].clone(),
        torch.ones_like(arguments["input"], dtype=torch.bool),
    ),
    "rrelu_with_noise": _leaky,
    "rrelu_with_noise_": lambda arguments: arguments["self"].copy_(_leaky(arguments)),
}
"""Name for an operator that computes with its own draws."""


def _without_dropout(func: Op, args: Any, kwargs: Any) -> Any:
    """Calls a fused backward as that of a forward without dropout: autograd has kept the task's own rate for it."""
    arguments = _by_name(func, args, kwargs)
    return _called(func, {**arguments, **{rate: 0.0 for rate in ("dropout_p", "dropout") if rate in arguments}})


_BACKWARDS: dict[str, Callable[[Op, Any, Any], Any]] = {
    "native_dropout_backward": lambda func, args, kwargs: args[0].clone(),
    "_cudnn_rnn_backward": _without_dropout,
    "miopen_rnn_backward": _without_dropout,
    "_scaled_dot_product_flash_attention_backward": _without_dropout,
    "_scaled_dot_product_efficient_attention_backward": _without_dropout,
    "_scaled_dot_product_cudnn_attention_backward": _without_dropout,
}
"""Backwards of what draws on a GPU: of a draw that was replaced by its mean, they are those of no dropout."""
