"""Completes what is typed in a shell: tasks, their fields, the plan's keys, runs and sites."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_origin

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.completion import CompletionContext

WORDS_IN_BASH = """
# bash ends words at "=", and plans and fields are full of them: this puts the words together again.
_grappe_words() {
  local line="${COMP_LINE:0:COMP_POINT}" word before
  word="${line##* }"
  before="${word%"${word##*=}"}"
  local IFS=' '
  set -f; COMP_WORDS=($line); set +f
  [[ "$line" == *" " ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _grappe
  COMPREPLY=("${COMPREPLY[@]//\\\\,/,}")
  COMPREPLY=("${COMPREPLY[@]#"$before"}")
  [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=/] ]] && compopt -o nospace
}
complete -F _grappe_words grappe
"""

START_IN_ZSH = """
[[ -n "$functions[compdef]" ]] || { autoload -Uz compinit && compinit }
compdef _cyclopts_grappe grappe
"""
NO_SPACE_IN_ZSH = (
    "(( ${#_cyc_vals} )) && compadd -d",
    """local -a _cyc_end=(); [[ "${_cyc_vals[-1]}" == *= ]] && _cyc_end=(-S "")
    (( ${#_cyc_vals} )) && compadd "${_cyc_end[@]}" -d""",
)
"""Leaves out the space that zsh adds after a word, where it ends in "="."""


def script(app: App, shell: Literal["bash", "zsh", "fish"]) -> str:
    """Returns the code that makes `shell` complete what is typed after `grappe`."""
    more = {"bash": WORDS_IN_BASH, "zsh": START_IN_ZSH, "fish": ""}
    return app.generate_completion(prog_name="grappe", shell=shell).replace(*NO_SPACE_IN_ZSH) + more[shell]


def tasks(context: CompletionContext) -> list[str]:
    """Lists the shipped tasks, and the Python files and folders that begin with what was typed."""
    from grappe import finder

    paths = (path for path in Path().glob(f"{context.incomplete}*") if not path.name.startswith("."))
    files = [f"{path}/" if path.is_dir() else str(path) for path in paths if path.is_dir() or path.suffix == ".py"]
    return [*finder.names(), *files]


def fields(context: CompletionContext) -> list[str]:
    """Lists the task's fields, each with `=`; the task's file is read, not imported."""
    from grappe import finder
    from grappe.task import Task

    names = [field.name for field in dataclasses.fields(Task)]
    place = str(context["task"].value or "").partition(":")[0]
    file = Path(place) if place.endswith(".py") else finder.SHIPPED / f"{place}.py"
    module = ast.parse(file.read_text(encoding="utf-8", errors="replace") if file.is_file() else "")
    lines = (line for cls in module.body if isinstance(cls, ast.ClassDef) for line in cls.body)
    fields = (line.target for line in lines if isinstance(line, ast.AnnAssign))
    names += [field.id for field in fields if isinstance(field, ast.Name)]
    return [f"{name}=" for name in dict.fromkeys(names)]


def plan(context: CompletionContext) -> list[str]:
    """Lists the plan so far with each key that may follow, and the values of a key that has a few."""
    from grappe.engines import names
    from grappe.fields import hints
    from grappe.plan import Plan

    before, comma, word = context.incomplete.rpartition(",")
    begun = before + comma
    key, equals, _ = word.partition("=")
    kinds = hints(Plan)
    if not equals:
        return [f"{begun}{name}" if kind is bool else f"{begun}{name}=" for name, kind in kinds.items()]
    kind = kinds.get(key)
    values = names() if key == "engine" else get_args(kind) if get_origin(kind) is Literal else ()
    return [f"{begun}{key}={value}" for value in values]


def runs(context: CompletionContext) -> list[str]:
    """Lists the runs in ./runs, the newest first."""
    folders = [file.parent for file in Path("runs").glob("*/run.json")]
    return [str(folder) for folder in sorted(folders, key=lambda folder: folder.name, reverse=True)]


def sites(context: CompletionContext) -> list[str]:
    """Lists the sites that grappe knows, and your own."""
    from grappe.sites import files

    return list(files())
