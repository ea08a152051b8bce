"""Detects silent data corruption: a piece of the batch is computed again by another process, and compared to the bit.

Every process passes one piece of its batch to the next process, which computes that piece's gradient again, with the
same weights and random numbers. Where their bits differ, a third process settles which of the two computed wrongly.
W processes, each with n parameters.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from grappe.data.batch import Batch, Microbatch
from grappe.errors import ComputedWrongly
from grappe.launch.world import World, packed, unpacked
from grappe.private_api.torch import tree_map
from grappe.step.clip import PIECE
from grappe.words import format_seconds, host_name

Gradient = Callable[[Batch, Microbatch, int], Sequence[Tensor | None]]
"""Computes a piece's gradients, from a batch, the piece, and its number in the batch; changes nothing."""


class CheckedPiece(NamedTuple):
    """The piece of this process's batch that may be compared."""

    batch: Batch
    """Without its microbatches."""
    micro: Microbatch
    index: int
    """The piece's number among this process's pieces."""
    digest: list[int] | None
    """Hash of its gradients; None if they are to be computed again, here too."""


class CrossCheck:
    """Compares gradients between processes that hold the same weights.

    Args:
        every: the number of steps after which a piece is compared.
        pieces: of each process in a batch; they take turns.
        gradient: computes a piece's gradients again.
        names: of the parameters.
    """

    def __init__(self, every: int, pieces: int, world: World, gradient: Gradient, names: Sequence[str]) -> None:
        self._every, self._pieces, self._world, self._gradient, self._names = every, pieces, world, gradient, names
        self._piece: CheckedPiece | None = None
        self._checked, self._turn = -1, 0
        self._comparisons, self._seconds, self._began = 0, 0.0, 0.0

    def note(self, batch: Batch, index: int, gradients: Sequence[Tensor | None]) -> None:
        """Notes a piece whose gradients were just computed; they are read only in a step that is compared."""
        self._began = self._began or time.perf_counter()
        if index == 0:  # small batches have pieces without rows
            filled = [number for number, micro in enumerate(batch.microbatches) if micro.rows] or [0]
            self._turn = filled[batch.step // self._every % len(filled)]
        if index == self._turn:
            digest = _digest(gradients) if self._due(batch.step) else None
            micro = batch.microbatches[index]
            self._piece = CheckedPiece(batch._replace(microbatches=()), micro, index, digest)

    def after(self, step: int) -> None:
        """Compares after the gradients of a step, if it is due. Collective.

        Raises:
            ComputedWrongly: some process's gradients have other bits.
        """
        if self._due(step):
            self._compare()

    def before_save(self) -> None:
        """Compares with the weights as they are, so that none that a faulty process computed are saved. Collective.

        Raises:
            ComputedWrongly: some process's gradients have other bits.
        """
        if self._piece is not None and self._piece.batch.step != self._checked:
            self._piece = self._piece._replace(digest=None)
            self._compare()

    def remarks(self) -> list[str]:
        """Returns how often pieces were compared, how long that took, and its share of the training's time."""
        if not self._comparisons:
            return []
        times = f"{self._comparisons:,} time{'s' if self._comparisons > 1 else ''}"
        share = self._seconds / (time.perf_counter() - self._began)
        took = f"{format_seconds(self._seconds)} ({share:.2%} of the time)"
        return [f"check: a piece was compared with another process's {times}, in {took}"]

    def _due(self, step: int) -> bool:
        return (step + 1) % self._every == 0

    def _compare(self) -> None:
        assert self._piece is not None, "a step has pieces"
        began, world, piece = time.perf_counter(), self._world, self._piece
        own = piece.digest if piece.digest is not None else self._computed((piece.index, piece.micro), world.data_rank)
        following, previous = (world.data_rank + 1) % world.data_size, (world.data_rank - 1) % world.data_size
        sent = self._send(own, following)
        received, digest = self._received(previous)
        again = self._computed(received, previous)
        differs = torch.tensor(digest != again)
        dist.all_reduce(differs, dist.ReduceOp.MAX, group=world.control)
        for message in sent:
            message.wait()
        if differs:
            rows = world.gather((own, again, host_name()))
            doubtful = [rank for rank in range(len(rows)) if rows[rank][0] != rows[(rank + 1) % len(rows)][1]]
            raise self._settled(doubtful, rows)
        self._checked = piece.batch.step
        self._comparisons += 1
        self._seconds += time.perf_counter() - began

    def _computed(self, piece: tuple[int, Microbatch], rank: int) -> list[int]:
        """Computes the digest of another process's piece, or of this one's; a piece comes with its number."""
        assert self._piece is not None
        index, micro = piece
        return _digest(self._gradient(self._piece.batch, micro, rank * self._pieces + index) if micro.rows else [])

    def _settled(self, doubtful: Sequence[int], rows: Sequence[tuple[list[int], list[int], str]]) -> ComputedWrongly:
        """Has a third process compute each doubtful piece; returns the error. Collective."""
        assert self._piece is not None
        world, size = self._world, len(rows)
        named, sure = dict[int, str](), True
        for rank in doubtful:
            second = (rank + 1) % size
            third = _third(rank, second, [row[2] for row in rows])
            first_digest, second_digest = rows[rank][0], rows[second][1]
            place = next(
                (n for n, two in enumerate(zip(first_digest, second_digest, strict=False)) if two[0] != two[1]), 0
            )
            where = f"step {self._piece.batch.step + 1}, gradient of {self._names[place]}"
            answer = list[int]()
            if third is not None:
                if world.rank == rank:
                    for message in self._send(first_digest, third):
                        message.wait()
                elif world.rank == third:
                    answer = self._computed(self._received(rank)[0], rank)
                answer = world.gather(answer)[third]
            wrong = {second} if answer == first_digest else {rank} if answer == second_digest else {rank, second}
            sure &= len(wrong) == 1
            for each in wrong:
                others = sorted({rank, second, *([] if third is None else [third])} - {each})
                named.setdefault(each, f"{where}, unlike {' and '.join(f'process {other}' for other in others)}")
        nodes = {rows[rank][2]: f"process {rank}, {text}" for rank, text in sorted(named.items())}
        lines = "; ".join(f"process {rank} (node {rows[rank][2]}), {text}" for rank, text in sorted(named.items()))
        return ComputedWrongly(
            f"the same samples and weights gave other gradients: {lines}. "
            + ("" if sure else "Two cannot tell which of them is wrong; a third process could. ")
            + f"Go on without {', '.join(nodes)}: the newest checkpoint was compared before it was saved",
            nodes,
        )

    def _send(self, digest: Sequence[int], rank: int) -> list[dist.Work]:
        """Begins to send this process's piece, and the digest of its gradients, to another process."""
        assert self._piece is not None
        copied = tree_map(_copied, self._piece.micro)
        content = torch.frombuffer(bytearray(packed((self._piece.index, copied, digest))), dtype=torch.uint8)
        sent = [dist.isend(part, rank, group=self._world.control) for part in (torch.tensor([len(content)]), content)]
        return [message for message in sent if message is not None]

    def _received(self, rank: int) -> tuple[tuple[int, Microbatch], list[int]]:
        """Receives another process's piece with its number, and the digest of its gradients."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank, group=self._world.control)
        content = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(content, rank, group=self._world.control)
        index, micro, digest = unpacked(content.numpy().tobytes())
        device = self._world.device
        micro = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, micro)
        return (index, micro), digest


def _copied(leaf: Any) -> Any:
    """Copies a leaf of a piece for sending: a view of a batch would bring the whole batch along."""
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def _third(first: int, second: int, nodes: Sequence[str]) -> int | None:
    """Returns who settles a difference of two processes: one of a third node, as a node's own may share its fault.

    None: there is nobody, as on two nodes, of which either may be at fault.
    """
    involved = {nodes[first], nodes[second]}
    free = [rank for rank in range(len(nodes)) if rank not in (first, second)]
    return next((rank for rank in free if len(involved) == 1 or nodes[rank] not in involved), None)


def _digest(gradients: Sequence[Tensor | None]) -> list[int]:
    """Sums each gradient's bits; None has 0."""
    present = {number: gradient for number, gradient in enumerate(gradients) if gradient is not None}
    sums = [sum_of_bits(gradient) for gradient in present.values()]
    values = torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []
    by_number = dict(zip(present, values, strict=True))
    return [by_number.get(number, 0) for number in range(len(gradients))]


@torch.no_grad()
def sum_of_bits(tensor: Tensor) -> Tensor:
    """Sums a tensor's bits as integers of 8 bytes, each with a factor of its own, modulo 2^64: a scalar on its device.

    The factors are odd, so that no single change keeps the sum, and random: in a row, as 1, 3, 5, 7, they would keep it
    where signs change alike at places of equal distance.
    """
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(content) % 8 or content.storage_offset() % 8:
        content = F.pad(content.clone(), (0, -len(content) % 8))  # a copy begins at a multiple of 8
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for bits in content.view(torch.int64).split(PIECE):
        total = total * 0x9E3779B1 + (bits * _factors(bits.device)[: len(bits)]).sum()
    return total


@functools.cache
def _factors(device: torch.device) -> Tensor:
    drawn = torch.randint(-(1 << 62), 1 << 62, (PIECE,), generator=torch.Generator().manual_seed(0))
    return (drawn | 1).to(device)
