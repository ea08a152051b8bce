"""A snapshot: this process's pieces, copied to host memory in one go, so that training can go on."""

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
    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The same pieces on the host; what `take` gave before is overwritten."""
        taken = []
        on_device = False
        for piece in pieces:
            buffer = self._buffer(piece)
            buffer.copy_(piece.data, non_blocking=True)
            on_device |= piece.data.is_cuda
            taken.append(piece._replace(data=buffer))
        if on_device:
            torch.cuda.synchronize()
        return taken

    def _buffer(self, piece: Piece) -> Tensor:
        kept = self._buffers.get(piece.name)
        if kept is None or kept.shape != piece.data.shape or kept.dtype != piece.data.dtype:
            # Contiguous, whatever the memory format of the tensor: that is how it is written.
            kept = torch.empty(piece.data.shape, dtype=piece.data.dtype, pin_memory=piece.data.is_cuda)
            self._buffers[piece.name] = kept
        return kept
