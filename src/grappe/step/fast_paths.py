"""Fast paths: torch's work at every step, without torch's checks, wrappers and messages.

Seeding of random generators, backward, and the optimizer's step; each has the same bits as torch's own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from grappe.data.draw import mix_steps
from grappe.data.seeded import seed_python
from grappe.private_api.torch import is_schedulers_step, profiler_enabled, run_backward, step_hooks, unwrapped_step

SEEDS_AT_ONCE = 256


# ---- Seeding -----------------------------------------------------------------------------------------------


def seed_dropout(seed: int, step: int, device: torch.device, *place: int) -> None:
    """Seeds torch's, Python's and NumPy's generators for `step`; as torch.manual_seed, less its 150 microseconds.

    Dropout's stream is a function of (seed, step, place), so that resuming needs no generator's state. Python's and
    NumPy's are functions of (seed, step): what a forward draws from them is for the whole batch, as a branch is.

    Args:
        place: the data slice, and what distinguishes this process from others of the same slice; 0 where each
            microbatch draws for the whole batch.
    """
    number, place_in_list = divmod(step, SEEDS_AT_ONCE)
    seed_torch(_seeds(seed, number, *place)[place_in_list], device)
    seed_python(_seeds(seed, number)[place_in_list])


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds torch's generators, Python's and NumPy's from 63 bits."""
    seed_torch(seed, device)
    seed_python(seed)


def seed_torch(seed: int, device: torch.device) -> None:
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
    """Calls optimizer.step() without torch's wrappers, when no profiler and no hook is active.

    The outer one takes 9 microseconds on a CPU, as long as torch's foreach SGD takes for a dozen parameters.
    """

    def __init__(self, made: Optimizer) -> None:
        self._optimizer = made
        self._inside, self._sets_mode = unwrapped_step(made)
        self._hooks = step_hooks(made)
        self._schedules: Any = None
        """Function by which a schedule replaced `step`, to see that it was called at all."""

    def __call__(self) -> None:
        made, inside = self._optimizer, self._inside
        own = made.__dict__.get("step")  # put there by a schedule, or by somebody else
        if inside is None or own is not self._schedules or profiler_enabled() or any(self._hooks):
            made.step()
            if own is None or is_schedulers_step(own):
                self._schedules = own
            return
        if not self._sets_mode:
            inside(made)
            return
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(made.defaults["differentiable"])
        try:
            inside(made)
        finally:
            torch.set_grad_enabled(before)
