"""Defines the commands that take a model out of grappe: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from grappe.cli.arguments import SWITCH, CheckpointName, DataFolder, RunFolder, RunTask
from grappe.cli.exit import show
from grappe.errors import EXIT_OK
from grappe.launch.terminal import complain, progress
from grappe.words import plain_table


def register(app: App) -> None:
    """Adds the commands to `app`."""
    app.command(export)


def export(
    run: RunFolder,
    /,
    *,
    to: Annotated[Path, Parameter(help="A new folder to write.")],
    format: Annotated[
        Literal["program", "safetensors", "transformers", "onnx", "torchscript"],
        Parameter(
            help="A C++ program with the compiled model; the weights alone with the task's fields; a folder for "
            "from_pretrained of transformers; ONNX (needs grappe[onnx]); or TorchScript, which is deprecated."
        ),
    ] = "program",
    task: RunTask = None,
    checkpoint: CheckpointName = None,
    data: DataFolder = None,
    no_build: Annotated[
        bool, SWITCH, Parameter(help="Prove the compiled model in Python only; do not build the C++ program.")
    ] = False,
    operators: Annotated[
        list[Path] | None,
        Parameter(help="A C++ file that registers operators of the model's own; once for each file."),
    ] = None,
    weights_for: Annotated[
        Path | None,
        Parameter(
            help="The folder of an exported program: write weights alone, which it takes without being compiled again."
        ),
    ] = None,
    trained: Annotated[
        bool,
        SWITCH,
        Parameter(help="Take the trained weights, where the run keeps a moving average of them (ema)."),
    ] = False,
) -> int:
    """Write a run's model as a C++ program, weights, or ONNX; proven on the whole validation split, or not written."""
    from grappe.verbs.export.exchange import DEPRECATED
    from grappe.verbs.export.export import export as verb
    from grappe.verbs.export.folder import check_target

    check_target(to)
    done = verb(
        run,
        to,
        checkpoint=checkpoint,
        task=task,
        data=data,
        format=format,
        build=not no_build,
        sources=operators or (),
        weights_for=weights_for,
        trained=trained,
        progress=progress,
    )
    progress("")
    if format == "torchscript":
        complain(f"grappe: {DEPRECATED}")
    proof, table = done.proof, plain_table("", "")
    table.add_row("written", str(done.folder))
    table.add_row("checkpoint", done.checkpoint)
    sizes = ", ".join(map(str, proof.batch_sizes))
    table.add_row("proven", f"{proof.samples:,} samples of {proof.split}, {sizes} at a time")
    table.add_row("largest difference", f"{proof.largest_difference:.1e} of a row")
    if format == "program":
        table.add_row("C++ program", f"not built: {done.cpp}" if done.cpp else "built and proven")
    table.add_row("how to use it", f"{done.folder}/README.md")
    show(table)
    return EXIT_OK
