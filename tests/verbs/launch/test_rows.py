"""Scripts for one process, unedited, on two and three: the lines and the weights of one process."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest
import torch

from grappe.verbs.launch.launch import launch
from tests.verbs.launch.script_rows import HEAD, SCRIPTS

ALL = """
import runpy, sys
import torch

saved = {}
for number in range(int(sys.argv[2])):
    print("##", number, flush=True)
    names = runpy.run_path(f"form_{number}.py")
    saved[number] = [each.detach().clone() for each in names["weights"]]
torch.save(saved, sys.argv[1])
"""
Trained = tuple[list[str], dict[int, list[torch.Tensor]]]


def written(folder: Path) -> None:
    for number, body in enumerate(SCRIPTS.values()):
        (folder / f"form_{number}.py").write_text(HEAD + body)
    (folder / "train.py").write_text(ALL)


def trained(text: str, file: Path) -> Trained:
    return [part.partition("\n")[2] for part in text.split("## ")[1:]], torch.load(file)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What each script prints and learns by itself."""
    folder = tmp_path_factory.mktemp("plain")
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()) as lines:
        patched.chdir(folder)
        written(folder)
        patched.setattr(sys, "argv", ["train.py", "plain.pt", str(len(SCRIPTS))])
        torch.set_num_threads(1)
        runpy.run_path("train.py", run_name="__main__")
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    return trained(lines.getvalue(), folder / "plain.pt")


@pytest.mark.parametrize("processes", [2, 3])
def test_scripts_learn_and_print_on_several_processes_what_they_do_on_one(
    processes: int,
    plain: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    plan = f"replicate={processes},device=cpu,threads=1"
    assert launch("train.py", ["out.pt", str(len(SCRIPTS))], plan) == 0
    lines, weights = trained(capfd.readouterr().out, tmp_path / "out.pt")
    for number, name in enumerate(SCRIPTS):
        assert lines[number] == plain[0][number], name
        for tensor, other in zip(plain[1][number], weights[number], strict=True):
            assert float((tensor - other).double().norm()) <= 1e-8 * float(tensor.double().norm()) + 1e-12, name
