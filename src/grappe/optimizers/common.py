"""Parts of optimizers: norms of whole tensors, Adam's moments, checks; groups by name; modes; larger batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, LRScheduler

from grappe.errors import TaskError, nearest
from grappe.step.clip import by_groups, local_part


class GroupOptimizer(Optimizer):
    """Optimizer whose derived classes write `move`, the step of the parameters of a group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves each parameter that has a gradient. Collective where parameters are sharded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if parameters := [parameter for parameter in group["params"] if parameter.grad is not None]:
                self.move(parameters, group)
        return loss

    def move(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Moves parameters, which have gradients, by the settings of their group."""
        raise NotImplementedError


def whole_norms(parts: Sequence[Tensor], placed_as: Sequence[Tensor]) -> Tensor:
    """Computes the 2-norm of each whole tensor, float64 [n], alike on every process. Collective where sharded.

    Args:
        parts: this process's part of each tensor.
        placed_as: for each, a tensor that lies on the processes in the same way: its parameter.

    Added up in float64: in float32 a sharded and a whole tensor would differ by more than rounding (see step/clip).
    One reduction for all tensors that are sharded over the same processes.
    """
    norms: list[Tensor] = [torch.empty(0)] * len(parts)
    for groups, numbers in by_groups(placed_as):
        squares = torch.stack(
            [torch.linalg.vector_norm(parts[number], dtype=torch.float64).square() for number in numbers]
        )
        for group in groups:
            dist.all_reduce(squares, group=group)
        for number, norm in zip(numbers, squares.sqrt().unbind(), strict=True):
            norms[number] = norm
    return torch.stack(norms)


def norm_pairs(parameters: Sequence[nn.Parameter], others: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Computes the norms of parameters and of this process's `others`, which lie as they do: float64 [n] each.

    Collective where parameters are sharded.
    """
    parts = [local_part(parameter).detach() for parameter in parameters]
    weights, rest = whole_norms([*parts, *others], [*parameters, *parameters]).split(len(parameters))
    return weights, rest


def ratio(above: Tensor, below: Tensor, like: Tensor) -> Tensor:
    """Divides; 1 where either is 0, as for a parameter that begins with zeros: float32 [n], or float64 as `like`."""
    positive = (above > 0) & (below > 0)
    return torch.where(positive, above / below.clamp_min(torch.finfo(torch.float64).tiny), 1.0).to(
        torch.promote_types(like.dtype, torch.float32)
    )


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Returns this process's part of a parameter's gradient, which must exist."""
    assert parameter.grad is not None
    return local_part(parameter.grad)


def adam_direction(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Updates the moments by the gradient and computes m / (sqrt(v) + eps), both without bias, of this process's part.

    `group` has betas and eps. Source: Kingma, Ba 2015, arXiv:1412.6980, algorithm 1.
    """
    if "step" not in state:
        state["step"] = torch.zeros(())  # a tensor, as torch's own optimizers count
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    state["step"] += 1
    step, (beta, second) = state["step"].item(), group["betas"]
    gradient = local_gradient(parameter)
    mean, square = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
    mean.lerp_(gradient, 1 - beta)
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    below = square.sqrt().div_((1 - second**step) ** 0.5).add_(group["eps"])
    return mean.div(1 - beta**step).div_(below)


def check(name: str, **numbers: float) -> None:
    """Raises TaskError where a number is not at least 0."""
    for key, value in numbers.items():
        if not value >= 0:
            raise TaskError(f"{name}({key}={value}): it must be at least 0")


def check_below_one(name: str, **numbers: float) -> None:
    """Raises TaskError where a number is not in [0, 1)."""
    for key, value in numbers.items():
        if not 0 <= value < 1:
            raise TaskError(f"{name}({key}={value}): it must be at least 0 and below 1")


def by_name(
    named_parameters: Iterable[tuple[str, nn.Parameter]], rules: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Sorts parameters into groups for any optimizer: one for each rule, and first one for all that no rule matches.

    Args:
        rules: by pattern of names (`*.bias`, `blocks.0.*`), the options of the group. The first that matches decides.

    Raises:
        TaskError: a pattern matches no parameter that is trained.
    """
    rest: dict[str, Any] = {"params": []}
    groups = {pattern: {"params": [], **options} for pattern, options in rules.items()}
    matched, names = set(), []
    for name, parameter in named_parameters:
        patterns = [pattern for pattern in rules if fnmatchcase(name, pattern)]
        matched.update(patterns)
        names.append(name)
        (groups[patterns[0]] if patterns else rest)["params"].append((name, parameter))
    for pattern in rules:
        if pattern not in matched:
            raise TaskError(f"by_name: no trained parameter is called {pattern!r}: {nearest(pattern, names)}")
    return [group for group in (rest, *groups.values()) if group["params"]]


def has_modes(optimizer: Optimizer) -> bool:
    """Says whether the optimizer has train() and eval(), as schedule-free ones do."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def begin_training(optimizer: Any) -> None:
    """Puts an optimizer that has modes into its training mode; some refuse to step without."""
    if has_modes(optimizer):
        optimizer.train()


@contextlib.contextmanager
@torch.no_grad()
def evaluated_weights(optimizer: Any) -> Iterator[None]:
    """Inside, parameters have the values that are to be evaluated and saved; afterwards their own, to the bit.

    train() may compute the trained values from the evaluated ones, with rounding: then when a training is evaluated or
    saved would change what it learns. So they are kept, which takes the parameters' memory once more.
    """
    if not has_modes(optimizer):
        yield
        return
    parameters = [local_part(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    kept = [parameter.clone() for parameter in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)


LrScaling = Literal["none", "linear", "sqrt"]
"""Rule for the learning rate of a batch of k times as many samples: as it is, k times it, or sqrt(k) times it."""

CHAINABLE = (
    ChainedScheduler,
    lr_scheduler.ConstantLR,
    lr_scheduler.CosineAnnealingLR,
    lr_scheduler.ExponentialLR,
    LinearLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.StepLR,
)
"""Schedules that modify the current rate; others compute it again at each step, whatever a warm-up did."""


def scale_factor(rule: LrScaling, *, batch_size: int, base: int) -> float:
    """Returns the factor from the learning rate for batches of `base` samples to the rate for `batch_size`.

    linear: for SGD (Goyal et al. 2017, "Accurate, large minibatch SGD"). sqrt: it keeps the variance of an update
    (Krizhevsky 2014, "One weird trick"); for Adam (Malladi et al. 2022, "On the SDEs and scaling rules for adaptive
    gradient algorithms").
    """
    k = batch_size / base
    return {"none": 1.0, "linear": k, "sqrt": math.sqrt(k)}[rule]


def warmed_up(optimizer: Optimizer, schedule: LRScheduler | None, *, factor: float, steps: int) -> LRScheduler | None:
    """Returns `schedule` with a warm-up before and within it: from the rate before scaling to the scaled one.

    Args:
        schedule: of the scaled rate; None: it is constant.
        factor: what the rate was multiplied by; at 1 or below, nothing is warmed up.
        steps: optimizer steps until the scaled rate is reached.

    Raises:
        TaskError: `schedule` computes its rate from the step alone, and would undo the warm-up.
    """
    if factor <= 1 or steps < 1:
        return schedule
    if schedule is not None and not isinstance(schedule, CHAINABLE):
        raise TaskError(
            f"{type(schedule).__name__} computes its rate from the step alone and would undo the warm-up: write the "
            f"warm-up into it, without warmed_up, or take one of {', '.join(kind.__name__ for kind in CHAINABLE[1:])}"
        )
    rising = LinearLR(optimizer, start_factor=1 / factor, total_iters=steps)
    return rising if schedule is None else ChainedScheduler([rising, schedule], optimizer)
