"""Copies this process's pieces to host memory at once, so that training can go on while they are written."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from grappe.checkpoint import device_copies
from grappe.checkpoint.tensor_file import Piece
from grappe.profiling import limits


class Snapshots:
    """Copies pieces into buffers that are kept from one save to the next: new memory costs more than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._device: device_copies.DeviceCopies | None = None

    @torch.no_grad()
    def take(
        self, pieces: Iterable[Piece], processes: int = 1, *, peak_known: bool = True
    ) -> tuple[list[Piece], bool]:
        """Returns the pieces on the host, and whether they are copies; overwrites the result of the previous call.

        Without memory for the copies beside a step's, pieces that are on the host already are returned uncopied. Those
        of a GPU may be on their way, if the GPU has room for a copy of them: call `wait` before they are read.

        Args:
            processes: the number of processes on this node that take theirs.
            peak_known: whether this process has had the memory that a step needs.
        """
        originals = list(pieces)
        on_gpu = [piece for piece in originals if piece.data.is_cuda]
        missing = sum(piece.data.nbytes for piece in originals if not self._kept(piece))
        if missing and not on_gpu and not limits.has_room(missing, processes, peak_known=peak_known):
            return self._without(originals)
        try:
            taken = [piece._replace(data=self._buffer(piece)) for piece in originals]
            beside = bool(on_gpu) and peak_known and self._start_beside(on_gpu, processes)
            for piece in originals:
                if not (beside and piece.data.is_cuda):
                    self._buffer(piece).copy_(piece.data, non_blocking=True)
        except (RuntimeError, MemoryError):
            if on_gpu:
                raise
            return self._without(originals)
        if on_gpu and not beside:
            torch.cuda.synchronize()
        return taken, True

    def wait(self) -> None:
        """Waits until the pieces of the last call are on the host; from any thread."""
        if self._device is not None:
            self._device.wait()

    def clear(self) -> None:
        """Gives the copies' memory back."""
        self._buffers.clear()

    def _without(self, originals: list[Piece]) -> tuple[list[Piece], bool]:
        self.clear()  # all of it: what the process needs to write must have room as well
        return originals, False

    def _start_beside(self, pieces: list[Piece], processes: int) -> bool:
        """Has pieces of a GPU copied beside the training, if the GPU has room for them; returns whether it has."""
        if not device_copies.has_room(sum(piece.data.nbytes for piece in pieces), processes):
            return False
        self._device = self._device or device_copies.DeviceCopies()
        return self._device.start([piece.data for piece in pieces], [self._buffer(piece) for piece in pieces])

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
