"""Defines the command that downloads data: fetch."""

from __future__ import annotations

from cyclopts import App

from grappe.cli.arguments import DataFolder, TaskName
from grappe.cli.exit import show
from grappe.errors import EXIT_OK
from grappe.words import plain_table


def register(app: App) -> None:
    """Adds the commands to `app`."""
    app.command(fetch)


def fetch(task: TaskName, /, *, data: DataFolder = None) -> int:
    """Download a task's data, on a machine with internet: cifar10, fashion_mnist, mnist, or what your task names.

    Over https alone, from the addresses in the task's file; each file is checked by its size
    and checksum. What was interrupted goes on when the same command is started again.
    """
    from grappe.training.request import data_folder
    from grappe.verbs.fetch.fetch import fetch as verb

    folder = data_folder(data)
    done = verb(task, folder)
    table = plain_table("", "")
    for file in done:
        words = "was there" if file.was_there else f"{file.size / 1e6:,.1f} MB"
        table.add_row(file.name, words)
    table.add_row("folder", str(folder.absolute()))
    show(table)
    return EXIT_OK
