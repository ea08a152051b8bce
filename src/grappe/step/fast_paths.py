"""Fast paths: torch's work at every step, without torch's checks, wrappers and messages.

Seeding of random generators, backward, and the optimizer's step; each has the same bits as torch's own.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.optim import Optimizer

from grappe.data.draw import mix_steps
from grappe.private_api.torch import (
    is_schedulers_step,
    mark_step_called,
    run_backward,
    step_is_observed,
    unwrapped_step,
)

SEEDS_AT_ONCE = 256


# ---- Seeding -----------------------------------------------------------------------------------------------


def seed_dropout(seed: int, step: int, device: torch.device, *place: int) -> None:
    """Seeds torch's generators for `step`; as torch.manual_seed, less its 150 microseconds.

    Dropout's stream is a function of (seed, step, place), so that resuming needs no generator's state.

    Args:
        place: the data slice, and what distinguishes this process from others of the same slice; 0 where each
            microbatch draws for the whole batch.
    """
    seed_generators(_seeds(seed, step // SEEDS_AT_ONCE, *place)[step % SEEDS_AT_ONCE], device)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds the generators of the CPU and of the device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


@functools.lru_cache(maxsize=8)
def _seeds(seed: int, number: int, *words: int) -> list[int]:
    """Computes the seeds of SEEDS_AT_ONCE steps: one by one, each seed would take 5 microseconds."""
    return mix_steps(seed, number * SEEDS_AT_ONCE, SEEDS_AT_ONCE, *words)


# ---- Backward ----------------------------------------------------------------------------------------------


def backward(roots: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """Adds the gradient of sum(root . gradient) to the leaves (backward); gradients have their roots' shapes and types.

    torch.autograd.backward takes 35 microseconds for checks that are not needed here.
    """
    if run_backward is None or torch.compiler.is_compiling():
        torch.autograd.backward(roots, gradients)
    else:
        run_backward(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


# ---- The optimizer's step ----------------------------------------------------------------------------------


class OptimizerStep:
    """Calls optimizer.step() without torch's profiler and hook wrapper, when no profiler and no hook is active.

    The wrapper takes 9 microseconds on a CPU, as long as torch's foreach SGD takes for a dozen parameters.
    """

    def __init__(self, made: Optimizer) -> None:
        self._optimizer = made
        self._inside = unwrapped_step(made)

    def __call__(self) -> None:
        made, inside = self._optimizer, self._inside
        own = made.__dict__.get("step")  # put there by a schedule, or by somebody else
        if inside is None or step_is_observed(made) or (own is not None and not is_schedulers_step(own)):
            made.step()
            return
        if own is not None:
            mark_step_called(made)  # all that a schedule's wrapper does
        inside(made)
