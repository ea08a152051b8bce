"""Measures the memory of a process, its peaks, and its limits (of cores too); sets how glibc keeps freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import resource
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


STATUS = Path("/proc/self/status")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
CEILING = 32 << 20  # bytes: the highest that glibc's own dynamic threshold for mmap gets


def bytes_of(tensors: Iterable[Any]) -> int:
    """Sums the bytes of this process's part of `tensors`; None counts 0."""
    total = 0
    for tensor in tensors:
        if tensor is not None and not tensor.is_meta:
            # FSDP's parameters are DTensors; DeepSpeed's stage 3 keeps a parameter's partition in its ds_tensor.
            local = tensor.to_local() if hasattr(tensor, "to_local") else getattr(tensor, "ds_tensor", tensor)
            if local.is_sparse:  # a gradient of nn.Embedding(sparse=True)
                sparse = local.coalesce()
                total += sparse.indices().nbytes + sparse.values().nbytes
                continue
            # A placeholder for a parameter of another process has its shape, and the memory of one number.
            total += min(local.numel() * local.element_size(), local.untyped_storage().nbytes())
    return total


def held(optimizer: torch.optim.Optimizer, model: Iterable[torch.nn.Parameter] = ()) -> dict[str, int]:
    """Measures bytes by kind: parameters, their current gradients, and the optimizer's state.

    Args:
        model: the model's parameters, if the optimizer may have its own copies.
    """
    import torch

    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = list({id(parameter): parameter for parameter in (*stepped, *model)}.values())
    states = (values.values() for values in optimizer.state.values() if isinstance(values, dict))
    state = [value for values in states for value in values if isinstance(value, torch.Tensor)]
    return {
        "parameters": bytes_of(parameters),
        "gradients": bytes_of(parameter.grad for parameter in parameters),
        "optimizer": bytes_of(state),
    }


def peak(device: torch.device, status: Path = STATUS) -> dict[str, int]:
    """Returns the peaks so far, in bytes: host memory with shared pages ("host"), and tensors on a GPU ("device")."""
    host = _status("VmHWM:", status)
    peaks = {"host": host} if host else {}
    if device.type == "cuda":
        import torch

        peaks["device"] = torch.cuda.max_memory_allocated(device)
    return {kind: max(size, _earlier.get(kind, 0)) for kind, size in peaks.items()}


_earlier: dict[str, int] = {}
"""Peaks before the last `not_counted`."""


@contextlib.contextmanager
def not_counted(device: torch.device) -> Iterator[None]:
    """Context whose memory is in no peak: that of a check, which no forecast of a training has."""
    before = peak(device)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, AttributeError):  # another system than Linux with glibc
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM is VmRSS now
            _earlier.update(before)
        if device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            _earlier.update(before)


def data_size() -> int:
    """Returns the bytes of this process that RLIMIT_DATA counts; 0 if the system does not report them."""
    return _status("VmData:")


def resident() -> int:
    """Returns the bytes of this process's resident memory, shared pages too; 0 if the system does not report them."""
    return _status("VmRSS:")


def data_limit() -> int | None:
    """Returns the bytes to which RLIMIT_DATA (`ulimit -d`) limits this process's data; None: it does not."""
    soft = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def below_peak() -> int:
    """Returns the bytes by which this process's resident memory is below its peak so far."""
    return max(0, _status("VmHWM:") - _status("VmRSS:"))


def _status(name: str, file: Path = STATUS) -> int:
    with contextlib.suppress(OSError):
        return _numbers(file).get(name, 0) * 1024
    return 0


def return_freed_memory(*, always: bool = False) -> None:
    """Makes glibc return freed memory to the system at once if RLIMIT_DATA limits this process: it costs page faults.

    glibc keeps freed blocks of up to 32 MB, in several heaps: a sharded model, whose parameters are gathered and freed,
    took 60 % more memory for that reason.

    Blocks from 64 kB on are mapped one by one: those of 64 to 256 kB in the heap kept holes of 20 MB beside CoAtNet's
    gradients, of which no foresight knows.
    """
    if always or data_limit() is not None:
        mallopt(mmap=64 * 1024, trim=1024 * 1024)


@contextlib.contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Context in which glibc keeps what a batch frees for the next one; with RLIMIT_DATA it changes nothing.

    A pass without gradients frees all its memory, 50 MB per batch, and glibc would return it to the system each
    time and fault it in again, page by page: a third of an evaluation's time on a CPU.
    """
    limited = data_limit() is not None
    if not limited:
        mallopt(mmap=CEILING, trim=2**31 - 1)
    try:
        yield
    finally:
        if not limited:
            mallopt(mmap=CEILING, trim=2 * CEILING)


def mallopt(*, mmap: int, trim: int | None = None) -> None:
    """Sets glibc's two limits: the size from which a block is mapped, and the free bytes kept at the heap's end."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        glibc = ctypes.CDLL(None).mallopt
        glibc(M_MMAP_THRESHOLD, mmap)
        if trim is not None:
            glibc(M_TRIM_THRESHOLD, trim)


def bytes_by_kind() -> dict[str, int]:
    """Measures the bytes of all parameters and optimizers found in this process, by kind, like `held`."""
    import torch

    parameters: dict[int, Any] = {}
    optimizers = []
    for candidate in gc.get_objects():
        kind = type(candidate)
        if issubclass(kind, torch.nn.Parameter):
            if not candidate.is_meta:
                parameters[id(candidate)] = candidate
        elif issubclass(kind, torch.optim.Optimizer):
            optimizers.append(candidate)
    return {
        "parameters": bytes_of(parameters.values()),
        "gradients": bytes_of(parameter.grad for parameter in parameters.values()),
        "optimizer": sum(held(optimizer)["optimizer"] for optimizer in optimizers),
    }


CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
SMALL_PART = 50
"""Times a size that must be left, for the size to count as small."""
UNLIMITED = 1 << 60  # bytes: version 1 writes a number near 2**63 where there is no limit


def folders(controller: Literal["cpu", "memory"], root: Path = CGROUPS, own: Path = OWN_CGROUP) -> Iterator[Path]:
    """Yields the folders of this process's control group and of those above it, of version 2 and 1, that may be there.

    Args:
        controller: its hierarchy is read in version 1, which has a hierarchy for each.
    """
    lines = []
    with contextlib.suppress(OSError):
        lines = [line.split(":", 2) for line in own.read_text().splitlines() if line.count(":") >= 2]
    paths = {"": "", controller: ""}
    paths |= {name: path for _, several, path in lines for name in several.split(",")}
    for base, path in ((root, paths[""]), (root / controller, paths[controller])):
        folder = base.joinpath(*[part for part in path.split("/") if part])
        # In a container, the path may be the one outside of the container.
        for above in (folder, *folder.parents):
            if above.is_relative_to(base) and ".." not in above.parts:
                yield above


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int | None:
    """Reads the lowest CPU quota of this process's control groups, in whole cores, at least 1; None: no quota."""
    quotas = []
    for folder in folders("cpu", root, own):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            if quota not in ("max", "-1"):
                quotas.append(max(1, int(quota) // int(period)))
    return min(quotas, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlGroup:
    """A control group whose memory is limited: of a Slurm job (`--mem`), or a container.

    The kernel kills one of its processes where they need more.
    """

    size: int
    """Bytes that its processes may have together."""
    free: int
    """Bytes that they can still have; files' cached pages, which the kernel gives up first, are among them."""


def control_group(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> ControlGroup | None:
    """Returns the control group that leaves this process the least memory, of version 2 or 1; None: none limits it."""
    groups = []
    for folder in folders("memory", root, own):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            names, prefix = ("memory.max", "memory.current"), ""
            if not (folder / names[0]).exists():
                names, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
            texts = ((folder / name).read_text().strip() for name in names)
            size, used = (UNLIMITED if text == "max" else int(text) for text in texts)
            if size < UNLIMITED:
                stat = _numbers(folder / "memory.stat")
                cached = stat[f"{prefix}inactive_file"] + stat[f"{prefix}active_file"]
                groups.append(ControlGroup(size=size, free=max(0, size - used + cached)))
    return min(groups, key=lambda group: group.free, default=None)


def killed(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Counts the processes that the kernel has killed for want of memory in this process's control groups.

    In version 1 only the killed process's group counts, whether it or one above has the limit; in version 2 all do.
    """
    count = 0
    for folder in folders("memory", root, own):
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                count += _numbers(folder / name).get("oom_kill", 0)
    return count


def free(meminfo: Path = MEMINFO) -> int | None:
    """Returns the bytes that the processes here can still have together; None if the system does not report them."""
    left = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        left.append(_numbers(meminfo)["MemAvailable:"] * 1024)
    group = control_group()
    if group is not None:
        left.append(group.free)
    return min(left, default=None)


def has_room(size: int, processes: int = 1, *, peak_known: bool = True) -> bool:
    """Returns whether this process may take `size` bytes more, and then grow to its peak, too.

    The peak is what a step needs, so the next step will need it again.

    Args:
        processes: the number of processes here that do the same.
        peak_known: whether this process has reached its peak; if not, `size` must be a small part of what is left.
    """
    needed = size + below_peak() if peak_known else SMALL_PART * size
    own = data_limit()
    if own is not None and data_size() + needed > own:
        return False
    left = free()
    return left is None or needed * processes <= left


def _numbers(file: Path) -> Mapping[str, int]:
    """Reads lines of a name, a number, and perhaps its unit."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
