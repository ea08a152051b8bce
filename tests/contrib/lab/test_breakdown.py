"""The time breakdown and its remedies, on recorded times: ten slownesses, each named first, and sums of 100 %."""

import dataclasses
from collections.abc import Mapping

import pytest

from grappe.contrib.lab.breakdown import (
    PARTS,
    SMALL_BATCH,
    USEFUL,
    ProcessTrace,
    RunTrace,
    break_down,
    remedies,
)
from grappe.contrib.lab.explain import Explanation, breakdown_table, explained
from grappe.contrib.lab.operators import LineCost, OperatorTotals
from grappe.errors import UsageError
from grappe.verbs.measure.points import Measurement, MeasureOptions
from tests.verbs.measure.test_verdict import point

STEP = {"forward": 0.040, "backward": 0.060}
EVERY = (1000, 1000)
RATES = {"fp32": 1e12, "bf16": 1e12}
LINE = "/home/me/my_task.py:41"


def traces(processes: int = 1, *, seen: Mapping[str, object] | None = None, **fields) -> RunTrace:
    """A trace of a step of 100 ms: 98 ms of products, which take 97 ms at the reachable rate."""
    known: dict = {
        "clock": "host", "operators": 100.0, "flops": 0.097e12, "matrix": 0.098, "copies": 0.0,
        "casts": 0.0, "elementwise": 0.0, "host": 0.002, "reads": 0.0, "messages": 0.0, "launches": 0.0,
        "host_lines": (), "read_lines": (), "copy_lines": (), **fields,
    }  # fmt: skip
    further = {"computing": 0.0, "evaluation": 0.0, "checkpoint": 0.0, "gradients": 100, "largest": ("w", 10)}
    one = ProcessTrace(operators=OperatorTotals(**known), **{**further, "steps_per_epoch": 50, **(seen or {})})
    return RunTrace(processes=(one,) * processes, reachable=RATES)


def cost(seconds: float = 0.05, calls: float = 1) -> tuple[LineCost, ...]:
    return (LineCost(line=LINE, calls=calls, seconds=seconds),)


def first(
    one: Measurement, found: RunTrace, *others: Measurement, every: tuple[int, int] = EVERY
) -> tuple[str, float, str]:
    """The part that is named first, its share, and the word that moves it; the sum is checked."""
    breakdown = break_down(one, found, *every)
    assert tuple(breakdown.parts) == PARTS
    assert min(breakdown.parts.values()) >= -1e-12
    assert sum(breakdown.share(part) for part in PARTS) == pytest.approx(1)
    best = remedies(breakdown, one, [one, *others])[0]
    return best.part, breakdown.parts.get(best.part, 0.0) / breakdown.seconds, best.word


def test_nothing_is_lost_and_the_rest_is_useful() -> None:
    breakdown = break_down(point(STEP), traces(), *EVERY)
    assert breakdown.seconds == pytest.approx(0.1)
    assert breakdown.share(USEFUL) == pytest.approx(0.97)
    assert breakdown.share("host between kernels") == pytest.approx(0.02)
    assert USEFUL not in [one.part for one in remedies(breakdown, point(STEP), [])]


def test_a_slow_loader() -> None:
    assert first(point({**STEP, "data": 0.3}), traces()) == ("waiting for data", pytest.approx(0.75), "workers=4")
    assert "in memory" in first(point({**STEP, "data": 0.3}, workers=None), traces())[2]


def test_thousands_of_tiny_operators() -> None:
    lines = (LineCost(line="", calls=50, seconds=0.06), *cost(calls=3900))
    slow = traces(matrix=0.01, flops=0.01e12, operators=4000.0, host=0.2, host_lines=lines)
    part, share, word = first(point(STEP), slow)
    assert (part, share) == ("host between kernels", pytest.approx(0.9))
    assert word == "4,000 operators a step, 3,900 of them at my_task.py:41: fewer, larger ones, or compile"


def test_values_that_are_read() -> None:
    slow = traces(matrix=0.01, flops=0.01e12, host=0.2, reads=0.16, read_lines=cost(calls=512))
    part, share, word = first(point(STEP), slow)
    assert (part, share) == ("values read by the host", pytest.approx(0.72))
    assert word.startswith("my_task.py:41 reads values (.item(), float(), .tolist()) 512 times a step")


def test_a_layout_that_is_copied_each_step() -> None:
    slow = traces(matrix=0.03, flops=0.03e12, copies=0.068, copy_lines=cost())
    part, share, word = first(point(STEP), slow)
    assert (part, share) == ("copies of layouts", pytest.approx(0.68))
    assert word == "a layout is copied each step at my_task.py:41: make it once, in data()"


def test_a_slow_process() -> None:
    """The others wait 30 ms for process 1: that is what its slowness costs, not the mean of all."""
    quick, slow = {**STEP, "communication": 0.030}, {"forward": 0.070, "backward": 0.060}
    part, share, word = first(point(quick, slow, quick, plan="replicate=3"), traces(3))
    assert (part, share) == ("imbalance", pytest.approx(0.030 / 0.130))
    assert word == "process 1 on a has 30 ms more a step, most of it in forward"


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
    assert first(point(STEP), fast)[0] == "precision not used"
    breakdown = break_down(point(STEP), fast, *EVERY)
    (remedy,) = [each for each in remedies(breakdown, point(STEP), []) if each.part == "precision not used"]
    assert remedy.at_most


def test_on_a_gpu_the_rates_of_its_generation_count() -> None:
    found = dataclasses.replace(
        traces(clock="device", flops=0.05e12), reachable={"fp32": 1e12, "tf32": 4e12, "bf16": 10e12}
    )
    assert first(point(STEP), found) == ("precision not used", pytest.approx(0.45), "precision=bf16")
    volta = dataclasses.replace(found, reachable={"fp32": 1e12, "fp16": 5e12, "bf16": 0.5e12})
    assert first(point(STEP, plan="precision=bf16"), volta)[2] == "precision=fp16"


def test_unbalanced_stages_and_a_bubble() -> None:
    """Stages of 20 and 60 ms in 4 microbatches take 60 + 20 / 4; of 40 and 40 they would take 40 + 40 / 4."""
    short, long = (
        {"forward": own / 3, "backward": own * 2 / 3, "communication": 0.065 - own} for own in (0.020, 0.060)
    )
    one = point(short, long, plan="pipeline=2,microbatches=4")
    part, share, word = first(one, traces(2, matrix=0.04, flops=0.04e12))
    assert (part, share) == ("imbalance", pytest.approx(0.015 / 0.065))
    assert word.startswith("the stages of process 1 have 1.5 times the mean work: cut elsewhere")
    even = {**STEP, "communication": 0.025}
    balanced = point(even, even, plan="pipeline=2,microbatches=4")
    breakdown = break_down(balanced, traces(2), *EVERY)
    assert breakdown.share("pipeline bubble") == pytest.approx(0.2)
    bubble = next(one for one in remedies(breakdown, balanced, [balanced]) if one.part == "pipeline bubble")
    assert (bubble.word, bubble.gain) == ("microbatches=8", pytest.approx(1 / 9))


def test_one_long_all_reduce() -> None:
    waits = {**STEP, "communication": 0.1}
    huge = traces(2, seen={"largest": ("embed.weight", 95)})
    part, share, word = first(point(waits, waits, plan="replicate=2"), huge)
    assert (part, share) == ("exposed communication", pytest.approx(0.5))
    assert word.startswith("the gradient of embed.weight is 95% of all bytes, and is sent in one piece")
    assert "larger batch_size" in first(point(waits, waits, plan="replicate=2"), traces(2))[2]


def test_copies_into_messages_are_not_waited_for_and_calls_of_collectives_are_not_computed() -> None:
    """Of 100 ms after the last gradient 30 are copies; of 100 ms of forward and backward 20 start collectives."""
    waits = {**STEP, "communication": 0.1}
    one = point(waits, waits, plan="shard=2")
    breakdown = break_down(one, traces(2, messages=0.03, launches=0.02, matrix=0.078), *EVERY)
    assert breakdown.share("copies for messages") == pytest.approx(0.15)
    assert breakdown.share("exposed communication") == pytest.approx(0.45)
    assert breakdown.share("not explained") == pytest.approx(0)
    assert sum(breakdown.share(part) for part in PARTS) == pytest.approx(1)


def test_stages_and_split_layers_send_no_gradients() -> None:
    waits = {**STEP, "communication": 0.1}
    huge = traces(2, seen={"largest": ("embed.weight", 95)})
    for plan, word in (("pipeline=2,microbatches=4", "cut where less is sent"), ("tensor=2", "a smaller tensor=")):
        one = point(waits, waits, plan=plan)
        found = remedies(break_down(one, huge, *EVERY), one, [one])
        (said,) = [each.word for each in found if each.part == "exposed communication"]
        assert said.startswith(word)


def test_of_compiled_units_only_operators_are_divided() -> None:
    one = point(STEP, plan="compile")
    breakdown = break_down(one, traces(matrix=0.05, flops=0.05e12, host=0.05), *EVERY)
    assert breakdown.share("host between kernels") == 0
    assert breakdown.share("not explained") == pytest.approx(0.5)
    assert "--profile" in next(each.word for each in remedies(breakdown, one, [one]))


def test_evaluations_are_named_only_if_they_are_too_frequent() -> None:
    every = (5, 1000)
    part, share, word = first(point(STEP), traces(seen={"evaluation": 0.5}), every=every)
    assert (part, share, word) == ("evaluation", pytest.approx(0.5), "--evaluate-every 100")
    for seconds, each in ((0.13, (24, 1000)), (0.5, EVERY)):
        breakdown = break_down(point(STEP), traces(seen={"evaluation": seconds}), *each)
        assert "evaluation" not in [one.part for one in remedies(breakdown, point(STEP), [])]


def test_what_the_trace_did_not_see_is_not_explained() -> None:
    breakdown = break_down(point({"forward": 0.2, "backward": 0.2}), traces(), *EVERY)
    assert breakdown.share("not explained") == pytest.approx(0.75)
    none = RunTrace(processes=(dataclasses.replace(traces().processes[0], operators=None),), reachable=RATES)
    assert break_down(point(STEP), none, *EVERY).share("not explained") == 1


def test_kernels_that_were_slower_under_the_trace_are_scaled_and_a_process_at_another_pace_divides_alike() -> None:
    breakdown = break_down(point(STEP), traces(matrix=0.15, elementwise=0.05, flops=0.06e12), *EVERY)
    assert breakdown.share("memory-bound operators") == pytest.approx(0.25)
    assert breakdown.share(USEFUL) + breakdown.share("small matrices") == pytest.approx(0.75)
    slow = traces(seen={"computing": 0.2}, matrix=0.196, flops=0.05e12, host=0.004)
    breakdown = break_down(point(STEP), slow, *EVERY)
    assert breakdown.share("not explained") == pytest.approx(0)
    assert breakdown.share("host between kernels") == pytest.approx(0.02)


def test_table_and_json() -> None:
    one = point({**STEP, "data": 0.3})
    breakdown = break_down(one, traces(), *EVERY)
    explanation = Explanation(plan="", batch=64, breakdown=breakdown, remedies=tuple(remedies(breakdown, one, [one])))
    shown = breakdown_table(breakdown, explanation.remedies, "one process (batch 64)")
    assert shown.row_count == 4  # data, host, useful, and what is too little
    said = [line for line in explained([explanation]) if isinstance(line, str)]
    assert "first: waiting for data 75%: workers=4 (up to 4x)" in said
    known = explanation.as_json()
    assert sum(known["parts"].values()) == pytest.approx(1)
    assert known["remedies"][0]["gain"] == pytest.approx(3)
    failed = Explanation(plan="", batch=64, failure="no")
    assert list(explained([failed])) == ["one process (batch 64): its steps could not be traced: no"]
    assert failed.as_json()["failure"] == "no"


@pytest.mark.parametrize("name", ["evaluate_every", "save_every"])
def test_every_is_at_least_one(name: str) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        MeasureOptions(**{name: 0})
