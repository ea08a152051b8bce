"""Averages gradients over processes during each backward, whatever parameters it reaches.

For hand-written loops, whose backwards differ: several a step, other branches at each step, parts that a backward does
not reach. DDP would look for unused parameters at every step, wrap the model, and fail where it was not told to.

Shapes: P parameters. Large gradients are reduced where they are, small ones in buckets of 25 MB; both while backward
goes on, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grappe.private_api.torch import after_backward, foreach_copy_

BUCKET_BYTES = 25 * 1024**2
FIRST_BUCKET_BYTES = 1024**2  # communication begins early
LARGE_BYTES = 2 * 1024**2
"""Of a gradient that is reduced where it is: copies would take longer than a message more."""


class _Bucket:
    """Parameters whose gradients are reduced together.

    Args:
        flags: numbers after the gradients, one for each parameter of all buckets; 0 but in the last bucket.
    """

    def __init__(self, numbers: list[int], parameters: list[nn.Parameter], flags: int) -> None:
        self.numbers = numbers
        self.parameters = parameters
        self.waiting = len(parameters)
        self.work: dist.Work | None = None
        self.is_large = not flags and parameters[0].nbytes >= LARGE_BYTES
        sizes = [0 if self.is_large else each.numel() for each in parameters]
        self.flat = parameters[0].detach().new_zeros(sum(sizes) + flags)
        pieces = [] if self.is_large else self.flat[: sum(sizes)].split(sizes)
        self.views = [piece.view(each.shape) for piece, each in zip(pieces, parameters, strict=False)]

    def filled(self) -> Tensor:
        """Returns what is to be reduced: the gradients, zeros where there is none."""
        if self.is_large:
            [parameter] = self.parameters
            if parameter.grad is None:
                self.flat = torch.zeros_like(parameter)
            return self.flat if parameter.grad is None else parameter.grad
        pairs = zip(self.views, self.parameters, strict=True)
        present = [(view, parameter.grad) for view, parameter in pairs if parameter.grad is not None]
        if len(present) < len(self.views):
            self.flat.zero_()
        if present:
            foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])
        return self.flat

    def put_back(self, reached: list[bool]) -> None:
        """Puts the means where the gradients were; leaves gradients that no process's backward has reached."""
        means = [self.flat] if self.is_large else self.views
        into, values = [], []
        for number, parameter, mean in zip(self.numbers, self.parameters, means, strict=True):
            if reached[number] and parameter.grad is None:
                parameter.grad = mean if self.is_large else mean.clone()
            elif reached[number] and not self.is_large:
                into.append(parameter.grad)
                values.append(mean)
        if into:
            foreach_copy_(into, values)
        self.waiting = len(self.parameters)


class GradientAverage:
    """Averages the gradients of `parameters`, which are the same on every process, in each backward. Collective.

    After a backward `parameter.grad` is the mean over the processes of what was there before and what the backward has
    added: so backwards add up as they do in one process. A gradient that no process has stays None.

    Args:
        group: the processes, each of which must run the same backwards.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        self._all = list(parameters)
        self._hooks: list[Any] = []
        self._covered = set[nn.Parameter]()
        self._reached: list[bool] = []
        self._buckets: list[_Bucket] = []
        self.deferred = False
        """Whether backwards only add up here: the next one after these, or `finish`, averages all together."""
        self._started: int | None = None
        """The number of buckets of the running backward that are being reduced; None outside of a backward."""
        self.renew()

    def renew(self) -> None:
        """Takes in parameters that were frozen before. Call it between backwards, on all processes."""
        covered = len(self._hooks)
        trained = [each for each in self._all if each.requires_grad or each in self._covered]
        if covered == len(trained):
            return
        for hook in self._hooks:
            hook.remove()
        self._covered = set(trained)
        self._reached = [False] * len(trained)
        self._buckets = _buckets(trained)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, number))
            for bucket in self._buckets
            for number, parameter in zip(bucket.numbers, bucket.parameters, strict=True)
        ]

    def _hook(self, bucket: _Bucket, number: int) -> Callable[[Tensor], None]:
        def came(parameter: Tensor) -> None:
            self._reached[number] = True
            if self.deferred:
                return
            if self._started is None:
                self._started = 0
                after_backward(self._finish)
            bucket.waiting -= 1
            while self._started < len(self._buckets) and not self._buckets[self._started].waiting:
                self._start()

        return came

    def finish(self) -> None:
        """Averages what deferred backwards have left, if no other has come after them."""
        self.deferred = False
        if any(self._reached):
            self._started = 0
            self._finish()

    @torch.no_grad()
    def _start(self) -> None:
        """Begins to reduce the next bucket."""
        assert self._started is not None
        bucket = self._buckets[self._started]
        self._started += 1
        gradients = bucket.filled()
        if bucket is self._buckets[-1]:
            flags = torch.tensor(self._reached, dtype=gradients.dtype)
            gradients[-len(self._reached) :].copy_(flags, non_blocking=True)
        bucket.work = dist.all_reduce(gradients.div_(self._size), group=self._group, async_op=True)

    @torch.no_grad()
    def _finish(self) -> None:
        """Reduces what is left at the backward's end, and puts the means where the gradients were."""
        assert self._started is not None
        while self._started < len(self._buckets):
            self._start()
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work = None
        reached = self._reached
        if not all(reached):  # on a GPU this waits for the reduction
            reached = (self._buckets[-1].flat[-len(reached) :] > 0).tolist()
        for bucket in self._buckets:
            bucket.put_back(reached)
        self._reached = [False] * len(reached)
        self._started = None


def _buckets(parameters: list[nn.Parameter]) -> list[_Bucket]:
    """Groups parameters of one type and device, in the order in which backward has all gradients of a group."""
    groups: list[list[int]] = []
    small: list[int] = []  # the group that is being filled
    size = 0
    for number in reversed(range(len(parameters))):
        parameter = parameters[number]
        if parameter.nbytes >= LARGE_BYTES:
            groups.append([number])
            continue
        limit = FIRST_BUCKET_BYTES if len(groups) <= 1 else BUCKET_BYTES
        last = parameters[small[-1]] if small else parameter
        if not small or size >= limit or (last.dtype, last.device) != (parameter.dtype, parameter.device):
            groups.append(small := [])
            size = 0
        small.append(number)
        size += parameter.nbytes
    groups.sort(key=lambda numbers: -numbers[-1])
    members = [(numbers, [parameters[number] for number in numbers]) for numbers in groups]
    return [_Bucket(*each, flags=len(parameters) if each is members[-1] else 0) for each in members]
