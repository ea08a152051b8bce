"""Tests of a process's rank in a launcher's variables, and of a plan's requirements."""

import os
from pathlib import Path

import pytest
import torch

from grappe.errors import PlanError, UsageError
from grappe.launch import rendezvous, world
from grappe.launch.rank import ProcessRank, rank_from_environment
from grappe.plan import Plan

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "n0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "bash", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
BATCH = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = {**JOB, "SLURM_STEP_ID": "5", "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
STEP |= {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("environment", "place", "launcher", "job"),
    [
        (TORCHRUN, (3, 4, 1, 2), "torchrun", "none-29500"),
        (STEP, (4, 5, 0, 1), "srun", "12-5-0"),  # whatever its job is called
        ({**STEP, "SLURM_RESTART_COUNT": "2"}, (4, 5, 0, 1), "srun", "12-5-2"),  # another start
        ({**STEP, **TORCHRUN}, (3, 4, 1, 2), "torchrun", "none-29500"),  # inside a job
    ],
)
def test_a_launchers_process(environment: dict[str, str], place: tuple[int, ...], launcher: str, job: str) -> None:
    rank, size, local_rank, local_size = place
    places = {"rank": rank, "size": size, "local_rank": local_rank, "local_size": local_size}
    assert rank_from_environment(environment) == ProcessRank(**places, launcher=launcher, job=job)


@pytest.mark.parametrize(
    ("text", "node", "tasks"),
    [("2(x2),1", "0", 2), ("2(x2),1", "1", 2), ("2(x2),1", "2", 1), ("4", "0", 4), ("3,1(x2),2", "3", 2)],
)
def test_tasks_of_a_node(text: str, node: str, tasks: int) -> None:
    process = rank_from_environment({**STEP, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": node})
    assert process.local_size == tasks


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="nothing"),
        pytest.param(JOB, id="salloc"),
        pytest.param(BATCH, id="batch shell"),
        pytest.param({**BATCH, "SLURM_STEP_ID": "4294967290"}, id="salloc's interactive step"),
        pytest.param({**STEP, "SLURM_PTY_PORT": "40000"}, id="srun --pty bash"),
        pytest.param({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, id="a step of one task"),
        pytest.param({"RANK": "0"}, id="some other RANK"),
    ],
)
def test_not_one_of_a_launchers_processes(environment: dict[str, str]) -> None:
    assert rank_from_environment(environment) is None


@pytest.mark.parametrize(
    "environment",
    [
        {**TORCHRUN, "RANK": "first"},
        {**TORCHRUN, "RANK": "-1"},
        {**TORCHRUN, "RANK": TORCHRUN["WORLD_SIZE"]},
        {**TORCHRUN, "WORLD_SIZE": "9" * 5000},
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "0"},
        {**TORCHRUN, "MASTER_PORT": "port"},
        {**STEP, "SLURM_STEP_TASKS_PER_NODE": "two"},
        {**STEP, "SLURM_PROCID": ""},
        {**STEP, "SLURM_NODEID": "-9"},
    ],
)
def test_variables_that_are_no_numbers(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"is not a number from .* unset RANK, WORLD_SIZE"):
        rank_from_environment(environment)


def test_ranks_without_an_address() -> None:
    with pytest.raises(UsageError, match="MASTER_PORT is not: unset both, or start grappe with torchrun"):
        rank_from_environment({name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"})


def test_backends() -> None:
    assert world.choose_backend(Plan(), CPU) == "gloo"
    assert world.choose_backend(Plan(per_device=2), torch.device("cuda", 0)) == "gloo"
    for plan in ("pipeline=2,microbatches=2,per_device=2", "tensor=2,per_device=2"):  # SIGABRT and SIGSEGV in gloo
        with pytest.raises(PlanError, match="give each process its own GPU"):
            world.choose_backend(Plan.parse(plan), torch.device("cuda", 0))


def test_nccl_is_the_choice_for_gpus() -> None:
    if torch.distributed.is_nccl_available():
        assert world.choose_backend(Plan(), torch.device("cuda", 0)) == "nccl"
    else:
        with pytest.raises(PlanError, match=r"backend=nccl is not in this torch .*: use backend=gloo"):
            world.choose_backend(Plan(), torch.device("cuda", 0))


def test_what_is_not_here() -> None:
    with pytest.raises(PlanError, match="this plan runs on the CPU: use backend=gloo"):
        world.choose_backend(Plan(backend="nccl"), CPU)
    if not torch.distributed.is_mpi_available():  # it is in no build of pip's
        with pytest.raises(PlanError, match="built from source against your MPI"):
            world.choose_backend(Plan(backend="mpi"), CPU)
    if not torch.cuda.is_available():
        with pytest.raises(PlanError, match="torch sees no GPU here; use device=cpu"):
            world.choose_device(Plan(device="cuda"), ProcessRank())


@pytest.mark.parametrize(
    ("plan", "processes", "needs", "remedy"),
    [
        ("shard=4,tensor=2", 4, "8 processes (shard=4 x tensor=2)", "use tensor=1, or ask for 8"),
        ("", 4, "1 process (one process)", "use replicate=4, or ask for 1"),
        ("shard=4,replicate=2", 6, "8 processes (replicate=2 x shard=4)", "use shard=3, or ask for 8"),
        ("shard=3,replicate=3", 4, "9 processes (replicate=3 x shard=3)", "ask for 9, or choose degrees whose {} 4"),
        ("replicate=2", 1, "2 processes (replicate=2)", "ask for 2, or choose degrees whose {} 1"),
    ],
)
def test_a_plan_that_does_not_fit(plan: str, processes: int, needs: str, remedy: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(plan).check_fits(processes)
    assert str(caught.value) == f"plan needs {needs}, this job has {processes}: {remedy.format('product is')}"


def test_a_group_with_nccl_is_bound_to_no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests what torch 2.8 needs for a mesh of groups with gloo beside NCCL, by its sources: no GPU has run it."""
    given: list[tuple[str, dict]] = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda name, **rest: given.append((name, rest)))
    assert rendezvous.start(ProcessRank(), "nccl", torch.device("cuda", 0), tmp_path) == ""
    [(backends, rest)] = given
    assert backends == "cpu:gloo,cuda:nccl"
    assert rest.get("device_id") is None


@pytest.mark.parametrize("loopback", ["lo", "lo0"])
def test_the_loopback_interface_is_the_kernels_not_a_files(
    loopback: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a container without /sys, too: there it was taken for a Mac's."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # restored afterwards
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(rendezvous.socket, "if_nameindex", lambda: [(1, loopback), (2, "eth0")])
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: None)
    rendezvous.start(ProcessRank(), "gloo", CPU, tmp_path)
    assert os.environ["GLOO_SOCKET_IFNAME"] == loopback


@pytest.mark.parametrize("text", ["^docker,lo", "lo", "l", "=lo", "none,lo", ""])
def test_interfaces_that_are_there(text: str) -> None:
    rendezvous._check_interface("NCCL_SOCKET_IFNAME", text)


@pytest.mark.parametrize(
    ("name", "text"), [("NCCL_SOCKET_IFNAME", "=l"), ("GLOO_SOCKET_IFNAME", "l"), ("NCCL_SOCKET_IFNAME", "ib")]
)
def test_interfaces_that_are_not_there_are_named(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"{name}={text}: .* has no such network interface, but .*lo"):
        rendezvous._check_interface(name, text)
