"""Each site's scripts before a stand-in of its submission: ours pass, and one that breaks a rule is refused."""

import re

import pytest

from grappe import sites
from grappe.contrib.slurm.script import render, resource_options
from grappe.errors import GrappeError
from grappe.plan import Plan
from grappe.sites.layout import layout, sliced
from grappe.sites.sbatch import JobOptions
from grappe.sites.schema import Site
from tests.contrib.slurm.golden import SIZES, account, script
from tests.sites.rules import RULES, refusals

WITH_GPUS = [name for name in sites.files() if (node := sites.find(name).node) and node.gpus]


def options(site: Site, plan: Plan, job: JobOptions) -> str:
    """The options of a job, as a script has them."""
    return "\n".join(f"#SBATCH {option}" for option in resource_options(site, layout(plan, site, job), job.account))


def test_each_site_with_gpus_has_rules() -> None:
    assert set(RULES) == set(WITH_GPUS)


@pytest.mark.parametrize("name", WITH_GPUS)
def test_ours_pass(name: str) -> None:
    site = sites.find(name)
    for size in SIZES:
        assert refusals(name, render(script(site, size))) == [], size
    for queue in site.queue:  # in each queue what one process or node gets
        for gpus in (1, site.node.gpus):
            job = JobOptions(account=account(site), queue=queue.name, time="15m")
            try:
                text = options(site, Plan(replicate=gpus), job)
            except GrappeError:
                continue  # refused here, with a message
            if queue.name != "kempner_requeue":
                assert refusals(name, text) == [], (queue.name, gpus)
    for part in site.slice:
        place = sliced(site, part.name)
        assert refusals(name, options(place, Plan(), JobOptions(account=account(site)))) == []


@pytest.mark.parametrize(
    ("name", "size", "line", "other", "rule"),
    [
        ("marenostrum5", "1-gpu", "--cpus-per-task=20", "--cpus-per-task=19", "20 cores for a GPU"),
        ("marenostrum5", "1-gpu", "--nodes=1", "--nodes=1\n#SBATCH --mem=64G", "no memory"),
        ("perlmutter", "1-gpu", "--cpus-per-task=32", "--cpus-per-task=31", "32 cores for a GPU in shared"),
        ("perlmutter", "1-gpu", "--cpus-per-task=32", "--cpus-per-task=33", "32 cores for a GPU in shared"),
        ("perlmutter", "1-gpu", "--qos=shared", "--comment=x", "a QOS, or it is debug"),
        ("trillium", "1-gpu", "h100:1", "h100:2", "one GPU, or a multiple of four"),
        ("trillium", "1-gpu", "h100:1", "h100:3", "one GPU, or a multiple of four"),
        ("trillium", "1-gpu", "--nodes=1", "--nodes=1\n#SBATCH --mem=188G", "no memory"),
        ("trillium", "1-gpu", "--time=00:30:00", "--time=00:14:00", "the shortest"),
        ("trillium", "2-nodes", "--nodes=2", "--nodes=6", "20 GPUs without RRG"),
        ("tamia", "1-node", "h100:4", "h100:3", "whole nodes"),
        ("tamia-h200", "1-node", "h200:8", "h200:4", "whole nodes"),
        ("narval", "1-gpu", "--gpus-per-node=a100:1", "--gpus=a100_1g.5gb:2", "one slice a job"),
        ("fir", "1-gpu", "--gpus-per-node=h100:1", "--gpus=nvidia_h100_80gb_hbm3_1g.10gb:2", "one slice a job"),
        ("rorqual", "1-gpu", "--gpus-per-node=h100:1", "--gpus-per-node=1", "the GPU's model is named"),
        ("nibi", "1-gpu", "--nodes=1", "--nodes=1\n#SBATCH --partition=x", "a partition is the scheduler's"),
        ("jean-zay-a100", "1-gpu", "qos_gpu_a100-t3", "qos_gpu_a100-t4", "the QOS"),
        ("roihu", "2-nodes", "gpularge", "gpumedium", "the partition's"),
        ("roihu", "1-gpu", "gpumedium", "gpularge", "the partition's"),
        ("clariden", "1-gpu", "--nodes=1", "--nodes=1\n#SBATCH --gres=gpu:4", "no GPU is asked for"),
        ("isambard-ai", "1-gpu", "--time=00:30:00", "--time=1-00:00:00", "less than 24 h"),
        ("kempner", "1-gpu", "--mem=240G", "--mem=241G", "a GPU's memory"),
        ("mila", "1-gpu", "--partition=long", "--partition=main", "the partition's"),
        ("snellius", "1-gpu", "--cpus-per-task=18", "--cpus-per-task=19", "a quarter"),
    ],
)  # fmt: skip
def test_one_that_breaks_a_rule_is_refused(name: str, size: str, line: str, other: str, rule: str) -> None:
    text = render(script(sites.find(name), size))
    assert line in text
    assert rule in refusals(name, text.replace(line, other, 1))


@pytest.mark.parametrize(
    ("name", "plan", "wish", "words"),
    [
        (
            "marenostrum5",
            "",
            {"cores": 19},
            "takes at least 20 cores for each GPU, and the job has 19 for 1",
        ),
        (
            "marenostrum5",
            "replicate=3,per_device=3",
            {},
            "the job has 18 for 1: leave --cores out, or use processes whose number divides 20",
        ),
        ("perlmutter", "", {"cores": 16}, "takes exactly 32 cores for each GPU"),
        ("trillium", "replicate=3", {}, "1 or a multiple of 4 GPUs; this plan has 3"),
        ("trillium", "", {"time": "14m"}, "at least 15 minutes"),
        (
            "trillium",
            "replicate=24",
            {},
            "the plan needs 24 GPUs, a job on trillium may have 20",
        ),
        (
            "trillium",
            "replicate=104",
            {"account": "rrg-abc"},
            "the plan needs 104 GPUs, a job on trillium may have 100",
        ),
        ("tamia", "replicate=3", {}, "a multiple of 4 GPUs"),
        ("roihu", "", {"queue": "gpularge"}, "at least 4 GPUs, this job asks for 1"),
        ("roihu", "replicate=44", {}, "gpularge: at most 10 nodes"),
        ("clariden", "replicate=4", {"time": "13h"}, "normal: at most 12 h"),
        ("isambard-ai", "", {"time": "24h"}, "gives at most 23.98 h"),
        ("jean-zay-a100", "", {"time": "21h"}, "qos_gpu_a100-t3: at most 20 h"),
        ("kempner", "replicate=20", {}, "may have 16"),
    ],
)
def test_the_same_is_refused_before_the_queue(name: str, plan: str, wish: dict, words: str) -> None:
    site = sites.find(name)
    with pytest.raises(GrappeError, match=re.escape(words)) as refusal:
        layout(Plan.parse(plan), site, JobOptions(**{"account": account(site), **wish}))
    assert refusal.value.exit_code == 2
