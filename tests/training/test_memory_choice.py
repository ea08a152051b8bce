"""A training under memory= has one plan on all its processes, which its run keeps, and learns the same to the bit."""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.foresee import measured_cell

import grappe
from grappe.errors import PlanError
from grappe.foresight.devices import device_reported
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.forecast import memory_forecast
from grappe.foresight.kernels import Kernels
from grappe.foresight.search import MemoryBudget, foreseen
from grappe.launch.rank import ProcessRank
from grappe.launch.signals import StopSignal
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.tasks.pysource import PySource
from grappe.training.memory_choice import ChoiceRequest, _earlier, memory_chosen, with_memory_chosen, worker
from grappe.training.options import Options
from grappe.training.request import Request, data_folder
from grappe.training.run import Run
from grappe.training.task_reference import TaskReference

pytestmark = pytest.mark.slow

FIELDS = {"width": 64, "depth": 2, "heads": 2, "batch_size": 8, "megabytes": 0.3}


def trained(folder: Path, plan: str) -> tuple[dict, dict[str, torch.Tensor]]:
    run = grappe.train("pysource", plan, folder, fields=FIELDS, options=Options(steps=1, evaluate_every=1000))
    return run.read_description(), grappe.load(run).state_dict()


def check_same_bits(folder: Path, plan: str, other: str) -> dict:
    """Checks that two plans train the same weights, to the bit; the description of the first one's run."""
    described, weights = trained(folder / "chosen", plan)
    _, others = trained(folder / "plain", other)
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
    return described


def test_two_processes_have_one_choice_and_the_bits_of_none(tmp_path: Path) -> None:
    described = check_same_bits(tmp_path, "replicate=2,memory=7MB", "replicate=2")
    assert described["plan"].startswith("replicate=2,recompute=") and "memory" not in described["plan"]
    assert described["chosen"].startswith(f"memory=7MB: the plan is {described['plan']}, foreseen to take ")


@pytest.mark.parametrize("more", ["", ",shard=2", ",schedule=interleaved,stages=2"])
def test_each_stage_of_a_pipeline_has_its_choice_and_the_bits_of_none(tmp_path: Path, more: str) -> None:
    plan = f"pipeline=2,microbatches=2{more}"
    limit = {"": 5.6, ",shard=2": 3.4}.get(more, 6.8)
    described = check_same_bits(tmp_path, f"{plan},memory={limit}MB", plan)
    assert ":" in Plan.parse(described["plan"]).recompute, described["chosen"]
    task = " ".join(["pysource", *(f"{name}={value}" for name, value in FIELDS.items())])
    assert max(process["peak"] for process in measured_cell(task, described["plan"])) <= limit * 1e6


def test_a_cpu_allocates_the_copies_too(tmp_path: Path) -> None:
    task = PySource(**FIELDS)
    needs = memory_forecast(FakeModel(task, data_folder(), kernels=Kernels(scratch=False)), Plan(recompute="host"))
    assert needs.peak is not None and needs.host > 0
    text = " ".join(["pysource", *(f"{name}={value}" for name, value in FIELDS.items())])
    [measured] = measured_cell(text, "recompute=host")
    assert measured["peak"] == pytest.approx(needs.most, rel=0.01)


def test_a_run_that_goes_on_keeps_its_choice_where_it_fits(tmp_path: Path) -> None:
    """As a job that went back into the queue: by the same command, where another choice would be made now."""
    described, _ = trained(tmp_path / "run", "memory=12MB")
    other = dataclasses.replace(Plan.parse(described["plan"]), recompute=True)
    assert str(other) != described["plan"]
    world = World(process=ProcessRank(), device=torch.device("cpu"))

    def request(chosen_before: str, plan: Plan) -> Request:
        Run(tmp_path / "run").describe(plan=str(plan), chosen=chosen_before)
        return Request(task=TaskReference.of("pysource", FIELDS), plan=Plan(memory="12MB"), run=tmp_path / "run")

    before = described["chosen"]
    kept = with_memory_chosen(request(before, other), world)
    assert kept.plan == other and kept.chosen == before
    assert with_memory_chosen(request(before, Plan()), world).plan.recompute, "it does not fit"
    assert _earlier(request("", other)) is None
    assert _earlier(request(before, dataclasses.replace(other, replicate=2))) is None


def test_a_signal_while_it_chooses_ends_a_training_before_its_first_step(tmp_path, monkeypatch):
    """As a job that is preempted; the same command chooses again."""

    def stopped(request: ChoiceRequest) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise KeyboardInterrupt

    monkeypatch.setattr("grappe.training.memory_choice._chosen", stopped)
    stop = StopSignal()
    before = signal.getsignal(signal.SIGTERM)
    stop.install([signal.SIGTERM])
    try:
        asked = Request(task=TaskReference.of("pysource", FIELDS), plan=Plan(memory="12MB"), run=tmp_path / "run")
        chosen = with_memory_chosen(asked, World(process=ProcessRank(), device=torch.device("cpu")))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stop.flag and chosen.plan == Plan() and not chosen.chosen


def test_on_a_gpu_some_memory_is_left_to_its_kernels() -> None:
    """The GPU is a name: nothing runs on it."""
    fields = {**FIELDS, "batch_size": 64}
    request = ChoiceRequest(
        task=TaskReference.of("pysource", fields), plan=Plan(memory="320MB"), data=data_folder(),
        gpu="NVIDIA H100 80GB HBM3", gpu_bytes=80 << 30, before=0,
    )  # fmt: skip
    plan, sentence = worker(request, ProcessRank(), Path())
    assert plan.recompute and "of 52 MB that torch may allocate" in sentence
    device, budget = device_reported(request.gpu), MemoryBudget(whose="this GPU's memory", size=request.gpu_bytes)
    fake_model = FakeModel(request.task.resolve(), request.data, foreach=True, records=True)
    foreseen_plan = foreseen(fake_model, request.plan, 64, budget, device)
    assert (foreseen_plan.plan, foreseen_plan.chosen) == (str(plan), sentence), "grappe foresee chooses otherwise"
    assert not worker(dataclasses.replace(request, plan=Plan(memory="2GB")), ProcessRank(), Path())[0].recompute


def test_a_gpu_too_small_for_the_states_has_them_on_the_host_if_there_is_room() -> None:
    request = ChoiceRequest(
        task=TaskReference.of("pysource", {**FIELDS, "width": 256}), plan=Plan(memory="288MB"), data=data_folder(),
        gpu="NVIDIA H100 80GB HBM3", gpu_bytes=80 << 30, host=1 << 30, before=0,
    )  # fmt: skip
    plan, sentence = worker(request, ProcessRank(), Path())
    assert plan.offload == "cpu"
    assert sentence.endswith(", and parameters and optimizer state on the host, whose time on the bus is not foreseen")
    with pytest.raises(PlanError, match="memory=288MB: torch may allocate 20 MB"):
        worker(dataclasses.replace(request, host=0), ProcessRank(), Path())


MOVED = """
import dataclasses
from pathlib import Path
from grappe.foresight.devices import device_reported
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.forecast import memory_forecast
from grappe.foresight.kernels import Kernels
from grappe.foresight.search import MemoryBudget, foreseen
from grappe.launch.rank import ProcessRank
from grappe.launch.signals import StopSignal
from grappe.plan import Plan
from grappe.training import worker
from grappe.training.options import Options
from grappe.training.request import Request
from grappe.training.task_reference import TaskReference

worker.with_memory_chosen = lambda request, world: dataclasses.replace(
    request, plan=Plan(offload="cpu"), chosen="on the host"
)
request = Request(
    task=TaskReference.of("pysource", FIELDS), plan=Plan(memory="1GB"), base=Path(), run=Path("run"),
    options=Options(steps=1, evaluate_every=1000), quiet=True,
)
Path("rank-0.log").touch()
assert worker.worker(request, ProcessRank(), Path().absolute()).step == 1
"""


def test_one_process_whose_states_went_to_the_host_trains(tmp_path: Path) -> None:
    """On a CPU, where nothing is moved: FSDP2 needs a group, which a process alone does not have."""
    words = [sys.executable, "-c", MOVED.replace("FIELDS", repr(FIELDS))]
    done = subprocess.run(words, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert described["plan"] == "offload=cpu" and described["chosen"] == "on the host"


def test_what_cannot_fit_is_refused_before_the_run_is_made(tmp_path: Path) -> None:
    request = Request(task=TaskReference.of("pysource", FIELDS), plan=Plan(memory="1MB"), run=tmp_path / "run")
    with pytest.raises(PlanError, match=r"memory=1MB: torch may allocate 1 MB .* \d MB more"):
        with_memory_chosen(request, World(process=ProcessRank(), device=torch.device("cpu")))
    assert not request.run.exists()


def test_a_command_without_a_training_needs_a_number() -> None:
    with pytest.raises(PlanError, match="write the bytes here"):
        memory_chosen(TaskReference.of("pysource", FIELDS), Plan(memory="auto"), data_folder())


def test_some_pipelines_and_other_engines_are_refused_by_name() -> None:
    for plan, words in (
        ("pipeline=2,microbatches=2,schedule=zero_bubble,memory=1GB", "schedule=1f1b or interleaved, or leave memory"),
        ("pipeline=2,microbatches=2,tensor=2,memory=1GB", "not foreseen: leave memory= out, and write recompute"),
        ("engine=lightning,memory=1GB", "native"),
    ):
        with pytest.raises(PlanError, match=words):
            grappe.train("pysource", plan)
