"""TaskReference: a task that other processes can load; and the record of the task that each run was trained with.

Records stand outside of all runs, as a run's own words are no reason to run code (decision 72): each is a file of the
user's state folder, named by the run's id.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grappe import finder
from grappe.checkpoint.commit import read_json
from grappe.errors import RunError, TaskError
from grappe.fields import parse, text_of
from grappe.launch import files
from grappe.launch.files import state_base, state_folder
from grappe.task import Task, check_signatures, fields, overrides
from grappe.training.run import DESCRIPTION, Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskReference:
    """A task that other processes can load: by name and field texts, or by value from a notebook or a script."""

    name: str
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    value: Task | None = None
    root: str = ""
    """The folder that its module must come from; "": anywhere."""

    def resolve(self) -> Task:
        """Finds or unpickles the task.

        Raises:
            TaskError: the task cannot be found or made, or lacks a part.
        """
        task = self.value if self.value is not None else finder.make(finder.find(self.name, self.root), self.texts)
        for part in ("model", "data", "loss", "optimizer"):
            if not overrides(task, part):
                raise TaskError(f"the task {type(task).__name__} has no {part}(): write it, see grappe.Task.{part}")
        check_signatures(task)
        return task

    def with_values(self, **values: Any) -> TaskReference:
        """Returns the task with other values of some of its fields."""
        if self.value is not None:
            return dataclasses.replace(self, value=dataclasses.replace(self.value, **values))
        return dataclasses.replace(self, texts={**self.texts, **{name: str(value) for name, value in values.items()}})

    def with_batch(self, batch: int, times: int = 1) -> TaskReference:
        """Returns the task with `times` its batch size, or times `batch` where that is not 0."""
        if not batch and times == 1:
            return self
        return self.with_values(batch_size=(batch or self.resolve().batch_size) * times)

    @classmethod
    def of(cls, task: Task | type[Task] | str, values: Mapping[str, object] | None = None) -> TaskReference:
        """Makes a reference from a task, its class, or its name, with other `values` of some of its fields.

        Raises:
            TaskError: it is no task.
            UsageError: it has no such field, or a value is of the wrong type.
        """
        if isinstance(task, str):
            place, colon, class_name = task.partition(":")
            name = f"{Path(place).resolve()}{colon}{class_name}" if place.endswith(".py") else task
            return cls(name=name, texts={name: text_of(value) for name, value in (values or {}).items()})
        value = task() if isinstance(task, type) else task
        if not isinstance(value, Task):
            raise TaskError(f"{value!r} is not a task: derive its class from grappe.Task")
        kind = type(value)
        if values:
            texts = {name: text_of(value) for name, value in values.items()}
            value = dataclasses.replace(value, **parse(kind, texts, f"task {kind.__name__}"))
        return cls(name=f"{kind.__module__}:{kind.__qualname__}", value=value)


def same_task(task: Task, description: Mapping[str, Any]) -> bool:
    """Returns whether a run's description is of this task: the same class, even if its file has moved."""
    return description.get("class") == type(task).__qualname__


def field_texts(task: Task) -> dict[str, Any]:
    """Returns the task's fields in JSON's form."""
    return {
        name: value if value is None or isinstance(value, bool | int | float | str) else repr(value)
        for name, value in fields(task).items()
    }


def source_hash(task: Task) -> str:
    """Hashes the task's own source text; "" if the source is not available."""
    try:
        return hashlib.sha256(inspect.getsource(type(task)).encode()).hexdigest()[:12]
    except (OSError, TypeError):
        return ""


RECORDS = "tasks"
SCRIPT = "Script"
"""Class of a launched script's run in run.json."""
ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


def write_record(run: str, name: str) -> str | None:
    """Writes down that the run of id `run` is trained with the task called `name`, in its file as it is now.

    Returns:
        Why later commands will ask for --task, for the user; None: they will not.
    """
    if finder.shipped(name) is not None or name.startswith("__main__:"):
        return None
    place = name.partition(":")[0]
    if place.endswith(".py"):
        file: Path | None = Path(place)
    else:
        source = getattr(sys.modules.get(place), "__file__", None)
        file = Path(source).resolve() if isinstance(source, str) and source.endswith(".py") else None
    if file is None or run_around(file) is not None:
        return f"the task {name} is in no file outside of runs: later commands will ask for --task"
    folder = state_folder(RECORDS, make=True)
    if folder is None:
        where = state_base() or "the home folder"
        return f"{where} cannot be written, so which task this run has is not kept: later commands will ask for --task"
    depth = 0 if place.endswith(".py") else place.count(".") + (file.name == "__init__.py")
    root = file.parents[depth]  # the folder that the task's module was imported from
    record = {"task": name, "file": str(file), "sha256": _hash(file), "root": str(root)}
    try:
        files.replace(folder / f"{run}.json", json.dumps(record, indent=1).encode(), mode=files.PRIVATE)
    except (OSError, RunError) as error:
        return f"which task this run has is not kept ({error}): later commands will ask for --task"
    return None


def reference_of(run: Run, *, asks: bool = True) -> TaskReference:
    """Returns the task that a run was trained with: a shipped one, or one that was trained here and has not changed.

    Imports nothing.

    Args:
        asks: whether the command takes --task (task=… in Python), which errors then name.

    Raises:
        TaskError: the run is of neither kind: the user must name its task.
        RunError: the run's description is not usable.
    """
    description = run.read_description()
    name, texts = description.get("task"), texts_of(description)
    _refuse_script(run)
    if "script" in description:
        raise RunError(
            f"{run.folder} is a run of a grappe.Loop, whose models only its script makes: the script evaluates and "
            "predicts; in Python grappe.load_models(run, *models) fills models with its weights"
        )
    if not isinstance(name, str) or texts is None:
        raise RunError(f"{run.folder}/{DESCRIPTION} does not name its task")
    if (own := finder.shipped(name)) is not None:
        return TaskReference(name=own, texts=texts)
    if name.startswith("__main__:"):
        # In this very script or notebook, which runs already; other processes lack it.
        return TaskReference.of(finder.make(finder.find(name), texts))
    record = _read(run.read_id())
    if record is None:
        shown = name if name.isprintable() and len(name) < 200 else repr(name[:200])
        why = (
            f"{run.folder} names the task {shown}, but nothing shows that you trained it here: "
            "grappe does not run code because a run names it"
        )
        raise TaskError(f"{why}. Say which task it is: --task path/to/file.py (task=… in Python)" if asks else why)
    file = Path(record["file"])
    _check(run, record, file, asks)
    if record["task"].partition(":")[0].endswith(".py"):
        return TaskReference(name=record["task"], texts=texts)
    return TaskReference(name=record["task"], texts=texts, root=record["root"])


def resolve_task(run: Run, task: Task | type[Task] | str | None) -> TaskReference:
    """Returns the user's task for a run, with the run's fields where the task is a name or a class.

    Raises:
        TaskError: it lies inside a run.
    """
    if task is None:
        return reference_of(run)
    _refuse_script(run)
    if isinstance(task, Task):
        return TaskReference.of(task)
    texts = texts_of(run.read_description()) or {}
    if isinstance(task, type):
        return TaskReference.of(finder.make(task, texts))
    place = task.partition(":")[0]
    finder.check_name(task)
    if place.endswith(".py") and (inside := run_around(Path(place))) is not None:
        raise TaskError(
            f"--task={task}: the file is inside the run {inside}, and grappe runs nothing that came with a run. "
            "If it is yours, copy it to another folder first"
        )
    return TaskReference.of(task, texts)


def _refuse_script(run: Run) -> None:
    if run.read_description().get("class") == SCRIPT:
        raise TaskError(
            f"{run.folder} is the run of a script, whose model grappe cannot make: evaluate, predict or export in the "
            "script, from the weights that it saves; or describe the training as a task (docs/task.md)"
        )


def texts_of(description: dict[str, Any]) -> dict[str, str] | None:
    """Returns the texts of the task's fields in a run's description; None where it has none."""
    values = description.get("fields")
    if values is None:
        return None
    return {field: "none" if value is None else str(value) for field, value in values.items()}


def run_around(file: Path) -> Path | None:
    """Finds the run's folder that a file lies in."""
    for folder in file.resolve().parents:
        if (folder / DESCRIPTION).exists():
            return folder
    return None


def _check(run: Run, record: dict[str, str], file: Path, asks: bool) -> None:
    if run_around(file) is not None or not file.is_file():
        why = f"{run.folder} was trained with {file}, which no longer exists"
        again = f"Say which task it is: --task path/to/file.py (task=… in Python) loads {run.folder} with it"
        raise TaskError(f"{why}. {again}" if asks else why)
    if _hash(file) != record["sha256"]:
        why = f"{file} has changed since {run.folder} was trained with it"
        again = f"If it is still the same task: --task {record['task']} (task=… in Python) takes it as it is now"
        raise TaskError(f"{why}. {again}" if asks else f"{why}: train it again in another folder")


def _read(run: str) -> dict[str, str] | None:
    folder = state_folder(RECORDS, make=False)
    if folder is None or not ID.fullmatch(run):
        return None
    try:
        record = read_json(folder / f"{run}.json")
    except RunError:
        return None
    keys = ("task", "file", "sha256", "root")
    return record if all(isinstance(record.get(name), str) for name in keys) else None


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
