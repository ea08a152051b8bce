"""The command line: a thin face over the verbs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Group, Parameter

from grappe import cli_figures, cli_slurm, cli_verify, entry
from grappe.entry import plain_table, show
from grappe.errors import EXIT_FAILURE, EXIT_OK, UsageError
from grappe.parameters import (
    SWITCH,
    DataFolder,
    FieldText,
    PlanText,
    RunFolder,
    TaskName,
    whole_numbers,
)

HELP = """Train a PyTorch model on whatever machines you were given.

The learning task is described once; a plan says how each optimizer step is
spread over processes. Changing the plan does not change what is learned.

    grappe train digits                         on this machine's cores
    grappe train digits --plan replicate=2      two processes, the same numbers
    grappe train my_task.py epochs=3 lr=0.2     your own task
    grappe runs                                 what was trained, and how well
    grappe submit --time 3h -- train digits     the same as a Slurm job

--debug shows the whole traceback of an error.
"""

app = App(
    name="grappe",
    help=HELP,
    help_format="plaintext",
    version_flags=["--version"],
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app["--help"].group = app["--version"].group = Group("About")


@app.command
def train(
    task: TaskName,
    /,
    *fields: FieldText,
    plan: PlanText = "",
    run: Annotated[
        Path | None, Parameter(help="The run's folder; if it holds a run, goes on with it.")
    ] = None,
    data: DataFolder = None,
    from_: Annotated[
        Path | None,
        Parameter(
            name="--from",
            help="First weights: a run, or a .safetensors, .ckpt or .pt file (as weights only).",
        ),
    ] = None,
    evaluate_every: Annotated[
        int | None, Parameter(help="Steps between evaluations. Default: each epoch.")
    ] = None,
    save_every: Annotated[
        int | None, Parameter(help="Steps between checkpoints. Default: each epoch.")
    ] = None,
    patience: Annotated[
        int | None, Parameter(help="Stop after so many evaluations without a lower loss.")
    ] = None,
    steps: Annotated[int | None, Parameter(help="Stop after so many steps in all.")] = None,
    keep: Annotated[int, Parameter(help="How many of the newest checkpoints stay, beside the best.")] = 3,
    time_limit: Annotated[
        str | None,
        Parameter(help="Save and stop before so long: 90s, 30m, 2h, 02:30:00. Default: Slurm's end time."),
    ] = None,
    stall_limit: Annotated[
        str | None,
        Parameter(help="End when nothing gets done for so long. Default: learned from its own steps."),
    ] = None,
    stop_on_failed_save: Annotated[
        bool, SWITCH, Parameter(help="End when a checkpoint cannot be written.")
    ] = False,
    ledger: Annotated[bool, SWITCH, Parameter(help="Write down the sample ids of each step.")] = False,
    log: Annotated[
        str,
        Parameter(show_default=False, help="Loggers beside the run's curves: tensorboard, wandb (offline)."),
    ] = "",
    profile: Annotated[
        str, Parameter(show_default=False, help="Profile a few steps of these processes: 0, or 0,3.")
    ] = "",
    profile_steps: Annotated[int, Parameter(help="How many steps to profile.")] = 5,
    bare: Annotated[
        bool,
        SWITCH,
        Parameter(help="To measure steps: no evaluation and no checkpoint."),
    ] = False,
    smoke: Annotated[
        bool, SWITCH, Parameter(help="One step, evaluation, save, resume: do they work under this plan?")
    ] = False,
) -> int:
    """Train a task under a plan, or go on with a run."""
    from grappe.duration import seconds
    from grappe.fields import split
    from grappe.verbs import session

    for name, value in (
        ("evaluate-every", evaluate_every),
        ("save-every", save_every),
        ("patience", patience),
        ("steps", steps),
        ("keep", keep),
        ("profile-steps", profile_steps),
    ):
        if value is not None and value < 1:
            raise UsageError(f"--{name}={value}: it must be at least 1")
    limits = [
        seconds(text, name) if text is not None else None
        for name, text in (("--time-limit", time_limit), ("--stall-limit", stall_limit))
    ]
    texts = split(fields)
    session.prepare([plan], task, run)
    from grappe.options import Options
    from grappe.verbs import train as verb

    options = Options(
        evaluate_every=evaluate_every,
        save_every=save_every,
        patience=patience,
        steps=steps,
        keep=keep,
        time_limit=limits[0],
        stall_limit=limits[1],
        stop_on_failed_save=stop_on_failed_save,
        ledger=ledger,
        log=tuple(name for name in log.split(",") if name),
        profile=tuple(whole_numbers("--profile", profile, least=0)),
        profile_steps=profile_steps,
        bare=bare,
    )
    asked = verb.request(task, plan, run, data, texts, from_, options)
    if smoke:
        from grappe.verbs.smoke import smoke as check

        show(check(asked))
        return EXIT_OK
    result = verb.run_training(asked)
    if result.status == "finished before":
        show(f"{result.run} is finished (step {result.step}): nothing to do")
    return session.interrupted() if result.status == "interrupted" else EXIT_OK


@app.command
def drill(
    task: TaskName,
    /,
    *fields: FieldText,
    plan: PlanText = "",
    data: DataFolder = None,
) -> int:
    """Kill a small training of a task, on purpose, and show what was lost."""
    from grappe.fields import split
    from grappe.verbs import session

    texts = split(fields)
    session.prepare([plan], task)
    from rich.console import Console

    from grappe.verbs import drill as verb
    from grappe.verbs.train import request

    asked = request(task, plan, data=data, fields=texts)
    with Console(stderr=True).status("") as status:  # seen on a terminal only
        findings = list(verb.drill(asked, lambda words: status.update(f"drill: {words}")))
    show(verb.table(findings))
    return EXIT_OK if all(one.recovered for one in findings) else EXIT_FAILURE


@app.command
def evaluate(
    run: RunFolder,
    /,
    *,
    split: Annotated[
        Literal["train", "validation", "test"], Parameter(help="What to score it on.")
    ] = "validation",
    plan: PlanText = "",
    data: DataFolder = None,
    json_: Annotated[
        bool, Parameter(name="--json", negative="", show_default=False, help="One JSON line.")
    ] = False,
) -> int:
    """Score a run's newest checkpoint on a split, every sample counted once."""
    from grappe.verbs import session

    if run.is_dir():
        session.prepare([plan])
    from grappe.verbs.evaluate import evaluate as verb

    scores = verb(run, split, plan, data=data)
    if json_:
        show(json.dumps(dataclasses.asdict(scores)))
        return EXIT_OK
    table = plain_table("", "")
    table.add_row("samples", f"{scores.samples:,} of {split}, each once")
    table.add_row("loss", f"{scores.loss:.6f}")
    for name, value in scores.metrics.items():
        table.add_row(name, f"{value:.6f}" if isinstance(value, float) else str(value))
    show(table)
    return EXIT_OK


@app.command
def predict(
    run: RunFolder,
    inputs: Annotated[str, Parameter(help="A .npy file of inputs [N, ...], or train, validation or test.")],
    /,
    *,
    data: DataFolder = None,
    out: Annotated[
        Path | None, Parameter(help="Write the outputs [N, ...] to this .npy file instead.")
    ] = None,
) -> int:
    """Print what a run's model says of inputs: one JSON line a sample."""
    from grappe.verbs.predict import predict as verb

    outputs = verb(run, inputs, data=data)
    if out is not None:
        import numpy as np
        import torch

        np.save(out, torch.stack(list(outputs)).numpy())
        return EXIT_OK
    for index, output in enumerate(outputs):
        line: dict[str, Any] = {"sample": index}
        if output.dim() == 1 and output.numel() > 1:
            probability = output.softmax(0)
            line |= {"class": int(output.argmax()), "probability": round(float(probability.max()), 6)}
        else:
            line["output"] = output.tolist()
        print(json.dumps(line))
    return EXIT_OK


@app.command
def runs(
    run: Annotated[Path | None, Parameter(help="A run's folder. Default: list them all.")] = None,
    /,
    *,
    base: Annotated[Path, Parameter(help="The folder of runs.")] = Path("runs"),
) -> int:
    """List the runs, or describe one: what it is, where it stands, its checkpoints."""
    from grappe.verbs.runs import describe, listing

    show(describe(run) if run is not None else listing(base))
    return EXIT_OK


@app.command
def prune(
    run: Annotated[Path | None, Parameter(help="A run's folder. Default: all that nobody writes.")] = None,
    /,
    *,
    base: Annotated[Path, Parameter(help="The folder of runs.")] = Path("runs"),
    keep: Annotated[int, Parameter(help="How many of the newest checkpoints stay, beside the best.")] = 1,
    dry_run: Annotated[bool, SWITCH, Parameter(help="Say what would go, and remove nothing.")] = False,
) -> int:
    """Remove checkpoints that nobody will miss, and what killed saves left behind."""
    if keep < 1:
        raise UsageError(f"--keep={keep}: it must be at least 1")
    from grappe.run import Run, all_runs
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


cli_figures.register(app)
cli_verify.register(app)
cli_slurm.register(app)


def main() -> None:
    """The `grappe` command: exit codes 0 done, 1 failed, 2 wrong use, 75 interrupted and saved."""
    entry.run(app)


if __name__ == "__main__":
    main()
