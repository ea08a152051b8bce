"""The operator in C++ computes and learns what torch's own do, under every plan; it can be verified and exported."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from grappe import finder
from grappe.contrib.export.export import export
from grappe.contrib.export.folder import ExportOptions
from grappe.errors import UsageError
from grappe.training.run import Run
from tests import needs
from tests.commands import GRAPPE, ran
from tests.extension import cell
from tests.parity.cell import TOLERANCE, difference
from tests.patience import PATIENCE_SECONDS
from tests.processes import Pool
from tests.training.test_training import train

pytestmark = pytest.mark.slow

STEPS = 4
PLANS = (
    "replicate=2", "shard=2", "shard=2,zero=2", "pipeline=2,microbatches=2", "tensor=2", "exact=2,replicate=2",
    "microbatches=2", "recompute", "compile", "offload=cpu", "engine=textbook,replicate=2",
    "engine=lightning,replicate=2", "engine=deepspeed,replicate=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder in which pip has installed the extension, from a copy: building leaves files beside the sources."""
    needs.compiler()
    folder = tmp_path_factory.mktemp("extension")
    ignored = shutil.ignore_patterns("build", "*.egg-info")
    copy = shutil.copytree(cell.FOLDER, folder / "source", ignore=ignored)
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--target"]
    done = subprocess.run(
        [*pip, str(folder / "site"), str(copy)], check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return str(folder / "site")


@pytest.fixture(scope="module", autouse=True)
def found(built: str) -> None:
    """Once its operators are registered they stay, in this process."""
    sys.path.insert(0, built)


def operands(kind: torch.dtype, *, gradients: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    gate, x = (torch.randn(7, 33, generator=generator, dtype=torch.double) for _ in range(2))
    return (4 * gate).to(kind).requires_grad_(gradients), x.to(kind).requires_grad_(gradients)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
)
def test_values_and_gradients_are_those_of_torchs_operators(kind: torch.dtype, tolerance: float) -> None:
    from swiglu import swiglu, swiglu_in_python

    found = []
    for operator in (swiglu, swiglu_in_python):
        gate, x = operands(kind)
        output = operator(gate, x)
        output.sum().backward()
        found.append((output, gate.grad, x.grad))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == kind
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_gradcheck_and_opcheck() -> None:
    from swiglu import swiglu

    inputs = operands(torch.float64)
    assert torch.autograd.gradcheck(swiglu, inputs)
    assert torch.autograd.gradcheck(lambda gate, x: swiglu(gate.t(), x.t()), inputs)  # not contiguous
    plain = operands(torch.float64, gradients=False)
    torch.library.opcheck(torch.ops.swiglu.forward, inputs)
    torch.library.opcheck(torch.ops.swiglu.backward, (plain[1], *plain))


def test_no_row_depends_on_where_it_stands() -> None:
    """Tests what `exact` needs: a row's bits are the same in a batch of any size."""
    from swiglu import swiglu

    gate, x = operands(torch.float32, gradients=False)
    assert torch.equal(swiglu(gate, x)[5:6], swiglu(gate[5:6], x[5:6]))


@pytest.mark.parametrize(
    ("gate", "x", "told"),
    [
        (torch.zeros(3, 2), torch.zeros(2, 3), "give one shape"),
        (torch.zeros(3), torch.zeros(3).double(), "give one type"),
        (torch.zeros(3).long(), torch.zeros(3).long(), "not implemented for 'Long'"),
    ],
)
def test_wrong_inputs_are_refused(gate: torch.Tensor, x: torch.Tensor, told: str) -> None:
    from swiglu import swiglu

    with pytest.raises(RuntimeError, match=told):
        swiglu(gate, x)


@functools.cache
def _plain(pool: Pool, built: str) -> dict[str, Any]:
    """One process, and torch's own operators."""
    return pool.run("tests.extension.cell:train", 1, built, True, "", STEPS)[0]


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_learns_what_one_process_does_in_python(plan: str, pool: Pool, built: str) -> None:
    alone = _plain(pool, built)
    processes = 2 if "=2" in plan.replace("microbatches=2", "") else 1
    trained = pool.run("tests.extension.cell:train", processes, built, False, plan, STEPS)[0]
    gap, worst = difference(alone["weights"], trained["weights"])
    assert gap <= TOLERANCE, f"{worst} is {gap:.1e} away"
    assert trained["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def test_verify_judges_it(built: str, tmp_path: Path) -> None:
    path = f"{os.environ.get('PYTHONPATH', '')}:{built}"
    done = ran(GRAPPE, "verify", str(cell.TASK), "--plan", "exact=2", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same" in done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, found: None) -> Run:
    folder = tmp_path_factory.mktemp("extension-run") / "run"
    return Run(train(folder, finder.find(str(cell.TASK))(), "threads=1", steps=4).run)


def test_the_program_compiles_the_operator(run: Run, tmp_path: Path) -> None:
    """The proof runs the program, which has no Python to load the extension with."""
    done = export(run, tmp_path / "out", ExportOptions(operators=(cell.SOURCE,)), task=str(cell.TASK), data=tmp_path)
    assert done.cpp is None
    known = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert known["operators"] == ["swiglu::forward"]
    assert "operators/swiglu.cpp" in known["files"]


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        ([], r"operators that LibTorch does not have: swiglu::forward\. Give the C\+\+ source"),
        ([cell.FOLDER / "none.cpp"], r"none\.cpp: give a file of C\+\+"),
        ([cell.FOLDER / "setup.py"], r"setup\.py: give a file of C\+\+"),
        ([cell.SOURCE, cell.SOURCE], "two files have one name"),
    ],
)
def test_sources_that_cannot_be(run: Run, sources: list[Path], told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        export(run, tmp_path / "out", ExportOptions(operators=tuple(sources)), task=str(cell.TASK), data=tmp_path)
    assert not list(tmp_path.iterdir())
