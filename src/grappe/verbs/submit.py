"""grappe submit: a training as a Slurm job. Checked, shown, submitted, and remembered in its run's folder."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from grappe import engines, sites, tasks
from grappe.duration import seconds
from grappe.errors import GrappeError, RunError, TaskError, UsageError
from grappe.fields import split
from grappe.plan import Plan
from grappe.run import DESCRIPTION, DONE, new_folder
from grappe.sites import sinfo, slurm
from grappe.sites.layout import Wish, fit, layout
from grappe.sites.schema import Site
from grappe.sites.script import Script, cost, render
from grappe.verbs.jobs import remember

OWN_OPTIONS = ("--run", "--data", "--plan")  # of train: given anew in the script
BETWEEN_SECONDS = 1.0  # between submissions, as the Alliance asks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """What the user asked for."""

    task: str
    arguments: tuple[str, ...]
    """What train is called with, the task first."""
    plan: str = ""
    fields: tuple[str, ...] = ()
    run: Path | None = None
    data: str | None = None
    site: str | None = None
    account: str | None = None
    time: str | None = None
    nodes: int | None = None
    gpus: tuple[int, ...] = ()
    """A job for each of these numbers of GPUs; none: as the plan says."""
    queue: str | None = None
    name: str | None = None
    environment: str = ""
    wheels: Path | None = None
    stage: Path | None = None
    chain: int = 0
    restarts: int = 50
    doctor: bool = True
    base: Path = Path("runs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submitted:
    """A job that waits in the queue; or, only shown, would."""

    run: Path
    job: str
    """Its id; nothing when it was only shown."""
    text: str
    """The script."""
    cost: str


def submit(asked: Submission, *, show: bool = False) -> Iterator[Submitted]:
    """Submits a job, or one for each number of GPUs; with `show`, renders the scripts only.

    Raises:
        GrappeError: something is wrong with what was asked, or sbatch refuses; nothing waits in the queue then.
    """
    yield from submit_all([asked], show=show)


def submit_all(asked: Iterable[Submission], *, show: bool = False) -> Iterator[Submitted]:
    """The same for several, all of them checked before the first is submitted."""
    scripts = [_script(one, wish) for one in asked for wish in _wishes(one)]
    texts = [render(one) for one in scripts]
    for number, (script, text) in enumerate(zip(scripts, texts, strict=True)):
        if number and not show:
            time.sleep(BETWEEN_SECONDS)
        job = "" if show else _send(script, text)
        yield Submitted(run=script.run, job=job, text=text, cost=cost(script.layout))


def judged(asked: Submission) -> Iterator[str]:
    """What sbatch says that it would do with each script; nothing is submitted, and nothing is left.

    Raises:
        GrappeError: something is wrong with what was asked, or sbatch would refuse.
    """
    for one in [_script(asked, wish) for wish in _wishes(asked)]:
        with tempfile.TemporaryDirectory(prefix="grappe-submit-") as folder:
            file = Path(folder) / "job.sh"
            file.write_text(render(one))
            yield f"{slurm.submit(file, test_only=True) or 'sbatch would take it'}; {cost(one.layout)}"


def _wishes(asked: Submission) -> Iterator[Wish]:
    limit = seconds(asked.time, "--time") if asked.time else None
    if asked.chain < 0 or asked.restarts < 0:
        raise UsageError("--chain and --restarts: they must be at least 0")
    if asked.run is not None and len(asked.gpus) > 1:
        raise UsageError(
            "--run is one run's folder, and several numbers of GPUs are several runs: leave it out"
        )
    for gpus in asked.gpus or (None,):
        yield Wish(nodes=asked.nodes, gpus=gpus, seconds=limit, queue=asked.queue, account=asked.account)


def _script(asked: Submission, wish: Wish) -> Script:
    plan = fit(Plan.parse(asked.plan), wish)
    tasks.check_name(asked.task)
    engines.check_name(plan.engine)
    site = _site(asked, plan)
    _check_training(asked, plan, here=(asked.environment or site.job.environment) == "here")
    _check_place(site, Path.cwd())
    found = layout(plan, site, wish)
    run = (asked.run or new_folder(asked.base, asked.task)).absolute()
    if (run / DONE).exists():
        raise RunError(f"{run} is finished: nothing to submit. Give another folder with --run")
    if asked.stage is not None and not asked.stage.is_file():
        raise UsageError(f"--stage={asked.stage}: there is no such archive")
    chain = asked.chain or (0 if site.job.requeue else 1)  # a chain of one does not requeue
    return Script(
        site=site,
        layout=found,
        plan=plan,
        name=asked.name or run.name[:64],
        arguments=_arguments(asked, plan),
        task=(asked.task, *asked.fields),
        run=run,
        folder=Path.cwd(),
        data=asked.data or os.environ.get("GRAPPE_DATA", "data"),
        python=sys.executable,
        account=asked.account,
        environment=_environment(asked.environment),
        wheels=asked.wheels and asked.wheels.absolute(),
        stage=asked.stage and asked.stage.absolute(),
        chain=chain,
        restarts=asked.restarts,
        doctor=asked.doctor,
        asked=_asked(asked, site),
    )


def _site(asked: Submission, plan: Plan) -> Site:
    site = sites.find(asked.site or sites.here())
    if not site.probe:
        return site
    known = slurm.sinfo(sinfo.FORMAT)
    return sinfo.probed(site, known, asked.queue, wants_gpus=plan.device != "cpu")


def _check_training(asked: Submission, plan: Plan, *, here: bool) -> None:
    """A mistyped field is found here, not after hours in a queue, and so is a plan that its engine refuses.

    Args:
        here: whether the job has this command's Python. Another may have packages that this one lacks.
    """
    texts = split(asked.fields)
    try:
        import torch  # noqa: F401

        task = tasks.find(asked.task)
    except (ImportError, TaskError):
        if here:
            raise
        return
    tasks.make(task, texts)
    if here:
        engines.check(plan)


def _check_place(site: Site, here: Path) -> None:
    if not site.job.submit_from:
        return
    wanted = Path(os.path.expandvars(site.job.submit_from))
    if wanted.is_absolute() and not here.is_relative_to(wanted):
        raise UsageError(
            f"{site.name} takes jobs from {site.job.submit_from} only, and lets them write nowhere else: "
            f"cd {wanted} first"
        )


def _environment(text: str) -> str:
    """The environment's text, paths made absolute."""
    if text in ("", "here", "virtualenv", "module") or text.startswith("conda:"):
        return text
    path = Path(text).absolute()
    image = path.suffix in (".sif", ".simg")
    if not (path.is_file() if image else (path / "bin" / "python").exists()):
        what = "no such image" if image else "no bin/python in it"
        raise UsageError(
            f"--env={text}: {what}. Give here, virtualenv, module, conda:NAME, the folder of a virtual environment, "
            "or a .sif image"
        )
    return str(path)


def _arguments(asked: Submission, plan: Plan) -> tuple[str, ...]:
    rest: list[str] = []
    words = iter(asked.arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in OWN_OPTIONS:
            if not equals:
                next(words, None)
            continue
        rest.append(word)
    return ("train", *rest, *(("--plan", str(plan)) if str(plan) else ()))


def _asked(asked: Submission, site: Site) -> str:
    return f"grappe submit --site {site.name} -- train {shlex.join(asked.arguments)}"


def _send(script: Script, text: str) -> str:
    """Writes the script into the run's folder, submits it, and remembers the job there."""
    logs = script.run / "logs"
    new = not (script.run / DESCRIPTION).exists()
    strangers = (
        [one.name for one in script.run.iterdir() if one.name != "logs"] if script.run.is_dir() else []
    )
    if new and strangers:
        raise RunError(f"{script.run} holds {strangers[0]} and is no run: give an empty folder, or a new one")
    try:
        logs.mkdir(parents=True, exist_ok=True)
        number = len(list(logs.glob("submit-*.sh"))) + 1
        file = logs / f"submit-{number}.sh"
        file.write_text(text)
    except OSError as error:
        raise RunError(
            f"{script.run} cannot be written: {error.strerror}: give another with --run"
        ) from error
    try:
        job = slurm.submit(file)
    except GrappeError:
        file.rename(logs / f"refused-{number}.sh")  # what was refused can be read, and is no submission
        raise
    remember(script.run, job, script.site.name, cost(script.layout))
    return job
