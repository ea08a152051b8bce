"""A plan on a site's nodes: what it asks for, and one message with the fix where it cannot be."""

import dataclasses

import pytest

from grappe import sites
from grappe.contrib.slurm import slurm
from grappe.contrib.slurm.script import cost, resource_options
from grappe.errors import GrappeError, PlanError
from grappe.fields import NumberRange
from grappe.plan import Plan
from grappe.sites.layout import fit, layout, sliced, stretched
from grappe.sites.sbatch import JobOptions, gpu_counts

ACCOUNTS = {
    "narval": "def-x",
    "narval-cpu": "def-x",
    "trillium": "def-x",
    "tamia": "aip-x",
    "jean-zay-v100": "x@v100",
    "perlmutter": "m_g",
    "lumi": "project_1",
}


def made(site: str, plan: str, **wish):
    return layout(Plan.parse(plan), sites.find(site), JobOptions(**{"account": ACCOUNTS.get(site), **wish}))


@pytest.mark.parametrize(
    ("site", "plan", "wish", "nodes", "processes", "gpus", "cores", "hours"),
    [
        ("narval", "", {}, 1, 1, 1, 12, 1.0),  # its share of the node
        ("narval", "replicate=8", {"time": "2h"}, 2, 4, 4, 12, 16.0),
        ("narval", "replicate=8,per_device=8", {}, 1, 8, 1, 1, 1.0),  # its cores are shared, too
        ("narval", "replicate=4", {"nodes": 2}, 2, 2, 2, 12, 4.0),
        ("narval", "replicate=4,device=cpu,threads=3,workers=1", {}, 1, 4, 0, 4, 16.0),
        ("narval-cpu", "replicate=2,device=cpu", {"cores": 8}, 1, 2, 0, 8, 16.0),
    ],
)
def test_a_plan_on_nodes(site: str, plan: str, wish: dict, nodes, processes, gpus, cores, hours) -> None:
    found = made(site, plan, **wish)
    assert (found.nodes, found.processes, found.gpus, found.cores) == (nodes, processes, gpus, cores)
    assert f": {hours:.3g} " in cost(sites.find(site), found)


def test_memory_is_the_nodes_share_or_that_of_the_cores() -> None:
    found = [made("narval", ""), made("narval", "replicate=8"), made("narval-cpu", "replicate=2,device=cpu", cores=8)]
    assert [one.memory_gb for one in found] == [124, 498, 62]


def test_a_range_of_nodes_has_a_plan_for_each_number_that_can_be() -> None:
    found = made("narval", "replicate=4,tensor=2,exact=0", nodes=NumberRange(2, 5), time="2h")
    assert {nodes: str(plan) for nodes, plan in found.sizes.items()} == {
        nodes: f"replicate={2 * nodes},tensor=2" for nodes in (2, 3, 4, 5)
    }
    assert (found.nodes, found.most_nodes, found.processes, found.gpus) == (2, 5, 4, 4)
    sharded = made("narval", "shard=4,exact=8", nodes=NumberRange(1, 3)).sizes
    assert {nodes: str(plan) for nodes, plan in sharded.items()} == {1: "shard=4,exact=8", 2: "shard=8,exact=8"}
    with pytest.raises(PlanError, match="give a multiple of 2, as only replicate of the plan tensor=2 changes"):
        stretched(Plan(tensor=2), 3)
    with pytest.raises(GrappeError, match="at most 32 GPUs, this job asks for 36"):
        made("jean-zay-v100", "replicate=4", nodes=NumberRange(1, 9), queue="qos_gpu-dev", time="1h")


def test_the_first_queue_that_admits_a_job_is_taken() -> None:
    queues = [made("jean-zay-v100", "", time=f"{hours}h").queue for hours in (1, 20, 21, 100)]
    assert [one.name for one in queues if one] == ["qos_gpu-t3", "qos_gpu-t3", "qos_gpu-t4", "qos_gpu-t4"]
    named = made("jean-zay-v100", "", queue="qos_gpu-dev").queue
    assert named.options == ("--qos=qos_gpu-dev",)


def test_gpus_make_a_plan() -> None:
    assert str(fit(Plan(), 4)) == "replicate=4"
    assert str(fit(Plan.parse("per_device=2"), 2)) == "replicate=4,per_device=2"
    assert str(fit(Plan.parse("shard=4"), 4)) == "shard=4"
    with pytest.raises(GrappeError, match="use --gpus 4"):
        fit(Plan.parse("shard=4"), 2)


@pytest.mark.parametrize(
    ("site", "plan", "wish", "words"),
    [
        ("lumi", "precision=tf32", {}, "lumi has AMD's GPUs: use precision=bf16"),
        ("lumi", "replicate=8,per_device=2", {}, "shares GPUs by NVIDIA's MPS"),
        ("narval", "", {"account": None}, "needs an account: --account NAME (of the form def-* or rrg-* or rpp-*)"),
        ("narval", "", {"account": "mine"}, "--account=mine: accounts of narval are of the form def-*"),
        ("narval", "", {"time": "8d"}, "at most 168 h"),
        ("narval", "", {"time": "60s"}, "at least 5 minutes"),
        ("narval", "replicate=5", {}, "into 2 nodes of 4 GPUs: use --nodes 5, or degrees whose product is 4"),
        ("narval", "replicate=5", {"nodes": 2}, "do not divide into 2 nodes: use --nodes 5"),
        ("narval", "replicate=8", {"nodes": 1}, "8 each, a node of narval has 4: use --nodes 2"),
        ("narval", "replicate=3,per_device=2", {}, "multiple of 2"),
        ("narval", "replicate=64,per_device=64", {}, "64 processes on 12 cores"),
        ("narval", "", {"nodes": 0}, "--nodes=0: it must be at least 1"),
        ("trillium", "replicate=2", {}, "whole nodes: 1 or a multiple of 4 GPUs; this plan has 2"),
        ("tamia", "", {}, "a multiple of 4 GPUs; this plan has 1"),
        ("lumi", "replicate=40", {"time": "49h"}, "no queue of lumi admits it. small-g: at most 4 nodes"),
        (
            "clariden",
            "",
            {"time": "15h", "account": "g1"},
            "normal: at most 12 h, this job asks for 15 h. If you name it: --queue low",
        ),
        ("jean-zay-v100", "", {"queue": "qos_gpu_t3"}, "no queue 'qos_gpu_t3': did you mean qos_gpu-t3"),
        ("jean-zay-v100", "", {"queue": "qos_gpu-dev", "time": "7201s"}, "at most 2 h"),
        ("narval-cpu", "replicate=2,device=cpu", {"cores": 33}, "those of narval-cpu have 64"),
        ("narval-cpu", "", {}, "add device=cpu"),
    ],
)
def test_what_a_site_forbids(site: str, plan: str, wish: dict, words: str) -> None:
    with pytest.raises(GrappeError) as refusal:
        made(site, plan, **wish)
    assert words in str(refusal.value)
    assert refusal.value.exit_code == 2


def test_spare_nodes_count_among_those_that_a_site_has_and_a_queue_gives() -> None:
    text = "gpu*|48|498000|gpu:4|7-00:00:00|12|1-4\nwide|48|498000|gpu:4|infinite|3|1-infinite"
    for partition, words in (
        ("gpu", "gpu: at most 4 nodes, this job asks for 5"),
        ("wide", "--spare=3: 5 nodes with those that the plan needs, and a job on generic may have 3: use --spare 1"),
    ):
        site = slurm.probed(sites.find("generic"), text, partition, wants_gpus=True)
        assert layout(Plan(replicate=8), site, JobOptions(spare=1)).most_nodes == 3
        with pytest.raises(GrappeError, match=words):
            layout(Plan(replicate=8), site, JobOptions(spare=3))


def test_a_range_ends_at_the_nodes_that_a_site_has() -> None:
    text = "wide|48|498000|gpu:4|infinite|3|1-infinite"
    site = slurm.probed(sites.find("generic"), text, "wide", wants_gpus=True)
    assert layout(Plan(replicate=4), site, JobOptions(nodes=NumberRange(1, 3))).most_nodes == 3
    with pytest.raises(
        GrappeError, match="takes 4 nodes, spare ones included, and generic has 3: use a range that ends at 2"
    ):
        layout(Plan(replicate=4), site, JobOptions(nodes=NumberRange(1, 3), spare=1))


@pytest.mark.parametrize(
    ("site", "name", "asked"),
    [
        ("narval", "a100_3g.20gb", "a100_3g.20gb"),
        ("narval", "3g.20gb", "a100_3g.20gb"),
        ("rorqual", "h100_1g.10gb", "nvidia_h100_80gb_hbm3_1g.10gb"),
        ("nibi", "h100_2.20", "nvidia_h100_80gb_hbm3_2g.20gb"),
        ("nibi", "h100_40gb", "nvidia_h100_80gb_hbm3_3g.40gb"),
        ("fir", "1g.10gb", "nvidia_h100_80gb_hbm3_1g.10gb"),
    ],
)
def test_a_slice_is_asked_for_by_its_own_name_with_the_cores_and_memory_of_its_site(site, name, asked) -> None:
    assert gpu_counts(name, "--gpus") == (name,)
    place = sliced(sites.find(site), name)
    job = JobOptions(account="def-x", gpus=(name,))
    found = layout(Plan(), place, job)
    assert (found.gpus, found.cores, found.memory_gb) == (1, place.node.slice.cores, place.node.slice.memory_gb)
    assert resource_options(place, found, "def-x")[-3:-1] == [f"--gpus={asked}:1", f"--mem={found.memory_gb}G"]
    for plan, wish in (("replicate=2", {}), ("replicate=2,per_device=2", {}), ("", {"spare": 1})):
        with pytest.raises(PlanError, match=f"{asked} is a slice of a GPU, for one process: slices have no link"):
            layout(Plan.parse(plan), place, dataclasses.replace(job, **wish))


def test_a_name_of_no_slice() -> None:
    with pytest.raises(
        GrappeError, match=r"--gpus=a100_1g.10gb: narval has no such slice of a GPU: did you mean a100_"
    ):
        sliced(sites.find("narval"), "a100_1g.10gb")
    with pytest.raises(GrappeError, match=r"--gpus=h100_1g.10gb: trillium .* gives whole GPUs alone: write a number"):
        sliced(sites.find("trillium"), "h100_1g.10gb")
    for text in ("two", "1,x", "-1", "h100", "1g"):
        with pytest.raises(GrappeError, match="--gpus"):
            gpu_counts(text, "--gpus")


@pytest.mark.parametrize(
    ("queue", "plan", "cores", "memory"),
    [("long", "", 12, 250), ("main", "", 8, 48), ("main", "replicate=2", 4, 48), ("unkillable", "", 6, 32)],
)
def test_a_queue_with_few_cores_gives_a_job_these(queue: str, plan: str, cores: int, memory: int) -> None:
    found = made("mila", plan, queue=queue)
    assert (found.cores, found.memory_gb) == (cores, memory)


@pytest.mark.parametrize(
    ("wish", "memory"),
    [
        ({"mem": "32G"}, 32),
        ({"mem": "2048"}, 2),
        ({"mem_per_cpu": "512M"}, 6),
        ({"mem": "1T"}, 1024),
        ({"mem": "0"}, 498),
    ],
)
def test_the_users_memory_counts(wish: dict, memory: float) -> None:
    assert made("narval", "", **wish).memory_gb == memory
