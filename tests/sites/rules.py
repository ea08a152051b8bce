"""A stand-in of each site's submission: its rules on a script's options, as the site's pages or its users have them."""

import re
from collections.abc import Callable
from typing import NamedTuple


class Asked(NamedTuple):
    """The resources that a script asks for."""

    options: dict[str, str]
    nodes: int
    gpus: int
    """GPUs on each node."""
    model: str
    cores: int
    """Cores of each node."""
    hours: float

    def value(self, name: str) -> str:
        return self.options.get(name, "")


def asked(text: str) -> Asked:
    """Reads the options of a script."""
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE))
    days, _, clock = options["time"].rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    request = options.get("gpus-per-node") or options.get("gpus") or options.get("gres", "").removeprefix("gpu:")
    model, _, number = request.rpartition(":")
    nodes = options["nodes"].rpartition("-")[2]
    return Asked(
        options=options,
        nodes=int(nodes),
        gpus=int(number or 0),
        model=model,
        cores=int(options.get("ntasks-per-node", 1)) * int(options["cpus-per-task"]),
        hours=24 * int(days or 0) + hours + minutes / 60 + seconds / 3600,
    )


Rule = Callable[[Asked], bool]
"""Whether a job keeps to it."""


def gigabytes(job: Asked) -> float:
    match = re.fullmatch(r"(\d+)G", job.value("mem"))
    return float(match[1]) if match else 0.0


def no_memory(job: Asked) -> bool:
    return not {"mem", "mem-per-cpu", "mem-per-gpu"} & set(job.options)


def of_alliance(longest: float, shortest: float = 5) -> dict[str, Rule]:
    return {
        "a partition is the scheduler's": lambda job: job.value("partition") in ("", "debug"),
        "the GPU's model is named": lambda job: bool(job.model),
        "the account's form": lambda job: job.value("account").startswith(("def-", "rrg-", "rpp-", "aip-")),
        "the longest": lambda job: job.hours <= longest,
        "the shortest": lambda job: job.hours * 60 >= shortest,
        "one slice a job": lambda job: (
            "gb" not in job.model.partition("hbm3")[2] + job.model or job.gpus * job.nodes == 1
        ),
    }


def whole(gpus: int) -> dict[str, Rule]:
    return {"whole nodes": lambda job: job.gpus == gpus}


def of_jean_zay(cores: int, qos: str, most: float) -> dict[str, Rule]:
    return {
        "the QOS": lambda job: bool(re.fullmatch(qos, job.value("qos"))),
        "the QOS's time": lambda job: job.hours <= (most if job.value("qos").endswith("t4") else 20),
        "memory follows the cores": no_memory,
        "a GPU's cores": lambda job: job.cores <= cores * job.gpus,
    }


def of_kempner(partition: str, cores: int, memory: int) -> dict[str, Rule]:
    return {
        "the partition": lambda job: job.value("partition") == partition,
        "the account's form": lambda job: job.value("account").startswith("kempner_"),
        "a GPU": lambda job: job.gpus > 0,
        "a GPU's cores": lambda job: job.cores <= cores * job.gpus,
        "a GPU's memory": lambda job: gigabytes(job) <= memory * job.gpus,
        "a user's GPUs": lambda job: job.nodes * job.gpus <= 16,
        "the longest": lambda job: job.hours <= 48,
    }


MILA = {"main": (120, 2, 8, 48), "unkillable": (48, 1, 6, 32), "short-unkillable": (3, 4, 10**6, 10**6)}
"""Hours, GPUs, cores, GB of a partition."""


def of_mila(job: Asked) -> bool:
    hours, gpus, cores, memory = MILA.get(job.value("partition"), (168, 10**6, 10**6, 10**6))
    within = job.hours <= hours and job.gpus * job.nodes <= gpus
    return within and job.cores * job.nodes <= cores and gigabytes(job) * job.nodes <= memory


ROIHU = {"gpumedium": (1, 4, 36), "gpularge": (4, 40, 36), "gputest": (1, 8, 0.25)}
"""GPUs at least and at most, hours of a partition."""


def of_roihu(job: Asked) -> bool:
    least, most, hours = ROIHU[job.value("partition")]
    return least <= job.gpus * job.nodes <= most and job.hours <= hours


RULES: dict[str, dict[str, Rule]] = {
    **dict.fromkeys(("fir", "nibi", "rorqual", "narval", "vulcan", "killarney", "killarney-h100"), of_alliance(168)),
    "trillium": {
        **of_alliance(24, 15),
        "one GPU, or a multiple of four": lambda job: job.gpus * job.nodes == 1 or job.gpus == 4,
        "no memory": no_memory,
        "20 GPUs without RRG": lambda job: job.gpus * job.nodes <= (100 if job.value("account")[:1] == "r" else 20),
    },
    "tamia": {**of_alliance(24), **whole(4)},
    "tamia-h200": {**of_alliance(24), **whole(8)},
    "jean-zay-v100": of_jean_zay(10, r"qos_gpu-(t3|t4|dev)", 100),
    "jean-zay-v100-octo": of_jean_zay(3, r"qos_gpu-(t3|t4|dev)", 100),
    "jean-zay-a100": of_jean_zay(8, r"qos_gpu_a100-(t3|dev)", 20),
    "jean-zay-h100": of_jean_zay(24, r"qos_gpu_h100-(t3|t4|dev)", 100),
    "perlmutter": {
        "32 cores for a GPU in shared": lambda job: job.value("qos") != "shared" or job.cores == 32 * job.gpus,
        "a QOS, or it is debug": lambda job: bool(job.value("qos")),
    },
    "lumi": {
        "7 cores for a GPU": lambda job: job.cores <= 7 * job.gpus,
        "60 GB for a GPU": lambda job: gigabytes(job) <= 60 * job.gpus,
        "a partition": lambda job: job.value("partition") in ("small-g", "standard-g", "dev-g"),
    },
    "leonardo": {"a GPU's cores": lambda job: job.cores <= 8 * job.gpus, "the longest": lambda job: job.hours <= 24},
    "roihu": {"the partition's": of_roihu, "no memory": no_memory},
    "clariden": {
        "no GPU is asked for": lambda job: not {"gres", "gpus", "gpus-per-node"} & set(job.options),
        "the longest": lambda job: job.hours <= {"normal": 12, "low": 24}.get(job.value("partition"), 1.5),
    },
    "isambard-ai": {
        "GPUs": lambda job: job.gpus > 0,
        "less than 24 h": lambda job: job.hours < 24,
    },
    "jupiter": {**whole(4), "the partition": lambda job: job.value("partition") == "booster"},
    "marenostrum5": {
        "20 cores for a GPU": lambda job: job.cores >= 20 * job.gpus,
        "no memory": no_memory,
        "a QOS": lambda job: job.value("qos").startswith("acc_"),
    },
    "snellius": {"a quarter": lambda job: job.cores <= 18 * job.gpus and gigabytes(job) <= 120 * job.gpus},
    "snellius-h100": {"a quarter": lambda job: job.cores <= 16 * job.gpus and gigabytes(job) <= 180 * job.gpus},
    "mila": {"the partition's": of_mila, "no account": lambda job: "account" not in job.options},
    "kempner": of_kempner("kempner", 16, 240),
    "kempner-h100": of_kempner("kempner_h100", 24, 360),
    "kempner-h200": of_kempner("kempner_h200", 16, 360),
}  # fmt: skip


def refusals(site: str, text: str) -> list[str]:
    """Returns the rules of a site that a script breaks."""
    job = asked(text)
    return [name for name, keeps in RULES[site].items() if not keeps(job)]
