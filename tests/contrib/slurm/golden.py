"""The scripts that every site's golden files hold; `python -m tests.contrib.slurm.golden` writes them anew."""

import dataclasses
from pathlib import Path
from typing import Any

from grappe import sites
from grappe.contrib.slurm.array import Array, parse
from grappe.contrib.slurm.environment import MADE_ON_NODES, Pack, Packages
from grappe.contrib.slurm.script import Script, render
from grappe.plan import Plan
from grappe.sites.layout import layout
from grappe.sites.sbatch import SCRIPT, TUNE, JobOptions
from grappe.sites.schema import Site
from tests.slurm.shapes import live

FOLDER = Path(__file__).with_name("golden")
RUN = Path("/scratch/me/runs/digits-1")
MORE = ("narval", "jean-zay-a100")
OPTIONS = {
    "mem": "32G",
    "constraint": "a100",
    "mail_user": "me@example.org",
    "dependency": "singleton",
    "sbatch": ("--exclude=n1", "--comment=mine", "--hint=compute_bound"),
}
PACKAGES = Packages(files={}, key="0123456789ab", locked=True)
PACK = Pack(file=Path("/scratch/me/.grappe-environments/0123456789ab.tar.zst"), source=Path("/home/me/env"))
SIZES = ("1-gpu", "1-node", "2-nodes")


def gpus(site: Site, size: str) -> int:
    """Returns the GPUs of a size on a site (processes on CPU nodes); without single GPUs, of the smallest job."""
    whole = site.node.gpus or site.node.cores
    least = whole if site.ask.whole_nodes and 1 not in site.ask.part_nodes else 1
    return {"1-gpu": least, "1-node": whole, "2-nodes": 2 * whole}[size]


def account(site: Site) -> str | None:
    """One of the form that the site wants."""
    if site.ask.account == "none":
        return None
    return site.ask.accounts[0].replace("*", "abc") if site.ask.accounts else "abc"


def script(site: Site, size: str, **changes: int) -> Script:
    """The script of a site and a size; `changes` are made to its layout behind the checks."""
    number = gpus(site, size)
    plan = Plan(replicate=number) if site.node and site.node.gpus else Plan(replicate=number, device="cpu")
    job = JobOptions(time="30m", account=account(site), name="digits-1", chain=0 if site.job.requeue else 3)
    made = layout(plan, site, job)
    return Script(
        site=site,
        layout=dataclasses.replace(made, **changes) if changes else made,
        plan=plan,
        job=job,
        arguments=("train", "digits", "epochs=3", *(("--plan", str(plan)) if number > 1 else ())),
        task=("digits", "epochs=3"),
        run=RUN,
        folder=Path("/scratch/me"),
        data="data",
        python="/home/me/.venv/bin/python",
        packages=PACKAGES if site.job.environment in MADE_ON_NODES else None,
        command=f"grappe submit --site {site.name} -- train digits epochs=3",
    )


def with_job(script: Script, **changes: Any) -> Script:
    """The same script with other options of the job."""
    return dataclasses.replace(script, job=dataclasses.replace(script.job, **changes))


def array_of(training: Script, ids: str, *words: str) -> Script:
    """The script of an array of trainings."""
    return dataclasses.replace(
        with_job(training, array=ids, chain=0), array=parse(ids), arguments=words, task=words[1:], command=""
    )


def others(site: Site) -> dict[str, Script]:
    """Scripts of what is no training, by the ends of their files' names."""
    training = script(site, "1-node")
    other = dataclasses.replace(with_job(training, name="other-1"), kind="evaluate", task=(), data="", saves=False)
    own = dataclasses.replace(
        other, kind=SCRIPT, torchrun=True, saves=True, command="grappe submit -- mine.py", arguments=("mine.py",)
    )
    return {
        "script": dataclasses.replace(own, arguments=("mine.py", "--lr", "0.1")),
        "script-chain": with_job(own, chain=3),
        "array": array_of(training, "1-20%4", "train", "digits", "seed={array}"),
        "study": dataclasses.replace(
            array_of(training, "0-1", "train", "digits"),
            array=Array(ids=(0, 1), words={0: ("lr=0.1",), 1: ("lr=0.2",)}),
        ),
        "options": with_job(training, **OPTIONS),
        "pack": dataclasses.replace(with_job(training, env="pack:/home/me/env"), packages=None, pack=PACK),
        "tune": dataclasses.replace(
            other,
            kind=TUNE,
            saves=True,
            task=("digits",),
            layout=dataclasses.replace(training.layout, processes=1, cores=training.layout.cores),
            arguments=("tune", "digits", "lr=0.01..1:log", "--parallel", "2", "--study", f"{RUN}/study"),
        ),
        "evaluate": dataclasses.replace(other, arguments=("evaluate", "runs/one")),
    }


def golden() -> dict[str, Script]:
    """All that the folder holds, by the names of its files: each site's sizes, and more of two very different ones."""
    made = {f"{site.name}-{size}.sh": script(site, size) for site in live() for size in SIZES}
    made |= {f"{site.name}-options.sh": others(site)["options"] for site in live()}
    for name in MORE:
        made |= {f"{name}-{end}.sh": one for end, one in others(sites.find(name)).items()}
    return made


def main() -> None:
    """Writes all golden files."""
    FOLDER.mkdir(exist_ok=True)
    for name, one in golden().items():
        (FOLDER / name).write_text(render(one))


if __name__ == "__main__":
    main()
