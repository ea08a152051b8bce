"""Time that grappe adds to a step: a tiny network beside the same loop by hand, in blocks by turns."""

from __future__ import annotations

from benchmarks.contenders.grappe import witness
from benchmarks.figures import Quartiles, spread
from benchmarks.gpu.part import Aim, Part
from benchmarks.rotation import Pace, rotate

CONTENDERS = ("handwritten", "grappe", "handwritten")
"""By hand twice: what separates a loop from itself is what a difference of nothing looks like."""
PACE = Pace(rounds=30, warmup=25, block=300)
AIM = Aim(figure=15, form="{:.0f} µs", at_most=True)


def main(part: Part) -> None:
    """Reports the median and the quartiles of the rounds' differences, in microseconds a step."""
    pace = PACE if part.on_gpu else Pace(rounds=4, warmup=5, block=40)
    folder = part.scratch / "contenders"
    folder.mkdir()
    blocks = rotate(CONTENDERS, 1, pace, folder, part.device)
    if part.on_gpu:  # a few steps on a CPU are over before a bar is drawn
        witness(folder / "1", pace.rounds * (pace.warmup + pace.block))
    by_hand, grappe, again = ([block[0].wall * 1e6 for block in blocks[place]] for place in range(3))
    added, nothing = _difference(grappe, by_hand), _difference(again, by_hand)
    part.measured(
        "time added to a step of a tiny network",
        f"{added.text('{:+.0f}')} µs to {spread(by_hand).text('{:.0f}')} by hand, which differ from themselves by "
        f"{nothing.text('{:+.0f}')}",
        aim=AIM,
        found=added.median,
        added_seconds=added.median / 1e6,
        by_hand_seconds=spread(by_hand).median / 1e6,
    )


def _difference(one: list[float], other: list[float]) -> Quartiles:
    """Takes differences within each round."""
    return spread([a - b for a, b in zip(one, other, strict=True)])
