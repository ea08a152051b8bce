"""Foreseen plans: memory and time of each, which is best under an aim, and whether a GPU is worth while."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from grappe.cli import measuring
from grappe.errors import PlanError, TaskError, UsageError
from grappe.foresight import gpu_time
from grappe.foresight.gpu_time import StepTime
from grappe.foresight.search import Foreseen, MemoryBudget, candidates
from grappe.sites import find
from grappe.verbs.foresee import foresee as verb
from grappe.verbs.foresee import measured_step, tables
from grappe.words import plan_name
from tests.foresight import test_fake_model, unusual
from tests.foresight.test_search import needing
from tests.verbs.foresee.test_tables import PLANS, plan


def test_a_sites_gpu_has_the_memory_that_its_name_says() -> None:
    budgets = [verb.budget_in(find(site)) for site in ("narval", "jean-zay-v100")]
    assert [budget and budget.size for budget in budgets] == [40 * 10**9, 16 * 10**9]  # 16 or 32
    with pytest.raises(UsageError, match="--site=narval-cpu: the memory of its GPU is unknown"):
        verb.foresee("digits", ["device=cuda"], site="narval-cpu")


def test_a_plan_that_is_not_foreseen_says_why_and_the_others_are_foreseen() -> None:
    times = verb.foresee("digits", ["compile", "offload=cpu"], site="narval")
    found = [one.foreseen for one in times.plans]
    assert "compile" in found[0].why
    assert found[1].needs is not None and found[1].needs.peak is None
    times = verb.foresee(f"{unusual.__file__}:Unchained", ["", "tensor=2"])
    assert "tensor_plan" in times.plans[1].foreseen.why


def test_a_choice_of_memory_is_said_with_its_price_in_the_words_of_a_training() -> None:
    small = {"width": 64, "depth": 2, "heads": 2, "batch_size": 4, "megabytes": 0.3}
    times = verb.foresee("pysource", ["memory=7MB", ""], fields=small, times=False)
    chosen = plan_name(times.plans[0].foreseen.plan)
    assert "recompute" in chosen
    assert len(times.notes) == 1
    note = (
        rf"memory=7MB: the plan is {re.escape(chosen)}, foreseen to take \d MB of 7 MB that torch may allocate, with "
    )
    assert re.fullmatch(note + ".*more computing.*", times.notes[0])


def test_units_that_are_not_the_model_refuse_a_pipeline_alone() -> None:
    tasks = unusual.__file__
    times = verb.foresee(f"{tasks}:Unchained", ["", "pipeline=2,microbatches=2"])
    assert times.plans[0].foreseen.needs is not None
    why = times.plans[1].foreseen.why
    assert "runs Unchained.units() one after the other" in why and "must be the whole model" in why
    for name in ("Twice", "Swapped"):
        times = verb.foresee(f"{tasks}:{name}", ["", "pipeline=2,microbatches=2"])
        assert times.plans[0].foreseen.needs is not None
        assert "do not compute what the model computes" in times.plans[1].foreseen.why


def test_plans_of_which_none_can_be_foreseen_are_refused() -> None:
    with pytest.raises(UsageError, match="compile: its memory is not foreseen"):
        verb.foresee("digits", ["compile"])


def test_a_task_that_reads_values_is_said_once() -> None:
    with pytest.raises(TaskError, match=r"cannot run without values"):
        verb.foresee(f"{test_fake_model.__file__}:Looks", ["", "microbatches=2"])


@pytest.mark.parametrize(("fits", "code"), [((False, None), 0), ((False, False), 1), ((True, False), 0)])
def test_the_exit_code_is_1_only_if_none_fits_for_sure(fits: tuple[bool | None, ...], code: int, monkeypatch) -> None:
    found = [Foreseen(plan="", processes=1, batch=8, needs=needing(10**9), fits=one) for one in fits]
    times = verb.PlanTimes(plans=tuple(verb.TimedPlan(foreseen=one) for one in found))
    monkeypatch.setattr("grappe.verbs.foresee.foresee.foresee", lambda *_, **__: times)
    assert measuring.foresee("digits", site="narval") == code


@pytest.mark.parametrize(("aim", "found"), [("fastest", "replicate=2"), ("cheapest", ""), ("smallest", "shard=2")])
def test_the_best_plan_depends_on_the_aim_and_fits(aim: Any, found: str) -> None:
    chosen = verb.best(PLANS, aim)
    assert chosen is not None and chosen.foreseen.plan == found


def test_of_times_that_are_closer_than_they_are_known_it_is_the_plainest() -> None:
    """The fewest processes, then the fewest microbatches, then the least time."""
    plans = (
        plan("replicate=2", 1.0, 2, 1),
        plan("microbatches=2", 1.03, 1, 1),
        plan("threads=1", 1.09, 1, 1),
        plan("", 1.08, 1, 1),
    )
    chosen = verb.best(verb.PlanTimes(plans=plans), "fastest")
    assert chosen is not None and chosen.foreseen.plan == ""
    chosen = verb.best(verb.PlanTimes(plans=plans[:2]), "fastest")
    assert chosen is not None and chosen.foreseen.plan == "microbatches=2"
    chosen = verb.best(verb.PlanTimes(plans=(plans[0], plan("", 1.11, 1, 1))), "fastest")
    assert chosen is not None and chosen.foreseen.plan == "replicate=2"


def test_a_sites_gpu_is_foreseen_from_its_data_sheet_and_says_so(tmp_path: Path) -> None:
    found = verb.foresee("digits", ["", "replicate=4", "replicate=8"], site="narval")
    one, four, eight = found.plans
    assert one.time is not None and one.cost is not None and four.time is not None
    assert not one.time.measured and one.time.spread == 0.5 and one.cost.kwh is not None
    assert eight.time is not None and eight.time.communication == 0  # within computing
    assert found.gpu.startswith("NVIDIA A100")
    assert "not measured on it" in found.caveats[0] and "data sheet" in found.caveats[0]
    assert found.notes[-1].startswith("GPU or CPU: a step uses ")
    assert measuring.foresee("digits", site="narval", plan=[""], out=tmp_path / "a.json") == 0
    assert json.loads((tmp_path / "a.json").read_text())["gpu"] == found.gpu


def test_the_numbers_of_gpus_that_a_batch_fits_on_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    small = MemoryBudget(whose="a small GPU", size=12_000_000, beyond=0)
    monkeypatch.setattr("grappe.verbs.foresee.foresee.budget_in", lambda site: small)
    found = verb.foresee("digits", gpus=[1, 2], batch_size=[512], site="narval")
    says = "fits on 1 GPU with no more computing (microbatches=2), on 2 GPUs with no more computing (replicate=2)"
    assert says in found.notes


@pytest.mark.slow
def test_a_plan_for_cpus_has_no_gpus_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs its steps here; a site of CPU nodes supplies device=cpu."""
    step = StepTime(compute=1.0, spread=0.1, measured=True)
    monkeypatch.setattr(measured_step, "measured_step", lambda *_, **__: step)
    times = verb.foresee("digits", ["", "device=cpu,threads=1"], site="narval")
    gpu, cpu = times.plans
    assert gpu.cost is not None and gpu.cost.kwh is not None and gpu.foreseen.fits
    assert cpu.cost is not None and cpu.cost.kwh is None and cpu.cost.unit_hours == cpu.cost.hours
    assert cpu.time == step and cpu.foreseen.fits is None
    assert times.budget is not None and times.budget.size == 40 * 10**9
    assert any("how fast the cores of narval-cpu are is not known here" in note for note in times.notes)
    times = verb.foresee("digits", ["device=cpu"], site="narval")
    assert times.notes[-1].startswith("GPU or CPU: a step uses ")
    times = verb.foresee("digits", [""], site="jean-zay-cpu")
    assert times.plans[0].foreseen.plan == "device=cpu" and not times.gpu and times.budget is None
    assert "A100" not in "".join(times.notes) and "jean-zay-cpu" in "".join(times.notes)


def test_over_nodes_whose_network_is_not_known_there_is_no_time() -> None:
    four, eight = verb.foresee("digits", ["replicate=4", "replicate=8"], site="fir").plans
    assert four.time is not None
    assert "a node has 4" in eight.why and "network_gbit" in eight.why


@pytest.mark.parametrize(
    ("here", "gpu", "used", "verdict"),
    [
        (0.001, 0.01, 0.0003, "the cores are 10 times as fast, and start sooner: take no GPU"),
        (1.0, 0.01, 0.008, "it is 50 to 150 times as fast as the cores: take a GPU"),
        (0.1, 0.01, 0.001, "times as fast as the cores, and mostly idle. A larger batch_size"),
        (0.01, 0.01, 0.005, "try both"),
    ],
)
def test_the_verdict_on_a_gpu(here: float, gpu: float, used: float, verdict: str, monkeypatch) -> None:
    step = StepTime(compute=gpu, spread=0.5, at_peak=(used / 2, used))
    monkeypatch.setattr(gpu_time, "gpu_time", lambda *_, **__: step)
    measured = plan("device=cpu", here, 1, 1)
    assert measured.time is not None
    measured = dataclasses.replace(measured, time=dataclasses.replace(measured.time, measured=True))
    fabric = verb.site_fabric(find("narval"))
    assert fabric is not None
    [found] = verb.gpu_or_not(None, [plan("replicate=2", 0.5, 2, 1), measured], fabric.device, None, 1)  # type: ignore[arg-type]
    assert f"{used / gpu:.0%} of its memory bandwidth" in found
    assert verdict in re.sub(r"the (\d+ cores|one core) here", "the cores", found)
    [found] = verb.gpu_or_not(None, [plan("replicate=2", 0.5, 2, 1)], fabric.device, None, 1)  # type: ignore[arg-type]
    assert (
        "enough to be worth its queue" if used / gpu >= verb.WORTH else "train on cores (--plan device=cpu)"
    ) in found


@pytest.mark.parametrize(("site", "unit", "charge"), [("narval", "RGU-hours", 4.0), ("perlmutter", "node-hours", 0.25)])
def test_a_sites_charge_stands_beside_gpu_hours(site: str, unit: str, charge: float) -> None:
    times = verb.foresee("digits", ["replicate=2"], site=site)
    (timed,) = times.plans
    assert timed.cost.charge == pytest.approx(charge * timed.cost.unit_hours)
    columns = [column.header for column in tables.table(times, times.plans).columns]
    assert columns[columns.index("GPU-hours") + 1] == unit
    assert times.table()["charge"] == [timed.cost.charge]


@pytest.mark.parametrize(("site", "fit", "plan"), [("jean-zay-v100", 15, 10), ("narval", 37, 12)])
def test_the_small_network_of_the_alliances_page_is_not_worth_a_gpu(site: str, fit: int, plan: int) -> None:
    """The page measured 6 % of a V100, advises against it, and says that 14 or 15 copies fit in its 16 GB."""
    said = " ".join(verb.foresee("cifar10", [""], site=site).notes)
    assert "too little to be worth its queue" in said
    assert f"{fit} fit in its" in said and f"--plan replicate={plan},per_device={plan}" in said
    shared = verb.foresee("cifar10", [f"replicate={plan},per_device={plan}"], site=site, times=False)
    assert shared.plans[0].foreseen.fits


@pytest.mark.parametrize(
    ("task", "samples"),
    [("cifar10", "45,000"), ("mnist", "55,000"), ("fashion_mnist", "55,000"), ("imagenet", "1,281,167")],
)
def test_shipped_tasks_are_foreseen_without_their_data(task: str, samples: str, tmp_path: Path) -> None:
    fields = {"network": "resnet18", "batch_size": 16} if task == "imagenet" else {}
    times = verb.foresee(task, [""], site="narval", data=tmp_path, fields=fields)
    assert times.plans[0].cost is not None and times.plans[0].foreseen.fits
    assert f"the data are not in {tmp_path}: foreseen for {samples} training samples of [" in " ".join(times.notes)
    if task == "mnist":
        here = verb.foresee(task, [""], data=tmp_path)
        assert here.plans[0].time is None and "the data are not there" in here.reasons[0]


def test_a_task_of_ones_own_names_what_foresees_it_without_data(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    times = verb.foresee(f"{tmp_path}/own.py:Own", [""], times=False)
    assert "foreseen for 7,000 training samples of [5]" in times.notes[0]
    for asks in ("Silent", "Damaged"):
        with pytest.raises(TaskError, match="No such file" if asks == "Silent" else "bad row") as error:
            verb.foresee(f"{tmp_path}/own.py:{asks}", [""], times=False)
        assert ("write fake_data(self, split)" in str(error.value)) == (asks == "Silent")


OWN = """
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import grappe


class Silent(grappe.Task):
    batch_size: int = 8

    def model(self):
        return torch.nn.Linear(5, 2)

    def data(self, split, folder):
        return torch.load(folder / "absent.pt")

    def loss(self, output, target):
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1)


class Own(Silent):
    def fake_data(self, split):
        count = 7000 if split == "train" else 100
        return TensorDataset(torch.zeros(5).expand(count, 5), torch.zeros((), dtype=torch.long).expand(count))


class Damaged(Own):
    def data(self, split, folder):
        raise ValueError("bad row")
"""


def test_without_a_site_a_machines_own_gpus_are_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for an H200: its name and memory, and the times of steps that would run on it."""
    ran: list[tuple[str, str]] = []

    def measured(task: Any, plan: Any, data: Path, *, seconds: float, device: str) -> StepTime:
        ran.append((str(plan), device))
        return StepTime(compute=0.01, spread=0.1, measured=True)

    gpus = measured_step.LocalGpus(name="NVIDIA H200", memory=150 * 10**9, number=1)
    monkeypatch.setattr(measured_step.LocalGpus, "find", lambda: gpus)
    monkeypatch.setattr(measured_step, "measured_step", measured)
    times = verb.foresee("digits", ["", "replicate=2", "replicate=2,per_device=2", "device=cpu"])
    assert ran == [("", "cuda"), ("replicate=2,per_device=2", "cuda"), ("device=cpu", "cpu")]
    one, two, shared, cores = times.plans
    assert "it takes 2 GPUs, and torch sees one GPU here" in two.why
    assert one.cost is not None and one.cost.on_gpus and one.cost.kwh is not None
    assert shared.cost is not None and shared.cost.unit_hours == one.cost.unit_hours
    assert cores.cost is not None and not cores.cost.on_gpus
    assert one.foreseen.fits and times.budget is not None and "this machine's NVIDIA H200" in times.budget.whose
    said = times.notes[-1]
    assert "of the FLOP/s of one NVIDIA H200 SXM, 141 GB" in said and "times as fast" in said


def test_plain_plans_are_tried_first_and_each_number_of_processes_in_turn() -> None:
    plans = [Foreseen(plan=str(one), processes=one.processes, batch=8, needs=None) for one in candidates([1, 2, 4])]
    names = [one.plan for one in verb.by_importance(plans)]
    assert names[:6] == ["", "replicate=2", "replicate=4", "shard=2,zero=1", "shard=4,zero=1", "shard=2,zero=2"]
    assert sorted(names) == sorted(one.plan for one in plans)
    assert names.index("microbatches=4") > names.index("shard=4")


@pytest.mark.slow
def test_steps_of_at_most_five_plans_that_fit_this_machine_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of another batch size run at theirs."""
    ran: list[tuple[str, Any]] = []

    def measured(task: Any, plan: Any, data: Path, *, seconds: float, device: str) -> StepTime:
        ran.append((str(plan), task.texts.get("batch_size")))
        if plan.microbatches > 1:
            raise PlanError("none of its steps ended in 1 s")
        return StepTime(compute=1.0 / plan.processes, spread=0.1, measured=True)

    monkeypatch.setattr(measured_step, "measured_step", measured)
    monkeypatch.setattr(measured_step, "cores", lambda: 2)
    plans = ["", "replicate=2", "shard=2", "replicate=4,threads=1", "microbatches=2"]
    times = verb.foresee("digits", plans, batch_size=(64, 32))
    assert len(times.plans) == 2 * len(plans) and len(ran) == verb.MEASURED
    assert ran[:4] == [("", "64"), ("replicate=2", "64"), ("", "32"), ("replicate=2", "32")]
    assert times.plans[0].time is not None and times.plans[0].cost is not None
    assert "4 threads of 4 processes on 2 cores" in times.plans[3].why
    assert any("foresee runs steps of at most 5 plans, for about 15 s; name others" in one for one in times.reasons)
    assert "GPU or CPU" not in " ".join(times.notes)  # no site and no GPU here
    times = verb.foresee("digits", ["", "microbatches=2"])
    assert "microbatches=2: none of its steps ended in 1 s" in times.reasons
    chosen = verb.best(times, "fastest")
    assert chosen is not None and chosen.foreseen.plan == ""
