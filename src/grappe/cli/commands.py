"""Defines the commands on tasks and runs, and registers the others; each command calls one verb."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from grappe import extensions
from grappe.cli import completion, images, measuring, output  # noqa: F401 (their commands)
from grappe.cli import exit as entry_point
from grappe.cli.application import (
    OPTIONS,
    CheckpointName,
    DataFolder,
    DryRun,
    FieldText,
    Json,
    OutFile,
    PlanText,
    RunFolder,
    RunsFolder,
    RunTask,
    TaskName,
    app,
    preflight,
    put_in_order,
)
from grappe.cli.exit import show, show_answer, show_either, show_json
from grappe.errors import EXIT_FAILURE, EXIT_OK, UsageError
from grappe.fields import typed_name
from grappe.launch.files import RUNS
from grappe.launch.rank import is_main_process, rank_from_environment
from grappe.launch.terminal import complain, redirected, waiting, write
from grappe.plan import as_plan
from grappe.training.options import Options
from grappe.words import format_number

Trained = Annotated[
    bool, Parameter(help="Take the trained weights, where the run keeps a moving average of them (ema).")
]
DEFAULTS = Options()


@app.command
def train(
    task: TaskName,
    /,
    *fields: FieldText,
    plan: PlanText = "",
    run: Path | None = None,
    name: str = "",
    runs: RunsFolder = RUNS,
    data: DataFolder = None,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
    with_optimizer: bool = False,
    epochs_done: int | None = None,
    callback: list[str] | None = None,
    options: Annotated[Options, OPTIONS] = DEFAULTS,
    smoke: bool = False,
    json: Json = False,
) -> int:
    """Train a task under a plan, or resume a run.

    Args:
        run: The run's folder; if there is a run, it is resumed.
        name: A name for the run, which other commands take in place of its folder, and reports show.
        from_: Initial weights: a run, or a .safetensors, .ckpt or .pt file (as weights only).
        with_optimizer: Take the optimizer's state and the number of epochs done from the --from file, too.
        epochs_done: Epochs that the training of --from has done: begin after them. Default: the file's.
        callback: Your own callback (watcher): file.py:Class or module:Class. Repeatable.
        smoke: Test one step, evaluation, save and resume under this plan.
    """
    texts = preflight([plan], task, fields, run=run, once=not smoke)
    from grappe.launch.start import interrupted
    from grappe.training.request import Request, checked_watchers, data_folder
    from grappe.training.task_reference import TaskReference
    from grappe.verbs import train as verb

    typed = ["grappe", *(text for text in sys.argv[1:] if text != "--debug"), *(["--run"] if run is None else [])]
    request = Request(
        task=TaskReference.of(task, texts),
        plan=as_plan(plan),
        run=run,
        name=name,
        base=runs,
        data=data_folder(data),
        weights=from_,
        with_optimizer=with_optimizer,
        epochs_done=epochs_done,
        options=options,
        watchers=checked_watchers(callback or ()),
        # A job's script and torchrun's user know their own command.
        typed=() if rank_from_environment() is not None else tuple(typed),
    )
    if smoke:
        show(verb.smoke(request))
        return EXIT_OK
    with redirected(1, to=2) if json else contextlib.nullcontext():
        result = verb.shown_training(request)
        if result.status == "finished before":
            show(f"{result.run} is finished (step {result.step}): nothing to do; --from {result.run} trains on from it")
    if json:
        from grappe.verbs.runs import facts

        show_json("runs", runs=facts(runs, result.run))
    return interrupted() if result.status == "interrupted" else EXIT_OK


@app.command
def drill(
    task: TaskName, /, *fields: FieldText, plan: PlanText = "", data: DataFolder = None, json: Json = False
) -> int:
    """Kill a short training on purpose, and show what was lost."""
    texts = preflight([plan], task, fields)
    from grappe.launch.safe_console import SafeConsole
    from grappe.training.request import Request, data_folder
    from grappe.training.task_reference import TaskReference
    from grappe.verbs import drill as verb

    training = Request(task=TaskReference.of(task, texts), plan=as_plan(plan), data=data_folder(data))
    waiting("")
    with SafeConsole(sys.stderr).status("") as status:  # seen on a terminal only
        findings = list(verb.drill(training, lambda words: status.update(f"drill: {words}")))
    show_either(json, "drill", verb.table(findings), findings=findings)
    return EXIT_OK if all(result.recovered for result in findings) else EXIT_FAILURE


@app.command
def evaluate(
    run: RunFolder,
    /,
    *,
    split: Annotated[Literal["train", "validation", "test"], Parameter(help="Split to evaluate on.")] = "validation",
    plan: PlanText = "",
    task: RunTask = None,
    checkpoint: CheckpointName = None,
    data: DataFolder = None,
    json: Json = False,
    trained: Trained = False,
) -> None:
    """Evaluate a run's checkpoint on a split, every sample counted once."""
    if run.is_dir():
        preflight([plan], once=True)
    from grappe.verbs.evaluate import evaluate as verb

    scores = verb(run, split, plan, task=task, data=data, checkpoint=checkpoint, trained=trained)
    taken = f"{scores.checkpoint} ({scores.why})"
    facts = [("checkpoint", taken), ("samples", f"{scores.samples:,} of {scores.split}, each once")]
    for name, value in (("loss", scores.loss), *scores.metrics.items()):
        facts.append((name, format_number(value) if isinstance(value, float) else str(value)))
    show_answer(json, "scores", facts, **dataclasses.asdict(scores))


@app.command
def predict(
    run: RunFolder,
    inputs: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *pictures: str,
    plan: PlanText = "",
    task: RunTask = None,
    checkpoint: CheckpointName = None,
    data: DataFolder = None,
    out: OutFile = None,
    trained: Trained = False,
) -> None:
    """Print the predictions of a run's model for inputs: one JSON line per sample.

    Args:
        inputs: train, validation or test; a .npy file of inputs [N, ...]; a .jsonl file, or - for lines on the standard
            input; a picture, or a folder of them.
        pictures: Further pictures.
        out: Write them [N, ...] to this file instead: .npy, or .npz where they have names.
    """
    if inputs.startswith("--"):
        line = shlex.join(["grappe", "predict", str(run), *(pictures or ["test"])])
        raise UsageError(f"there is no option {inputs}: give INPUTS without it: {line}")
    output.check(out, streams=False)
    from grappe.verbs.predict import predict as verb
    from grappe.verbs.predict.inputs import files_of

    if run.is_dir():
        preflight([plan], once=True)
    files = files_of([inputs, *pictures] if pictures else inputs)
    taken: list[str] = []
    predictions = verb.predict(
        run, files or inputs, plan, task=task, data=data, checkpoint=checkpoint, taken=taken.append,
        trained=trained,
    )  # fmt: skip
    if not is_main_process():  # of those that a launcher started
        list(predictions)
        return
    if out is not None:
        verb.save(out, predictions)
        return
    for index, prediction in enumerate(predictions):
        if not index:
            complain(f"grappe: predictions of {taken[0]}")
        name = {"file": str(files[index])} if files else {}
        write(dumps({"sample": index, **name, **verb.as_json(prediction)}))


@app.command
def runs(
    run: Annotated[Path | None, Parameter(help="A run's folder. Default: list them all.")] = None,
    /,
    *,
    runs: RunsFolder = RUNS,
    tag: Annotated[str | None, Parameter(help="List the runs with this tag alone.")] = None,
    all_: Annotated[bool, Parameter(name="--all", help="List all runs, not the newest 200 alone.")] = False,
    race: Annotated[
        str | None, Parameter(help="Rank the runs by what they took to reach a score: accuracy=0.97, 'perplexity<=20'.")
    ] = None,
    by: Annotated[
        Literal["time", "samples", "gpu-hours", "core-hours", "energy"],
        Parameter(help="With --race: the cost to rank runs by."),
    ] = "time",
    json: Json = False,
) -> None:
    """List the runs, or describe one: its task, plan, progress and checkpoints."""
    from grappe.verbs import runs as verb

    if race is not None:
        if run is not None:
            raise UsageError("--race ranks all runs of a folder: leave RUN out, and give --runs FOLDER")
        target = verb.target_of(race)
        entries = verb.race(runs, target)
        show_either(json, "race", verb.board(entries, target, by), target=target, runs=entries)
    elif json:
        show_json("runs", runs=verb.facts(runs, run, tag))
    else:
        show(verb.describe(run) if run is not None else verb.listing(runs, tag, everything=all_))


@app.command
def prune(
    run: Annotated[Path | None, Parameter(help="A run's folder. Default: all that are not being written.")] = None,
    /,
    *,
    runs: RunsFolder = RUNS,
    keep: Annotated[int, Parameter(help="Newest checkpoints to keep in addition to the best.")] = DEFAULTS.keep,
    dry_run: Annotated[DryRun, Parameter(help="List what would be removed; remove nothing.")] = False,
    json: Json = False,
) -> None:
    """Remove checkpoints that are not needed any more, and files of killed saves."""
    if keep < 1:
        raise UsageError(f"--keep={keep}: it must be at least 1")
    from grappe.training.run import Run, all_runs
    from grappe.verbs.prune import prune as verb
    from grappe.verbs.prune import table

    removed = verb([Run(run)] if run is not None else all_runs(runs), keep, dry_run=dry_run)
    folders = [{"folder": folder, "bytes": size} for folder, size in removed]
    show_either(json, "prune", table(removed, dry_run=dry_run), dry_run=dry_run, folders=folders)


@app.command
def tasks(
    name: Annotated[str | None, Parameter(help="A task, as for grappe train. Default: the shipped ones.")] = None,
    /,
    *,
    json: Json = False,
) -> None:
    """List the shipped tasks, or one task's fields."""
    from grappe import finder
    from grappe.verbs.catalogue import task_fields, task_list

    listed = []
    for each in ([name] if name else finder.names()) if json else ():
        cls = finder.find(each)
        fields = {typed_name(field): value for field, value in finder.defaults(cls).items()}
        listed.append({"task": each, "what": finder.describe(cls), "fields": fields})
    show_either(json, "tasks", task_fields(name) if name else task_list(), tasks=listed)


@app.command
def engines(*, json: Json = False) -> None:
    """Show what each engine can do: the keys of a plan."""
    from grappe import engines as available
    from grappe.verbs.catalogue import plan_table, support

    keys = [dict(zip(("key", "default", "what", "engines"), row, strict=True)) for row in support()]
    show_either(json, "engines", plan_table(), engines=available.names(), keys=keys)


@app.command
def fetch(
    task: TaskName,
    /,
    *,
    data: DataFolder = None,
    dry_run: Annotated[DryRun, Parameter(help="List the files and whether they are there; download nothing.")] = False,
    json: Json = False,
) -> None:
    """Download a task's data, on a machine with internet: cifar10, fashion_mnist, mnist, or what your task names.

    Over https alone, from the addresses in the task's file; each file is checked by its size
    and checksum. The same command continues an interrupted download.
    """
    from grappe.training.request import data_folder
    from grappe.verbs.fetch import fetch as verb

    folder = data_folder(data)
    done = verb(task, folder, dry_run=dry_run)
    missing = "{} to download" if dry_run else "{}"
    sizes = [
        (file.name, "was there" if file.was_there else missing.format(f"{file.size / 1e6:,.1f} MB")) for file in done
    ]
    facts = [*sizes, ("folder", folder.absolute())]
    show_answer(json, "fetch", facts, folder=folder.absolute(), files=done, dry_run=dry_run)


@app.command(name="completion")
def completion_(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print what completes commands, tasks, fields, plans and runs in your shell.

    For ~/.bashrc: eval "$(grappe completion bash)"; for ~/.zshrc the same with zsh.
    For fish's config.fish: grappe completion fish | source
    """
    for line in completion.script(app, shell).splitlines():
        write(line)


@app.command
def sites(
    name: Annotated[str | None, Parameter(completer=completion.sites, help="A site, to show all its facts.")] = None,
    /,
    *,
    json: Json = False,
) -> None:
    """List the clusters that jobs can be submitted to, or one cluster's facts and their sources."""
    from grappe import sites as known_sites
    from grappe.verbs.catalogue import site_facts, site_list

    listed = [known_sites.find(each) for each in ([name] if name else known_sites.files())]
    show_either(json, "sites", site_facts(name) if name else site_list(), sites=listed)


@app.command
def gpus(*, json: Json = False) -> None:
    """List GPUs by their data sheets: memory, peak rates, power, generation, and the clusters that have them."""
    from grappe.foresight.devices import devices
    from grappe.verbs.catalogue import gpu_list

    show_either(json, "gpus", gpu_list(), gpus=devices())


for extension in extensions.having("commands"):
    extensions.module(extension, "commands")
put_in_order(app)


def main(words: Sequence[str] | None = None) -> None:
    """The `grappe` command: exit codes 0 done, 1 failed, 2 wrong use, 75 interrupted and saved."""
    entry_point.run(app, words)


if __name__ == "__main__":
    main()
