"""Data workers of a script's loader, shared out over the processes: each batch is loaded once, and its rows are sent.

One process has W workers, of which worker w loads the batches w, w + W, ..., with random numbers of its own. Here the
batches of worker w are loaded by the process w % P alone, whose worker w draws the same numbers: a dataset may draw,
count and read what it likes. Worker w of another process loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from grappe.private_api.torch import tree_leaves, tree_map
from grappe.rows.context import NOW
from grappe.rows.layout import Placement, even
from grappe.rows.tensor import from_local, usual_rows
from grappe.training.interception import Begin

SENT_WHOLE = 1 << 16
"""Bytes up to which a tensor is sent whole: labels, whose numbers are then read without a message."""
SENT = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
     torch.int64, torch.bool}
)  # fmt: skip
"""Types of tensors whose rows are sent; others are sent whole."""


class Elsewhere:
    """Stands for a batch that another process loads."""


_share: tuple[int, int] | None = None
"""Rank and number of processes, for the workers that are forked now."""


def fetching(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns the function by which a worker loads a batch: one that is another process's is not loaded."""

    def fetch(fetcher: Any, indices: Any) -> Any:
        worker = get_worker_info()
        if _share is None or worker is None or worker.id % _share[1] == _share[0]:
            return plain(fetcher, indices)
        return Elsewhere()

    return fetch


def begun(loader: DataLoader[Any], begin: Begin, group: ProcessGroup) -> Iterator[Any]:
    """Begins an iteration of a loader, whose workers are shared if they are forked and load samples by number.

    Args:
        group: all processes, for messages of batches alone.
    """
    global _share  # noqa: PLW0603 - forked workers read it
    if not _can_be_shared(loader):
        return begin()
    _share = group.rank(), group.size()
    try:
        return SharedIteration(begin(), loader, group)
    finally:
        _share = None


def _can_be_shared(loader: DataLoader[Any]) -> bool:
    context = loader.multiprocessing_context
    method = torch.multiprocessing.get_start_method() if context is None else context.get_start_method()  # type: ignore[attr-defined]
    by_number = not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None
    return loader.num_workers > 0 and by_number and method == "fork" and getattr(loader, "in_order", True)


class SharedIteration:
    """An iteration of a loader, of which each process has loaded a part. Collective in each batch."""

    def __init__(self, plain: Iterator[Any], loader: DataLoader[Any], group: ProcessGroup) -> None:
        self._plain, self._workers, self._group = plain, loader.num_workers, group
        self._pins = loader.pin_memory and torch.cuda.is_available()
        self._taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        owner = self._taken % self._workers % self._group.size()
        self._taken += 1
        is_mine = self._group.rank() == owner
        batch, head = None, [None, None]
        try:
            batch = next(self._plain)  # ends on all processes at once
            head = [None, tree_map(_kept_back(batch), batch)] if is_mine else head
        except StopIteration:
            raise
        except Exception as error:
            if not is_mine:
                raise
            head = [error, None]
        source = dist.get_global_rank(self._group, owner)
        try:
            dist.broadcast_object_list(head, src=source, group=self._group)
        except Exception:
            if head[0] is None:
                raise
            head = [RuntimeError(str(head[0])), None]  # an error that cannot be sent
            dist.broadcast_object_list(head, src=source, group=self._group)
        error, form = head
        if error is not None:
            raise error
        return self._joined(form, batch, owner)

    def _joined(self, form: Any, batch: Any, owner: int) -> Any:
        """Returns the batch, with rows in place of meta tensors, of which the owner sends each process its own."""
        rank, works = self._group.rank(), list[Any]()
        tensors = iter(tree_leaves(batch)) if rank == owner else None

        def own(leaf: Any) -> Any:
            tensor = None if tensors is None else next(tensors)
            if type(leaf) is not Tensor or not leaf.is_meta:
                return leaf
            placement = Placement(0, even(leaf.shape[0]))
            if tensor is None:
                part = torch.empty((placement.rows, *leaf.shape[1:]), dtype=leaf.dtype, pin_memory=self._pins)
                dist.recv(_bytes(part), src=dist.get_global_rank(self._group, owner), group=self._group)
                return from_local(part, placement)
            parts = [part.contiguous() for part in tensor.split(placement.sizes)]
            for other, sent in enumerate(parts):
                if other != rank:
                    target = dist.get_global_rank(self._group, other)
                    works.append(dist.isend(_bytes(sent), dst=target, group=self._group))
            return from_local(parts[rank].pin_memory() if self._pins else parts[rank].clone(), placement)

        joined = tree_map(own, form)
        for work in works:
            work.wait()
        return joined


def _bytes(part: Tensor) -> Tensor:
    return part.reshape(-1).view(torch.uint8)


def loaded_rows(batch: Any) -> int:
    """Returns the rows that most tensors of a script's batch have; 0 if it has none with rows.

    Lists of one length, as `zip(*samples)` makes them of images and boxes, have a tensor for each sample, and no rows.
    """
    if isinstance(batch, list | tuple) and all(isinstance(each, list | tuple) for each in batch):
        of_samples = len(set(map(len, batch))) == 1
        kinds = {type(each) for part in batch for each in part}
        lengths = {len(each) for each in tree_leaves(batch) if isinstance(each, Tensor) and each.dim()}
        if of_samples and (kinds != {Tensor} or len(lengths) > 1):
            return len(batch[0])
    return usual_rows(batch)


def _kept_back(batch: Any) -> Callable[[Any], Any]:
    """Returns the function that puts meta tensors in place of those of a batch whose rows are sent apart."""
    rows = loaded_rows(batch)
    several = rows >= NOW.context.size

    def replaced(leaf: Any) -> Any:
        if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.dtype not in SENT:
            return leaf
        sent = several and leaf.dim() and len(leaf) == rows and leaf.nbytes > SENT_WHOLE
        return torch.empty_like(leaf, device="meta") if sent else leaf

    return replaced
