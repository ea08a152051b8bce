"""Chooses the pieces of a state that this process writes: each byte once, and all processes write equally."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from grappe.checkpoint.tensor_file import Piece
from grappe.launch.world import World
from grappe.private_api.torch import local_shape_and_offset


def pieces_to_write(
    tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], world: World
) -> Iterator[Piece]:
    """Yields this process's pieces: its shard of sharded tensors, its turn of replicated ones, and all local tensors.

    A pure function of names and shapes, so that processes agree without communication: a tensor that several
    processes have alike is written by the process with the fewest bytes to write so far.
    """
    loads: dict[int, list[int]] = {}
    for name, tensor in tensors.items():
        copies, index = _copies(tensor, world)
        load = loads.setdefault(copies, [0] * copies)
        writer = load.index(min(load))
        load[writer] += tensor.numel() * tensor.element_size() + 1
        if writer == index and (piece := _piece(name, tensor)) is not None:
            yield piece
    for name, tensor in own.items():
        yield _complete(name, tensor)


def _copies(tensor: Tensor, world: World) -> tuple[int, int]:
    """Returns the number of processes that hold the same part of the tensor, and this process's number among them."""
    split = {"pipeline"}  # what a stage has, no other has
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        split |= {n for n, placed in zip(names, tensor.placements, strict=True) if not placed.is_replicate()}
    copies, index = 1, 0
    for axis, (position, degree) in world.coordinates().items():
        if axis not in split:
            copies, index = copies * degree, index * degree + position
    return copies, index


def _piece(name: str, tensor: Tensor) -> Piece | None:
    if not isinstance(tensor, DTensor):
        return _complete(name, tensor)
    local = tensor.to_local().detach()
    if local.numel() == 0:
        # Nobody writes an empty part of a tensor; an empty tensor is still a tensor, and one process writes it.
        places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
        first = all(place == 0 for place, placed in places if not placed.is_replicate())
        return _complete(name, local.view(tensor.shape)) if first and tensor.numel() == 0 else None
    shape, offset = local_shape_and_offset(tensor)
    assert tuple(local.shape) == shape, (name, local.shape, shape)
    return Piece(name, local, tuple(tensor.shape), offset)


def _complete(name: str, tensor: Tensor) -> Piece:
    shape = tuple(tensor.shape)
    return Piece(name, tensor.detach(), shape, (0,) * len(shape))
