"""Domain: the processes that hold the parts of the same samples, what they send, and their terms of gradients."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe.private_api.torch import gradients_handed_over
from grappe.rows.context import RowsContext
from grappe.rows.exchange import every_row, noted
from grappe.rows.layout import Placement, even
from grappe.rows.messages import own_part
from grappe.rows.plans import activate
from grappe.rows.tensor import Rows, from_local, full, own_local, own_term
from grappe.words import sent_in_step

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Sent = Counter[tuple[str, str]]


@dataclass(kw_only=True)
class Domain(RowsContext):
    """The processes that hold the parts of the same samples."""

    summed: ProcessGroup | None
    """The processes over which gradients are summed: those of `group`, for all data slices."""
    cut: str = "sample"
    """The plan key."""
    of_step: Sent = field(default_factory=Counter)
    """Messages and bytes of the second training step; of the gradients, which DDP or FSDP2 sums, bytes alone."""
    _began: float = field(default_factory=time.perf_counter)
    _entered: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.gathers = self.cut == "batch"
        self.exchanges = not self.gathers
        super().__post_init__()

    def enter(self, *, sharded: bool = False) -> None:
        """Begins what this process does in parts of samples.

        Args:
            sharded: whether FSDP2 sums the gradients.
        """
        mha, fast = torch.backends.mha, torch.backends.mha.get_fastpath_enabled()
        self._entered.callback(mha.set_fastpath_enabled, fast)
        mha.set_fastpath_enabled(False)  # which is one operator for a whole layer
        self._entered.callback(setattr, F, "pad", F.pad)
        F.pad = _padded
        self._entered.enter_context(activate(self))
        if sharded:
            self._entered.enter_context(gradients_handed_over(self.gradient_term))

    def leave(self) -> None:
        """Ends it."""
        self._entered.close()

    def counted(self) -> Sent:
        """Returns the messages and bytes that this process has sent so far, forward and backward, by purpose."""
        bytes_sent = {(purpose, "bytes"): number for purpose, number in self.sent.items()}
        return Counter({(purpose, "messages"): number for purpose, number in self.sends.items()} | bytes_sent)

    def remarks(self) -> list[str]:
        """Returns what a training step sends, for the run's summary."""
        sizes = sent_in_step(self.by_purpose())
        gathering = self.gathering(time.perf_counter() - self._began)
        return [*([f"domain= sends in a step, from process 0: {sizes}"] if sizes else ()), *filter(None, [gathering])]

    def by_purpose(self) -> dict[str, dict[str, int]]:
        """Returns the messages and bytes of a training step; none before the second."""
        purposes: dict[str, dict[str, int]] = {}
        for (purpose, what), number in self.of_step.items():
            purposes.setdefault(purpose, {})[what] = number
        return purposes

    def gradient_term(self, gradient: Tensor) -> Tensor:
        """Returns this process's term of a gradient that came from an Nth of the loss's: fp16 holds no larger ones."""
        return own_term(gradient, self.size) * self.size if type(gradient) is Rows else gradient


_pad = F.pad


def _padded(input: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    if mode == "circular" and type(input) is Rows:  # of torch's own, the gradient needs places in memory
        for at in range(0, len(pad), 2):
            dim, (before, after) = input.dim() - 1 - at // 2, pad[at : at + 2]
            ends = input.narrow(dim, input.shape[dim] - before, before), input, input.narrow(dim, 0, after)
            input = torch.cat([each for each in ends if each.shape[dim]], dim)
        return input
    return _pad(input, pad, mode, value)


def take_terms(parameters: Iterator[nn.Parameter], domain: Domain) -> None:
    """Has DDP, and whoever sums gradients over the processes, get this process's terms."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(domain.gradient_term)


def cut(plain: Tensor, dim: int) -> Rows:
    """Returns a tensor that every process has, cut into even parts; keeps this process's part alone in memory."""
    dim %= plain.dim()
    placement = Placement(dim, noted(even(plain.shape[dim])))
    return from_local(own_part(plain, placement).clone(), placement)


def gathered(value: Any, purpose: str) -> Any:
    """Returns all rows of what is cut, on every process; the rest as it is. Collective."""
    if type(value) is not Rows:
        return value
    placement = value._cell.layout.placement
    if type(placement) is not Placement:
        return full(value).detach()
    return every_row(own_local(value).detach(), placement, purpose)
