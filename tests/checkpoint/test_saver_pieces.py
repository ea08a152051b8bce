"""Tests of the pieces that each process writes: over real meshes, all pieces together are every tensor once."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from grappe.checkpoint.saver import pieces_to_write
from grappe.checkpoint.tensor_file import Piece
from grappe.launch.world import ProcessRank, World, join
from grappe.plan import Plan

PLANS = """
replicate=2 replicate=3 replicate=4 shard=2 shard=3 replicate=2,shard=2 tensor=2 replicate=2,tensor=2 shard=2,tensor=2
"""
SHAPES = [(7, 3), (1, 5), (8, 8), (4,), (0, 4), (2, 6)]


def states(world: World) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Whole tensors by name, and the same spread over the mesh in every way that it has."""
    whole = {"scalar": torch.tensor(3.0), "plain": torch.arange(5.0), "empty": torch.empty(0)}
    spread = dict(whole)
    for index, shape in enumerate(SHAPES):
        for way, axes, placements in ways(world, len(shape)):
            name = f"{way}.{index}"
            whole[name] = torch.arange(float(torch.Size(shape).numel())).view(shape) + index
            spread[name] = distribute_tensor(whole[name], world.mesh[axes], placements)
    return whole, spread


def ways(world: World, dims: int) -> Iterable[tuple[str, tuple[str, ...], list]]:
    if world.mesh is None:
        return
    yield "shard", ("shard",), [Shard(0)]
    yield "replicate", ("replicate",), [Replicate()]
    yield "hybrid", ("replicate", "shard"), [Replicate(), Shard(0)]
    yield "tensor", ("tensor",), [Shard(dims - 1)]
    yield "kept", ("tensor",), [Replicate()]
    if dims > 1:
        yield "both", ("shard", "tensor"), [Shard(0), Shard(1)]
        yield "same", ("shard", "tensor"), [Replicate(), Shard(0)]


def pieces(process: ProcessRank, rendezvous_folder: Path, text: str) -> tuple[dict, list[Piece], list[str]]:
    """Of one process: the whole tensors, its pieces, and the names of what is spread."""
    world = join(Plan.parse(f"{text},threads=1" if text else "threads=1"), process, rendezvous_folder)
    whole, spread = states(world)
    own = {f"local.{process.rank}.count": torch.tensor(process.rank)}
    taken = [piece._replace(data=piece.data.clone()) for piece in pieces_to_write(spread, own, world)]
    world.gather(None)  # process 0 has the store: it may not leave before all have met
    world.leave()
    return whole, taken, [name for name, tensor in spread.items() if isinstance(tensor, DTensor)]


@pytest.mark.parametrize("text", ["", *PLANS.split()])
def test_all_pieces_together_are_each_tensor_once(pool, text: str) -> None:
    size = Plan.parse(text).processes
    told = pool.run("tests.checkpoint.test_saver_pieces:pieces", size, text)
    whole = told[0][0]
    for rank in range(size):
        whole[f"local.{rank}.count"] = torch.tensor(rank)
    covered = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in whole.items()}
    writers: dict[str, int] = {}
    for _, taken, _ in told:
        for piece in taken:
            box = tuple(slice(at, at + n) for at, n in zip(piece.offset, piece.data.shape, strict=True))
            assert piece.shape == whole[piece.name].shape
            assert torch.equal(piece.data, whole[piece.name][box])
            covered[piece.name][box] += 1
            writers[piece.name] = writers.get(piece.name, 0) + 1
    assert set(writers) == set(whole)
    assert all(bool((count == 1).all()) for count in covered.values())
    assert all(writers[name] == 1 for name, tensor in whole.items() if not tensor.numel())


def loads(process: ProcessRank, rendezvous_folder: Path, text: str) -> int:
    """Bytes that one process writes of 200 tensors that every process has, from 4 to 4,000 bytes."""
    world = join(Plan.parse(f"{text},threads=1"), process, rendezvous_folder)
    tensors = {f"t{index}": torch.zeros((index * 37) % 1000 + 1) for index in range(200)}
    written = sum(piece.data.numel() * 4 for piece in pieces_to_write(tensors, {}, world))
    world.gather(None)  # process 0 has the store: it may not leave before all have met
    world.leave()
    return written


@pytest.mark.parametrize("text", ["replicate=4", "replicate=2,shard=2", "replicate=2,tensor=2"])
def test_what_all_have_is_written_by_all(pool, text: str) -> None:
    written = pool.run("tests.checkpoint.test_saver_pieces:loads", 4, text)
    assert sum(written) == sum(4 * ((index * 37) % 1000 + 1) for index in range(200))
    assert max(written) - min(written) <= 4000  # no more than the largest tensor apart
