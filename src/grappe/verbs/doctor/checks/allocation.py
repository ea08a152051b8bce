"""Check of the Slurm job: processes against the plan's, variables of an older job, sbatch's rejections."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from grappe.errors import GrappeError
from grappe.sites import slurm
from grappe.verbs.doctor.checks import Finding, Machine, error, note, warning
from grappe.words import first_line

TRIAL = "#!/bin/bash\n#SBATCH --time=5\ntrue\n"


def check(machine: Machine) -> Iterator[Finding]:
    """Checks Slurm's variables inside a job; outside, sbatch's answer to the smallest job."""
    environment, process, plan = machine.environment, machine.process, machine.plan
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        if not machine.job and process.launcher == "grappe":
            yield from submittable()
        return
    if machine.process.rank:
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


def submittable() -> Iterator[Finding]:
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
