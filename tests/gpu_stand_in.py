"""GpuStandIn: a stand-in for a GPU, for machines without one: counts the calls of a step that would wait for it.

Tensors "on cuda:0" are tensors on the meta device: they have shapes, types and gradients, and no values. A mode for
torch's functions presents them as CUDA tensors and sends requests for "cuda" to meta; a mode for operators sees what
autograd and the optimizer call, too, and notes each operator that waits on a GPU: by torch's sources
(aten/src/ATen/native/cuda/Copy.cu, Nonzero.cu, TensorCompare.cpp), not by a measurement. Streams and events are noted
in the order of the calls. Nothing here runs on a GPU, and nothing is computed.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from grappe.data.device_copy import copies_to

GPU, META, CPU = torch.device("cuda", 0), torch.device("meta"), torch.device("cpu")
aten = torch.ops.aten
READS = {aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.item}
OF_UNKNOWN_SIZE = {
    aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount,
}  # fmt: skip
DEVICE, IS_CUDA, IS_META, IS_CPU = (
    getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_meta", "is_cpu")
)


class Wait(NamedTuple):
    """A call that waits for the GPU."""

    what: str
    line: str
    """The innermost line of grappe's that it comes from."""


class Stream:
    """Stands in for torch.cuda.Stream."""

    def __init__(self, gpu: GpuStandIn, name: str) -> None:
        self._gpu, self.name = gpu, name

    def wait_stream(self, other: Stream) -> None:
        self._gpu.calls.append(f"{self.name} waits for {other.name}")


class Event:
    """Stands in for torch.cuda.Event."""

    def __init__(self, gpu: GpuStandIn) -> None:
        self._gpu = gpu

    def record(self) -> None:
        self._gpu.calls.append(f"event on {self._gpu.current.name}")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._gpu.event_waits += 1

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class GpuStandIn:
    """Notes of a stand-in GPU: the calls that waited, and the calls of its streams in their order."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.event_waits = 0
        """Waits of the host for an event: a step's numbers, read one step late."""
        self.calls: list[str] = []
        self.computing = self.current = Stream(self, "computing")
        self.locked: list[Any] = []
        """Storages of page-locked memory; they are kept, so that no other can have the address of one."""

    def is_locked(self, tensor: Tensor) -> bool:
        return any(one.data_ptr() == tensor.untyped_storage().data_ptr() for one in self.locked)

    def lock(self, tensor: Tensor) -> Tensor:
        self.locked.append(tensor.untyped_storage())
        return tensor

    def wait(self, what: str) -> None:
        frames = [one for one in traceback.extract_stack() if "/src/grappe/" in one.filename]
        line = f"{frames[-1].filename.rpartition('/src/grappe/')[2]}:{frames[-1].lineno}" if frames else ""
        self.waits.append(Wait(what, line))

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class _Functions(TorchFunctionMode):
    """Presents tensors on meta as CUDA's, and sends what asks for "cuda" to meta."""

    def __init__(self, gpu: GpuStandIn) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function == DEVICE:
            return GPU if _device(args[0]) == META else _device(args[0])
        if function in (IS_CUDA, IS_META, IS_CPU):
            return _device(args[0]) == {IS_CUDA: META, IS_CPU: CPU}.get(function)
        if function in (Tensor.__getitem__, Tensor.__setitem__) and _device(args[0]) == META:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(one, list) for one in places):
                self._gpu.wait("an index that is a list: torch makes a tensor of it on the host")
        if function is Tensor.pin_memory:
            assert _device(args[0]) == CPU, "only dense CPU tensors can be pinned"
            assert all(step or size == 1 for step, size in zip(args[0].stride(), args[0].shape, strict=True))
            return args[0] if self._gpu.is_locked(args[0]) else self._gpu.lock(args[0].clone())
        if function is torch.device:
            return function(*args, **kwargs)
        locks = kwargs.pop("pin_memory", False)
        if function in (torch.tensor, torch.as_tensor) and _asks_for_gpu(kwargs.get("device")):
            kwargs.pop("device")
            return function(*args, **kwargs).to(META)  # as torch does: made on the host, and copied
        found = function(*(_on_meta(one) for one in args), **{key: _on_meta(one) for key, one in kwargs.items()})
        return self._gpu.lock(found) if locks else found


class _Operators(TorchDispatchMode):
    """Notes operators that wait, and gives a value where a tensor on meta has none."""

    def __init__(self, gpu: GpuStandIn) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = function.overloadpacket
        with torch._C.DisableTorchFunction():
            if packet in READS and _device(args[0]) == META:
                self._gpu.wait(str(packet))
                return False if packet is aten.equal else 1.0 if args[0].is_floating_point() else 1
            if packet in OF_UNKNOWN_SIZE and _device(args[0]) == META:
                self._gpu.wait(str(packet))
            if packet in (aten.index, aten.index_put, aten.index_put_) and _device(args[0]) == META:
                self._index(packet, args)
            if packet is aten.repeat_interleave and kwargs.get("output_size") is None:
                self._gpu.wait(str(packet))
            if packet is aten._to_copy:
                return self._to_copy(function, args, kwargs)
            if packet is aten.copy_ and _device(args[0]) != _device(args[1]):
                self._copy(args[1], args[0], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
                return args[0]
            return function(*args, **kwargs)

    def _index(self, packet: Any, args: Any) -> None:
        for one in args[1]:
            if one is not None and one.dtype in (torch.bool, torch.uint8):
                self._gpu.wait(f"{packet} by a mask")
            elif one is not None and _device(one) == CPU:
                self._gpu.wait(f"{packet} by an index on the host")

    def _to_copy(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        source, target = _device(args[0]), kwargs.get("device") or _device(args[0])
        if torch.device(target) == source:
            return function(*args, **kwargs)
        options = {"dtype": kwargs.get("dtype") or args[0].dtype, "device": target}
        found = torch.zeros(args[0].shape, **options)
        # What is copied to the host without waiting is made in page-locked memory (TensorConversions.cpp).
        if found.device == CPU and kwargs.get("non_blocking"):
            self._gpu.lock(found)
        self._copy(args[0], found, kwargs.get("non_blocking", False))
        return found

    def _copy(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        host = source if _device(source) == CPU else target
        way = "to the host" if host is target else "to the GPU"
        if not (non_blocking and self._gpu.is_locked(host)):
            self._gpu.wait(f"a copy {way}{'' if non_blocking else ' that blocks'} of {list(source.shape)}")
        self._gpu.calls.append(f"copy {way} on {self._gpu.current.name}")


def _device(tensor: Tensor) -> torch.device:
    with torch._C.DisableTorchFunction():
        return tensor.device


def _asks_for_gpu(value: Any) -> bool:
    return str(value).startswith("cuda") if isinstance(value, str | torch.device) else False


def _on_meta(value: Any) -> Any:
    return META if _asks_for_gpu(value) else value


@contextlib.contextmanager
def gpu_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuStandIn]:
    """Context in which torch has a GPU, as far as this stand-in goes."""
    gpu = GpuStandIn()
    generators = (torch.Generator(),)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 33, 1 << 33))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    # Classes, since libraries that are imported meanwhile name them as types.
    side = type("Stream", (Stream,), {"__init__": lambda stream, device=None: Stream.__init__(stream, gpu, "side")})
    monkeypatch.setattr(torch.cuda, "Stream", side)
    event = type("Event", (Event,), {"__init__": lambda event, **_: Event.__init__(event, gpu)})
    monkeypatch.setattr(torch.cuda, "Event", event)
    # A build with CUDA would ask the driver.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr(torch.cuda, "stream", gpu.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: gpu.current)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device=None: generators[0].get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: generators[0].set_state(state))
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: gpu.calls.append(f"recorded on {stream.name}"))
    copies_to.cache_clear()
    with _Operators(gpu), _Functions(gpu):
        yield gpu
    copies_to.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuStandIn]:
    """A stand-in for a GPU."""
    with gpu_stand_in(monkeypatch) as made:
        yield made
