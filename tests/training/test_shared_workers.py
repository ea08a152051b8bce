"""Data workers that processes share: which loaders have such, and that a batch is loaded once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from grappe.contrib.script.launch import launch
from grappe.training import shared_workers
from grappe.training.shared_workers import Elsewhere, fetching, loaded_rows

ROWS = TensorDataset(torch.arange(12.0))


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(12))


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ({"num_workers": 2}, True),
        ({"num_workers": 2, "persistent_workers": True, "shuffle": True}, True),
        ({}, False),
        ({"num_workers": 2, "multiprocessing_context": "spawn"}, False),
        ({"num_workers": 2, "batch_size": None}, False),
        ({"num_workers": 2, "dataset": Endless()}, False),
    ],
)
def test_workers_that_are_forked_and_load_by_number_are_shared(options: dict[str, Any], shared: bool) -> None:
    loader = DataLoader(**{"dataset": ROWS, **options})
    assert shared_workers._can_be_shared(loader) == shared


IMAGE, BOXES = torch.zeros(3, 8, 8), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ([torch.zeros(6, 2), torch.zeros(6)], 6),
        (((torch.zeros(6, 2), torch.zeros(6, 2)), (torch.zeros(6), torch.zeros(6))), 6),
        (((IMAGE,) * 5, ({"boxes": BOXES},) * 5), 5),
        (((IMAGE,) * 5, (BOXES,) * 5), 5),
        ((["text"] * 6, torch.zeros(6)), 6),
    ],
)
def test_a_list_of_each_sample_s_tensors_has_no_rows(batch: Any, rows: int) -> None:
    assert loaded_rows(batch) == rows


def test_outside_of_a_shared_loader_s_workers_batches_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = fetching(lambda _, indices: indices)
    assert fetch(None, [1]) == [1]
    monkeypatch.setattr(shared_workers, "_share", (0, 2))
    assert fetch(None, [1]) == [1], "this is no worker"
    monkeypatch.setattr(shared_workers, "get_worker_info", lambda: type("Worker", (), {"id": 3}))
    assert isinstance(fetch(None, [1]), Elsewhere)
    monkeypatch.setattr(shared_workers, "_share", (1, 2))
    assert fetch(None, [1]) == [1]


SCRIPT = """
import os, torch
from torch.utils.data import DataLoader, Dataset


class Noted(Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, number):
        descriptor = os.open("loads", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, bytes([number]))
        os.close(descriptor)
        return torch.randn(3, 60, 60), number % 2


model = torch.nn.Linear(3 * 3600, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for images, labels in DataLoader(Noted(), 6, num_workers=3):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images.flatten(1)), labels).backward()
    optimizer.step()
print(f"{model.weight.sum().item():.6f}")
"""


def test_each_sample_is_loaded_once(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "train.py").write_text(SCRIPT)
    assert launch("train.py", [], "replicate=2,device=cpu,threads=1") == 0
    assert sorted(Path("loads").read_bytes()) == [*range(30)]
