"""Copies this process's pieces to host memory at once, so that training can go on while they are written."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from grappe.checkpoint.tensor_file import Piece


class Snapshots:
    """Copies pieces into buffers that are kept from one save to the next: new memory costs more than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, pieces: Iterable[Piece]) -> tuple[list[Piece], bool]:
        """Returns the pieces on the host, and whether they are copies; overwrites the result of the previous call.

        Without memory for copies, pieces that are on the host already are returned uncopied.
        """
        given = list(pieces)
        try:
            taken = [piece._replace(data=self._copied(piece)) for piece in given]
        except (RuntimeError, MemoryError):
            if any(piece.data.is_cuda for piece in given):
                raise
            self._buffers.clear()  # all of it: what the process needs to write must have room as well
            return given, False
        if any(piece.data.is_cuda for piece in given):
            torch.cuda.synchronize()
        return taken, True

    def _copied(self, piece: Piece) -> Tensor:
        buffer = self._buffer(piece)
        buffer.copy_(piece.data, non_blocking=True)
        return buffer

    def _buffer(self, piece: Piece) -> Tensor:
        kept = self._buffers.get(piece.name)
        if kept is None or kept.shape != piece.data.shape or kept.dtype != piece.data.dtype:
            # Contiguous, whatever the memory format of the tensor: that is how it is written.
            kept = torch.empty(piece.data.shape, dtype=piece.data.dtype, pin_memory=piece.data.is_cuda)
            self._buffers[piece.name] = kept
        return kept
