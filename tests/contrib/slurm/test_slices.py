"""--gpus auto chooses a slice of a GPU: the one of least charge that is enough, against brute force."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import grappe
from grappe.contrib.slurm.forecast import smallest_slice, with_gpus
from grappe.contrib.slurm.resources import Submission
from grappe.contrib.slurm.script import resource_options
from grappe.contrib.slurm.submit import submit_all
from grappe.errors import PlanError
from grappe.foresight.fake_model import FakeModel
from grappe.foresight.gpu_time import gpu_time
from grappe.foresight.search import MemoryBudget, foreseen
from grappe.plan import Plan
from grappe.sites import find
from grappe.sites.layout import layout, sliced
from grappe.sites.sbatch import FEWEST, JobOptions
from grappe.verbs.foresee.foresee import site_fabric
from tests.sites.rules import asked
from tests.sites.test_charge import FORMULAS

DRAWN = 25  # trainings of each seed
SITES = ("fir", "nibi", "rorqual", "narval")


class Layers(grappe.Task):
    width: int = 256
    depth: int = 4
    batch_size: int = 256

    def model(self):
        return nn.Sequential(*(nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(self.depth)))

    def data(self, split, folder):
        return TensorDataset(torch.empty(self.batch_size, self.width), torch.empty(self.batch_size, self.width))

    def loss(self, output, target):
        return F.mse_loss(output, target, reduction="none").mean(1)

    def optimizer(self, named_parameters):
        return torch.optim.AdamW(named_parameters, lr=1e-3)


def fake(draw: random.Random) -> FakeModel:
    width = 2 ** draw.randint(5, 14)
    task = Layers(width=width, depth=draw.choice([1, 2, 4]), batch_size=2 ** draw.randint(2, 13 if width < 4096 else 7))
    return FakeModel(task, Path("data"), foreach=True, kernels=None, records=True)


def enough(fake_model: FakeModel, plan: Plan, site: str, job: JobOptions) -> dict[str, float]:
    """Returns the charge of an hour of each slice that is enough, by formulas on what a script would ask for."""
    share = gpu_time(fake_model, plan, site_fabric(find(site))).gpu_share()
    charges = {}
    for part in find(site).slice:
        budget = MemoryBudget(whose="", size=part.gpu_gb * 10**9)
        place = sliced(find(site), part.name)
        made = layout(plan, place, job)
        text = "\n".join(f"#SBATCH {option}" for option in resource_options(place, made, job.account))
        if foreseen(fake_model, plan, fake_model.task.batch_size, budget).fits and share < part.fraction:
            charges[part.name] = FORMULAS[site](asked(text))
    return charges


def compare(seed: int) -> set[str | None]:
    """Compares the choices for DRAWN drawn trainings; returns the profiles of the chosen slices."""
    draw, chosen = random.Random(seed), set()
    for _ in range(DRAWN):
        fake_model, site = fake(draw), draw.choice(SITES)
        plan = Plan(precision=draw.choice(["fp32", "bf16", "tf32"]))
        job = JobOptions(account="def-x", cores=draw.choice([None, None, 1, 4, 8]))
        charges = enough(fake_model, plan, site, job)
        found = smallest_slice(fake_model, plan, find(site), job)
        if found is None:
            assert not charges, (site, fake_model.task, charges)
        else:
            assert found[0] in charges and charges[found[0]] == min(charges.values()), (site, fake_model.task, charges)
        chosen.add(None if found is None else found[0].rpartition("_")[2])
    return chosen


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12))
def test_drawn_trainings_get_the_slice_of_least_charge_that_is_enough(seed: int) -> None:
    assert len(compare(seed)) >= 4


@pytest.mark.slow
def test_no_slice_is_chosen_where_there_is_none_or_several_nodes_are_asked_for() -> None:
    fake_model, job = FakeModel(Layers(), Path("data"), foreach=True, kernels=None, records=True), JobOptions()
    job = dataclasses.replace(job, account="def-x")
    assert smallest_slice(fake_model, Plan(), find("narval"), job) is not None
    for site, other in (
        ("trillium", job),
        ("narval", dataclasses.replace(job, nodes=1)),
        ("narval", dataclasses.replace(job, spare=1)),
    ):
        assert smallest_slice(fake_model, Plan(), find(site), other) is None
    with pytest.raises(PlanError):
        layout(Plan(replicate=2), sliced(find("narval"), "1g.5gb"), job)


@pytest.mark.slow
def test_the_command_asks_for_a_slice_and_says_what_the_next_larger_costs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = JobOptions(site="rorqual", account="def-me", gpus=FEWEST, env="here")
    chosen, sentence = with_gpus(Submission(task="digits", arguments=("digits",), job=job))
    assert chosen.job.gpus == ("nvidia_h100_80gb_hbm3_1g.10gb",)
    for words in (
        "--gpus auto: slice nvidia_h100_80gb_hbm3_1g.10gb of rorqual: takes 1.",
        " of 10.0 GB, and ", "% of a GPU, of which it has 12%: 1.74 RGU-hours an hour, a step of ",
        "; the next larger, nvidia_h100_80gb_hbm3_2g.20gb: 3.48 RGU-hours an hour, a step of ",
        ". Foreseen, not measured on that GPU",
    ):  # fmt: skip
        assert words in sentence
    (made,) = submit_all([chosen], show=True)
    assert "#SBATCH --gpus=nvidia_h100_80gb_hbm3_1g.10gb:1\n#SBATCH --mem=15G\n" in made.text
    assert "--gpus nvidia_h100_80gb_hbm3_1g.10gb" in made.text.splitlines()[1]
    assert made.cost == "slice nvidia_h100_80gb_hbm3_1g.10gb for at most 01:00:00: 1.74 RGU-hours"
