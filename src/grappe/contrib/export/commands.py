"""Defines grappe export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from grappe.cli.application import OPTIONS, OUT_NAMES, CheckpointName, DataFolder, DryRun, Json, RunFolder, RunTask, app
from grappe.cli.exit import show_answer
from grappe.contrib.export.folder import ExportOptions, check_target
from grappe.launch.terminal import progress

EXPORTED = ExportOptions()


@app.command
def export(
    run: RunFolder,
    /,
    *,
    out: Annotated[Path, Parameter(name=OUT_NAMES, help="A new folder to write.")],
    options: Annotated[ExportOptions, OPTIONS] = EXPORTED,
    task: RunTask = None,
    checkpoint: CheckpointName = None,
    data: DataFolder = None,
    dry_run: Annotated[DryRun, Parameter(help="Check the run and the options; write nothing.")] = False,
    json: Json = False,
) -> None:
    """Write a run's model as a C++ program, weights or ONNX; it is checked on the whole validation split first."""
    check_target(out)
    progress("loading the run and its model")
    from grappe.contrib.export.export import checked
    from grappe.contrib.export.export import export as verb
    from grappe.verbs.load import choose
    from grappe.verbs.runs import shown_scores

    if dry_run:
        source, _ = checked(run, out, options, task)
        name = choose(source, checkpoint)[1].folder.name
        planned = [("would be written", f"{out}: {options.format}, weights in {options.weights}"), ("checkpoint", name)]
        show_answer(json, "export", planned, folder=out, checkpoint=name, dry_run=True)
        return
    done = verb(run, out, options, checkpoint=checkpoint, task=task, data=data, progress=progress)
    progress("")
    proof, sizes = done.proof, ", ".join(map(str, done.proof.batch_sizes))
    built = f"not built: {done.cpp}" if done.cpp else "built and proven"
    facts = [
        ("written", done.folder),
        ("checkpoint", done.checkpoint),
        ("proven", f"{proof.samples:,} samples of {proof.split}, {sizes} at a time"),
        ("largest difference", f"{proof.largest_difference:.1e} of a row"),
        *((f"scores, weights in {rounding}", shown_scores(scores)) for rounding, scores in done.scores.items()),
        *([("C++ program", built)] if options.format == "program" else []),
        ("how to use it", f"{done.folder}/README.md"),
    ]
    show_answer(json, "export", facts, **vars(done), dry_run=False)
