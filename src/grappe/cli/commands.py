"""Defines the commands that train, evaluate and list, and registers the others; each command calls one verb."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from grappe.cli import cluster, exporting, fetching, foreseeing, images, learning, measuring, tuning, verify
from grappe.cli import exit as entry_point
from grappe.cli.application import app
from grappe.cli.arguments import (
    SWITCH,
    BaseFolder,
    CheckpointName,
    DataFolder,
    FieldText,
    PlanText,
    RunFolder,
    RunTask,
    TaskName,
)
from grappe.cli.exit import show
from grappe.cli.training import train
from grappe.errors import EXIT_FAILURE, EXIT_OK, UsageError
from grappe.launch.terminal import say
from grappe.words import plain_table

Trained = Annotated[
    bool,
    SWITCH,
    Parameter(help="Take the trained weights, where the run keeps a moving average of them (ema)."),
]

app.command(train)


@app.command
def drill(
    task: TaskName,
    /,
    *fields: FieldText,
    plan: PlanText = "",
    data: DataFolder = None,
) -> int:
    """Kill a small training of a task, on purpose, and show what was lost."""
    from grappe.cli.preflight import preflight
    from grappe.fields import split

    texts = split(fields)
    preflight([plan], task)
    from grappe.launch.safe_console import SafeConsole
    from grappe.plan import as_plan
    from grappe.training.request import Request, data_folder
    from grappe.training.task_reference import TaskReference
    from grappe.verbs.drill import drill as verb

    training = Request(task=TaskReference.of(task, texts), plan=as_plan(plan), data=data_folder(data))
    with SafeConsole(sys.stderr).status("") as status:  # seen on a terminal only
        findings = list(verb.drill(training, lambda words: status.update(f"drill: {words}")))
    show(verb.table(findings))
    return EXIT_OK if all(result.recovered for result in findings) else EXIT_FAILURE


@app.command
def evaluate(
    run: RunFolder,
    /,
    *,
    split: Annotated[
        Literal["train", "validation", "test"], Parameter(help="Split to evaluate on.")
    ] = "validation",
    plan: PlanText = "",
    task: RunTask = None,
    checkpoint: CheckpointName = None,
    data: DataFolder = None,
    json_: Annotated[
        bool, Parameter(name="--json", negative="", show_default=False, help="One JSON line.")
    ] = False,
    trained: Trained = False,
) -> int:
    """Evaluate a run's checkpoint on a split, every sample counted once."""
    from grappe.cli.preflight import preflight

    if run.is_dir():
        preflight([plan], once=True)
    from grappe.verbs.evaluate import evaluate as verb

    scores = verb(run, split, plan, task=task, data=data, checkpoint=checkpoint, trained=trained)
    if json_:
        show(json.dumps(dataclasses.asdict(scores)))
        return EXIT_OK
    table = plain_table("", "")
    table.add_row("checkpoint", scores.checkpoint)
    table.add_row("samples", f"{scores.samples:,} of {split}, each once")
    table.add_row("loss", f"{scores.loss:.6f}")
    for name, value in scores.metrics.items():
        table.add_row(name, f"{value:.6f}" if isinstance(value, float) else str(value))
    show(table)
    return EXIT_OK


@app.command
def predict(
    run: RunFolder,
    inputs: Annotated[
        str,
        Parameter(
            help="train, validation or test; a .npy file of inputs [N, ...]; a .jsonl file, or - for lines on "
            "the standard input; a picture, or a folder of them.",
            allow_leading_hyphen=True,  # for - alone
        ),
    ],
    /,
    *pictures: Annotated[str, Parameter(help="Further pictures.")],
    task: RunTask = None,
    checkpoint: CheckpointName = None,
    data: DataFolder = None,
    out: Annotated[
        Path | None,
        Parameter(help="Write them [N, ...] to this file instead: .npy, or .npz where they have names."),
    ] = None,
    trained: Trained = False,
) -> int:
    """Print the predictions of a run's model for inputs: one JSON line per sample."""
    from grappe.verbs.predict import predict as verb
    from grappe.verbs.predict.inputs import files_of
    from grappe.verbs.predict.predict import save

    files = files_of([inputs, *pictures] if pictures else inputs)
    taken: list[str] = []
    predictions = verb.predict(
        run, files or inputs, task=task, data=data, checkpoint=checkpoint, taken=taken.append, trained=trained
    )
    if out is not None:
        save(out, predictions)
        return EXIT_OK
    for index, prediction in enumerate(predictions):
        name = {"file": str(files[index])} if files else {}
        say(json.dumps({"sample": index, **name, "checkpoint": taken[0], **verb.as_json(prediction)}))
    return EXIT_OK


@app.command
def runs(
    run: Annotated[Path | None, Parameter(help="A run's folder. Default: list them all.")] = None,
    /,
    *,
    base: BaseFolder = Path("runs"),
    race: Annotated[
        str | None,
        Parameter(help="Rank the runs by what they took to reach a score: accuracy=0.97, 'perplexity<=20'."),
    ] = None,
    by: Annotated[
        Literal["time", "samples", "gpu-hours", "core-hours", "energy"],
        Parameter(help="With --race: what they are ranked by."),
    ] = "time",
) -> int:
    """List the runs, or describe one: its task, plan, progress and checkpoints."""
    from grappe.verbs.runs import describe, listing

    if race is not None:
        from grappe.verbs.race import board, target_of
        from grappe.verbs.race import race as verb

        if run is not None:
            raise UsageError("--race ranks all runs of a folder: leave RUN out, and say --base FOLDER")
        target = target_of(race)
        show(board(verb(base, target), target, by))
        return EXIT_OK
    show(describe(run) if run is not None else listing(base))
    return EXIT_OK


@app.command
def prune(
    run: Annotated[
        Path | None, Parameter(help="A run's folder. Default: all that are not being written.")
    ] = None,
    /,
    *,
    base: BaseFolder = Path("runs"),
    keep: Annotated[int, Parameter(help="Number of newest checkpoints to keep, besides the best.")] = 1,
    dry_run: Annotated[bool, SWITCH, Parameter(help="List what would be removed; remove nothing.")] = False,
) -> int:
    """Remove checkpoints that are not needed any more, and files of killed saves."""
    if keep < 1:
        raise UsageError(f"--keep={keep}: it must be at least 1")
    from grappe.training.run import Run, all_runs
    from grappe.verbs.prune import prune as verb
    from grappe.verbs.prune import table

    removed = verb([Run(run)] if run is not None else all_runs(base), keep, dry_run=dry_run)
    show(table(removed, dry_run=dry_run))
    return EXIT_OK


@app.command
def tasks(
    name: Annotated[
        str | None, Parameter(help="A task, as for grappe train. Default: the shipped ones.")
    ] = None,
    /,
) -> int:
    """List the shipped tasks, or one task's fields."""
    from grappe.verbs.catalogue import task_fields, task_list

    show(task_fields(name) if name else task_list())
    return EXIT_OK


@app.command
def engines() -> int:
    """Show what each engine can do: the keys of a plan."""

    from grappe.verbs.catalogue import plan_table

    show(plan_table())
    return EXIT_OK


foreseeing.register(app)
measuring.register(app)
verify.register(app)
learning.register(app)
tuning.register(app)
exporting.register(app)
images.register(app)
fetching.register(app)
cluster.register(app)


def main() -> None:
    """The `grappe` command: exit codes 0 done, 1 failed, 2 wrong use, 75 interrupted and saved."""
    entry_point.run(app)


if __name__ == "__main__":
    main()
