"""Steps are composed of the times of operators, messages and the engine."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.views_task import Views

from grappe.errors import PlanError
from grappe.foresight import step_time
from grappe.foresight.calibration import Calibration, Machine, Overhead
from grappe.foresight.exchange import pipeline_kind
from grappe.foresight.links import COLLECTIVES, MEETING
from grappe.foresight.microbatch import microbatch_parts
from grappe.foresight.pipeline_passes import PipelinePasses
from grappe.foresight.recording import Recording
from grappe.foresight.sketch import Sketch
from grappe.foresight.step_time import Clock
from grappe.parallel.pipeline.rules import RULES
from grappe.plan import Plan
from grappe.tasks.digits import Digits
from grappe.tasks.pysource import PySource

EACH = 1e-3  # seconds of an operator
LATENCY, SPEED = 1e-2, 1e8
ONE = Overhead(step=0.5)


@pytest.fixture(scope="module")
def sketch() -> Sketch:
    return Sketch(Digits(), Path("data"), records=True)


@pytest.fixture
def clock(sketch: Sketch, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A machine of two cores, on which each operator takes EACH and messages LATENCY and SPEED."""

    def replayed(recordings: Sequence[Recording], **_: object) -> dict[str, float]:
        return {key: EACH for one in recordings for key in one.counts}

    monkeypatch.setattr(step_time, "replayed", replayed)
    monkeypatch.setattr(step_time, "cores", lambda: 2)
    monkeypatch.setattr(type(sketch.batches), "seconds", lambda self, rows: 0.25)
    points = ((256.0, LATENCY), (1e9, LATENCY + 1e9 / SPEED))
    links = {"2": {**dict.fromkeys(COLLECTIVES, points), MEETING: ((1.0, LATENCY),)}}
    made = Calibration(
        machine=Machine.here(),
        overheads={"one": ONE},
        links=links,
        flops={},
        bandwidth={"1": 1e12, "2": 1e12},
    )
    return Clock(sketch, made)


def kernels(sketch: Sketch, rows: int, recompute: bool = False) -> int:
    recording = sketch.trace(rows, "fp32", recompute, 1).recording
    assert recording is not None
    return len(recording.operators)


def test_one_process_takes_its_operators_the_engine_and_the_data(clock: Clock, sketch: Sketch) -> None:
    found = clock.of(Plan.parse("threads=1"))
    update = len(next(iter(clock._updates.values())).operators)
    assert found.compute == pytest.approx(EACH * (kernels(sketch, 64) + update) + ONE.step)
    assert (found.data, found.communication, found.bubble) == (0.25, 0.0, 0.0)
    assert found.total == pytest.approx(found.compute + 0.25)
    assert clock.learned and set(clock.calibration.operators) == {"1x1-holding"}


def test_microbatches_and_recomputation_take_their_operators(clock: Clock, sketch: Sketch) -> None:
    plain = clock.of(Plan.parse("threads=1")).compute
    twice = clock.of(Plan.parse("threads=1,microbatches=2")).compute
    assert twice == pytest.approx(plain + EACH * kernels(sketch, 64), rel=1e-3)
    again = clock.of(Plan.parse("threads=1,recompute")).compute
    assert again == pytest.approx(plain + EACH * (kernels(sketch, 64, True) - kernels(sketch, 64)))


def test_a_unit_that_runs_again_takes_the_engine_more(clock: Clock) -> None:
    plans = [Plan.parse(f"{one}threads=1,recompute") for one in ("", "microbatches=2,")]
    before = [clock.of(plan).compute for plan in plans]
    overheads = {"one": ONE, "recompute": Overhead(unit=1.0)}
    clock.calibration = dataclasses.replace(clock.calibration, overheads=overheads)
    after = [clock.of(plan).compute for plan in plans]
    assert after == pytest.approx([before[0] + 4, before[1] + 8])
    staged = Plan.parse("pipeline=2,microbatches=4,threads=1,recompute")
    assert clock.of(staged).compute > 4 * 2  # of four microbatches, the two units of a stage


def test_operators_are_timed_with_the_heap_of_their_plan(clock: Clock, monkeypatch) -> None:
    """A plan that saves memory gives freed blocks back; others keep them, and new tensors have their pages already."""
    kept = []

    def replayed(recordings: Sequence[Recording], *, keeps: bool, **_: object) -> dict[str, float]:
        kept.append(keeps)
        return {key: EACH for one in recordings for key in one.counts}

    monkeypatch.setattr(step_time, "replayed", replayed)
    clock.of(Plan.parse("replicate=2,threads=1"))
    assert set(kept) == {True}
    kept.clear()
    clock.of(Plan.parse("shard=2,threads=1"))
    assert set(kept) == {False}
    assert set(clock.calibration.operators) == {"1x2", "1x2-saving"}


def test_replicas_sum_their_gradients_beyond_a_small_message(clock: Clock, sketch: Sketch) -> None:
    size = sum(one.size for one in sketch.parameters)
    found = clock.of(Plan.parse("replicate=2,threads=1"))
    assert found.communication == pytest.approx(size / SPEED, rel=0.02)


def test_a_norm_over_shards_is_one_more_message(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [Plan.parse(text) for text in ("replicate=2,threads=1", "shard=2,threads=1")]
    before = [clock.updated(plan) for plan in plans]
    monkeypatch.setattr(step_time, "needs_norm", lambda task, plan: True)
    after = [clock.updated(plan) for plan in plans]
    assert after == pytest.approx([before[0], before[1] + LATENCY])


def test_zero_3_sends_a_third_message_for_each_parameter(clock: Clock) -> None:
    two, three = (clock.of(Plan.parse(f"shard=2,threads=1,zero={zero}")).communication for zero in (2, 3))
    assert three == pytest.approx(1.5 * two, rel=0.05)


def test_a_unit_of_fsdp_takes_more_where_cores_are_busy(clock: Clock, sketch: Sketch) -> None:
    plan, units = Plan.parse("shard=2,threads=1"), 4
    before = clock.of(plan).compute
    busy = clock.of(plan).total  # from nothing on: a unit computes for milliseconds
    for busy_from, share in ((1e-9, 1.0), (1e9, 0.0)):
        overheads = {"one": ONE, "zero3": Overhead(unit=1.0, busy=2.0, busy_from=busy_from)}
        clock.calibration = dataclasses.replace(clock.calibration, overheads=overheads)
        assert clock.of(plan).compute == pytest.approx(before + units * (1.0 + 2.0 * share), rel=1e-3)
    assert busy > before


def test_zero_1_reduces_once_a_step_and_gathers_for_each_microbatch(clock: Clock) -> None:
    plans = [Plan.parse(f"shard=2,threads=1,zero={zero},microbatches=2") for zero in (1, 2)]
    before, units = [clock.of(plan).compute for plan in plans], 4
    overheads = {"one": ONE, "zero3": Overhead(unit=5.0), "zero1": Overhead(unit=3.0)}
    clock.calibration = dataclasses.replace(clock.calibration, overheads=overheads)
    after = [clock.of(plan).compute for plan in plans]
    assert after[0] - before[0] == pytest.approx(units * (3.0 + 2.0))  # zero=3 gathers twice, for 2.0 more
    assert after[1] - before[1] == pytest.approx(units * 2 * 3.0)


def test_split_modules_wait_for_their_messages(clock: Clock, tmp_path: Path) -> None:
    sketch = Sketch(PySource(width=32, depth=2, heads=2, batch_size=8, megabytes=0.3), tmp_path, records=True)
    own, plan = Clock(sketch, clock.calibration), Plan.parse("tensor=2,threads=1")
    found = own.of(plan)
    recording = sketch.trace(8, "fp32", False, 1, 2).recording
    assert recording is not None
    sent = [collective for collective, _ in recording.messages]
    assert set(sent) == {"all_reduce"} and len(sent) >= 2 * 4  # two of a block each way
    assert found.communication >= len(sent) * LATENCY
    overheads = {"one": ONE, "tensor": Overhead(unit=1.0)}
    own.calibration = dataclasses.replace(own.calibration, overheads=overheads)
    assert own.of(plan).compute == pytest.approx(found.compute + 2 * 6)  # modules of two blocks
    for other in ("replicate=2", "pipeline=2,microbatches=2"):
        with pytest.raises(PlanError, match="tensor with another axis"):
            own.of(Plan.parse(f"tensor=2,threads=1,{other}"))


def test_a_pipeline_with_a_loss_of_the_whole_batch_has_no_time(clock: Clock) -> None:
    own = Clock(Sketch(Views(), Path("data"), records=True), clock.calibration)
    with pytest.raises(PlanError, match="loss of the whole batch: its time is not foreseen"):
        own.of(Plan.parse("pipeline=2,microbatches=2,threads=1"))


def test_a_pipelines_idle_time_is_the_bubble(clock: Clock) -> None:
    found = clock.of(Plan.parse("pipeline=2,microbatches=4,threads=1"))
    assert found.bubble > LATENCY  # of what stages send each other, at least
    assert clock.of(Plan.parse("pipeline=2,microbatches=8,threads=1")).bubble < 2 * found.bubble


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("replicate=3,threads=1", "3 threads of 3 processes on 2 cores"),
        ("tensor=2,replicate=2", "tensor with another axis: its time is not foreseen"),
        ("pipeline=2,microbatches=2,offload=cpu", "pipeline with offload"),
        ("engine=textbook", "engine=textbook"),
    ],
)
def test_what_is_not_foreseen_says_why(clock: Clock, plan: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        clock.of(Plan.parse(plan))


def test_links_that_were_not_measured_are_named(clock: Clock) -> None:
    clock.calibration = dataclasses.replace(clock.calibration, links={})
    with pytest.raises(PlanError, match="between 2 processes were not measured here"):
        clock.of(Plan.parse("replicate=2,threads=1"))


def test_operators_are_run_for_a_limited_time(sketch: Sketch, clock: Clock) -> None:
    late = Clock(sketch, clock.calibration, seconds=0.0)
    with pytest.raises(PlanError, match="for lack of time"):
        late.of(Plan.parse("threads=1"))


def test_a_microbatch_is_a_forward_and_a_backward(sketch: Sketch) -> None:
    ahead, back = microbatch_parts(sketch.trace(64), lambda one: EACH)
    assert 0 < ahead.operators < back.operators
    assert ahead.operators + back.operators == kernels(sketch, 64)
    assert ahead.kernels == pytest.approx(EACH * ahead.operators)


@pytest.mark.parametrize("schedule", sorted(RULES))
def test_the_passes_of_a_pipeline_run_a_microbatchs_operators(schedule: str, sketch: Sketch) -> None:
    parts = PipelinePasses(sketch, Plan.parse(f"pipeline=2,microbatches=4,schedule={schedule}"), 64).parts(
        lambda one: one.flops
    )
    ahead, back = microbatch_parts(sketch.trace(16), lambda one: one.flops)
    found: dict[str, float] = defaultdict(float)
    for (kind, _), part in parts.items():
        found["forward" if kind == "forward" else "backward"] += part.kernels
    assert found == {"forward": ahead.kernels, "backward": back.kernels}
    if RULES[schedule].splits_backward:
        # torch leaves the first stage's whole backward to the other half
        assert parts["inputs", 0].operators == 0
        assert parts["weights", 1].kernels > 0 and parts["inputs", 1].kernels > 0
    else:
        assert {kind for kind, _ in parts} == {"forward", "backward"}


@pytest.mark.parametrize("schedule", sorted(RULES))
def test_the_time_of_each_schedule_is_foreseen(schedule: str, clock: Clock) -> None:
    plan = Plan.parse(f"pipeline=2,microbatches=4,threads=1,schedule={schedule}")
    before = clock.of(plan)
    assert before.bubble > 0
    overheads = {"one": ONE, pipeline_kind(plan): Overhead(unit=1.0)}
    clock.calibration = dataclasses.replace(clock.calibration, overheads=overheads)
    passes = {"interleaved": 16, "zero_bubble": 12}.get(schedule, 8)  # of one process
    assert clock.of(plan).compute == pytest.approx(before.compute + passes)


def test_a_pipeline_of_a_model_of_transformers(clock: Clock, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.parallel.families import Llama

    own = Clock(Sketch(Llama(), tmp_path, records=True), clock.calibration)
    found = own.of(Plan.parse("pipeline=2,microbatches=2,threads=1"))
    assert found.bubble > 0


def test_operators_that_memory_has_no_room_for_are_not_run(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_time.limits, "free", lambda: 1_000_000)
    with pytest.raises(
        PlanError, match=r"its operators were not run: they take [0-9.]+ MB, and 1 MB are free"
    ):
        clock.of(Plan.parse("threads=1"))


def test_operators_are_counted_under_every_kind_of_plan(clock: Clock) -> None:
    for text in ("threads=1", "shard=2,threads=1", "pipeline=2,microbatches=4,threads=1"):
        forward, backward, update = clock.operators(Plan.parse(text))
        assert 0 < forward[0] < backward[0] and update[0] > 0


def test_a_call_that_cannot_be_run_is_run_once_and_estimated(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []

    def replayed(recordings: Sequence[Recording], **_: object) -> dict[str, float]:
        runs.append(len(recordings))
        return {key: EACH for one in recordings for key in one.counts if not key.startswith("aten.addmm")}

    monkeypatch.setattr(step_time, "replayed", replayed)
    first = clock.of(Plan.parse("threads=1"))
    again = clock.of(Plan.parse("threads=1"))
    assert len(runs) == 1 and first == again
    products = [key for key in clock.calibration.operators["1x1-holding"] if key.startswith("aten.addmm")]
    assert products
    assert all(0 < clock.calibration.operators["1x1-holding"][key] < EACH for key in products)
