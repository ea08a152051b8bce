"""Buffers of several processes agree on their mean, and keep all bits where they are the same."""

import pytest
import torch

from grappe.checkpoint.weights import LOCAL, InMemory, ModelWeights, agreed


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_equal_buffers_keep_their_bits(processes: int) -> None:
    buffer = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(agreed([buffer.clone() for _ in range(processes)]), buffer)


def test_buffers_that_differ_are_their_mean_and_counts_are_the_first() -> None:
    assert agreed([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 5.0])]).tolist() == [2.0, 5.0]
    assert agreed([torch.tensor(4), torch.tensor(6)]).item() == 4


def test_a_models_buffer_is_that_of_all_slices() -> None:
    weights = ModelWeights(InMemory({f"{LOCAL}{slice}.norm.mean": torch.tensor(slice / 2) for slice in range(3)}))
    assert weights.read("norm.mean").item() == 0.5
