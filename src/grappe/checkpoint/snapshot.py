"""Copies this process's pieces to host memory at once, so that training can go on while they are written."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from grappe.checkpoint.tensor_file import Piece
from grappe.profiling import memory_limit


class Snapshots:
    """Copies pieces into buffers that are kept from one save to the next: new memory costs more than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(
        self, pieces: Iterable[Piece], processes: int = 1, *, peak_known: bool = True
    ) -> tuple[list[Piece], bool]:
        """Returns the pieces on the host, and whether they are copies; overwrites the result of the previous call.

        Without memory for the copies beside a step's, pieces that are on the host already are returned uncopied.

        Args:
            processes: the number of processes on this node that take theirs.
            peak_known: whether this process has had the memory that a step needs.
        """
        given = list(pieces)
        device = any(piece.data.is_cuda for piece in given)
        missing = sum(piece.data.nbytes for piece in given if not self._kept(piece))
        if missing and not device and not memory_limit.has_room(missing, processes, peak_known=peak_known):
            return self._without(given)
        try:
            taken = [piece._replace(data=self._copied(piece)) for piece in given]
        except (RuntimeError, MemoryError):
            if device:
                raise
            return self._without(given)
        if device:
            torch.cuda.synchronize()
        return taken, True

    def clear(self) -> None:
        """Gives the copies' memory back."""
        self._buffers.clear()

    def _without(self, given: list[Piece]) -> tuple[list[Piece], bool]:
        self.clear()  # all of it: what the process needs to write must have room as well
        return given, False

    def _copied(self, piece: Piece) -> Tensor:
        buffer = self._buffer(piece)
        buffer.copy_(piece.data, non_blocking=True)
        return buffer

    def _buffer(self, piece: Piece) -> Tensor:
        if not self._kept(piece):
            # Contiguous, whatever the memory format of the tensor: that is how it is written.
            self._buffers[piece.name] = torch.empty(
                piece.data.shape, dtype=piece.data.dtype, pin_memory=piece.data.is_cuda
            )
        return self._buffers[piece.name]

    def _kept(self, piece: Piece) -> bool:
        kept = self._buffers.get(piece.name)
        return kept is not None and kept.shape == piece.data.shape and kept.dtype == piece.data.dtype
