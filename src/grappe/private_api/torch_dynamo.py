"""Keeps torch's optimizers from importing torch._dynamo in a process that compiles nothing. Seen in torch 2.11 to 2.13.

torch takes as long to import torch._dynamo as to import all of itself. Its optimizers import it when one is made and at
each step, only to tell a compiler to leave them alone; while it is not loaded there is no compiler to tell.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from grappe.private_api.name import PrivateName

DYNAMO = "torch._dynamo"
MARK = "__dynamo_disable"  # where torch._disable_dynamo keeps what it made of a function
USED: tuple[PrivateName, ...] = ()  # found by what they do, which its own test looks at
METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
STEP = "_use_grad"  # what torch.optim.optimizer wraps each step in


def leave_unloaded() -> None:
    """Has torch's optimizers do the same without torch._dynamo in this process, until somebody else loads it."""
    if DYNAMO in sys.modules:
        return
    import torch
    from torch.optim import Optimizer

    for name in METHODS:
        _leave_enabled(getattr(Optimizer, name))
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer) and is_wrapped(vars(kind).get("step")):
            kind.step = _without_dynamo(vars(kind)["step"])  # type: ignore[method-assign]


def is_wrapped(step: Any) -> bool:
    """Whether `step` has torch's wrapper that imports torch._dynamo."""
    code = getattr(step, "__code__", None)
    return code is not None and code.co_name == STEP and hasattr(step, "__wrapped__")


def _leave_enabled(method: Any) -> None:
    """Calls `method` as it is until torch._dynamo is loaded, and from then on as torch does."""
    inside = getattr(method, "__wrapped__", None)
    if inside is None or hasattr(inside, MARK):
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        if DYNAMO not in sys.modules:
            return inside(*args, **kwargs)
        vars(inside).pop(MARK, None)
        return method(*args, **kwargs)

    setattr(inside, MARK, call)


def _without_dynamo(step: Any) -> Callable[..., Any]:
    """What torch's wrapper does, less its messages to a compiler."""
    import torch

    inside = step.__wrapped__

    @functools.wraps(step)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if DYNAMO in sys.modules:
            return step(self, *args, **kwargs)
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(self.defaults["differentiable"])
            return inside(self, *args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return call
