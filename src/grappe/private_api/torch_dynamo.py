"""Keeps torch's optimizers from importing torch._dynamo in a process that compiles nothing. Seen in torch 2.11 to 2.13.

The import of torch._dynamo takes as long as the import of torch. torch's optimizers import it when one is made and at
each step, only to exclude themselves from compilation; while torch._dynamo is not loaded, nothing is compiled.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from grappe.private_api import PrivateName

DYNAMO = "torch._dynamo"
MARK = "__dynamo_disable"  # where torch._disable_dynamo keeps what it made of a function
USED: tuple[PrivateName, ...] = ()  # found by what they do, which its own test looks at
METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
STEP = "_use_grad"  # what torch.optim.optimizer wraps each step in


def leave_unloaded() -> None:
    """Makes torch's optimizers work without torch._dynamo in this process, until other code imports it."""
    if DYNAMO in sys.modules:
        return
    import torch
    from torch.optim import Optimizer

    for name in METHODS:
        leave_enabled(getattr(Optimizer, name))
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer) and is_wrapped(vars(kind).get("step")):
            kind.step = _without_dynamo(vars(kind)["step"])  # type: ignore[method-assign]


def is_wrapped(step: Any) -> bool:
    """Returns whether `step` has torch's wrapper that imports torch._dynamo and sets the gradient mode."""
    code = getattr(step, "__code__", None)
    return code is not None and code.co_name == STEP and hasattr(step, "__wrapped__")


def leave_enabled(method: Any) -> None:
    """Calls torch's function `method` directly until torch._dynamo is loaded, and from then on as torch does."""
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
    """Does the same as torch's wrapper, without its calls to the compiler; it has the same name."""
    import torch

    inside = step.__wrapped__

    @functools.wraps(inside)
    def _use_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        if DYNAMO in sys.modules:
            return step(self, *args, **kwargs)
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(self.defaults["differentiable"])
            return inside(self, *args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return _use_grad
