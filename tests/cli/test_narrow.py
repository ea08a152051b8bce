"""On a narrow terminal a table is shown as several, each with the whole first column; no column is lost."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import RenderableType

from grappe.contrib.slurm import jobs, slurm
from grappe.launch.safe_console import SafeConsole, wide_console
from grappe.verbs import catalogue, runs
from grappe.verbs.foresee import tables
from tests.verbs.foresee.test_tables import PLANS

NAME = "digits-20261125-143000-7c1e"


def run_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> RenderableType:
    (folder / NAME).mkdir()
    described = {"task": "digits", "plan": "replicate=2,shard=4,precision=bf16", "tags": ["thesis", "second"]}
    (folder / NAME / "run.json").write_text(json.dumps(described))
    scores = {"kind": "evaluation", "step": 3, "count": 360, "loss": 0.0664, "accuracy": 0.9833}
    (folder / NAME / "metrics.jsonl").write_text(json.dumps(scores) + "\n")
    return runs.listing(folder)


def queue_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> RenderableType:
    entry = slurm.Entry(
        job="1234567_[1-20]", name=NAME, state="PENDING", reason="Priority", start="2026-11-26T10:00:00",
        left="3:00:00", nodes="node[12-20]",
    )  # fmt: skip
    monkeypatch.setattr(slurm, "queue", lambda: [entry])
    return jobs.queue(folder)


TABLES: dict[str, tuple[str, Callable[[Path, pytest.MonkeyPatch], RenderableType]]] = {
    "runs": (NAME, run_table),
    "queue": ("1234567_[1-20]", queue_table),
    "tasks": ("fashion_mnist", lambda *given: catalogue.task_list()),
    "engines": ("channels_last", lambda *given: catalogue.plan_table()),
    "sites": ("jean-zay-cpu", lambda *given: catalogue.site_list()),
    "gpus": ("one die of an AMD Instinct MI250X, 64 GB", lambda *given: catalogue.gpu_list()),
    "foresee": ("replicate=2", lambda *given: tables.table(PLANS, PLANS.plans)),
}


def printed(table: RenderableType, width: int | None) -> str:
    stream = io.StringIO()
    console = (
        SafeConsole(stream, width=width, force_terminal=True, color_system=None) if width else wide_console(stream)
    )
    console.print(table)
    return stream.getvalue()


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("kind", TABLES)
def test_the_first_column_is_whole(kind: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, make = TABLES[kind]
    table = make(tmp_path, monkeypatch)
    wide, narrow = printed(table, None), printed(table, width)
    assert any(line.startswith(first) for line in wide.splitlines())
    assert max(map(len, narrow.splitlines())) <= width
    blocks = narrow.split("\n\n") if "\n\n" in narrow else [narrow]
    assert all(any(line.startswith(first) for line in block.splitlines()) for block in blocks)
    heads = [name.strip() for name in wide.splitlines()[0].split("  ") if name.strip()]
    shown = " ".join(block.splitlines()[0] for block in blocks)
    assert [name for name in heads if name not in shown] == []
