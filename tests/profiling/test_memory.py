"""Bytes by kind, to the byte, and the most that a process held."""

import gc
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from grappe.profiling import memory
from tests.sleeping import Net


def test_held_is_to_the_byte() -> None:
    net = Net(0, 0)
    count = sum(parameter.numel() for parameter in net.parameters())
    adam = torch.optim.Adam(net.parameters())
    assert memory.held(adam) == {"parameters": 4 * count, "gradients": 0, "optimizer": 0}
    net(torch.ones(1, 3)).sum().backward()
    adam.step()
    # Two moments of each number, and a step count of each tensor.
    state = 8 * count + 4 * len(list(net.parameters()))
    assert memory.held(adam) == {"parameters": 4 * count, "gradients": 4 * count, "optimizer": state}
    # DeepSpeed steps a copy; its stage 3 keeps a parameter's part beside the empty parameter.
    part = nn.Parameter(torch.empty(0))
    part.ds_tensor = torch.ones(7)  # pyrefly: ignore
    assert memory.held(adam, [*net.parameters(), part])["parameters"] == 4 * count + 28
    half = torch.optim.SGD(nn.Linear(3, 3, dtype=torch.bfloat16).parameters())
    assert memory.held(half)["parameters"] == 2 * 12


def test_a_sparse_gradient_has_its_indices_and_rows() -> None:
    embedding = torch.nn.Embedding(1000, 8, sparse=True)
    embedding(torch.tensor([3, 5, 3])).sum().backward()
    assert memory.bytes_of([embedding.weight.grad]) == 2 * (8 + 8 * 4)


def test_peak_is_what_the_kernel_says(tmp_path: Path) -> None:
    fake = tmp_path / "status"
    fake.write_text("Name:\tpython\nVmHWM:\t  1024 kB\nThreads: 1\n")
    assert memory.peak(torch.device("cpu"), fake) == {"host": 1024 * 1024}
    assert memory.peak(torch.device("cpu"), tmp_path / "none") == {}
    assert memory.peak(torch.device("cpu"))["host"] > 50e6


def test_what_all_hold_is_found_whoever_made_it() -> None:
    gc.collect()  # what other tests left is counted until it is collected, at any time
    before = memory.bytes_by_kind()
    net = nn.Linear(1000, 100)
    adam = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 1000)).sum().backward()
    adam.step()
    after = memory.bytes_by_kind()
    grown = {kind: after[kind] - before[kind] for kind in after}
    assert grown == {"parameters": 4 * 100_100, "gradients": 4 * 100_100, "optimizer": 8 * 100_100 + 2 * 4}


FAULTS = """
import resource, torch
from grappe.profiling import memory
memory.mallopt(mmap=1 << 20, trim=1 << 20)  # large blocks are mapped, and given back
taken = []
for _ in range(2):
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(5_000_000) for _ in range(4)]
        del blocks
    taken.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    if len(taken) == 1:
        kept = memory.keep_freed_memory()
        kept.__enter__()
print(*taken)
"""


def test_what_a_batch_frees_is_there_for_the_next_one() -> None:
    """Page faults of the sixth pass over 80 MB, which are 20,000 pages. Until the fourth the heap finds its layout."""
    said = subprocess.check_output([sys.executable, "-c", FAULTS], text=True)
    given_back, kept = map(int, said.split())
    assert kept < 1000
    assert given_back > 10_000


HOLES = """
import torch
from grappe.profiling import memory
memory.return_freed_memory(always=True)
blocks = [torch.ones(25_000) for _ in range(400)]
before = memory.data_size()
del blocks[::2]
print(before - memory.data_size())
"""


def test_freed_blocks_between_others_go_back() -> None:
    """200 of 100 kB, each between two that stay."""
    said = subprocess.check_output([sys.executable, "-c", HOLES], text=True)
    assert int(said) > 150 * 100_000


@pytest.mark.parametrize(("limit", "told"), [(resource.RLIM_INFINITY, 2), (1 << 40, 0)])
def test_where_memory_is_limited_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, limit: int, told: int) -> None:
    calls: list[dict[str, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(memory, "mallopt", lambda **given: calls.append(given))
    with memory.keep_freed_memory():
        pass
    assert len(calls) == told
