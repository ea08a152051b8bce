"""Defines the command tour: it shows commands on the digits one by one, and runs them."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from grappe.cli.application import app
from grappe.cli.exit import execute, typed
from grappe.errors import EXIT_OK, GrappeError
from grappe.launch.terminal import complain, say, write

FOLDER = "runs/tour"
TEXTS = (
    "A task names a model and its data, and a run is the folder of one training.",
    "A training may stop at any step: by Ctrl-C, a time limit, or --steps. The same command resumes it.",
    "A plan spreads a training: replicate=2 is DDP on two processes. Compare its loss with the first step's.",
    "verify proves that plans learn the same as one process, or names the cause.",
    "foresee predicts memory, time and cost on a cluster that you are not on.",
    "submit writes the job. Without --dry-run it submits it; launch and measure take your own script in this way.",
)
COMMANDS = (
    (
        f"grappe train digits epochs=2 --run {FOLDER}/first",
        f"grappe runs --runs {FOLDER}",
    ),
    (
        f"grappe train digits epochs=2 --run {FOLDER}/stopped --steps 20",
        f"grappe train digits epochs=2 --run {FOLDER}/stopped",
    ),
    (f"grappe train digits epochs=2 --plan replicate=2 --run {FOLDER}/two",),
    ("grappe verify digits --plan replicate=2 --plan shard=2",),
    ("grappe foresee digits --site narval --gpus 4",),
    ("grappe submit --site narval --account def-me --gpus 1 --dry-run -- train digits",),
)
"""The commands of each step."""


@app.command
def tour(*, step: Annotated[int, Parameter(validator=Number(gte=1, lte=len(TEXTS)))] = 1) -> int:
    """Show in six steps what grappe does: each has commands on a small data set, and runs them.

    Enter runs a step's commands, q ends. Without a terminal they are printed alone.

    Args:
        step: The step to begin with, 1 to 6.
    """
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    for number, text in enumerate(TEXTS[step - 1 :], step):
        write("")
        say(f"{number} of {len(TEXTS)}. {text}")
        for command in COMMANDS[number - 1]:
            write(f"  {command}")
        if not asks:
            continue
        say("Enter: run, q: end", end=" ")
        sys.stdout.flush()
        if sys.stdin.readline() != "\n":
            say(f"to continue: grappe tour --step {number}")
            return EXIT_OK
        for command in COMMANDS[number - 1]:
            _executed(command)
    write("")
    say(f"The runs are in {FOLDER}. Your own script on two processes: grappe launch --plan replicate=2 train.py")
    return EXIT_OK


def _executed(command: str) -> None:
    """Runs a command of grappe as in a terminal; an error ends it alone."""
    words = shlex.split(command)[1:]
    try:
        with typed(words):
            execute(app, words)
    except GrappeError as error:
        complain(f"grappe: {error}")
