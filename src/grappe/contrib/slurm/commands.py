"""Defines the commands for clusters: submit, queue, logs, wait, cancel.

The command that follows `grappe submit … --` is read by the definitions of grappe's own commands.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from time import strftime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from grappe.cli.application import OPTIONS, DryRun, Json, RunFolder, RunsFolder, app
from grappe.cli.corrections import corrected, unknown_option
from grappe.cli.exit import script_apart, show, show_either, show_json
from grappe.contrib.slurm import array, slurm
from grappe.contrib.slurm.resources import Submission, allocation, line_in_allocation, placed
from grappe.contrib.slurm.script import FUNCTIONS
from grappe.errors import EXIT_OK, UsageError
from grappe.fields import split
from grappe.launch.command import become
from grappe.launch.files import RUNS
from grappe.launch.terminal import complain, write
from grappe.plan import Plan
from grappe.profiling.phases import WARMUP
from grappe.sites.layout import stretched
from grappe.sites.sbatch import LAUNCH, SCRIPT, TRAIN, TUNE, JobOptions
from grappe.training.options import Options

if TYPE_CHECKING:
    from grappe.contrib.slurm.script import Script
    from grappe.verbs.measure.points import MeasureOptions

DEFAULTS = JobOptions()
NOT_IN_JOBS = ("fetch", "submit", "queue", "logs", "wait", "cancel", "sites", "gpus")
LAUNCHERS = ("torchrun", "srun", "mpirun", "mpiexec", "horovodrun", "deepspeed", "accelerate", "lightning")
PROCESSES = re.compile(r"(?:nproc[-_]per[-_]node|num[-_](?:processes|gpus)|ntasks|-np?)[= ]?(\d+)", re.ASCII)
USAGE = "grappe submit --time 3h -- train TASK …, another command of grappe, or -- my_script.py ARGUMENTS"


@app.command
def submit(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True)],
    job: Annotated[JobOptions, OPTIONS] = DEFAULTS,
    test_only: bool = False,
    interactive: bool = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Submit a command as a Slurm job: grappe submit --time 3h -- train TASK …

    Nodes, processes, cores and memory follow from the plan and the cluster. The job
    saves before its time is over or when it is preempted, and goes back into the
    queue until the run is finished.

        grappe submit --dry-run -- train digits       its script, and no job
        grappe submit --gpus 4 --time 3h -- train my_task.py epochs=90
        grappe submit --time auto --gpus auto -- train my_task.py  as foreseen
        grappe submit --site narval --account def-me --time 3h \\
            -- train digits --plan shard=8            two nodes of four GPUs
        grappe submit --time 1h -- verify digits --plan replicate=2
        grappe submit --nodes 2 -- launch --plan replicate=8 mnist.py
        grappe submit --processes 2 -- my_script.py --lr 0.1
        grappe submit --array 1-20%4 -- train digits seed={array}  20 runs, 4 at a time

    Args:
        words: After --: the command, as it runs here.
        test_only: Test the script with sbatch; submit nothing.
        interactive: Allocate the nodes and open a shell there (salloc), for --gpus or a command's plan.
        dry_run: Print the script; submit nothing.
    """
    from grappe.contrib.slurm import submit as verb
    from grappe.contrib.slurm.forecast import foreseen_warnings, with_gpus, with_sizes

    if interactive:
        _allocate(words, job, show_only=dry_run or test_only)
        return
    submission = read_submission(words, job, app)
    submission, of_gpus = with_gpus(submission)
    submission, of_sizes = with_sizes(submission)
    for text in filter(None, (of_gpus, of_sizes)):
        complain(text)
    if test_only:
        answers = list(verb.judged(submission))
        show_json("submit", answers=answers) if json else show("\n".join(answers))
        return

    def examine(asked: Submission, script: Script) -> None:
        for text in foreseen_warnings(asked, script) if script.foreseen is None else script.foreseen:
            complain(f"grappe: warning: {text}")

    warned, jobs = set[str](), list[verb.Submitted]()
    for submitted in verb.submit_all([submission], show=dry_run, examine=examine):
        for text in submitted.warnings:
            if text not in warned:
                complain(f"grappe: warning: {text}")
        warned |= set(submitted.warnings)
        jobs.append(submitted)
        if not json and not submitted.job:
            write(submitted.text, end="")
        elif not json:
            cost = f"job {submitted.job}: {submitted.cost}; run {submitted.run}"
            for text in filter(None, (submitted.torch, cost, submitted.time_note)):
                show(text)
            if submitted.note:
                complain(f"grappe: the packages of its environment were not checked: {submitted.note}")
    if json:
        show_json("submit", jobs=jobs, dry_run=dry_run)
    elif dry_run:
        complain(f"grappe: job.sh, which a script sources, is a copy of {FUNCTIONS}")


def _allocate(words: Sequence[str], job: JobOptions, *, show_only: bool) -> None:
    """Becomes salloc; without a terminal, or with --dry-run, prints the line."""
    submission = read_submission(words, job, app) if words else Submission(command=SCRIPT, arguments=(), job=job)
    line = allocation(submission)
    show(shlex.join(line))
    if show_only:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            "a shell needs a terminal, and there is none here: run the line above in one, or add --dry-run"
        )
    if words:
        complain(f"grappe: in that shell, start it so: {shlex.join(line_in_allocation(submission))}")
    become(line)


def read_submission(words: Sequence[str], job: JobOptions, app: App) -> Submission:
    """Reads the submission of a command of grappe, or of a Python script.

    Args:
        app: the application with all its commands.

    Raises:
        UsageError: the words are neither, or an option is unknown or wrong.
    """
    words = list(words)
    first = words[0] if words else ""
    words = words[first in ("grappe", "python", "python3") :]
    if first in ("python", "python3") and not (words and words[0].endswith(".py")):
        raise UsageError(f"python is followed by a script, my_script.py: {USAGE}")
    if not words:
        raise UsageError(f"what should the job run? {USAGE}")
    if words[0].startswith("-"):
        typed = sys.argv[1:] if words[0] in sys.argv else ["submit", words[0], "--", *words[1:]]
        raise UsageError(unknown_option(words[0], typed, app["submit"].assemble_argument_collection()))
    if words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise UsageError(f"there is no script {words[0]}: is the path right, seen from {Path.cwd()}?")
        of_tasks = array.parse(job.array)
        return Submission(command=SCRIPT, script=Path(words[0]), arguments=tuple(words), job=job, array=of_tasks)
    if words[0] in LAUNCHERS:
        at = next((number for number, word in enumerate(words) if word.endswith(".py")), len(words))
        number = PROCESSES.search(shlex.join(words[:at]))
        raise UsageError(
            f"the job starts the processes itself, so leave {words[0]} out: grappe submit --processes "
            f"{number[1] if number else 4} -- {shlex.join(words[at:]) or 'my_script.py ARGUMENTS'}"
        )
    if words[0] in NOT_IN_JOBS:
        raise UsageError(f"grappe {words[0]} is for the login node, and runs in no job: {USAGE}")
    if words[0] not in app:
        raise UsageError(f"grappe has no command {words[0]!r}: {USAGE}")
    words = script_apart(words)
    own = words.index("--") if words[0] == LAUNCH else len(words)
    words[:own] = [re.sub("^-p=?(?=.)", "--plan=", word) if word != "-p" else "--plan" for word in words[:own]]
    try:
        _, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise corrected(error, words, app) from error
    values: dict[str, Any] = bound.arguments
    plans = values.get("plan") or ""
    data, options = values.get("data"), values.get("options")
    if words[0] == TUNE and getattr(values.get("job"), "site", None) is not None:
        raise UsageError(
            "grappe tune --site submits a job for each trial, and itself runs on the login node: leave submit out"
        )
    if words[0] == TUNE and (values.get("task") is None or values.get("dry_run")):
        raise UsageError("grappe tune --dry-run shows a study and needs no job: leave submit out")
    return Submission(
        command=words[0],
        task=values.get("task"),
        arguments=tuple(words[1:]),
        plans=(plans,) if isinstance(plans, str) else tuple(plans),
        fields=tuple(values.get("fields", ())),
        run=values.get("run"),
        epochs_done=values.get("epochs_done") or 0,
        data=str(data) if data is not None else None,
        parallel=getattr(values.get("search"), "parallel", 1),
        study=values.get("study"),
        loggers=tuple(getattr(options, "log", ())),
        array=array.parse(job.array),
        options=options if words[0] == TRAIN and options is not None else Options(),
        job=dataclasses.replace(job, runs=values["runs"]) if words[0] in (TRAIN, LAUNCH) and "runs" in values else job,
    )


@app.command
def queue(*, runs: RunsFolder = RUNS, json: Json = False) -> None:
    """List your jobs in Slurm's queue, by run: state, reason, expected start."""
    from grappe.contrib.slurm import jobs as verb

    if not json:
        show(verb.queue(runs))
        return
    folders, entries = verb.runs_of(runs), slurm.queue()
    jobs = [dataclasses.asdict(entry) | {"run": folders.get(entry.job.partition("_")[0])} for entry in entries]
    show_json("queue", jobs=jobs)


@app.command
def logs(
    run: RunFolder,
    /,
    *,
    rank: Annotated[int | None, Parameter(help="Rank of the process to read. Default: the job's own log.")] = None,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], help="Follow until the job ends.")] = False,
) -> None:
    """Print what a run's job, or one of its processes, wrote."""
    from grappe.contrib.slurm.jobs import lines

    for text in lines(run, rank, follow=follow):
        write(text, end="")


@app.command
def wait(run: RunFolder, /, *, json: Json = False) -> int:
    """Wait for the end of a run's job, restarts included, and return the job's exit code."""
    from grappe.contrib.slurm.jobs import wait as verb

    code = verb(run)
    if json:
        show_json("wait", run=run, code=code)
    return code


@app.command
def cancel(
    *runs: RunFolder,
    dry_run: Annotated[DryRun, Parameter(help="List the jobs that would be cancelled; cancel nothing.")] = False,
    json: Json = False,
) -> None:
    """Cancel the jobs of runs. Checkpoints are kept."""
    from grappe.contrib.slurm.jobs import cancel as verb

    if not runs:
        raise UsageError("name a run: grappe cancel RUN … (see: grappe queue)")
    jobs = verb(runs, dry_run=dry_run)
    ended = f"{'would cancel' if dry_run else 'cancelled'} {', '.join(jobs)}"
    show_either(json, "cancel", ended, jobs=jobs, dry_run=dry_run)


PROOF_STEPS = 300
"""Timed steps of a proof of scaling where --steps is not given: of the usual number, start-up would take most."""


def measure_by_jobs(
    task: str,
    plans: Sequence[str],
    options: MeasureOptions,
    *,
    site: str,
    account: str | None,
    time: str | None,
    fields: Sequence[str],
    data: Path | None,
    out: Path | None,
    dry_run: bool,
    script: Sequence[str] = (),
    nodes: Sequence[int] | None = None,
    training_steps: int | None = None,
) -> int:
    """Submits the jobs of `grappe measure --site`, and shows the command that gathers their results.

    Args:
        nodes: node counts of a proof of scaling, strong and weak; (): as many as the site's rule asks for; None: no
            proof, each plan on as few nodes as it needs.
    """
    from grappe import finder
    from grappe.contrib.slurm.submit import submit_all

    job, runs, rest = JobOptions(site=site, account=account, time=time, restarts=0), list[str](), list[str]()
    batches, steps = options.batch_size, options.steps
    if not batches and not script and (options.weak or nodes is not None):
        batches = (finder.make(finder.find(task), split(fields)).batch_size,)
    if nodes is not None:
        steps = PROOF_STEPS if steps == type(options)().steps else steps
        points = _points_of_proof(plans, batches or (0,), nodes, job)
        where = ", ".join(map(str, dict.fromkeys(point[2] for point in points)))
        kinds = f"strong and weak scaling, {steps} steps each" if batches else "strong scaling, of the whole script"
        complain(f"{len(points) * options.repeats} jobs on {where} nodes: {kinds}")
        rest = ["--proposal", *(["--training-steps", str(training_steps)] if training_steps else [])]
    else:
        points = [
            (text, batch * (Plan.parse(text).data_parallel if options.weak else 1), None)
            for batch, text in itertools.product(batches or (0,), plans)
        ]
    trained = Options() if script else Options(steps_only=True, steps=steps + WARMUP)
    stamp, submissions = strftime("%Y%m%d-%H%M%S"), list[Submission]()
    for place, (text, batch, count) in enumerate(points * options.repeats, 1):
        words, run = tuple(fields), job.runs / f"measure-{stamp}-{place}"
        if batch:
            words = (*(field for field in fields if not field.startswith("batch_size=")), f"batch_size={batch}")
        arguments = ("--plan", text, "--run", str(run), "--", *script)
        submissions.append(
            Submission(
                command=LAUNCH if script else TRAIN,
                task=None if script else task,
                arguments=arguments if script else (task, *words, "--steps-only", "--steps", str(trained.steps)),
                plans=(text,),
                fields=words,
                run=run,
                data=None if data is None else str(data),
                options=trained,
                job=dataclasses.replace(job, nodes=count),
            )
        )
    for submitted in submit_all(submissions, show=dry_run):
        if dry_run:
            write(submitted.text, end="")
        else:
            show(f"job {submitted.job}: {submitted.cost}; run {submitted.run}")
        runs.append(str(submitted.run))
    if not dry_run:
        words = (*runs, *["--weak"] * options.weak, *rest, *(["--out", str(out)] if out else []))
        show(f"once they have ended: grappe measure {task} --gather {shlex.join(words)}")
    return EXIT_OK


def _points_of_proof(
    plans: Sequence[str], batches: Sequence[int], nodes: Sequence[int], job: JobOptions
) -> list[tuple[str, int, int | None]]:
    """Returns plan, batch size and nodes of each job of a proof of scaling; the plan is that of the fewest nodes."""
    if len(plans) > 1 or len(batches) > 1:
        raise UsageError("--proposal measures one plan at one batch size: give one of each")
    (text,), (batch,) = plans, batches
    site, first = placed(Submission(arguments=(), plans=(text,), job=job))
    asked = site.scaling.counts
    counts = sorted(set(nodes)) or [2**power for power in range(asked)]
    if len(counts) < asked:
        complain(f"grappe: warning: the proof needs {asked} node counts ({site.scaling.source}): give more to --nodes")
    if not text:  # a process for each GPU, or one on each node
        first = dataclasses.replace(first, replicate=counts[0] * (site.node.gpus if site.node else 0) or counts[0])
    if batch % first.data_parallel:
        raise UsageError(f"batch_size={batch} is not shared evenly by {first.data_parallel} processes: give a multiple")
    points = list[tuple[str, int, int | None]]()
    for count in counts:
        plan = stretched(first, first.processes // counts[0] * count) if count > counts[0] else first
        weak = batch * plan.data_parallel // first.data_parallel
        points += [(str(plan), size, count) for size in sorted({batch, weak})]
    return points
