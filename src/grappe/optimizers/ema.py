"""EMA: an exponential moving average of the weights, which is what is evaluated and saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from grappe.errors import TaskError
from grappe.optimizers.arguments import check_below_one
from grappe.step.clip import local_part

AVERAGE = "average"


class EMA(Optimizer):
    """An optimizer, and beside each parameter w the average of its values, a = decay a + (1 - decay) w.

    a begins as w after its first update. The average is what is evaluated, saved and loaded; training goes on from w.
    It is sharded as w is, and part of the optimizer's state. The same as torch.optim.swa_utils.AveragedModel with
    get_ema_multi_avg_fn(decay), on any plan; buffers are not averaged.

    Raises:
        TaskError: `optimizer` is none, or decay is out of its range.
    """

    def __init__(self, optimizer: Optimizer, decay: float = 0.999) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TaskError(
                "EMA(optimizer) takes an optimizer. Horovod makes optimizers anew from their parameter groups, "
                "which EMA cannot be made from: use another engine than horovod"
            )
        check_below_one("EMA", decay=decay)
        self.inner, self.decay = optimizer, decay
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self.state = optimizer.state
        self._evaluated = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the optimizer, then each average."""
        loss = self.inner.step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue  # not moved; a state of its own would look to the optimizer as one of its making
                state = self.state[parameter]
                if AVERAGE in state:
                    local_part(state[AVERAGE]).lerp_(local_part(parameter), 1 - self.decay)
                else:
                    state[AVERAGE] = parameter.detach().clone()
        return loss

    def eval(self) -> None:
        """Puts the averages into the model."""
        if not self._evaluated:
            self._swap()

    def train(self) -> None:
        """Puts the trained weights back into the model."""
        if self._evaluated:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        self._evaluated = not self._evaluated
        for group in self.param_groups:
            for parameter in group["params"]:
                if AVERAGE in self.state.get(parameter, ()):
                    mine, other = local_part(parameter), local_part(self.state[parameter][AVERAGE])
                    value = mine.clone()
                    mine.copy_(other)
                    other.copy_(value)
