"""The time breakdown and its remedies, on recorded times: planted slownesses, each named first, and sums of 100 %."""

import dataclasses
from collections.abc import Sequence

import pytest

from grappe.contrib.lab.breakdown import RULES, SMALL_BATCH, USEFUL, TimeBreakdown, TracedRun, break_down
from grappe.contrib.lab.explain import tables
from grappe.contrib.lab.operators import LineCost
from grappe.verbs.measure.points import Measurement
from tests.verbs.measure.test_verdict import point

STEP = {"forward": 0.040, "backward": 0.060}
RATES = {"fp32": 1e12, "bf16": 1e12}
LINE = "/home/me/my_task.py:41"
OTHERS = "waiting for other processes"


def traces(*further: LineCost, processes: int = 1, matrix: float = 0.098, flops: float = 0.097e12, host: float = 0.002):
    """A trace of a step of 100 ms: 98 ms of products, which take 97 ms at the reachable rate."""
    costs = (LineCost(kind="matrix", calls=100, host=host, kernel=matrix, flops=flops), *further)
    return TracedRun(processes=(costs,) * processes, reachable=RATES)


def first(one: Measurement, found: TracedRun, *others: Measurement) -> tuple[str, float, str]:
    """The part that is named first, its share, and the word that moves it; the sum is checked."""
    breakdown = break_down(one, found, [one, *others])
    assert set(breakdown.parts) == {*RULES, USEFUL}
    assert min(breakdown.parts.values()) >= -1e-12
    assert sum(breakdown.parts.values()) == pytest.approx(1)
    assert breakdown.seconds == pytest.approx(sum(one.middle().processes[0].phases.values()))
    best = breakdown.remedies[0]
    return best.part, breakdown.parts.get(best.part, 0.0), best.word


def test_nothing_is_lost_and_the_rest_is_useful() -> None:
    breakdown = break_down(point(STEP), traces())
    assert breakdown.seconds == pytest.approx(0.1)
    assert breakdown.parts[USEFUL] == pytest.approx(0.97)
    assert breakdown.parts["host between kernels"] == pytest.approx(0.02)
    assert USEFUL not in [remedy.part for remedy in breakdown.remedies]


def test_a_slow_loader() -> None:
    assert first(point({**STEP, "data": 0.3}), traces()) == ("waiting for data", pytest.approx(0.75), "workers=4")
    assert "cheaper transform" in first(point({**STEP, "data": 0.3}, workers=None), traces())[2]


def test_thousands_of_tiny_operators() -> None:
    slow = traces(LineCost(line=LINE, calls=3900, host=0.14), matrix=0.01, flops=0.01e12, host=0.06)
    part, share, word = first(point(STEP), slow)
    assert (part, share) == ("host between kernels", pytest.approx(0.9))
    assert word == "4,000 operators a step, 3,900 of them at my_task.py:41: fewer, larger ones, or compile"


def test_values_that_are_read() -> None:
    """The host's seconds of all operators at a line that reads count."""
    reading = (LineCost(kind="read", line=LINE, calls=512, host=0.06), LineCost(line=LINE, calls=1024, host=0.1))
    slow = traces(*reading, matrix=0.01, flops=0.01e12, host=0.04)
    part, share, word = first(point(STEP), slow)
    assert (part, share) == ("values read by the host", pytest.approx(0.72))
    assert word.startswith("my_task.py:41 reads values (.item(), float(), .tolist()) 512 times a step")


def test_a_layout_that_is_copied_each_step() -> None:
    slow = traces(LineCost(kind="copy", line=LINE, calls=1, kernel=0.068), matrix=0.03, flops=0.03e12)
    part, share, word = first(point(STEP), slow)
    assert (part, share) == ("copies of layouts", pytest.approx(0.68))
    assert word == "a layout is copied each step at my_task.py:41: make it once, in data()"


def test_a_slow_process() -> None:
    """The others wait 30 ms for process 1: that is what its slowness costs, not the mean of all."""
    quick, slow = {**STEP, "communication": 0.030}, {"forward": 0.070, "backward": 0.060}
    part, share, word = first(point(quick, slow, quick, plan="replicate=3"), traces(processes=3))
    assert (part, share) == (OTHERS, pytest.approx(0.030 / 0.130))
    assert word == "process 1 on a has 30 ms more a step, most of it in forward"


@pytest.mark.parametrize(
    ("plan", "remedy"),
    [
        ("replicate=2", "a larger batch_size, or fewer processes"),
        ("pipeline=2,microbatches=4", "microbatches=8, or stages of more even work (cuts)"),
    ],
)
def test_communication_and_stages(plan: str, remedy: str) -> None:
    """Collectives that are called in forward and backward are waiting, too, and no computing."""
    waits = {**STEP, "communication": 0.1}
    found = traces(LineCost(kind="collective", calls=2, kernel=0.02), processes=2, matrix=0.078)
    part, share, word = first(point(waits, waits, plan=plan), found)
    assert (part, share, word) == (OTHERS, pytest.approx(0.6), remedy)
    assert break_down(point(waits, waits, plan=plan), found).parts["not explained"] == pytest.approx(0)


def test_a_tiny_batch() -> None:
    """Four times the batch takes as long: what it would bring is told, of several parts together."""
    small = traces(matrix=0.09, flops=0.001e12)
    part, _, word = first(point({**STEP, "update": 0.1}), small, point({**STEP, "update": 0.1}, batch=256))
    assert part == SMALL_BATCH
    assert word == "batch_size=256 (tried; it changes what is learned)"


def test_fp32_where_bf16_is_meant_and_bf16_where_it_is_slow() -> None:
    """97 ms at the rate of fp32 are 48.5 ms at that of bf16: the gain is what large products promise."""
    fast = dataclasses.replace(traces(), reachable={"fp32": 1e12, "bf16": 2e12})
    assert first(point(STEP), fast) == ("precision not used", pytest.approx(0.485), "precision=bf16")
    emulated = dataclasses.replace(traces(flops=0.097e11), reachable={"fp32": 1e12, "bf16": 1e11})
    assert first(point(STEP, plan="precision=bf16"), emulated)[2] == "precision=fp32"


def test_on_a_gpu_the_rates_of_its_generation_count_and_the_host_has_what_kernels_leave() -> None:
    found = dataclasses.replace(traces(flops=0.05e12), reachable={"fp32": 1e12, "tf32": 4e12, "bf16": 10e12})
    one = point(STEP, device="NVIDIA H100")
    assert first(one, found) == ("precision not used", pytest.approx(0.45), "precision=bf16")
    volta = dataclasses.replace(found, reachable={"fp32": 1e12, "fp16": 5e12, "bf16": 0.5e12})
    assert first(point(STEP, plan="precision=bf16"), volta)[2] == "precision=fp16"
    assert first(one, traces(matrix=0.03, flops=0.03e12))[:2] == ("host between kernels", pytest.approx(0.7))


def test_of_compiled_units_only_operators_are_divided() -> None:
    one = point(STEP, plan="compile")
    breakdown = break_down(one, traces(matrix=0.05, flops=0.05e12, host=0.05))
    assert breakdown.parts["host between kernels"] == 0
    assert breakdown.parts["not explained"] == pytest.approx(0.5)
    assert "--profile" in next(each.word for each in breakdown.remedies)


def test_what_the_trace_did_not_see_is_not_explained() -> None:
    breakdown = break_down(point({"forward": 0.2, "backward": 0.2}), traces())
    assert breakdown.parts["not explained"] == pytest.approx(0.75)
    none = TracedRun(processes=((),), reachable=RATES)
    assert break_down(point(STEP), none).parts["not explained"] == 1
    assert break_down(point(STEP, device="NVIDIA H100"), none).parts["not explained"] == 1


def test_kernels_that_were_slower_under_the_trace_are_scaled() -> None:
    breakdown = break_down(point(STEP), traces(LineCost(kernel=0.05), matrix=0.15, flops=0.06e12))
    assert breakdown.parts["small or memory-bound kernels"] == pytest.approx(0.4)
    assert breakdown.parts[USEFUL] == pytest.approx(0.6)


def test_the_table() -> None:
    breakdown = break_down(point({**STEP, "data": 0.3}), traces())
    empty, shown = tables([breakdown])
    assert (empty, cells(shown, 0)[0]) == ("", "waiting for data")
    assert cells(shown, 1) == ["75.0%", "0.8%", "24.2%"]
    assert cells(shown, 3) == ["up to 4x", "", ""]
    failed = TimeBreakdown(plan="", batch=64, failure="no")
    assert list(tables([failed])) == ["one process (batch 64): its steps could not be traced: no"]


def cells(table, column: int) -> Sequence[str]:
    return list(table.columns[column].cells)
