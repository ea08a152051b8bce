"""Times of plans: which is best under an aim, what they cost, and whether a GPU is worth while."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grappe.cli import foreseeing
from grappe.errors import UsageError
from grappe.foresight.calibration import Calibration, Machine, Overhead
from grappe.foresight.search import Foreseen
from grappe.foresight.step_time import StepTime
from grappe.verbs.foresee import calibrate, time_table, times
from grappe.verbs.foresee.foresee import foresee
from grappe.verbs.foresee.times import Cost, Timed, Times, best, gpu_or_not
from tests.foresight.test_search import needing


def plan(text: str, seconds: float, processes: int, peak: int, fits: bool | None = None) -> Timed:
    foreseen = Foreseen(plan=text, processes=processes, batch=64, needs=needing(peak), fits=fits)
    cost = Cost(samples_per_second=64 / seconds, hours=seconds, unit_hours=seconds * processes)
    return Timed(foreseen=foreseen, time=StepTime(compute=seconds, spread=0.15), cost=cost)


PLANS = Times(
    plans=(
        plan("", 1.0, 1, 3 * 10**9),
        plan("replicate=2", 0.6, 2, 2 * 10**9),
        plan("shard=2", 0.9, 2, 10**9),
        plan("shard=4", 0.1, 4, 10**9, fits=False),
        Timed(foreseen=Foreseen(plan="tensor=2", processes=2, batch=64, needs=None), why="not foreseen"),
    )
)


@pytest.mark.parametrize(
    ("aim", "found"), [("fastest", "replicate=2"), ("cheapest", ""), ("smallest", "shard=2")]
)
def test_the_best_plan_depends_on_the_aim_and_fits(aim: Any, found: str) -> None:
    chosen = best(PLANS, aim)
    assert chosen is not None and chosen.foreseen.plan == found


def test_of_times_that_are_closer_than_they_are_known_it_is_the_plainest() -> None:
    """The fewest processes, then the fewest microbatches, then the least time."""
    plans = (
        plan("replicate=2", 1.0, 2, 1),
        plan("microbatches=2", 1.03, 1, 1),
        plan("threads=1", 1.09, 1, 1),
        plan("", 1.08, 1, 1),
    )
    chosen = best(Times(plans=plans), "fastest")
    assert chosen is not None and chosen.foreseen.plan == ""
    chosen = best(Times(plans=plans[:2]), "fastest")
    assert chosen is not None and chosen.foreseen.plan == "microbatches=2"
    chosen = best(Times(plans=(plans[0], plan("", 1.11, 1, 1))), "fastest")
    assert chosen is not None and chosen.foreseen.plan == "replicate=2"


def test_the_sentence_names_the_best_and_how_many_may_be_as_good() -> None:
    assert time_table.sentences(PLANS, "fastest")[-1] == "fastest: replicate=2, with 600.0 ms a step"
    close = dataclasses.replace(PLANS, plans=(plan("", 1.0, 1, 1), plan("replicate=2", 0.95, 2, 1)))
    assert "1 other plan may be as good" in time_table.sentences(close, "fastest")[-1]
    assert time_table.table(Times(plans=PLANS.plans[-1:])) is None


def test_the_smallest_is_named_with_its_memory_and_without_times() -> None:
    bare = Times(plans=tuple(Timed(foreseen=one.foreseen) for one in PLANS.plans))
    assert time_table.sentences(bare, "smallest") == ["smallest: shard=2, with 1.0 GB a process"]
    assert time_table.sentences(PLANS, "smallest") == time_table.sentences(bare, "smallest")
    assert time_table.sentences(bare, "fastest") == []


def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grappe.verbs.foresee.foresee.foresee", None)
    monkeypatch.setattr("grappe.verbs.foresee.history.history", None)
    for out, why in ((tmp_path / "x.csv", r"\.json"), (tmp_path / "no" / "x.json", "No such file")):
        with pytest.raises(UsageError, match=why):
            foreseeing.foresee("digits", out=out)
    with pytest.raises(UsageError, match=r"\.csv"):
        foreseeing.foresee(history=True, out=tmp_path / "x.txt")


def test_all_of_it_is_written_as_json(tmp_path: Path) -> None:
    time_table.write(PLANS, tmp_path / "a.json")
    read = json.loads((tmp_path / "a.json").read_text())
    assert [one["time"]["total"] for one in read["plans"][:2]] == [1.0, 0.6]
    with pytest.raises(UsageError, match="json"):
        time_table.write(PLANS, tmp_path / "a.txt")


def test_without_a_calibration_times_are_left_out_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = foresee("digits", [""])
    assert found.plans[0].time is None and found.notes == (times.UNCALIBRATED,)


def test_a_sites_gpu_is_foreseen_from_its_data_sheet_and_says_so(tmp_path: Path) -> None:
    found = foresee("digits", ["", "replicate=4", "replicate=8"], site="narval")
    one, four, eight = found.plans
    assert one.time is not None and one.cost is not None and four.time is not None
    assert not one.time.calibrated and one.time.spread == 0.5 and one.cost.kwh is not None
    assert eight.time is not None and eight.time.communication == 0  # within computing
    assert found.gpu.startswith("NVIDIA A100")
    assert "not calibrated" in found.notes[-1] and "data sheet" in found.notes[-1]
    assert foreseeing.foresee("digits", site="narval", plan=[""], out=tmp_path / "a.json") == 0
    assert json.loads((tmp_path / "a.json").read_text())["gpu"] == found.gpu


def test_over_nodes_whose_network_is_not_known_there_is_no_time() -> None:
    four, eight = foresee("digits", ["replicate=4", "replicate=8"], site="fir").plans
    assert four.time is not None
    assert "a node has 4" in eight.why and "network_gbit" in eight.why


@pytest.mark.parametrize(
    ("here", "gpu", "busy", "verdict"),
    [
        (0.001, 0.01, 0.0003, "3% busy; the cores are 10.0 times as fast, and start sooner: take no GPU"),
        (1.0, 0.01, 0.008, "80% busy; it is 50 to 150 times as fast as the cores: take a GPU"),
        (0.1, 0.01, 0.001, "mostly waits for its host"),
        (0.01, 0.01, 0.005, "try both"),
    ],
)
def test_the_verdict_on_a_gpu(
    here: float, gpu: float, busy: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Here:
        def of(self, plan: object) -> StepTime:
            return StepTime(compute=here)

    step = StepTime(compute=gpu, spread=0.5, calibrated=False, busy=busy)
    monkeypatch.setattr(times, "gpu_time", lambda *_: step)
    found = gpu_or_not(Here(), None)  # type: ignore[arg-type]
    assert found is not None
    for count in range(1, 257):
        found = found.replace(f"the {count} cores here", "the cores")
    assert verdict in found.replace("the one core here", "the cores") and "not measured" in found


def test_the_engines_own_time_is_what_grows_beyond_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine that takes 10 microseconds an operator and 200 a step, that is found."""

    def base(made: object, task: calibrate.Reference, *_: object) -> Any:
        names = ("forward", "backward", "update")
        return SimpleNamespace(
            data=1e-4, operators=dict.fromkeys(names, (10 * task.depth, 3e-3 * task.depth))
        )

    def trained(task: calibrate.Reference, *_: object) -> dict[str, float]:
        operators = base(None, task).operators
        phases = {name: took + 10e-6 * count for name, (count, took) in operators.items()}
        return {**phases, "step": sum(phases.values()) + 1e-4 + 200e-6}

    monkeypatch.setattr(calibrate, "_Base", base)
    monkeypatch.setattr(calibrate, "_trained", trained)
    found = calibrate._fitted(None, "", Path())  # type: ignore[arg-type]
    assert (found.forward, found.backward, found.update) == pytest.approx((10e-6,) * 3)
    assert found.step == pytest.approx(200e-6)


def test_what_shards_add_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine on which units, parameters, busy cores and messages take so much each, that is found."""
    busy_from, spent = 12e-3, {calibrate.SMALL: 0.0, calibrate.LARGE: 3e-3, calibrate.BUSY: 12e-3}

    def beyond(made: object, task: calibrate.Reference, *_: object) -> calibrate._Beyond:
        parameters, computing = 6 * task.depth * task.blocks, spent[task.width]
        messages = 40e-3 if task.width == calibrate.LARGE else 0.0
        unit = 3e-3 + 2e-3 * computing / busy_from
        return calibrate._Beyond(
            depth=task.depth,
            parameters=parameters,
            step=1e-3 + task.depth * unit + 50e-6 * parameters + 0.5 * messages,
            update=10e-6 * parameters,
            operators=parameters,
            computing=task.depth * computing,
            messages=messages,
        )

    monkeypatch.setattr(calibrate, "_beyond", beyond)
    one = Calibration(machine=Machine.here(), overheads={"one": Overhead()}, links={}, flops={}, bandwidth={})
    found = calibrate._added(one, "zero3", "shard=2,threads=1", Path())
    assert (found.step, found.unit, found.parameter) == pytest.approx((1e-3, 3e-3, 50e-6))
    assert (found.busy, found.busy_from) == pytest.approx((2e-3, busy_from))
    assert (found.messages, found.update) == pytest.approx((1.5, 10e-6))
    replicas = calibrate._added(one, "replicate", "replicate=2,threads=1", Path())
    assert replicas.parameter > 0 and replicas.messages > 1


@pytest.mark.parametrize(
    ("schedule", "passes", "kinds"),
    [("1f1b", 10, 4), ("interleaved", 18, 8), ("zero_bubble", 13, 6)],
)
def test_what_a_pass_of_a_pipeline_takes_is_found(
    monkeypatch: pytest.MonkeyPatch, schedule: str, passes: int, kinds: int
) -> None:
    """Of a machine that takes 0.2 ms for each pass on the longest way, and 0.7 where cores are busy."""

    def beyond(made: object, task: calibrate.Reference, *_: object) -> calibrate._Beyond:
        busy = task.batch_size == calibrate.SAMPLES // 2
        return calibrate._Beyond(
            depth=task.depth,
            parameters=6 * task.depth,
            step=passes * (0.7e-3 if busy else 0.2e-3),
            update=0.0,
            operators=1,
            computing=40e-3 if busy else 8e-3,
            messages=0.0,
        )

    monkeypatch.setattr(calibrate, "_beyond", beyond)
    one = Calibration(machine=Machine.here(), overheads={"one": Overhead()}, links={}, flops={}, bandwidth={})
    found = calibrate._added(
        one, schedule, f"pipeline=2,microbatches=4,schedule={schedule},threads=1", Path()
    )
    assert (found.unit, found.busy) == pytest.approx((0.2e-3, 0.5e-3))
    assert (found.busy_after, found.busy_from) == pytest.approx((8e-3 / kinds, 40e-3 / kinds))
    for computing, took in ((0.0, 0.2e-3), (8e-3, 0.2e-3), (24e-3, 0.45e-3), (40e-3, 0.7e-3), (1.0, 0.7e-3)):
        assert found.unit_beside(computing / kinds) == pytest.approx(took)
