"""The loss of a whole batch, on one process."""

from __future__ import annotations

import torch

from grappe.data.batch import Batch, Microbatch
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.step.whole_batch import WholeBatchLosses
from tests.parity.contrastive import Views


def batch(rows: list[torch.Tensor], step: int = 0) -> Batch:
    micros = tuple(Microbatch(None, torch.zeros(len(one)), len(one), None) for one in rows)
    samples = sum(map(len, rows))
    return Batch(0, step, micros, samples, float(samples), torch.arange(samples).numpy())


def losses() -> WholeBatchLosses:
    world = World(process=ProcessRank(launcher="test"), device=torch.device("cpu"))
    return WholeBatchLosses(Views(), Plan(), world)


def test_a_microbatch_that_is_left_out_is_not_taken_for_a_later_one() -> None:
    """Engines may leave out a microbatch without samples; Python gives its identity to another one."""
    whole, generator = losses(), torch.Generator().manual_seed(0)
    outputs = [torch.randn(4, 2, 3, generator=generator) for _ in range(2)]
    first = batch(outputs)
    whole.look_ahead(first, outputs, 1.0)
    left_out = id(first.microbatches[1])
    del first
    later = [Microbatch(None, torch.zeros(4), 4, None) for _ in range(1000)]
    assert left_out not in map(id, later)


def test_the_gradient_in_parts_is_that_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 2, 3, generator=generator)
    alone = rows.clone().requires_grad_()
    Views().loss(alone, torch.zeros(7)).mean().backward()
    parts = [one.clone().requires_grad_() for one in rows.split([4, 3])]
    several, whole = batch(parts), losses()
    whole.look_ahead(several, [one.detach() for one in parts], 1.0)
    found = [whole(part, micro, several) for part, micro in zip(parts, several.microbatches, strict=True)]
    for one in found:
        one.scalar().backward()
    assert torch.allclose(torch.cat([one.grad for one in parts]), alone.grad, atol=1e-7)
    total = sum(float(one.total) for one in found)
    assert abs(total / 7 - float(Views().loss(rows, torch.zeros(7)).mean())) < 1e-6
