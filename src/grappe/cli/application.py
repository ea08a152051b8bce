"""Makes the application, to which other modules add their commands."""

from __future__ import annotations

from cyclopts import App, Group

from grappe.cli.arguments import read_text_forms

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
    config=read_text_forms,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app["--help"].group = app["--version"].group = Group("About")
