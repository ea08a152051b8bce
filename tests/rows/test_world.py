"""The forked processes whose collectives the test of every operator relays."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.rows.world import Died, OutOfStep, World


def working(rank: int):
    def work(piece: str):
        own = torch.tensor([rank + 1.0, 5.0 * rank])
        if piece == "sum":
            dist.all_reduce(own)
            return own.tolist()
        if piece == "gather":
            parts = [torch.empty(2) for _ in range(3)]
            dist.all_gather(parts, own)
            return torch.stack(parts).tolist()
        if piece == "die" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if piece == "alone" and rank == 2:
                return "ended"
            dist.all_reduce(own[: 1 + rank % 2].clone() if piece == "apart" else own)
        except OutOfStep as error:
            return str(error)
        return "met"

    return work


def test_collectives_are_relayed() -> None:
    world = World(3, working)
    assert world.run("sum") == [[6.0, 15.0]] * 3
    assert world.run("gather") == [[[1.0, 0.0], [2.0, 5.0], [3.0, 10.0]]] * 3
    world.close()


def test_processes_out_of_step_are_told_so() -> None:
    world = World(3, working)
    assert world.run("alone")[0].endswith("process 2 has ended")
    assert "process 1 is in all_reduce SUM (2,)" in world.run("apart")[0]
    assert world.run("together") == ["met"] * 3
    world.close()


def test_a_process_that_dies_is_replaced() -> None:
    world = World(3, working)
    with pytest.raises(Died, match="SIGKILL"):
        world.run("die")
    assert world.run("sum") == [[6.0, 15.0]] * 3
    world.close()
