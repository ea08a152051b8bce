"""The command line's part for clusters: submit, queue, logs, wait, cancel, sites, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from grappe.entry import show
from grappe.errors import EXIT_FAILURE, EXIT_OK, UsageError
from grappe.parameters import SWITCH, FieldText, PlanText, RunFolder

Base = Annotated[Path, Parameter(help="The folder of runs.")]


def register(app: App) -> None:
    """Adds the commands to `app`."""
    for command in (queue, logs, wait, cancel, sites, doctor):
        app.command(command)

    @app.command
    def submit(
        *words: Annotated[
            str, Parameter(allow_leading_hyphen=True, help="After --: train TASK …, as it runs here.")
        ],
        site: Annotated[
            str | None, Parameter(help="A cluster (see: grappe sites). Default: this one.")
        ] = None,
        account: Annotated[str | None, Parameter(help="What is billed.")] = None,
        time: Annotated[
            str | None, Parameter(help="At most so long: 90m, 3h, 1-00:00:00. Default: 1 h.")
        ] = None,
        nodes: Annotated[int | None, Parameter(help="Default: as few as hold the plan.")] = None,
        gpus: Annotated[
            str | None,
            Parameter(help="GPUs in all; 1,2,4: a job for each number. Default: as the plan says."),
        ] = None,
        queue: Annotated[str | None, Parameter(help="A partition or quality of service.")] = None,
        name: Annotated[str | None, Parameter(help="The job's name. Default: the run's.")] = None,
        env: Annotated[
            str,
            Parameter(
                show_default=False,
                help="here, virtualenv (made on each node), module, conda:NAME, a virtual environment's folder, "
                "or a .sif image. Default: the site's way.",
            ),
        ] = "",
        wheels: Annotated[Path | None, Parameter(help="A folder of wheels, beside the site's.")] = None,
        stage: Annotated[
            Path | None, Parameter(help="A tar archive of data, unpacked to local scratch on each node.")
        ] = None,
        chain: Annotated[int, Parameter(help="So many jobs in a row, where jobs may not requeue.")] = 0,
        restarts: Annotated[int, Parameter(help="How often the job may go back into the queue.")] = 50,
        doctor: Annotated[bool, Parameter(help="Examine the nodes first.")] = True,
        test_only: Annotated[
            bool, SWITCH, Parameter(help="Have sbatch judge the script; submit nothing.")
        ] = False,
        base: Base = Path("runs"),
        show_: Annotated[
            bool,
            Parameter(
                name="--show", negative="", show_default=False, help="Print the script; submit nothing."
            ),
        ] = False,
    ) -> int:
        """Submit a training as a Slurm job: grappe submit --time 3h -- train TASK …

        Nodes, processes, cores and memory follow from the plan and the cluster. The job
        saves before its time is over or when it is preempted, and goes back into the
        queue until the run is finished.

            grappe submit --show -- train digits          its script, and no job
            grappe submit --gpus 4 --time 3h -- train my_task.py epochs=90
            grappe submit --site narval --account def-me --time 3h \\
                -- train digits --plan shard=8            two nodes of four GPUs
        """
        from grappe.verbs import submit as verb

        train = read_training(app, words)
        asked = verb.Submission(
            **train,
            site=site,
            account=account,
            time=time,
            nodes=nodes,
            gpus=_numbers(gpus),
            queue=queue,
            name=name,
            environment=env,
            wheels=wheels,
            stage=stage,
            chain=chain,
            restarts=restarts,
            doctor=doctor,
            base=base,
        )
        if test_only:
            for words_ in verb.judged(asked):
                show(words_)
            return EXIT_OK
        for one in verb.submit(asked, show=show_):
            if show_:
                sys.stdout.write(one.text)
            else:
                show(f"job {one.job}: {one.cost}; run {one.run}")
        return EXIT_OK


def read_training(app: App, words: tuple[str, ...]) -> dict[str, Any]:
    """What the words after `--` say, read as the command line that they are."""
    if not words or words[0] != "train":
        raise UsageError(
            f"grappe submit runs a training{f', not {words[0]!r}' if words else ''}: "
            "grappe submit --time 3h -- train TASK …"
        )
    _, bound, _ = app.parse_args(list(words), exit_on_error=False, print_error=False)
    told = bound.arguments
    data = told.get("data")
    return {
        "task": told["task"],
        "arguments": tuple(words[1:]),
        "plan": told.get("plan", ""),
        "fields": tuple(told.get("fields", ())),
        "run": told.get("run"),
        "data": str(data) if data is not None else None,
    }


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(f"--gpus={text}: give a number, or several: 1,2,4") from None


def queue(*, base: Base = Path("runs")) -> int:
    """List your jobs in Slurm's queue, by run: state, reason, expected start."""
    from grappe.verbs.jobs import queue as verb

    show(verb(base))
    return EXIT_OK


def logs(
    run: RunFolder,
    /,
    *,
    rank: Annotated[int | None, Parameter(help="Of this process. Default: the job's own.")] = None,
    follow: Annotated[bool, SWITCH, Parameter(name=["--follow", "-f"], help="Until the job ends.")] = False,
) -> int:
    """Print what a run's job, or one of its processes, wrote."""
    from grappe.verbs.logs import lines

    for text in lines(run, rank, follow=follow):
        sys.stdout.write(text)
        sys.stdout.flush()
    return EXIT_OK


def wait(run: RunFolder, /) -> int:
    """Wait for the end of a run's job, restarts included; ends with the job's exit code."""
    from grappe.verbs.jobs import wait as verb

    return verb(run)


def cancel(*runs: RunFolder) -> int:
    """Cancel the jobs of runs. What was saved stays."""
    from grappe.verbs.jobs import cancel as verb

    if not runs:
        raise UsageError("say which: grappe cancel RUN … (see: grappe queue)")
    jobs = verb(runs)
    show(f"cancelled {', '.join(jobs)}")
    return EXIT_OK


def sites(name: Annotated[str | None, Parameter(help="One of them: all its facts.")] = None, /) -> int:
    """List the clusters that jobs can be submitted to, or one's facts and where they come from."""
    from grappe.verbs.sites import facts, listing

    show(facts(name) if name else listing())
    return EXIT_OK


def doctor(
    task: Annotated[str | None, Parameter(help="Look at this task's sizes too.")] = None,
    /,
    *fields: FieldText,
    plan: PlanText = "",
    folder: Annotated[Path, Parameter(help="Where runs are written.")] = Path("runs"),
    job: Annotated[
        bool, SWITCH, Parameter(help="As the first step of a job: warnings and errors only.")
    ] = False,
) -> int:
    """Say what is wrong with this machine, or with all processes of this allocation, in seconds."""
    from grappe.fields import split
    from grappe.plan import Plan
    from grappe.verbs import session

    session.prepare([plan], task)
    from grappe.verbs import doctor as verb

    asked = verb.Request(
        plan=Plan.parse(plan), folder=folder.absolute(), job=job, task=task, fields=split(fields)
    )
    found = verb.doctor(asked)
    if session.speaks():
        said = [one for one in found if one.level != "note"] if job else found
        if said or not job:
            print(verb.text(said), flush=True)
    return EXIT_FAILURE if verb.failed(found) else EXIT_OK
