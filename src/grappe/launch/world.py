"""World: a process's rank, device, threads and mesh, the collectives over all processes, and the joining."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import cloudpickle

from grappe.errors import GrappeError, PlanError
from grappe.launch import rendezvous
from grappe.launch.fork import end_with_launcher
from grappe.launch.rank import ProcessRank
from grappe.profiling.memory import cpu_quota
from grappe.words import processor_name

T = TypeVar("T")

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from grappe.domain.parts import Domain
    from grappe.plan import Plan

AXES = ("pipeline", "replicate", "shard", "domain", "tensor")


def cores() -> int:
    """Counts this process's usable cores: its affinity mask, capped by its cgroup's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    return max(1, min(cores, cpu_quota() or cores))


def own_cores(process: ProcessRank) -> int:
    """Counts the cores for this process alone: those that srun gave it, else its share of the node's cores."""
    if process.cores is not None:
        return min(cores(), process.cores)  # it may be bound to them already, and then sees no others
    return max(1, cores() // process.local_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """This process's rank, device, mesh and process groups under a plan."""

    process: ProcessRank
    device: torch.device
    mesh: DeviceMesh | None = None
    """Axes pipeline, replicate, shard, domain, tensor; None for one process."""
    data_rank: int = 0
    data_size: int = 1
    data_group: ProcessGroup | None = None
    """The processes that see different slices of a batch; None for one slice."""
    domain: Domain | None = None
    """The processes that hold the parts of the same samples; None: each sample is whole."""
    sharded: DeviceMesh | None = None
    """Axes replicate (with the domain's processes) and shard, for FSDP2; None: those of `mesh`."""
    control: ProcessGroup | None = None
    """A gloo group over all processes, for objects and barriers; None for one process."""
    threads: int = 1

    @property
    def rank(self) -> int:
        """Returns this process's rank, 0 to size - 1."""
        return self.process.rank

    @property
    def size(self) -> int:
        """Returns the world size: the number of processes."""
        return self.process.size

    @property
    def gradient_group(self) -> ProcessGroup | None:
        """Returns the processes whose gradients are summed: of all slices and parts; None: there is one."""
        return self.data_group if self.domain is None else self.domain.summed

    @property
    def gradient_size(self) -> int:
        """Returns the number of processes whose gradients are summed."""
        return self.data_size * (1 if self.domain is None else self.domain.size)

    def coordinates(self) -> dict[str, tuple[int, int]]:
        """Returns, by mesh axis, this process's coordinate and the axis's size."""
        if self.mesh is None:
            return dict.fromkeys(AXES, (0, 1))
        process = self.mesh.get_coordinate()
        assert process is not None
        return {axis: (process[i], self.mesh.size(i)) for i, axis in enumerate(AXES)}

    @property
    def speaks_for_buffers(self) -> bool:
        """Returns whether this process is the first of those with the same buffers (same data slice, same stage)."""
        places = self.coordinates()
        return places["tensor"][0] == places["domain"][0] == 0

    def gather(self, value: T) -> list[T]:
        """Gathers every process's `value`, by rank. Collective."""
        return _gathered(value, self.size, self.control)

    def share(self, value: T) -> T:
        """Broadcasts process 0's `value` to every process. Collective."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def first(self, work: Callable[[], T]) -> T:
        """Calls `work` on process 0; returns its value, or raises its GrappeError, on every process. Collective."""
        answer: Any = None
        if self.rank == 0:
            try:
                answer = work()
            except GrappeError as error:
                answer = error
        answer = self.share(answer)
        if isinstance(answer, GrappeError):
            raise answer
        return answer

    def scatter(self, values: Sequence[T] | None) -> T:
        """Gives each process its own of process 0's `values`, by rank. Collective."""
        if self.size == 1:
            assert values is not None
            return values[0]
        import torch.distributed as dist

        box: list[Any] = [None]
        dist.scatter_object_list(box, None if values is None else list(values), src=0, group=self.control)
        return box[0]

    def gather_data(self, value: T) -> list[T]:
        """Gathers every data slice's `value`, in the order of the slices. Collective over the data axes."""
        return _gathered(value, self.data_size, self.data_group)

    def barrier(self) -> None:
        """Waits until every process has called it. Collective."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier(group=self.control)

    def leave(self) -> None:
        """Ends all communication."""
        if self.domain is not None:
            self.domain.leave()
        if self.mesh is not None:
            import torch.distributed as dist

            from grappe.private_api.torch import forget_meshes

            dist.destroy_process_group()
            forget_meshes()


def _gathered(value: T, size: int, group: ProcessGroup | None) -> list[T]:
    if size == 1:
        return [value]
    import torch.distributed as dist

    box: list[Any] = [None] * size
    dist.all_gather_object(box, value, group=group)
    return box


def packed(value: object) -> bytes:
    """Makes bytes of a value, for another process of this command."""
    return cloudpickle.dumps(value)


def unpacked(content: bytes) -> Any:
    """Reads what `packed` made in a process of this command, and nothing from elsewhere."""
    return cloudpickle.loads(content)


def gather_into(output: torch.Tensor, part: torch.Tensor, group: ProcessGroup) -> None:
    """Fills `output` [W x n] with every process's `part` [n], by rank. Collective."""
    import torch.distributed as dist

    # Renamed in torch 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, part, group=group)


def join(plan: Plan, process: ProcessRank, rendezvous_folder: Path, timeout: timedelta = rendezvous.TIMEOUT) -> World:
    """Joins the other processes; returns this one's World. Collective.

    Args:
        rendezvous_folder: a folder shared by all processes, where process 0 publishes its address.
        timeout: of every wait for another process.

    Raises:
        PlanError: the plan's product is not the number of processes, or its device or backend is not available.
    """
    import torch

    if process.launcher == "torchrun":
        end_with_launcher()
    plan.check_fits(process.size)
    device = choose_device(plan, process)
    # How a sum is split over threads decides its bits, so an exact plan does not follow the machine.
    threads = plan.threads or (1 if plan.exact else own_cores(process))
    torch.set_num_threads(threads)
    if process.size == 1 and plan.offload == "none":
        return World(process=process, device=device, threads=threads)
    backend = choose_backend(plan, device)
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    from grappe.private_api.torch import flatten_mesh

    secret = rendezvous.start(process, backend, device, rendezvous_folder, timeout)
    degrees = tuple(getattr(plan, axis) for axis in AXES)
    mesh = init_device_mesh(device.type, degrees, mesh_dim_names=AXES)
    control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo")

    def flattened(number: int, axes: tuple[str, ...], name: str) -> Any:
        if number == process.size > 1:
            return dist.group.WORLD
        return flatten_mesh(mesh[axes], name).get_group() if number > 1 else None

    data_group = flattened(plan.data_parallel, ("replicate", "shard"), "data")
    domain = sharded = None
    if plan.domain > 1:
        from grappe.domain.parts import Domain

        domain = Domain(
            group=mesh["domain"].get_group(),
            summed=flattened(plan.data_parallel * plan.domain, ("replicate", "shard", "domain"), "gradients"),
            rank=mesh["domain"].get_local_rank(),
            size=plan.domain,
            cut=plan.cut,
        )
        if plan.uses_fsdp:
            ranks = mesh.mesh.view(plan.replicate, plan.shard, plan.domain).transpose(1, 2).reshape(-1, plan.shard)
            sharded = DeviceMesh(device.type, ranks, mesh_dim_names=("replicate", "shard"))
    coordinate = dict(zip(AXES, mesh.get_coordinate() or (), strict=True))
    world = World(
        process=process,
        device=device,
        mesh=mesh,
        data_rank=coordinate["replicate"] * plan.shard + coordinate["shard"],
        data_size=plan.data_parallel,
        data_group=data_group,
        domain=domain,
        sharded=sharded,
        control=cast("ProcessGroup", control),
        threads=threads,
    )
    if secret:  # the other ends of each group's own connections; NCCL checks its own by its unique id
        groups = [world.control]
        if backend == "gloo":
            groups += [mesh[axis].get_group() for axis, degree in zip(AXES, degrees, strict=True) if degree > 1]
            groups += [world.data_group, world.gradient_group]
            groups += [] if sharded is None else sharded.get_all_groups()
        proven = [dist.group.WORLD]
        for group in groups:
            if group is not None and group not in proven:
                rendezvous.authenticate(process, secret, group)
                proven.append(group)
    if domain is not None:
        domain.enter(sharded=plan.uses_fsdp)
    return world


@contextlib.contextmanager
def joined(plan: Plan, process: ProcessRank, rendezvous_folder: Path) -> Iterator[World]:
    """Context of a process among its plan's others: joins them, waits for them at the end, and leaves. Collective.

    Raises like `join`. After an error nobody is waited for: the others may never come.
    """
    world = join(plan, process, rendezvous_folder)
    yield world
    world.barrier()
    world.leave()


def choose_device(plan: Plan, process: ProcessRank) -> torch.device:
    """Chooses this process's device: its own GPU, or with the plan key `per_device` a shared one."""
    import torch

    if plan.device == "cpu" or (plan.device == "auto" and not torch.cuda.is_available()):
        if plan.cuda_graphs:
            raise PlanError("cuda_graphs: this plan runs on the CPU, which has none: leave it out")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise PlanError("device=cuda: torch sees no GPU here; use device=cpu, or see `nvidia-smi` and torch's build")
    if torch.version.hip is not None and plan.precision == "tf32":
        raise PlanError("precision=tf32 is NVIDIA's, and this torch is built for AMD's GPUs (ROCm): use bf16, or fp32")
    visible = torch.cuda.device_count()
    # Under --gpus-per-task each process sees one GPU only, whatever its local rank.
    alone = visible == 1 and (process.local_size <= plan.per_device or process.launcher == "srun")
    index = 0 if alone else process.local_rank // plan.per_device
    if index >= visible:
        raise PlanError(
            f"plan needs {-(-process.local_size // plan.per_device)} GPUs on this node, torch sees {visible}: "
            f"use fewer processes, per_device={-(-process.local_size // visible)}, or device=cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def choose_backend(plan: Plan, device: torch.device) -> str:
    """Chooses the communication library of a plan on `device`: gloo on CPU; NCCL on GPU, with one process per GPU."""
    import torch.distributed as dist

    backend = plan.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" and plan.per_device == 1 else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise PlanError("backend=nccl moves data between GPUs, and this plan runs on the CPU: use backend=gloo")
    sends = next((key for key in ("pipeline", "domain", "tensor") if getattr(plan, key) > 1), None)
    if backend == "gloo" and device.type == "cuda" and sends is not None:
        raise PlanError(
            f"{sends}= on GPUs sends activations from GPU to GPU, which gloo "
            "cannot: give each process its own GPU (per_device=1, backend=nccl), or let processes share one with "
            "replicate= or shard="
        )
    available = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    if not available[backend]():
        why = "torch's pip and conda builds have none; it needs one built from source against your MPI"
        reason = why if backend == "mpi" else "this build of torch was made without it"
        raise PlanError(f"backend={backend} is not in this torch ({reason}): use backend=gloo or leave it out")
    return backend


def processor(device: torch.device) -> str:
    """Returns the model name of the processor or GPU, on which the instructions used depend."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}"
