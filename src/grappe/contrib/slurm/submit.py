"""grappe submit: makes the scripts of jobs from submissions, submits them, and records each job in its run's folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from grappe import engines, extensions, finder
from grappe.contrib.slurm import slurm
from grappe.contrib.slurm.array import Array
from grappe.contrib.slurm.environment import MADE_ON_NODES
from grappe.contrib.slurm.forecast import with_time
from grappe.contrib.slurm.jobs import FAILED_NODES, nodes_to_leave_out, record_job, submitted
from grappe.contrib.slurm.pack import PACK, UV, make_pack, pack_of
from grappe.contrib.slurm.packages import imported, job_packages, torch_of
from grappe.contrib.slurm.resources import ON_CPU, Submission, jobs_of, laid_out, without_options
from grappe.contrib.slurm.script import FUNCTIONS, Script, check_name, notice, render
from grappe.errors import GrappeError, RunError, TaskError, UsageError
from grappe.errors.causes import unfit_packages
from grappe.fields import NumberRange, split
from grappe.launch import files
from grappe.launch.files import IN_CHECKPOINT, IN_PART
from grappe.launch.imports import LIGHTNING
from grappe.plan import Plan
from grappe.sites.advice import misplaced, unfit_precision
from grappe.sites.sbatch import LAUNCH, SCRIPT, TRAIN, TUNE
from grappe.sites.schema import Site
from grappe.training.run import DESCRIPTION, DONE, Run, new_folder

SCRIPT_FILE = re.compile(r"(?:submit|refused)-(\d{1,9})\.sh", re.ASCII)
BETWEEN_SECONDS = 1.0  # between submissions, as the Alliance asks
OWN_OPTIONS = ("--run", "--runs", "--data", "--plan")  # of train: the script sets them again
SHORTEST = 300
"""Time limit in seconds below which `submit` warns about a resumable job: a start takes a minute or two."""
OWN_LOOP = "grappe"
SAVE_ON_SIGNALS = ("grappe", "signal")  # imports of a script that saves on a signal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submitted:
    """A submitted job; or with `show`, one that is only rendered."""

    run: Path
    job: str
    """The job's id; "" if it was only rendered."""
    text: str
    """The script's text."""
    cost: str
    note: str = ""
    """The reason why packages were not checked; "" if they were."""
    warnings: tuple[str, ...] = ()
    """Warnings of what will cost time or files, one line each."""
    time_note: str = ""
    """The source of the time limit, with --time auto."""
    torch: str = ""
    """The version of torch that the job gets, and from where; "" if it is not known before the job."""


Examine = Callable[[Submission, Script], None]


def submit_all(
    submissions: Iterable[Submission], *, show: bool = False, examine: Examine | None = None
) -> Iterator[Submitted]:
    """Submits a job, or one for each number of GPUs, of each submission; with `show`, only renders the scripts.

    Args:
        examine: called with each job's script when all were checked, before the first is submitted.

    Raises:
        GrappeError: a submission is wrong, or sbatch rejects a job; the queue then has none of these jobs.
    """
    jobs = [job for submission in submissions for job in jobs_of(submission)]
    scripts = [job_script(job, show=show) for job in jobs]
    texts = [render(script) for script in scripts]
    if examine is not None:
        for asked, script in zip(jobs, scripts, strict=True):
            examine(asked, script)
    for pack in () if show else [script.pack for script in scripts if script.pack is not None]:
        make_pack(pack)
    for number, (script, text) in enumerate(zip(scripts, texts, strict=True)):
        if number and not show:
            time.sleep(BETWEEN_SECONDS)
        yield Submitted(
            run=script.run,
            job="" if show else _send(script, text),
            text=text,
            cost=script.cost,
            note=script.unchecked,
            warnings=script.warnings,
            time_note=script.time_note,
            torch=script.torch,
        )


def judged(submission: Submission) -> Iterator[str]:
    """Returns sbatch's estimate for each script (--test-only); nothing is submitted, and no files remain.

    Raises:
        GrappeError: the submission is wrong, or sbatch would reject a job.
    """
    for script in [job_script(job) for job in jobs_of(submission)]:
        with tempfile.TemporaryDirectory(prefix="grappe-submit-") as folder:
            file = Path(folder) / "job.sh"
            file.write_text(render(script))
            yield f"{slurm.submit(file, test_only=True) or 'sbatch would take it'}; {script.cost}"
            if script.time_note:
                yield script.time_note


def _send(script: Script, text: str) -> str:
    """Writes the script into the run's folder, submits it, and records the job there."""
    logs = script.run / "logs"
    absent = [folder for folder in (script.run, *script.run.parents) if not folder.exists()]
    new = not (script.run / DESCRIPTION).exists()
    strangers = [entry.name for entry in script.run.iterdir() if entry.name != "logs"] if script.run.is_dir() else []
    tasks = script.array.folders(script.run) if script.array else {}
    with_runs = script.array and (script.array.words or submitted(script.run))
    if new and strangers and not with_runs:
        raise RunError(f"{script.run} holds {strangers[0]} and is not a run: give an empty or a new folder")
    try:
        files.refuse_link(script.run.parent / FAILED_NODES)  # which the script itself writes, as "killed"
        for folder in (script.run, *tasks.values()):
            folder.mkdir(parents=True, exist_ok=True)
            files.make_folder(folder / "logs")
            files.refuse_link(folder / "logs" / "killed")
        numbers = [int(match[1]) for name in files.names(logs) if (match := SCRIPT_FILE.fullmatch(name))]
        file = logs / f"submit-{max(numbers, default=0) + 1}.sh"
        files.replace(file, text.encode(), IN_PART)
        files.replace(logs / FUNCTIONS.name, FUNCTIONS.read_bytes(), IN_PART)
        if script.packages is not None:
            folder = logs / script.packages.folder_name
            files.make_folder(folder, IN_PART)
            for name, content in script.packages.files.items():
                files.replace(folder / name, content, IN_CHECKPOINT)
    except OSError as error:
        raise RunError(f"{script.run} cannot be written: {error.strerror}: give another with --run") from error
    try:
        job = slurm.submit(file)
    except slurm.NoAnswer:
        raise  # the job may start
    except GrappeError:
        with contextlib.suppress(OSError, RunError):
            if absent:
                files.remove(file, IN_PART)
            else:  # what was refused can be read, and is no submission
                files.rename(file, file.with_name(file.name.replace("submit", "refused", 1)), IN_PART)
            # Another command may have submitted a job of the same run just now.
            if not any(name.startswith("submit-") for name in files.names(logs)):
                files.remove(logs / FUNCTIONS.name, IN_PART)
                if script.packages is not None:
                    files.remove_tree(logs / script.packages.folder_name, IN_PART)
        for folder in (*(each for task in tasks.values() for each in (task / "logs", task)), logs, *absent):
            files.remove_empty(folder)
        raise
    record_job(script.run, job, script.site.name, script.cost, tasks)
    return job


def job_script(submission: Submission, *, show: bool = False) -> Script:
    """Makes the script of one job.

    Raises:
        GrappeError: the submission is wrong, the site forbids it, or packages are missing.
    """
    submission, time_note, foreseen = with_time(submission)
    job = submission.job
    job_layout, site, plan = laid_out(submission)
    _check_task(submission, job_layout.sizes.values() or (plan,), existing=(job.env or site.job.environment) == "here")
    expected = Path(os.path.expandvars(site.job.submit_from))
    if expected.is_absolute() and not Path.cwd().is_relative_to(expected):
        raise UsageError(
            f"{site.name} takes jobs from {site.job.submit_from} only, and lets them write nowhere else: "
            f"cd {expected} first"
        )
    if site.job.login_environment and job.env in MADE_ON_NODES:
        raise UsageError(
            f"--env={job.env}: environments of {site.name} are made on a login node, in $HOME: activate it there, and "
            "leave --env out"
        )
    if job_layout.nodes > 1 and (package := _spreader(submission)) not in ("", OWN_LOOP):
        raise UsageError(
            f"the script uses {package}, which spreads it, and grappe launch starts such a script on one node. On "
            f"several, leave launch out: grappe submit --processes {plan.processes} -- SCRIPT ARGUMENTS"
        )
    run = _folder(submission)
    if job.stage is not None and not job.stage.is_file():
        raise UsageError(f"--stage={job.stage}: there is no such archive")
    if not show:
        slurm.check_controller()  # before pip is asked, which may take minutes
    tasks, notes = _tasks(submission, run, site, show=show)
    content, note = job_packages(submission, site, plan, show=show)
    env = _environment(job.env)
    pack = pack_of(env, site, job.modules, run.parent, show=show)
    is_script = submission.command == SCRIPT
    # Of a search the doctor gets the task alone, since its fields are ranges.
    fields = () if submission.command == TUNE else submission.fields
    saves, modules = submission.command in (TRAIN, TUNE, LAUNCH), set[str]()
    if submission.script is not None:
        modules = {name.partition(".")[0] for name in imported(submission.script)}
        saves = not modules.isdisjoint(SAVE_ON_SIGNALS)  # USR2 would only end other processes sooner
    failed = nodes_to_leave_out(run.parent)
    if any(option.startswith(("--exclude", "--nodelist")) for option in job.sbatch):
        failed = {}  # you choose the nodes yourself
    script = Script(
        site=site,
        layout=job_layout,
        plan=plan,
        job=dataclasses.replace(
            job,
            env=env,
            wheels=job.wheels and job.wheels.absolute(),
            stage=job.stage and job.stage.absolute(),
            chain=job.chain or (0 if site.job.requeue or tasks else 1),  # a chain of one does not requeue
            sbatch=(*job.sbatch, *([f"--exclude={','.join(failed)}"] if failed else [])),
        ),
        kind=submission.command,
        arguments=_arguments(submission, plan, run),
        task=() if submission.task is None else (submission.task, *fields),
        run=run,
        array=tasks,
        folder=Path.cwd(),
        data=submission.data or ("" if submission.command != TRAIN else os.environ.get("GRAPPE_DATA", "data")),
        python=sys.executable,
        torchrun=is_script and (job.processes is not None or plan.processes > 1),
        lightning=not modules.isdisjoint(LIGHTNING),
        saves=saves,
        packages=content,
        pack=pack,
        command="" if tasks and tasks.words else shlex.join(_command(submission, site, run)),
        time_note=time_note,
        unchecked=note,
        foreseen=foreseen,
    )
    left_out = [
        f"node {node} is left out: it was noted twice within a week or computed wrongly, last in {notes[-1].run}: "
        f"{notes[-1].evidence} ({run.parent / FAILED_NODES})"
        for node, notes in failed.items()
    ]
    return dataclasses.replace(script, torch=torch_of(script), warnings=(*notes, *left_out, *_warnings(script)))


def _tasks(submission: Submission, run: Path, site: Site, *, show: bool) -> tuple[Array | None, list[str]]:
    """Returns the tasks of an array that are not finished, with notes for the user; None: one job, or a chain.

    Raises:
        RunError: all are finished.
        UsageError: there are more than the site lets a user have.
    """
    tasks, most, chain = submission.array, site.ask.max_jobs, submission.job.chain
    if tasks is None:
        if most and chain > most:
            raise UsageError(f"--chain={chain}: {site.name} lets a user have {most} jobs: use fewer")
        return None, []
    if (run / DESCRIPTION).exists():
        raise RunError(f"{run} is a run, and an array has a folder of runs: give another with --run")
    done = tuple(number for number, folder in tasks.folders(run).items() if (folder / DONE).exists())
    left = dataclasses.replace(tasks, ids=tuple(number for number in tasks.ids if number not in done))
    if not left.ids:
        raise RunError(f"all tasks of {run} are finished: nothing to submit. Give another folder with --run")
    queued = len(slurm.queue(expand=True)) if most and not show else 0
    if most and len(left.ids) > most - queued:
        do = "give fewer --trials" if tasks.words else "submit fewer ids, and the others with the same --run later"
        raise UsageError(
            f"--array={left}: {len(left.ids)} tasks are as many jobs, whatever % says. Of {most} that a user may have "
            f"on {site.name}, at most {most - queued} are free: {do}"
        )
    notes = [f"finished tasks are left out: {dataclasses.replace(tasks, ids=done, at_once=None)}"] if done else []
    if not site.job.requeue:
        notes.append(
            f"no job of {site.name} requeues itself: with --run {run} the same again submits what is not finished"
        )
    return left, notes


def _warnings(script: Script) -> Iterator[str]:
    """Yields warnings about packages, a short limit, the GPUs' precision, and folders that the site wants elsewhere."""
    if script.saves and script.layout.seconds < SHORTEST:
        yield (
            f"--time: a job of {script.layout.seconds} s saves {notice(script.layout.seconds)} s before its end, and a "
            f"start takes a minute or two: each may train little before the next. Give {SHORTEST // 60}m or more"
        )
    site = script.site
    if site.ask.usual_minutes and script.layout.seconds < 60 * site.ask.usual_minutes:
        yield f"--time: {site.name} wants jobs of at least {site.ask.usual_minutes} minutes, and shorter ones as tests"
    if site.job.local_is_memory and script.job.stage is not None:
        yield f"--stage: {site.job.local} of {site.name} is memory, of which the job then has less"
    if script.environment == "here":
        yield from unfit_packages()
    node = script.site.node
    if node is not None and script.layout.gpus and script.kind != SCRIPT:
        generation = None if node.capability is None else divmod(round(node.capability * 10), 10)
        if unfit := unfit_precision(script.plan.precision, node.gpu, generation):
            yield f"{unfit.what}: {unfit.why}: {unfit.do}"
    if why := misplaced(script.site, "runs", script.run):
        yield why
    if script.data and "$" not in script.data and script.job.stage is None:
        data = Path(script.data).absolute()
        if data.exists() and (why := misplaced(script.site, "data", data)):
            yield why


def _folder(submission: Submission) -> Path:
    """Returns the run's folder, or the folder of another command's job."""
    base, run = submission.job.runs, submission.run
    if submission.command == LAUNCH and run is not None:
        return run.absolute()
    if submission.command == TRAIN:
        assert submission.task is not None
        folder = (run or new_folder(base, submission.task)).absolute()
        if (folder / DONE).exists():
            raise RunError(f"{folder} is finished: nothing to submit. Give another folder with --run")
        return folder
    if run is not None:
        Run(run)
    name = submission.job.name or (submission.file.name if submission.file else submission.command)
    check_name(name)
    return new_folder(base, name).absolute()


def _check_task(submission: Submission, plans: Iterable[Plan], *, existing: bool) -> None:
    """Checks the task's fields and the plan of each size now: an error must not appear only after hours in a queue.

    Args:
        existing: whether the job has this command's Python; another Python may have other packages.
    """
    if submission.task is None:
        return
    finder.check_name(submission.task)
    try:
        import torch  # noqa: F401

        task = finder.find(submission.task)
    except (ImportError, TaskError):
        if existing:
            raise
        return
    for fields in submission.fields_of_tasks:
        if submission.command == TUNE:
            extensions.module(TUNE, "space").read_space(task, split(fields))
        else:
            finder.make(task, split(fields))
    if existing:
        # Variables of the node's are expanded there.
        for size in plans:
            engines.check(dataclasses.replace(size, offload="cpu") if "$" in size.offload else size)


def _environment(text: str) -> str:
    """Returns the environment's text with absolute paths."""
    if text in ("", "here", "virtualenv", "module", UV) or text.startswith("conda:"):
        return text
    kind = PACK if text.startswith(PACK) else ""
    path = Path(text.removeprefix(kind)).absolute()
    image = not kind and path.suffix in (".sif", ".simg")
    if not (path.is_file() if image else (path / "bin" / "python").exists()):
        what = "no such image" if image else "no bin/python in it"
        raise UsageError(
            f"--env={text}: {what}. Give here, virtualenv, module, uv, conda:NAME, the folder of a virtual "
            "environment, pack: and such a folder, or a .sif image"
        )
    return f"{kind}{path}"


def _command(submission: Submission, site: Site, run: Path) -> Iterator[str]:
    """Yields the words that make the same script again, in this folder; but for a training it gets a new folder."""
    yield from ("grappe", "submit")
    job = dataclasses.replace(submission.job, site=site.name)
    for field in dataclasses.fields(job):
        value, name = getattr(job, field.name), field.name.strip("_").replace("_", "-")
        if value == field.default:
            continue
        if value is False:
            yield f"--no-{name}"
            continue
        values = value if isinstance(value, tuple) and not isinstance(value, NumberRange) else (value,)
        if field.type in ("Names", "GpuCounts"):  # one text, with commas
            values = (",".join(map(str, values)),)
        for text in values:
            yield from (f"--{name}", str(text))
    yield "--"
    if submission.command != SCRIPT:
        yield submission.command
    yield from submission.arguments
    if submission.command == TRAIN and submission.run is None:
        yield from ("--run", str(run.relative_to(Path.cwd()) if run.is_relative_to(Path.cwd()) else run))


def _spreader(submission: Submission) -> str:
    """Returns what spreads a launched script: OWN_LOOP, or a package; "" for a script for one process."""
    if submission.command != LAUNCH:
        return ""
    launch = extensions.module("script", "launch")
    return launch.spreader(set(launch.imports_of(launch.parsed(submission.file))))


def _arguments(submission: Submission, plan: Plan, run: Path) -> tuple[str, ...]:
    """Returns the command's words, without the options that the script sets again."""
    if submission.command == SCRIPT:
        return submission.arguments
    added: tuple[str, ...] = ()
    if submission.command == TUNE and submission.study is None:
        added = ("--study", str(run / "study"))  # with which a restarted job goes on
    array = submission.array
    if submission.command == LAUNCH and (submission.run is None or array) and not _spreader(submission):
        rest = without_options(submission.arguments, ("--run",))
        submission = dataclasses.replace(submission, arguments=("--run", "$run" if array else str(run), *rest))
    if submission.command == TRAIN:
        given_again = OWN_OPTIONS
    elif len(submission.plans) == 1 and submission.command not in ON_CPU and plan != Plan.parse(submission.plans[0]):
        given_again = ("--plan",)  # --gpus has changed it
    else:
        return (submission.command, *submission.arguments, *added)
    rest = without_options(submission.arguments, given_again)
    again = ("--plan", str(plan)) if str(plan) else ()
    if submission.command == LAUNCH:  # whose script's own arguments come last
        return (LAUNCH, *again, *rest)
    return (submission.command, *rest, *added, *again)
