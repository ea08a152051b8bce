"""Copies of a GPU's tensors beside the training: on tests.gpu_stand_in, since this machine has no GPU."""

from collections.abc import Iterator

import pytest
import torch

from grappe.checkpoint.saver import Snapshots, gpu_has_room
from grappe.checkpoint.tensor_file import Piece
from tests.gpu_stand_in import GPU, GpuStandIn, gpu_stand_in

SIZE = 4 * 1024


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuStandIn]:
    """A GPU with 100 kB free, of a process that had 1 kB at most."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000)
    with gpu_stand_in(monkeypatch) as stand_in:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (100_000, 100_000))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: stand_in.calls.append("host waits"))
        yield stand_in


def pieces() -> list[Piece]:
    return [Piece("w", torch.zeros(1024, device="cuda"), (1024,), (0,)), Piece("step", torch.tensor([3.0]), (1,), (0,))]


def test_the_training_waits_for_no_copy(gpu: GpuStandIn) -> None:
    snapshots, given = Snapshots(), pieces()
    gpu.calls.clear()
    taken, copied = snapshots.take(given)
    assert copied
    assert gpu.calls == [
        "side waits for computing", "copy to the host on side", "recorded on side", "event on side",
    ]  # fmt: skip
    assert not gpu.waits and not gpu.event_waits
    given[1].data.fill_(4)  # the next step
    assert taken[1].data.item() == 3
    snapshots.wait()
    assert gpu.event_waits == 1


@pytest.mark.parametrize("why", ["the peak is not known", "no room", "memory runs out all the same"])
def test_without_a_copy_on_the_gpu_the_training_waits(gpu: GpuStandIn, monkeypatch, why: str) -> None:
    snapshots, given, empty = Snapshots(), pieces(), torch.empty

    def short(*shape: int, **options: object) -> torch.Tensor:
        if options.get("device") == GPU:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*shape, **options)  # type: ignore[call-overload]

    if why == "no room":
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 98_000)
    elif why != "the peak is not known":
        monkeypatch.setattr(torch, "empty", short)
    gpu.calls.clear()
    assert snapshots.take(given, peak_known=why != "the peak is not known")[1]
    assert gpu.calls == ["copy to the host on computing", "host waits"]
    snapshots.wait()
    assert not gpu.event_waits


def test_what_a_step_needs_stays_free(gpu: GpuStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_has_room(79_000, 1)
    assert not gpu_has_room(81_000, 1)
    assert not gpu_has_room(1, 2), "two processes share the GPU"
