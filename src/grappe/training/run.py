"""Reads and writes a run's folder: the description, the curves, the checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from grappe.checkpoint import format as checkpoint_format
from grappe.checkpoint.commit import LARGEST_LIST, json_hash, read_json, strangers, write_json
from grappe.checkpoint.format import Choice, leftovers, refuse_package, select
from grappe.checkpoint.lease import FILE as LEASE
from grappe.checkpoint.lease import STALE_SECONDS, Lease, is_taken_over
from grappe.errors import GrappeError, PlanError, RunError
from grappe.errors.foreign_text import entries, number, objects, printable
from grappe.launch import files
from grappe.launch.files import IN_PART, RUNS
from grappe.table import Table, Tabular, frame
from grappe.training.plot import Plot
from grappe.words import VERSION, host_name, plan_name

if TYPE_CHECKING:
    from grappe.launch.world import World
    from grappe.step.scores import Scores

DESCRIPTION = "run.json"
CODE, LARGEST_CODE = "code.txt", 1 << 18
"""The text of the task's file, or of the script, as the newest start had it: to be read, never run."""
HASH = "xxh3_128"  # of the other entries of run.json
METRICS = "metrics.jsonl"
USAGE = "usage.jsonl"
DRAWN_PARTS = 8  # of a training, after which run.json says what was drawn from which source
MOST_OF_REASON = 500  # characters, of why a start failed
SCORES = "scores.json"
"""The scores that `grappe evaluate` computed last, by split."""
MOST_SIZES = 200  # of starts before, in run.json
LONGEST_LINE = 1 << 20  # bytes; a longer one is damage, and is read in parts
DONE, FAILED = "done", "failed"
ENDED_UNEXPECTEDLY = "ended unexpectedly"
SAVED = ("finished", "stopped", "paused", "interrupted")
"""Endings after a save: run.json has its step then."""
PARTS = ("checkpoints", "logs", METRICS, FAILED, USAGE, "samples", "profile", "tensorboard", "wandb", "mlflow")
"""Folders of a run, and the files in it that a training appends to."""
ENTRIES: dict[str, Any] = {
    **dict.fromkeys(("task", "class", "plan", "data", "dataset", "sampling", "source", "device"), str),
    **dict.fromkeys(("processor", "host", "started", "status", "bottleneck", "id", "name", "note", "script"), str),
    "replay": str,
    **dict.fromkeys(("seed", "processes", "threads", "restarts", "step", "total_steps"), int),
    **dict.fromkeys(("fields", "used", "headspace", "loading", "drawn", "drawn_until"), dict[str, Any]),
    "start": TypedDict("Start", {"units": list[str]}, total=False),  # pyrefly: ignore
    "versions": dict[str, str],
    "checked": dict[str, float],
    **dict.fromkeys(("changes", "tags", "lower_is_better"), list[str]),
    **dict.fromkeys(("costs", "sizes"), list[dict[str, Any]]),
}
"""The types of run.json's entries; a run has those that its starts have written so far."""
RENDEZVOUS = re.compile(r"\.(rendezvous|secret)-[0-9a-f-]+(\.[0-9a-f]{8})?", re.ASCII)


class Run(Tabular):
    """The folder of a run, or its name (`grappe train --name`) if a run in ./runs alone has it.

    Raises:
        RunError: the folder is no run, or several runs have the name.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = folder = Path(folder)
        if len(folder.parts) == 1 and not files.kind(folder):
            named = []
            for run in all_runs(RUNS):
                with contextlib.suppress(RunError):
                    named += [run.folder] if run.read_description().get("name") == str(folder) else []
            if len(named) > 1:
                raise RunError(
                    f"{len(named)} runs have the name {folder}: give a folder: {', '.join(map(str, named[:3]))}"
                )
            self.folder = named[0] if named else folder
        refuse_package(self.folder)
        files.refuse_link(self.folder / DESCRIPTION)
        if not (self.folder / DESCRIPTION).is_file():
            runs = [run.folder for run in all_runs(self.folder) or all_runs(self.folder.parent) or all_runs(RUNS)]
            runs.sort(key=lambda run: (run / DESCRIPTION).lstat().st_mtime, reverse=True)
            neighbours = f"; there is: {', '.join(map(str, runs[:3]))}{', …' if len(runs) > 3 else ''}" if runs else ""
            raise RunError(f"{self.folder} is not a run (no {DESCRIPTION}){neighbours}")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def keep_code(self, file: Path) -> None:
        """Keeps the text of the user's file with the run, unless it is larger than LARGEST_CODE or no file."""
        if files.kind(file) == "file" and 0 < file.stat().st_size <= LARGEST_CODE:
            files.replace(self.folder / CODE, files.read_bytes(file))

    def read_description(self) -> dict[str, Any]:
        """Reads run.json: task, fields, plan, versions, hosts, restarts, each of its type.

        Raises:
            RunError: run.json is damaged.
        """
        import msgspec  # 20 ms that few commands need

        description = read_json(self.folder / DESCRIPTION, largest=LARGEST_LIST)
        damage = "" if description.pop(HASH, None) in (None, json_hash(description)) else "its hash differs"
        try:
            msgspec.convert(description, TypedDict("Entries", ENTRIES, total=False))  # pyrefly: ignore
        except (msgspec.ValidationError, ValueError) as error:
            damage = str(error)
        if damage:
            raise RunError(
                f"{self.folder / DESCRIPTION} is damaged ({damage}). The checkpoints next to it are intact: start a "
                f"new run from their weights with --from {self.folder}"
            )
        return description

    def is_finished(self) -> bool:
        """Reads from the run's folder whether the training is finished."""
        return files.kind(self.folder / DONE) != ""

    @property
    def checkpoints(self) -> Path:
        """Returns the folder of the run's checkpoints."""
        return self.folder / "checkpoints"

    def latest(self) -> checkpoint_format.Checkpoint | None:
        """Finds the run's newest checkpoint that verifies."""
        return checkpoint_format.latest(self.checkpoints, self.read_id())

    def read_id(self) -> str:
        """Reads the run's id, which its checkpoints carry, from run.json; "": unknown."""
        try:
            return self.read_description().get("id", "")
        except RunError:
            return ""

    def choose(self, which: int | str | None = None, *, description: Mapping[str, Any] | None = None) -> Choice:
        """Finds the newest checkpoint that verifies, and names the ones passed over; or the requested one.

        Args:
            which: a step, "last" or "best": that one and no other. None: the newest that verifies.
            description: the content of run.json; None: it is read, and may be damaged.

        Raises:
            RunError: the requested one does not verify.
        """
        if description is None:
            try:
                description = self.read_description()
            except RunError:
                description = {}
        saved = description.get("step") if description.get("status") in SAVED else None
        return select(self.checkpoints, which, run=description.get("id", ""), saved=saved)

    def records(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """Yields the records of the run's curves, of one `kind` ("step", "evaluation") or all; skips a damaged line."""
        if files.kind(self.folder / METRICS) not in ("file", "link"):
            return
        try:
            stream = files.reader(self.folder / METRICS)
        except OSError:
            return
        with stream:
            for record in objects(iter(lambda: stream.readline(LONGEST_LINE), b"")):
                if kind in (None, record.get("kind")):
                    yield record

    def last_record(self, kind: str) -> dict[str, Any]:
        """Returns the newest record of a kind; {} if there is none."""
        last: dict[str, Any] = {}
        for record in self.records(kind):
            last = record
        return last

    def curves(self, kind: str = "step") -> Any:
        """Returns the run's curves: a pandas.DataFrame where pandas is installed, else a Table with the same columns.

        Args:
            kind: of the rows: "step" (step, epoch, samples, loss, lr, seconds, …), "evaluation" (step, loss, and the
                task's metrics) or "epoch".
        """
        return frame({name: record[name] for name in record if name != "kind"} for record in self.records(kind))

    def plot(self) -> Plot:
        """Draws the loss and the metrics by step, as a picture for a notebook; `run.plot().save("curves.svg")`."""
        return Plot(self.records())

    def scores(self) -> Scores:
        """Returns the scores of the last evaluation.

        Raises:
            RunError: there was no evaluation.
        """
        from grappe.step.scores import Scores

        record = self.last_record("evaluation")
        if not record:
            raise RunError(f"{self.folder} has no evaluation yet: grappe.evaluate makes one of a checkpoint")
        others = ("kind", "step", "samples", "count", "loss", "split")
        metrics = {name: record[name] if isinstance(record[name], list) else _value(record, name) for name in record}
        return Scores(
            samples=int(number(record.get("samples"))),
            count=number(record.get("count")),
            loss=_value(record, "loss"),
            metrics={name: metrics[name] for name in metrics if name not in others},
            split=str(record.get("split", "validation")),
        )

    def costs(self) -> Any:
        """Returns what each process of the last start used: a pandas.DataFrame, or a Table, with a row for each rank.

        Columns: rank, host, device; `peak` and what was held of it in parameters, gradients and optimizer, in bytes;
        the median seconds of a step and of its phases: data, transfer, forward, backward, communication, update.
        """
        rows = []
        for cost in self.read_description().get("costs", []):
            timing, peak = entries(cost.get("timing")), entries(cost.get("peak"))
            medians = {"step": entries(timing.get("step")), **entries(timing.get("phases"))}
            rows.append(
                {name: cost.get(name) for name in ("rank", "host", "device")}
                | {"peak": peak.get("device", peak.get("host")), **entries(cost.get("held"))}
                | {name: number(entries(medians.get(name)).get("median")) for name in medians}
            )
        return frame(rows)

    def table(self) -> Table:
        """Returns the run's state in one row: task, plan, status, step and the scores of the last evaluation."""
        description, last = self.read_description(), self.last_record("evaluation")
        scores = {name: last[name] for name in last if name not in ("kind", "step", "count")}
        facts = {name: description.get(name) for name in ("task", "started")}
        return Table(
            [
                {
                    "run": self.folder,
                    "plan": plan_name(description.get("plan")),
                    **facts,
                    "status": self.read_status(description),
                    "step": self.step_reached(description),
                    **scores,
                }
            ]
        )

    def step_reached(self, description: Mapping[str, Any]) -> int:
        """Reads the step at which the last start ended; of one that runs or was killed, the last that it has written.

        Args:
            description: the content of run.json.
        """
        if description.get("status") != "running" and "step" in description:
            return int(description["step"])
        saved = [checkpoint.step for checkpoint in checkpoint_format.list_checkpoints(self.checkpoints)]
        return max([0, *saved, *(int(number(record.get("step"))) for record in self.records())])

    def cut_back(self, step: int) -> None:
        """Drops the records of the curves after `step`, at which the training resumes."""
        kept = []
        for record in self.records():
            at = record.get("step", 0)
            if isinstance(at, int) and at <= step:
                kept.append(json.dumps(record))
        files.replace(self.folder / METRICS, "".join(line + "\n" for line in kept).encode())

    def describe(self, **changes: Any) -> None:
        """Changes entries of run.json."""
        self.write_description({**self.read_description(), **changes})

    def describe_drawn(self, counts: Callable[[int], Mapping[str, int]], begin: int, step: int) -> None:
        """Writes to run.json what the steps up to `step` were drawn from, and up to some steps before it.

        Args:
            counts: of samples by source, up to a step from `begin` on; none where it is no mixture.
        """
        if not counts(step):
            return
        earlier = self.read_description().get("drawn_until", {})
        until = {int(place): number for place, number in earlier.items() if int(place) <= begin}
        places = (begin + (step - begin) * part // DRAWN_PARTS for part in range(1, DRAWN_PARTS + 1))
        until |= {place: dict(counts(place)) for place in places if place > begin}
        while len(until) > 2 * DRAWN_PARTS:  # of a loop whose calls are many
            until = dict(list(until.items())[::-2][::-1])
        self.describe(drawn=until[step], drawn_until={str(place): number for place, number in until.items()})

    def write_description(self, description: dict[str, Any]) -> None:
        """Replaces the content of run.json."""
        _write_description(self.folder, description)

    def finish(self) -> None:
        """Marks the training as finished."""
        files.replace(self.folder / DONE, b"")

    def clear(self) -> None:
        """Makes room for a start that holds the lease: removes an earlier one's failure and unfinished saves.

        Raises:
            RunError: a link is in the place of a part of the run.
        """
        for name in PARTS:
            files.refuse_link(self.folder / name)
        files.remove(self.folder / FAILED)
        for entry in leftovers(self.checkpoints):
            with contextlib.suppress(OSError):
                files.remove_tree(entry, IN_PART)

    def note_failure(self, error: BaseException, token: str) -> None:
        """Writes down an error that ends a start, if it is the first.

        Args:
            token: the lease's; a start that has lost the lease to another writes nothing.
        """
        if is_taken_over(self.folder, token):
            return  # the run's state is the other start's
        reason = str(error) if isinstance(error, GrappeError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError, RunError):  # another process has failed before, say
            files.replace(self.folder / FAILED, printable(reason, MOST_OF_REASON).encode(), new=True)

    @contextlib.contextmanager
    def noting_failure(self, token: str) -> Iterator[None]:
        """Context of a start, in each of its processes: notes the first error that ends it, as `note_failure` does."""
        try:
            yield
        except Exception as error:
            if isinstance(error, PlanError) and not files.kind(self.folder / METRICS):
                raise  # a new run is taken back
            self.note_failure(error, token)
            raise

    def read_status(self, description: Mapping[str, Any]) -> str:
        """Reads how the last start stands: "running", "paused", "failed: " and why; "finished" once all is done.

        A start that was killed leaves "running" in run.json: without a living holder of its lease it is
        "ended unexpectedly".
        """
        if self.is_finished():
            return "finished"
        with contextlib.suppress(OSError, RunError, ValueError):
            with files.reader(self.folder / FAILED) as stream:
                reason = stream.read(4 * MOST_OF_REASON).decode(errors="replace")
            return f"failed: {printable(reason, MOST_OF_REASON)}"
        status = description.get("status", "unknown")
        if status != "running" or Lease(self.folder).held_by():
            return status
        # A start writes run.json before it takes the lease.
        age = time.time() - (self.folder / DESCRIPTION).stat().st_mtime
        return status if files.kind(self.folder / LEASE) == "" and age < STALE_SECONDS else ENDED_UNEXPECTEDLY

    @staticmethod
    def is_run(folder: Path) -> bool:
        """Returns whether there is a run in `folder`."""
        return (folder / DESCRIPTION).is_file()

    @classmethod
    def begin(cls, folder: Path, description: dict[str, Any]) -> tuple[Run, Made]:
        """Makes a new run in `folder`, which may exist if it is empty; returns it with the parts that can be undone.

        Raises:
            RunError: the folder has other content, or cannot be written.
        """
        made = Made(folder)
        try:
            with contextlib.suppress(FileExistsError):  # a file in the folder's place is reported below
                folder.parent.mkdir(parents=True, exist_ok=True)
            made.folder(folder)
            for name in files.names(folder):
                kind = files.kind(folder / name)
                if name == "logs" and kind == "link":
                    files.refuse_link(folder / name)
                # A job that was submitted has logs already, and its processes meet in the folder before there is a run.
                if not ((name == "logs" and kind == "folder") or (RENDEZVOUS.fullmatch(name) and kind == "file")):
                    raise RunError(f"{folder} holds {name} and is not a run: give an empty or a new folder")
            for name in ("checkpoints", "logs"):
                made.folder(folder / name)
            _write_description(folder, description, new=True)
            made.described = True
            files.flush(folder.parent)
        except OSError as error:
            # It belongs to another start now: nothing is taken back.
            if isinstance(error, FileExistsError) and cls.is_run(folder):
                raise RunError(
                    f"{folder} was begun by another process a moment ago: give another with --run, "
                    "or start again to continue it when that process has ended"
                ) from error
            made.undo()
            raise RunError(f"{folder} cannot be written: {error.strerror}: give another with --run") from error
        except RunError:
            made.undo()
            raise
        return cls(folder), made


@contextlib.contextmanager
def taken(
    folder: Path, now: dict[str, Any], refuse: Callable[[Mapping[str, Any], Mapping[str, Any]], None]
) -> Iterator[tuple[Run, dict[str, Any], Lease, Made | None]]:
    """Context with a run that this process takes, a new one of the description `now` where `folder` has none.

    After an error the lease is given back, and what was made is removed.

    Args:
        refuse: refuse(before, now) raises RunError if a run with the description `before` cannot be resumed.

    Yields:
        The run, its description before, the lease, and what was made of a new run.
    """
    made = None
    if Run.is_run(folder):
        run = Run(folder)
        before = run.read_description()
        refuse(before, now)
    else:
        run, made = Run.begin(folder, now)
        before = now
    lease = Lease(run.folder)
    lease.take()
    try:
        run.clear()
        yield run, before, lease, made
    except BaseException:
        lease.release()
        if made is not None:
            made.undo()
        raise


def start_facts(world: World) -> dict[str, Any]:
    """Returns the entries of a new run.json that tell of its start: where, when and with which versions."""
    import platform

    import torch

    from grappe.launch.world import processor

    # The size of this start: of a job, also the seconds that it waited, and nodes that idle.
    numbers = {name: os.environ.get(f"GRAPPE_{name.upper()}", "") for name in ("waited", "idle_nodes", "start")}
    of_job = {name: int(text) for name, text in numbers.items() if re.fullmatch("[0-9]{1,12}", text)}
    nodes = max(1, world.size // world.process.local_size)
    return {
        "processes": world.size,
        "threads": world.threads,
        "device": world.device.type,
        "processor": processor(world.device),
        "host": host_name(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {"grappe": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        "restarts": 0,
        "status": "running",
        "id": secrets.token_hex(16),
        "sizes": [{"at": round(time.time()), "step": 0, "processes": world.size, "nodes": nodes, **of_job}],
    }


def restarted(before: Mapping[str, Any], now: Mapping[str, Any], step: int = 0) -> dict[str, Any]:
    """Returns the content of a run.json after a restart at `step`; it keeps the time and place of its first start."""
    sizes = [*before.get("sizes", [])[-MOST_SIZES:], *({**size, "step": step} for size in now.get("sizes", []))]
    kept = {name: before[name] for name in ("started", "host", "id") if name in before}
    return {**before, **now, **kept, "sizes": sizes, "restarts": before.get("restarts", 0) + 1}


class Made:
    """Parts of a new run that a start has made: only these may be removed again."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._folders = [folder for folder in reversed(run.parents) if not folder.exists()]
        self.described = False
        """Whether run.json is of this start."""

    def folder(self, folder: Path) -> None:
        """Makes a folder, unless there is one."""
        if files.make_folder(folder):
            self._folders.append(folder)

    def undo(self) -> None:
        """Removes run.json, the code, the checkpoints, its processes' logs, and folders that are empty then."""
        logs = self.run / "logs"
        with contextlib.suppress(OSError, RunError):
            for name in files.names(logs) if logs in self._folders else ():
                if name.startswith("rank-"):
                    files.remove(logs / name)
            if self.described:  # so nothing was in `checkpoints` before this start
                checkpoints = self.run / "checkpoints"
                saved = [saved.folder for saved in checkpoint_format.list_checkpoints(checkpoints)]
                for left in (*leftovers(checkpoints), *saved):
                    if files.kind(left) == "folder" and not strangers(left):
                        files.remove_tree(left, IN_PART)
                files.remove(self.run / DESCRIPTION)
                files.remove(self.run / CODE)
        for folder in reversed(self._folders):
            files.remove_empty(folder)


def _write_description(folder: Path, description: dict[str, Any], *, new: bool = False) -> None:
    write_json(folder / DESCRIPTION, {**description, HASH: json_hash(description)}, new=new)


def short_name(task: str) -> str:
    """Returns a task's name for a run's folder and header: spiral of spiral.py, net of models.py:Net."""
    place, _, name = task.partition(":")
    return name.lower() or Path(place).name.removesuffix(".py")


def new_folder(base: Path, task: str) -> Path:
    """Chooses a name for a new run under `base`: the task's, the time, and four digits against a race."""
    return base / f"{short_name(task)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def all_runs(base: Path) -> list[Run]:
    """Lists the runs under `base`, oldest first."""
    if not base.is_dir():
        return []
    return [Run(entry) for entry in sorted(base.iterdir()) if (entry / DESCRIPTION).is_file()]


def _value(record: Mapping[str, Any], name: str) -> float:
    """Returns a number of a record; NaN, which JSON does not have, where it has none."""
    return math.nan if record.get(name) is None else number(record[name])
