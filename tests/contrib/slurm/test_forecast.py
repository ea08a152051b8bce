"""Before the queue: a peak that does not fit a site's GPUs, with a plan that fits; and a GPU that would mostly wait."""

import dataclasses
import re
import time
from pathlib import Path

import pytest

from grappe.contrib.slurm import forecast, slurm
from grappe.contrib.slurm.forecast import foreseen_warnings, with_gpus, with_sizes
from grappe.contrib.slurm.resources import Submission
from grappe.contrib.slurm.script import Script
from grappe.contrib.slurm.submit import submit_all
from grappe.errors import TaskError, UsageError
from grappe.fields import NumberRange
from grappe.plan import Plan
from grappe.sites import find
from grappe.sites.sbatch import FEWEST, JobOptions
from grappe.verbs.foresee.run_forecast import traced

BIG = """
import time
import grappe, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

class Big(grappe.Task):
    width: int = 8192
    batch_size: int = 16
    reads: bool = False
    says: str = ""
    sleeps: float = 0.0

    def model(self):
        return nn.Sequential(*(nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(40)))

    def forward(self, model, inputs):
        if self.reads and inputs.sum().item() > 0:
            inputs = inputs + 1
        return model(inputs)

    def data(self, split, folder):
        print(self.says)
        time.sleep(self.sleeps)
        return TensorDataset(torch.zeros(16, self.width), torch.zeros(16, self.width))

    def loss(self, output, target):
        return F.mse_loss(output, target, reduction="none").mean(1)

    def optimizer(self, named_parameters):
        return torch.optim.AdamW(named_parameters, lr=1e-3)

    def units(self, model):
        return list(model)
"""


FOUR = (
    "with 4 processes, each needs 60.6 GB, and narval's A100, 40 GB has 40.0 GB",
    "--plan shard=4,zero=1 fits, with ",
)
ONE = (
    "with one process, each needs",
    "No plan of as many GPUs fits; with 2 GPUs --plan shard=2,zero=1 does, with ",
)


LITTLE = ("% of a GPU (NVIDIA A100 SXM4, 40 GB), and 1.", " GB of its 40.0 GB: ", ". Or train on cores")


@pytest.mark.parametrize(
    ("site", "plan", "fields", "says"),
    [
        ("narval", "replicate=4", (), FOUR),
        ("narval", "", (), ONE),
        ("narval", "shard=4", (), ()),
        (
            "narval",
            "replicate=4",
            ("width=8",),
            (*LITTLE, "--plan one is enough (4 RGU-hours", "instead of 16 RGU-hours"),
        ),
        ("narval", "", ("width=8",), (*LITTLE, "--gpus a100_1g.5gb is enough (0.57 RGU", "instead of 4 RGU-hours")),
        ("trillium", "", ("width=8",), ("% of a GPU (NVIDIA H100 SXM5, 80 GB): train on cores",)),
        ("narval", "replicate=4,per_device=2", (), ("A100, 40 GB, shared by 2 processes, has 20.0 GB",)),
        ("narval", "replicate=4,per_device=4", ("width=8",), ()),
        ("narval", "engine=lightning", ("width=8",), ("a step would use ",)),
        ("narval", "compile", ("width=8",), ()),
        ("narval", "device=cpu", ("width=8",), ()),
        ("narval", "replicate=4", ("reads=true",), ("was not foreseen: ",)),
    ],
)
def test_what_does_not_fit_is_said(
    tmp_path: Path, site: str, plan: str, fields: tuple[str, ...], says: tuple[str, ...]
) -> None:
    (tmp_path / "big.py").write_text(BIG)
    found = warnings(tmp_path, site, plan, fields)
    assert len(found) == bool(says)
    assert all(each in found[0] for each in says)


def warnings(folder: Path, site: str, plan: str, fields: tuple[str, ...]) -> list[str]:
    found = list[str]()

    def examine(submission: Submission, script: Script) -> None:
        found.extend(foreseen_warnings(submission, script))

    job = JobOptions(site=site, account="def-me", runs=folder / "runs")
    task = str(folder / "big.py")
    submission = Submission(task=task, arguments=(task,), plans=(plan,), fields=fields, job=job)
    list(submit_all([submission], show=True, examine=examine))
    return found


@pytest.mark.slow
def test_gpus_auto_are_the_fewest_whose_memory_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("big.py").write_text(BIG)
    job = JobOptions(site="narval", account="def-me", gpus=FEWEST)
    submission = Submission(task="big.py", arguments=("big.py",), job=job)
    chosen, sentence = with_gpus(submission)
    step = r"a step of [\d.]+ m?s"
    assert re.fullmatch(
        r"--gpus auto: 2 GPUs of narval: fits on 2 GPUs with no more computing \(shard=2\); not on 1 GPU; 2 GPUs: 8 "
        rf"RGU-hours an hour, {step}; 4 GPUs: 16 RGU-hours an hour, {step}\. Foreseen, not measured on that GPU",
        sentence,
    )
    (made,) = submit_all([chosen], show=True)
    assert "--gpus-per-node=a100:2" in made.text and "train big.py --plan shard=2" in made.text
    with pytest.raises(UsageError, match="--gpus auto chooses processes and recomputation"):
        with_gpus(dataclasses.replace(submission, plans=("replicate=2",)))
    with pytest.raises(UsageError, match="does not fit on a node of narval: not on 1 GPU or 2 GPUs or 4 GPUs"):
        with_gpus(dataclasses.replace(submission, fields=("width=16384",)))
    with pytest.raises(UsageError, match="give a number here"):
        list(submit_all([dataclasses.replace(submission, command="evaluate")], show=True))


@pytest.mark.slow
def test_sizes_whose_memory_is_too_little_are_not_asked_for(here: Path) -> None:
    Path("big.py").write_text(BIG)
    job = JobOptions(site="narval", account="def-me", gpus=NumberRange(1, 4))
    submission = Submission(task="big.py", arguments=("big.py", "--plan", "shard=2"), plans=("shard=2",), job=job)
    chosen, sentence = with_sizes(submission)
    assert sentence.startswith(
        "--gpus 1-4: 2 GPUs: shard=2, and no free one is seen; not 1 GPU: with one process, each"
    )
    (made,) = submit_all([chosen], show=True)
    assert "--gpus-per-node=a100:2" in made.text and "train big.py --plan shard=2" in made.text
    with pytest.raises(
        UsageError, match=r"--gpus 1-4: big\.py does not fit on any of them: with one process, each needs"
    ):
        with_sizes(dataclasses.replace(submission, plans=("",)))
    chosen, sentence = with_sizes(
        dataclasses.replace(submission, job=dataclasses.replace(job, gpus=NumberRange(4, 12)))
    )
    assert sentence == "--gpus 4-12: 1-3 nodes: shard=4 to shard=12, as many as Slurm has at each start"
    (made,) = submit_all([chosen], show=True)
    assert "--nodes=1-3" in made.text and "size 3 12 shard=12\n" in made.text and '--plan "$plan"' in made.text
    with pytest.raises(UsageError, match="a node of narval has 4 GPUs: begin with a multiple of it"):
        with_sizes(dataclasses.replace(submission, job=dataclasses.replace(job, gpus=NumberRange(6, 8))))


@pytest.mark.parametrize(
    ("gpus", "plan", "spare", "words"),
    [
        ((2, 16), "", 0, "8 nodes with 2 GPUs each, and generic has 3: use a range that ends at 6,"),
        ((4, 12), "", 1, "4 nodes with 4 GPUs each, 1 of them spare, and generic has 3: use a range that ends at 8,"),
        ((16, 20), "", 0, "at least 4 nodes with 4 GPUs each, and generic has 3: use at most 12 GPUs,"),
        ((12, 20), "", 1, "at least 4 nodes with 4 GPUs each, 1 of them spare, and generic has 3: use at most 8 GPUs,"),
        ((2, 4), "tensor=8", 0, "4 processes: give a multiple of 8, as only replicate of the plan tensor=8 changes"),
        ((8, 12), "tensor=3", 0, "8 processes: give a multiple of 3, as only replicate of the plan tensor=3 changes"),
    ],
)  # fmt: skip
def test_a_range_of_gpus_is_refused_in_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, int], plan: str, spare: int, words: str
) -> None:
    text = "wide|48|498000|gpu:4|infinite|3|1-infinite"
    site = slurm.probed(find("generic"), text, "wide", wants_gpus=True)
    monkeypatch.setattr(forecast, "placed", lambda submission: (site, Plan.parse(plan)))
    job = JobOptions(gpus=NumberRange(*gpus), spare=spare)
    with pytest.raises(UsageError, match=re.escape(f"--gpus {gpus[0]}-{gpus[1]}: {words}")):
        with_sizes(Submission(task="digits", arguments=("digits",), job=job))


def test_what_a_task_prints_is_no_part_of_a_script(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    (tmp_path / "big.py").write_text(BIG)
    assert warnings(tmp_path, "narval", "replicate=4", ("width=8", "says=hello"))
    out, err = capfd.readouterr()
    assert "hello" not in out
    assert err.startswith("tracing the model")


def test_a_task_that_takes_for_ever_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "big.py").write_text(BIG)
    monkeypatch.setattr("grappe.verbs.foresee.run_forecast.WAITING_SECONDS", 3)
    (found,) = warnings(tmp_path, "narval", "replicate=4", ("width=8", "sleeps=600"))
    assert "take more than 3 s here" in found


def test_time_of_computing_is_limited_and_not_time_that_others_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grappe.verbs.foresee.run_forecast.SECONDS", 1)
    assert traced("", lambda: time.sleep(2) or "waited, as beside others") == "waited, as beside others"

    def computes() -> str:
        while True:
            pass

    with pytest.raises(TaskError, match="take more than 1 s here"):
        traced("", computes)


def test_the_plan_is_judged_without_advice_where_the_search_fails(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "big.py").write_text(BIG)
    monkeypatch.setattr("grappe.contrib.slurm.forecast._another", lambda *_: 1 / 0)
    (found,) = warnings(tmp_path, "narval", "replicate=4", ())
    assert "it will run out of memory (foreseen" in found
