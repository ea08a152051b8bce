"""The pieces of an exact plan: every slice's together are the global batch, in whatever order they are gathered."""

import numpy as np
import pytest
import torch

from grappe.data.batch import ExactPieces
from grappe.plan import Plan


@pytest.mark.parametrize("plan", ["exact=8", "exact=8,replicate=2", "exact=8,shard=4", "exact=8,replicate=8"])
def test_the_slices_pieces_are_the_batch(plan: str) -> None:
    pieces = ExactPieces.of(Plan.parse(plan))
    everyone = np.arange(21)
    spans = [span for rank in range(pieces.slices) for span in pieces.spans(len(everyone), rank)]
    gathered = [everyone[a:b].tolist() for a, b in spans]
    assert [one for place in pieces.order() for one in gathered[place]] == everyone.tolist()


def test_sharded_pieces_that_are_reduced_together_are_neighbours() -> None:
    pieces = ExactPieces.of(Plan.parse("exact=8,shard=2"))
    assert [list(pieces.places(rank)) for rank in range(2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_one_process_has_all_pieces_in_order() -> None:
    pieces = ExactPieces.of(Plan.parse("exact=4"))
    assert pieces.gathered(torch.arange(4), None).tolist() == [0, 1, 2, 3]
