"""A notebook, executed by a real kernel: a training shows its progress in the cell; the course's calls, one for one."""

from __future__ import annotations

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

from grappe import slurm
from grappe.errors import UsageError
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]


def executed(cells: list[str], folder: Path) -> list[str]:
    """Executes a notebook of these cells in `folder`; returns what each wrote to its output."""
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(text) for text in cells]
    client = nbclient.NotebookClient(
        book, timeout=PATIENCE_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    with pytest.MonkeyPatch.context() as patch:
        # With it ipykernel leaves out what other processes write, which a notebook of a user's shows.
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        client.execute()
    return ["".join(output.text for output in cell.outputs if output.output_type == "stream") for cell in book.cells]


TRAIN = """
import grappe
from tests.slow import Slow

task = Slow(epochs=3, pause=0.4)
run = grappe.train(task, "replicate=2,device=cpu,threads=1,workers=0")
"""


def test_progress_is_in_the_cell(tmp_path: Path) -> None:
    said, loss = executed([TRAIN, "print(grappe.load(run, task).weight.shape)"], tmp_path)
    assert "\repoch 1  step " in said
    assert "/24  loss" in said
    assert "epoch  3  step   24" in said
    assert "torch.Size([2, 3])" in loss


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
def test_what_the_courses_call_cannot_have_is_refused(options, words: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dlojz.py").write_text("print(1)\n")
    with pytest.raises(UsageError, match=words):
        slurm.gpu_jobs_submitter("dlojz.py -b 128", 1, site="jean-zay-v100", account="a@v100", **options)
    assert not (tmp_path / "runs").exists()


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
