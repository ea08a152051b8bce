"""Finds the packages of a submission's job: those that its environment lacks, checked before the queue."""

from __future__ import annotations

from pathlib import Path

from grappe.errors import UsageError
from grappe.plan import Plan
from grappe.sites.environment import MADE_ON_NODES, Packages
from grappe.sites.schema import Site
from grappe.training.run import Run
from grappe.verbs.packages.needed import PackageRequests, prepare
from grappe.verbs.packages.resolve import Wheelhouse
from grappe.verbs.submission import TPE, Submission


def job_packages(
    submission: Submission, site: Site, plan: Plan, *, show: bool
) -> tuple[Packages | None, str]:
    """Returns the packages of an environment that is made on the nodes, and the reason why they were not checked."""
    job, kind = submission.job, submission.job.env or site.job.environment
    if kind not in MADE_ON_NODES:
        for name, value in (("with", job.with_), ("requirements", job.requirements)):
            if value:
                raise UsageError(
                    f"--{name} is for an environment that is made on the nodes: add --env virtualenv (or module). "
                    f"This job's is '{kind}': install it there"
                )
        return None, ""
    if job.wheels is not None and not show and not job.wheels.is_dir():
        raise UsageError(f"--wheels={job.wheels}: there is no such folder")
    house = Wheelhouse(
        modules=job.modules or site.job.modules,
        wheels=job.wheels and job.wheels.absolute(),
        on_modules=kind == "module",
        site=site.name,
    )
    needs = PackageRequests(
        task=submission.task or _task_of_run(submission.run),
        script=submission.script,
        features=(plan.engine, *submission.loggers, *(["tune"] if submission.sampler == TPE else [])),
        requested=job.with_,
        file=job.requirements,
    )
    return prepare(needs, house, ask_pip=not show)


def _task_of_run(run: Path | None) -> str | None:
    """Returns the name of the task that a run was trained on, unless it was made in a notebook."""
    name = Run(run).read_description().get("task") if run is not None else None
    return str(name) if name is not None and not str(name).startswith("__main__") else None
