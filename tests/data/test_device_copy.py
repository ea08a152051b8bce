"""Copies to a GPU beside the kernels of the step before: the order of the calls, on tests.gpu_stand_in."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from grappe import Arrays, Task, normalise
from grappe.data.device_copy import Constant, copies_to, on_device, page_locked, sent
from grappe.data.loader import evaluation_loader, training_loader
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api.torch import fake_tensors
from grappe.profiling.phases import DATA, TRANSFER
from tests.gpu_stand_in import CPU, GPU, GpuStandIn

BESIDE = ["copy to the GPU on side"] * 2
HANDED_OVER = ["computing waits for side", *["recorded on computing"] * 2]


class Graph:
    """A batch object with a `to` of its own, whose tensors nobody else knows."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device, *, non_blocking: bool):
        return Graph(self.nodes.to(device, non_blocking=non_blocking))


class Rows(Dataset):
    """Samples that are loaded one by one."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3,), float(index)), index % 2


class RowsOnTheGpu(Rows):
    """Samples that are on the GPU already, with a target that is an expanded view."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(3, device="cuda"), torch.ones(1).expand(3)


class Classes(Task):
    """Classes of rows."""

    batch_size: int = 4

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def data(self, split: str, folder: Path) -> Any:
        return Rows()


def test_a_batch_is_copied_on_a_stream_of_its_own_which_the_computing_one_waits_for(gpu: GpuStandIn) -> None:
    batch = {"image": torch.ones(4, 3), "name": "a"}, (torch.ones(4), 3, None)
    (inputs, targets) = copies_to(GPU)(batch)
    assert gpu.calls == BESIDE + HANDED_OVER
    assert inputs["image"].device == targets[0].device == GPU
    assert (inputs["name"], targets[1:]) == ("a", (3, None))
    assert gpu.waits == []


def test_what_cannot_be_recorded_is_copied_where_it_is_used(gpu: GpuStandIn) -> None:
    """Tests what else would be overwritten by a later copy, while kernels read it."""
    nodes = torch.ones(4).pin_memory()
    (graph, target) = copies_to(GPU)((Graph(nodes), torch.ones(4)))
    there = ["copy to the GPU on side", "computing waits for side"]
    assert gpu.calls == [*there, "copy to the GPU on computing", "recorded on computing"]
    assert graph.nodes.device == target.device == GPU


def test_what_is_on_the_gpu_already_stays(gpu: GpuStandIn) -> None:
    there = torch.ones(4, device="cuda")
    assert copies_to(GPU)([there])[0] is there


def test_loaders_of_training_and_evaluation_copy_beside_the_steps(gpu: GpuStandIn) -> None:
    task, world = Classes(), World(process=ProcessRank(), device=GPU)
    for make, parts in ((training_loader, 2), (evaluation_loader, 1)):
        plan = Plan.parse("microbatches=2,workers=0")
        loader = make(task, Rows(), plan, world)
        loader.phase = lambda phase: gpu.calls.append({TRANSFER: "transfer", DATA: "data"}[phase])
        gpu.calls.clear()
        batch = next(loader.batches(0, 1))
        assert gpu.calls == ["transfer", *BESIDE, *HANDED_OVER, "data"] * parts
        assert {micro.inputs.device for micro in batch.microbatches} == {GPU}
    assert gpu.waits == []


def test_samples_on_the_gpu_and_expanded_ones_make_a_batch(gpu: GpuStandIn) -> None:
    task, world = Classes(batch_size=1), World(process=ProcessRank(), device=GPU)
    batch = next(training_loader(task, RowsOnTheGpu(), Plan.parse("workers=0"), world).batches(0, 1))
    assert batch.microbatches[0].inputs.device == batch.microbatches[0].targets.device == GPU
    assert gpu.waits == []


def test_arrays_that_stay_on_the_host_are_copied_beside_the_steps(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (100, 100))
    pixels, transform = np.zeros((50, 3, 2, 2), np.uint8), normalise((0.0,) * 3, (1.0,) * 3)
    arrays = Arrays(pixels, {"class": np.zeros(50)}, transform=transform)
    arrays.to_device(GPU)
    constants = ["copy to the GPU on computing"] * 2
    for first in (constants, []):  # the mean and the deviation are sent once
        gpu.calls.clear()
        inputs, targets = arrays.gather(np.arange(4), GPU)
        assert gpu.calls == BESIDE + HANDED_OVER + first
        assert inputs.device == targets["class"].device == GPU
    assert gpu.waits == []


def test_arrays_on_the_gpu_gather_there_and_give_the_host_what_it_asks_for(gpu: GpuStandIn) -> None:
    arrays = Arrays(np.zeros((50, 3)), np.zeros(50))
    arrays.to_device(GPU)
    gpu.waits.clear()
    gpu.calls.clear()
    inputs, _ = arrays.gather(np.arange(4), GPU)
    assert inputs.device == GPU
    assert gpu.calls == ["copy to the GPU on computing"]  # of the ids, once for all arrays
    assert gpu.waits == []
    inputs, targets = arrays.gather(np.arange(4), CPU)
    assert inputs.device == targets.device == CPU


def test_splits_of_the_same_arrays_move_their_own_rows(gpu: GpuStandIn) -> None:
    arrays = Arrays(torch.zeros(10, 4), torch.zeros(10))
    part = arrays.rows(np.arange(3))
    part.to_device(GPU)
    assert len(part.inputs) == len(part) == 3
    assert part.gather(np.array([2, 0]), GPU)[0].shape == (2, 4)
    assert arrays.inputs.is_cpu and len(arrays.inputs) == 10


def test_a_copy_to_the_host_waits_for_its_values(gpu: GpuStandIn) -> None:
    """Tests that an example batch is not read before it has arrived."""
    on_device(torch.ones(3, device="cuda"), CPU)
    assert [wait.what for wait in gpu.waits] == ["a copy to the host that blocks of [3]"]


def test_memory_is_locked_once(gpu: GpuStandIn) -> None:
    values = torch.arange(3)
    locked = page_locked(values)
    assert page_locked(locked) is locked
    assert locked.tolist() == [0, 1, 2]
    # torch refuses to write what shares memory
    assert page_locked(values.expand(4, 3)).tolist() == [[0, 1, 2]] * 4


def test_on_a_cpu_nothing_is_copied() -> None:
    values = torch.ones(3)
    assert sent(values, CPU) is values
    assert Constant(values).on(CPU) is values


def test_a_constant_of_a_trace_is_not_kept() -> None:
    constant, meta = Constant(torch.ones(3)), torch.device("meta")
    with fake_tensors():
        assert type(constant.on(meta)) is not Tensor
    assert type(constant.on(meta)) is Tensor
    assert constant.on(meta) is constant.on(meta)
