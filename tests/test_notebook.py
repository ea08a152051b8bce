"""A notebook, in a real kernel: a training's curves in the cell, short errors; the course's calls, one for one."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from docs import translations
from jupyter_client.manager import KernelManager

from grappe import slurm
from grappe.errors import UsageError
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def in_users_environment() -> pytest.MonkeyPatch:
    """With pytest's variable ipykernel leaves out what other processes write, which a notebook of a user's shows."""
    patch = pytest.MonkeyPatch()
    patch.delenv("PYTEST_CURRENT_TEST", raising=False)
    patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    return patch


def executed(cells: list[str], folder: Path) -> list[str]:
    """Executes a notebook of these cells in `folder`; returns what each wrote to its output."""
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(text) for text in cells]
    place = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(book, timeout=PATIENCE_SECONDS, kernel_name="python3", resources=place)
    patch = in_users_environment()
    try:
        client.execute()
    finally:
        patch.undo()
    return ["".join(output.text for output in cell.outputs if output.output_type == "stream") for cell in book.cells]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel, which executes one cell after the other."""

    manager: KernelManager
    client: Any
    folder: Path

    def execute(self, code: str, during: Callable[[str], None] = lambda kind: None) -> list[tuple[str, dict[str, Any]]]:
        """Executes a cell; returns its messages, of each the kind and the content; calls `during` with each kind."""
        messages = []

        def note(message: dict[str, Any]) -> None:
            if message["msg_type"] not in ("status", "execute_input"):
                messages.append((message["msg_type"], message["content"]))
                during(message["msg_type"])

        self.client.execute_interactive(code, output_hook=note, timeout=PATIENCE_SECONDS)
        return messages


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("notebook")
    manager, patch = KernelManager(kernel_name="python3"), in_users_environment()
    try:
        manager.start_kernel(cwd=str(folder))
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=PATIENCE_SECONDS)
        made = Kernel(manager=manager, client=client, folder=folder)
        made.execute("import grappe\nfrom tests.slow import Slow")
        yield made
    finally:
        patch.undo()
        manager.shutdown_kernel(now=True)


def pictures(messages: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The HTML that is displayed and updated in a cell; all of it in one place."""
    shown = [content for kind, content in messages if kind in ("display_data", "update_display_data")]
    assert len({content["transient"]["display_id"] for content in shown}) == 1
    return [content["data"]["text/html"] for content in shown]


def text(messages: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(content["text"] for kind, content in messages if kind == "stream")


PLAN = "replicate=2,device=cpu,threads=1,workers=0"


def test_a_training_has_its_curves_in_the_cell(kernel: Kernel) -> None:
    messages = kernel.execute(f'task = Slow(epochs=1, pause=0.3)\nrun = grappe.train(task, "{PLAN}")')
    shown, words = pictures(messages), text(messages)
    assert "starting 2 processes" in shown[0]
    assert any("epoch 1, step" in picture and "polyline" in picture for picture in shown)
    assert "validation</tspan>" in shown[-1] and "epoch" not in shown[-1]
    assert "\r" not in words and "  \n" not in words
    assert words.startswith("slow on 2 processes")
    assert "epoch  1  step    8" in words
    [(_, result)] = kernel.execute("run")
    assert "finished" in result["data"]["text/html"]
    [(_, result)] = kernel.execute("print(grappe.load(run, task).weight.shape)")
    assert "torch.Size([2, 3])" in result["text"]


def test_an_error_is_its_message_and_the_users_line(kernel: Kernel) -> None:
    [(kind, content)] = kernel.execute('x = 1\ngrappe.train("digits", "replicte=2")')
    assert kind == "error"
    assert content["traceback"] == [
        'line 2: grappe.train("digits", "replicte=2")',
        "PlanError: plan has no 'replicte': did you mean replicate or recompute or device?",
        "%tb shows the whole traceback",
    ]
    [(_, content)] = kernel.execute("%tb")
    assert "in as_plan" in "".join(content["traceback"])


def test_the_guide_runs_cell_by_cell(kernel: Kernel) -> None:
    """docs/notebook.md, whose cells follow from each other."""
    guide = (ROOT / "docs" / "notebook.md").read_text()
    blocks = [block for block in translations.blocks(guide) if block.startswith("```python")]
    cells = [block.split("\n", 1)[1].rpartition("\n")[0] for block in blocks]
    contents = [kernel.execute(cell) for cell in cells]
    assert not [content["traceback"] for messages in contents for kind, content in messages if kind == "error"]
    _, plot, verdicts, _ = contents
    assert plot[-1][1]["data"]["text/html"].count("polyline") == 3  # training, validation; accuracy
    assert "replicate=2" in verdicts[-1][1]["data"]["text/html"]
    assert kernel.execute("run.scores().metrics['accuracy'] > 0.5")[-1][1]["data"]["text/plain"] == "True"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_gpu_per_task": 2}, "shard=2"),
        ({"script_addon": "module load x; rm -rf /"}, "nothing that is typed becomes one"),
        ({"slurm_addon": "--output=/etc/passwd"}, "grappe sets --output by itself"),
        ({"slurm_addon": "'--comment=a b'"}, "without spaces and quotes"),
        ({"name": "a b"}, "letters, digits"),
    ],
)
def test_what_the_courses_call_cannot_have_is_refused(options, words: str, here: Path) -> None:
    (here / "dlojz.py").write_text("print(1)\n")
    with pytest.raises(UsageError, match=words):
        slurm.gpu_jobs_submitter("dlojz.py -b 128", 1, site="jean-zay-v100", account="a@v100", **options)
    assert not (here / "runs").exists()


def test_a_task_is_submitted_as_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the submission itself; tests/slurm has a real one."""
    seen = []
    monkeypatch.setattr(slurm, "submit_all", lambda submissions: seen.extend(submissions) or [])
    slurm.gpu_jobs_submitter(["digits lr=0.2 --plan replicate=2", "train digits"], 1, site="generic")
    assert [(one.command, one.task) for one in seen] == [("train", "digits")] * 2
    assert seen[0].fields == ("lr=0.2",) and seen[0].plans == ("replicate=2",)


def test_logs_are_found_as_on_the_page(tmp_path: Path) -> None:
    for name, job in (("dlojz-1", "12345"), ("dlojz-2", "67"), ("other", "89")):
        logs = tmp_path / name / "logs"
        logs.mkdir(parents=True)
        (logs / f"job-{job}.out").write_text("")
    jobid = ["12345"]
    for options in ({}, {"with_err": True}):
        assert slurm.search_log(contains=jobid, base=tmp_path, **options)[0].endswith("job-12345.out")
    assert len(slurm.search_log("dlojz", contains=["67", "89"], base=tmp_path)) == 1
    assert len(slurm.search_log(base=tmp_path)) == 3
