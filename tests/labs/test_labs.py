"""The labs, executed by a kernel in an environment that has grappe's wheel and no checkout: `make soak` runs all."""

import ast
import inspect
import json
from pathlib import Path

import nbclient
import nbformat
import pytest
from docs.labs import outdated

import grappe as package
from tests.patience import PATIENCE_SECONDS
from tests.test_wheel import grappe, wheel  # noqa: F401

LABS = Path(__file__).parents[2] / "labs"
BOOKS = sorted(LABS.glob("*.ipynb"))
ALL = (*BOOKS, *sorted((LABS.parent / "examples").glob("*.ipynb")))
QUICK = ("01-first-job", "10-from-scratch")
"""Those of every test run; with the others it would be minutes more."""


@pytest.fixture(scope="module")
def kernel(grappe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A folder of Jupyter's with the kernel "lab", which is the environment's Python."""
    folder = tmp_path_factory.mktemp("jupyter")
    (folder / "kernels" / "lab").mkdir(parents=True)
    python = str(grappe.resolve().with_name("python"))
    command = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": command, "display_name": "lab", "language": "python"}
    (folder / "kernels" / "lab" / "kernel.json").write_text(json.dumps(spec))
    return folder


@pytest.mark.parametrize(
    "book", [pytest.param(one, marks=[] if one.stem in QUICK else [pytest.mark.soak], id=one.stem) for one in ALL]
)
def test_a_lab_runs(book: Path, kernel: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(kernel))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    content = nbformat.read(book, as_version=4)
    content.cells.append(nbformat.v4.new_code_cell("import grappe\n\nprint(grappe.__file__)"))
    client = nbclient.NotebookClient(
        content, timeout=PATIENCE_SECONDS, startup_timeout=PATIENCE_SECONDS, kernel_name="lab",
        resources={"metadata": {"path": str(tmp_path)}},
    )  # fmt: skip
    client.execute()
    imported = "".join(output.get("text", "") for output in content.cells[-1].outputs)
    assert "site-packages" in imported


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_a_lab_has_a_question_a_look_and_a_solution(book: Path) -> None:
    content = nbformat.read(book, as_version=4)
    nbformat.validate(content)
    text = "\n".join(cell.source for cell in content.cells if cell.cell_type == "markdown")
    for part in ("*Question:", "*Question :", "**Look at**", "## Solution"):
        assert part in text, part
    assert outdated(content) != "code", "execute it: make labs ONLY=" + book.stem[:2]


@pytest.mark.parametrize("book", ALL, ids=lambda book: book.stem)
def test_a_labs_calls_fit_the_signatures(book: Path) -> None:
    content = nbformat.read(book, as_version=4)
    for cell in content.cells:
        for call in ast.walk(ast.parse(cell.source if cell.cell_type == "code" else "")):
            name = ast.unparse(call.func).removeprefix("grappe.") if isinstance(call, ast.Call) else ""
            if name in package.__all__:
                named = {word.arg: None for word in call.keywords if word.arg}
                inspect.signature(getattr(package, name)).bind_partial(*call.args, **named)


def test_there_is_at_most_a_dozen() -> None:
    assert len(BOOKS) <= 12
