"""Processes of one start know each other; a stranger who is connected in the place of one is found out."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from grappe.errors import ProcessDied
from grappe.launch import rendezvous
from grappe.launch.rank import ProcessRank
from grappe.launch.world import join
from grappe.plan import Plan


def join_as(process: ProcessRank, rendezvous_folder: Path, secrets: list[str], folder: str = "") -> str:
    """Joins with the secret that each has; what went wrong."""
    place = rendezvous_folder / folder
    place.mkdir(exist_ok=True)
    known = dataclasses.replace(process, secret=secrets[process.rank])
    plan = Plan.parse(f"replicate={process.size},threads=1,device=cpu")
    try:
        world = join(plan, known, place)
    except ProcessDied as error:
        dist.destroy_process_group()  # the pool's processes go on
        return str(error)
    world.barrier()
    left = [one.name for one in place.iterdir() if one.name.startswith((".secret", ".rendezvous"))]
    world.leave()
    return f"joined {left}"


@pytest.mark.parametrize("size", [2, 3])
def test_those_who_share_a_secret_join(pool, size: int) -> None:
    told = pool.run("tests.launch.test_authentication:join_as", size, ["ours"] * size, f"a{size}")
    assert told == ["joined []"] * size


def test_one_who_does_not_know_it_is_found_out_by_all(pool) -> None:
    told = pool.run("tests.launch.test_authentication:join_as", 3, ["ours", "ours", "theirs"], "b")
    for rank in (0, 1):
        assert f"process {rank} of 3 is connected to a program that is not process 2 of this start" in told[rank]
    assert "is not process 0 of this start" in told[2]


def join_beside_a_stranger(process: ProcessRank, rendezvous_folder: Path, folder: str, stranger: int) -> str:
    """Joins a mesh; another program stands in the place of process `stranger` in the smaller groups alone."""
    place = rendezvous_folder / folder
    place.mkdir(exist_ok=True)
    groups, authenticate = [], rendezvous.authenticate

    def planted(process: ProcessRank, secret: str, group: dist.ProcessGroup | None = None) -> None:
        groups.append(dist.get_process_group_ranks(group) if group is not None else [])
        authenticate(process, "theirs" if group is not None and process.rank == stranger else secret, group)

    known = dataclasses.replace(process, secret="ours")
    with mock.patch.object(rendezvous, "authenticate", planted):
        try:
            world = join(Plan.parse("replicate=2,shard=2,threads=1,device=cpu"), known, place)
        except ProcessDied as error:
            dist.destroy_process_group()
            return str(error)
    world.leave()
    return f"joined, and proven in {groups}"


def test_smaller_groups_are_proven_too(pool) -> None:
    found = pool.run("tests.launch.test_authentication:join_beside_a_stranger", 4, "d", -1)
    assert found[1] == "joined, and proven in [[], [1, 3], [0, 1]]"
    found = pool.run("tests.launch.test_authentication:join_beside_a_stranger", 4, "e", 3)
    assert "process 1 of 4 is connected to a program that is not process 3 of this start" in found[1]
    assert not any("joined" in one for one in found[1:])


def test_without_a_commands_secret_a_file_has_it(pool) -> None:
    """As under srun and torchrun."""
    assert pool.run("tests.launch.test_authentication:join_as", 2, ["", ""], "c") == ["joined []"] * 2


class Store(dict):
    """Stands for a store that a stranger may write to."""

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret", ".secret-/../../x", "none", ""])
def test_a_stranger_cannot_say_where_the_secret_is(tmp_path: Path, name: str) -> None:
    process = ProcessRank(rank=1, size=2, local_rank=1, local_size=2, launcher="srun")
    with pytest.raises(ProcessDied, match="share no secret"):
        rendezvous.shared_secret(process, Store({rendezvous.KEY: name.encode()}), tmp_path)  # type: ignore[arg-type]


def test_a_secret_is_not_shown() -> None:
    assert "hidden" not in repr(ProcessRank(secret="hidden"))
