"""Checks of a job and its site: Slurm's variables and sbatch's answer, where files should lie, wheels for jobs."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from grappe import sites
from grappe.contrib.doctor.checks import Finding, Level, Machine, error, note, once, warning
from grappe.contrib.slurm import slurm
from grappe.contrib.slurm.environment import MADE_ON_NODES
from grappe.errors import GrappeError
from grappe.launch import command
from grappe.sites.advice import misplaced
from grappe.sites.schema import Contents
from grappe.words import first_line

TRIAL = "#!/bin/bash\n#SBATCH --time=5\ntrue\n"
CACHES = {"XDG_CACHE_HOME": ".cache", "HF_HOME": ".cache/huggingface", "TORCH_HOME": ".cache/torch"}
"""Variables that say where caches lie, and the folders in HOME without them."""
LINKS = re.compile(r"find-links='([^']*)'")
TORCH = re.compile(r"torch-(\d[\w.]*)")


@once
def check_allocation(machine: Machine) -> Iterator[Finding]:
    """Checks Slurm's variables inside a job; outside, sbatch's answer to the smallest job."""
    environment, process, plan = machine.environment, machine.process, machine.plan
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        if not machine.job and process.launcher == "grappe":
            yield from of_sbatch()
        return
    tasks = environment.get("SLURM_NTASKS", "")
    if process.launcher == "grappe" and tasks.isdigit() and int(tasks) > 1 and plan.processes == int(tasks):
        yield warning(
            f"this job has {tasks} tasks, and this is none of them: grappe would start its own processes here",
            why="the other nodes would be idle",
            do="start it with srun: srun grappe train …",
        )
    try:
        runs = machine.job or bool(slurm.queue([job]))
    except GrappeError:
        runs = True  # no Slurm to ask
    if not runs:
        yield warning(
            f"SLURM_JOB_ID={job} is set, and that job does not run any more",
            why="this shell has another job's variables: programs start on cores and ports that are not theirs",
            do="open a new shell, or unset SLURM_JOB_ID",
        )
    if process.size > 1 and plan.processes != process.size:
        yield error(
            f"the plan has {plan.processes} processes, srun started {process.size}",
            why="training ends at once",
            do="give the plan to srun --ntasks, or use grappe submit",
        )


def of_sbatch() -> Iterator[Finding]:
    """Tests a job of one core and five minutes with sbatch."""
    with tempfile.TemporaryDirectory(prefix="grappe-doctor-") as folder:
        script = Path(folder) / "trial.sh"
        script.write_text(TRIAL)
        try:
            slurm.submit(script, test_only=True)
        except slurm.ControllerDown as silence:
            yield warning(str(silence), why="no job can be submitted, and no queue be read")
        except slurm.SlurmError as refusal:  # with its remedy
            yield warning("sbatch would refuse even a small job", why=str(refusal))
        except GrappeError as absence:
            yield note(first_line(absence).partition(". ")[0])


@once
def check_storage(machine: Machine) -> Iterator[Finding]:
    """Judges whether runs, data and caches lie in a storage that the site means for them."""
    environment = machine.environment
    site = sites.find(sites.current(environment))
    places: list[tuple[Contents, Path, Level]] = [("runs", machine.folder, "warning")]
    if data := environment.get("GRAPPE_DATA"):
        places.append(("data", Path(data).absolute(), "warning"))
    for name, within in CACHES.items():
        folder = Path(environment.get(name) or Path(environment.get("HOME") or "/") / within)
        if folder.is_dir():
            places.append(("caches", folder, "note"))
    for holds, folder, level in places:
        if sentence := misplaced(site, holds, folder, environment):
            what, _, rest = sentence.partition(": ")
            why, _, do = rest.rpartition(": ")
            yield Finding(level=level, what=what, why=why, do=do)
            if holds == "caches":  # one of them shows it
                return


@once
def check_wheelhouse(machine: Machine) -> Iterator[Finding]:
    """Lists the folders of wheels, outside of jobs, on sites whose jobs make their environment of wheels."""
    site = sites.find(sites.current(machine.environment))
    if machine.job or site.job.environment not in MADE_ON_NODES:
        return
    try:
        configuration = command.run(sys.executable, "-m", "pip", "config", "list")
    except GrappeError as mistake:
        yield note(f"pip does not say where wheels come from: {mistake}")
        return
    links = [link for text in LINKS.findall(configuration) for link in re.split(r"\s+|\\n", text) if link]
    yield from of_wheelhouse(site.name, [*links, *machine.environment.get("PIP_FIND_LINKS", "").split()])


def of_wheelhouse(site: str, links: list[str]) -> Iterator[Finding]:
    """Returns findings for the wheelhouse's folders: how many wheels, and torch's versions."""
    folders = [Path(folder) for folder in dict.fromkeys(links) if "://" not in folder]
    there = [folder for folder in folders if folder.is_dir()]
    if not there:
        yield warning(
            f"jobs of {site} are made of wheels, and pip knows of no folder of wheels here",
            why="grappe submit resolves packages on this machine, before the queue",
            do="load the site's Python module first, or give --wheels FOLDER",
        )
        return
    names = [file.name for folder in there for file in folder.glob("*.whl")]
    versions = sorted({match[1] for name in names if (match := TORCH.match(name))})
    torch = f"torch {', '.join(versions[-3:])}" if versions else "no torch"
    yield note(f"wheelhouse: {', '.join(map(str, there))} ({len(names):,} wheels, {torch})")
