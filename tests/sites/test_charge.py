"""A job's charge in its site's unit, against formulas of each kind of site on what its script asks for."""

import random
import re
from collections.abc import Callable

import pytest

from grappe import sites
from grappe.contrib.slurm.script import cost
from grappe.errors import GrappeError
from grappe.plan import Plan
from grappe.sites.layout import charge, hourly_charge, layout, sliced
from grappe.sites.sbatch import JobOptions
from tests.contrib.slurm.golden import account
from tests.sites.rules import Asked, asked
from tests.sites.test_rules import options

DRAWN = 300
RGU = {"a100": 4.0, "h100": 12.2, "1g.5gb": 0.57, "2g.10gb": 1.14, "3g.20gb": 2.0}
RGU |= {"1g.10gb": 1.74, "2g.20gb": 3.48, "3g.40gb": 6.1}


def alliance(cores_per_rgu: float, gb_per_rgu: float) -> Callable[[Asked], float]:
    """max(ΣRGU, cores / cores per RGU, GB / GB per RGU) x time ("Allocations and compute scheduling", 2026-09-27)."""

    def rate(job: Asked) -> float:
        rgu = RGU[job.model.rpartition("_")[2]] * job.gpus
        return job.nodes * max(rgu, job.cores / cores_per_rgu, gigabytes(job) / gb_per_rgu)

    return rate


def gigabytes(job: Asked) -> float:
    """Memory of each node as Slurm reads it: megabytes without a unit."""
    if each := re.fullmatch(r"(\d+)([MGT])", job.value("mem-per-cpu")):
        return int(each[1]) * {"M": 1 / 1024, "G": 1, "T": 1024}[each[2]] * job.cores
    match = re.fullmatch(r"(\d+)([MG]?)", job.value("mem"))
    return int(match[1]) / (1 if match[2] == "G" else 1024) if match else 0


FORMULAS: dict[str, Callable[[Asked], float]] = {
    "narval": alliance(3.0, 31.1),
    "fir": alliance(0.98, 23.6),
    "nibi": alliance(1.15, 20.5),
    "rorqual": alliance(1.31, 10.2),
    "trillium": alliance(1.97, 15.4),
    "roihu": lambda job: 200 * job.gpus * job.nodes,  # BU, a GPU
    "snellius": lambda job: job.nodes * 128 * max(job.gpus, job.cores / 18, gigabytes(job) / 120),  # a quarter
    "leonardo": lambda job: job.nodes * max(job.cores, 8 * job.gpus),  # core-hours
    "isambard-ai": lambda job: job.nodes * max(job.gpus / 4, job.cores / 288),  # the largest share of a node
    "clariden": lambda job: job.nodes,  # whole nodes
    "perlmutter": lambda job: job.nodes * (1 if job.value("qos") == "regular" else max(job.gpus / 4, job.cores / 128)),
}


def test_each_site_with_a_table_has_a_formula_here() -> None:
    assert {name for name in sites.files() if sites.find(name).charge} == {*FORMULAS, "snellius-h100"}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_charge_is_the_formulas_of_the_site(name: str) -> None:
    site, draw, done = sites.find(name), random.Random(7), 0
    while done < DRAWN:
        part = draw.choice([None, *site.slice])
        wish: dict = {"account": account(site), "time": f"{draw.randint(15, 700)}m"}
        if draw.random() < 0.3:
            wish["cores"] = draw.randint(1, 20)
        if draw.random() < 0.4 and site.node.memory_gb:
            wish |= draw.choice([{"mem": f"{draw.randint(1, 400)}G"}, {"mem_per_cpu": f"{draw.randint(100, 9000)}M"},
                                 {"mem": str(draw.randint(1000, 400_000))}])  # fmt: skip
        gpus = 1 if part else draw.choice([1, 2, 3, 4, 8, 12, 16])
        place, job = sliced(site, part.name) if part else site, JobOptions(**wish)
        try:
            made = layout(Plan(replicate=gpus), place, job)
        except GrappeError:
            continue
        done += 1
        text = options(place, Plan(replicate=gpus), job)
        for option, value in (("mem", job.mem), ("mem-per-cpu", job.mem_per_cpu)):
            if value:  # as sbatch.merged puts them in
                text = re.sub(r"#SBATCH --mem=.*\n", "", text) + f"\n#SBATCH --{option}={value}\n"
        job = asked(text)
        found, expected = charge(place, made), FORMULAS[name](job) * job.hours
        assert found == pytest.approx(expected, rel=1e-9), text
        assert f" {site.charge.unit}" in cost(place, made)


def test_an_hour_of_a_plan_costs_a_hour_of_its_job_and_nothing_is_known_of_what_a_site_forbids() -> None:
    narval = sites.find("narval")
    assert hourly_charge(Plan(replicate=2), narval) == 8.0
    assert hourly_charge(Plan(), sliced(narval, "1g.5gb")) == 0.57
    assert hourly_charge(Plan(), sliced(narval, "a100_1g.5gb"), JobOptions(mem="62G")) == pytest.approx(62 / 31.1)
    assert hourly_charge(Plan(replicate=3), sites.find("trillium")) is None
    assert hourly_charge(Plan(), sites.find("vulcan")) is None  # its units are not known


@pytest.mark.parametrize(
    ("name", "plan", "part", "words"),
    [
        ("narval", "replicate=4", None, "4 GPUs for at most 01:00:00: 4 GPU-hours, 16 RGU-hours"),
        ("narval", "", "3g.20gb", "slice a100_3g.20gb for at most 01:00:00: 2 RGU-hours"),
        ("leonardo", "replicate=4", None, "4 GPU-hours, 32 core-hours"),
        ("leonardo", "device=cpu,threads=4", None, "4 cores for at most 01:00:00: 4 core-hours"),
        ("roihu", "replicate=8", None, "8 GPU-hours, 1,600 billing units"),
        ("vulcan", "", None, "1 GPU for at most 01:00:00: 1 GPU-hours"),
    ],
)
def test_a_charge_stands_beside_the_hours(name: str, plan: str, part: str | None, words: str) -> None:
    site = sites.find(name)
    place, parsed = sliced(site, part) if part else site, Plan.parse(plan)
    assert words in cost(place, layout(parsed, place, JobOptions(account=account(site))))
