"""Makes the application, to which other modules add their commands; the arguments that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, ArgumentCollection, Group, Parameter

from grappe.cli import completion
from grappe.errors import EXIT_OK
from grappe.errors.causes import COMPANIONS, unfit_packages
from grappe.fields import split, text_form
from grappe.launch.rank import is_main_process, rank_from_environment
from grappe.launch.terminal import complain, starting
from grappe.plan import Plan

HELP = """Train a PyTorch model on whatever machines you were given.

A plan decides how each optimizer step is spread over processes. It does not
change what is learned.

    grappe launch --plan replicate=2 train.py   your script, on two processes
    grappe train digits --plan replicate=2      a task, which has every plan
    grappe train my_task.py epochs=3 lr=0.2     your own task
    grappe runs                                 what was trained, and how well
    grappe submit --time 3h -- train digits     the same as a Slurm job

grappe help all shows all commands, grappe help COMMAND its options.
--debug shows the whole traceback of an error.
"""
TaskName = Annotated[
    str, Parameter(completer=completion.tasks, help="A shipped task, path/to/file.py[:Name], or package.module:Name.")
]
FieldText = Annotated[
    str, Parameter(completer=completion.fields, help="The task's fields: epochs=3 lr=0.2 (see: grappe tasks NAME).")
]
PLAN_NAMES = ("--plan", "-p")
PlanText = Annotated[
    str,
    Parameter(
        name=PLAN_NAMES,
        show_default=False,
        completer=completion.plan,
        help="Distribution over processes: replicate=2, or shard=4,zero=2,precision=bf16 (see: grappe engines)",
    ),
]
Plans = Annotated[list[str] | None, Parameter(name=PLAN_NAMES, completer=completion.plan)]
RunFolder = Annotated[Path, Parameter(completer=completion.runs, help="A run's folder: runs/… (see: grappe runs)")]
RunTask = Annotated[
    str | None,
    Parameter(name="--task", help="The run's task, where it was not trained here: a name or file as for grappe train."),
]
CheckpointName = Annotated[
    str | None,
    Parameter(name="--checkpoint", help="A step, best or last: that and no other. Default: the newest that verifies."),
]
DataFolder = Annotated[Path | None, Parameter(help="Folder of datasets. Default: $GRAPPE_DATA, or ./data.")]
RunsFolder = Annotated[Path, Parameter(help="Folder of runs.")]
Json = Annotated[bool, Parameter(name="--json", help="One line of JSON, and nothing else on the standard output.")]
OUT_NAMES = ("--out", "-o")
OutFile = Annotated[Path | None, Parameter(name=OUT_NAMES)]
DryRun = Annotated[bool, Parameter(name=("--dry-run", "-n"))]


OPTIONS = Parameter(name="*")
"""Parameter of a dataclass: each field is an option, and the docstring under it the option's help."""
USAGE = Parameter(
    show_default=lambda default: str(default) if default and default is not True else None,
    negative_bool=(),
    negative_iterable=(),
)
"""Settings of every option: an empty default is not shown, a switch has no --no-NAME, a list no --empty-NAME."""
GROUPS = {
    "Train": ("train", "launch", "tune", "drill", "verify", "tour"),
    "Look at runs": ("runs", "follow", "report", "curves", "prune"),
    "Choose a plan, a learning rate": ("foresee", "measure", "lr-find", "engines", "tasks", "gpus"),
    "Data": ("fetch", "data"),
    "Cluster": ("submit", "queue", "logs", "wait", "cancel", "sites", "doctor"),
    "After training": ("evaluate", "predict", "export"),
    "Shell": ("completion",),
}
"""The commands by what you do with them, in the order of the help."""


FIRST = frozenset({"train", "launch", "runs", "report", "verify", "foresee", "submit", "doctor"})
"""The commands that `grappe --help` shows; `grappe help all` shows all."""


def put_in_order(app: App) -> None:
    """Puts the commands into their groups."""
    for title, names in GROUPS.items():
        group = Group.create_ordered(title)
        for place, name in enumerate(each for each in names if each in app):  # others are of extensions
            app[name].group = (group,)
            app[name].sort_key = place
    app["--help"].group = app["--version"].group = (Group.create_ordered("About"),)


def read_text_forms(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Reads the options whose type is written in a form of its own (90s, 0,3); cyclopts reads the others."""
    for argument in arguments:
        form = text_form(argument.field_info.annotation)
        if form is not None:
            argument.tokens = [
                token.evolve(implicit_value=form.read(token.value, token.keyword or argument.name))
                for token in argument.tokens
            ]


app = App(
    name="grappe",
    help=HELP,
    help_format="plaintext",
    version_flags=["--version", "-V"],
    config=read_text_forms,
    default_parameter=USAGE,
    result_action=lambda code: code or EXIT_OK,  # a command that cannot fail returns none
    suppress_keyboard_interrupt=False,
)


def preflight(
    plans: Sequence[str],
    task: str | None = None,
    fields: Sequence[str] = (),
    *,
    run: Path | None = None,
    once: bool = False,
    later: bool = False,
) -> dict[str, str]:
    """Checks plans, fields and the task's name without torch; then starts the server that processes are forked from.

    Args:
        once: whether the command starts processes only once: a single process then needs no server.
        later: whether the command starts the server itself.

    Returns:
        The texts of the task's fields, by name.

    Raises:
        UsageError: a plan's text, a field or the task's name is wrong.
    """
    from grappe import engines, finder
    from grappe.launch import local

    texts = split(fields)
    parsed = [Plan.parse(plan) for plan in plans]
    for plan in parsed:
        engines.check_name(plan.engine)
    if task is not None:
        finder.check_name(task)
    imported = [name for name in COMPANIONS if task is not None and finder.mentions(task, name)]
    for text in unfit_packages(imported) if is_main_process() else ():
        complain(f"grappe: warning: {text}")
    done = run is not None and (run / "done").exists()
    single = once and all(plan.processes == 1 for plan in parsed)
    starts = not done and rank_from_environment() is None
    if starts:
        starting(max((plan.processes for plan in parsed), default=1))
    if starts and not single and not later:
        local.start_server(metrics=task is None or finder.mentions(task, "torchmetrics"))
    return texts
