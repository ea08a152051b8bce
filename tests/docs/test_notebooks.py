"""Labs as pages: their outputs, solutions folded; stored outputs name no folder of the machine."""

import json
from pathlib import Path
from typing import Any

import pytest
from docs import labs
from docs.site import notebooks


def cell(kind: str, *lines: str) -> dict[str, Any]:
    further = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": f"c{hash(lines)}", "metadata": {}, "source": list(lines), **further}


CELLS = [
    cell("markdown", "# A lab"),
    cell(
        "code",
        "import os\n",
        "print('step 1   \\r' + 'step 2')\n",
        "print(os.getcwd() + '/runs/x', flush=True)\n",
        "print('on', os.uname().nodename)",
    ),
    cell("markdown", "Try.\n\n## Solution\n", "\n", "It is 2."),
    cell("code", "class Shown:\n    def _repr_html_(self):\n        return '<b>2</b>'\n\n\nShown()"),
    cell("markdown", "## More"),
]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("labs") / "lab.ipynb"
    file.write_text(json.dumps({"cells": CELLS, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    labs.execute(file)
    return file


def test_outputs_are_as_a_terminal_leaves_them(executed: Path) -> None:
    book = json.loads(executed.read_text())
    (output,) = book["cells"][1]["outputs"]
    assert "".join(output["text"]) == "step 2\nruns/x\non node\n"
    _, heading, text = book["cells"][2:5]
    assert heading["metadata"] == {"jp-MarkdownHeadingCollapsed": True}
    assert "".join(text["source"]) == "It is 2."


def test_a_lab_is_a_page_with_outputs_and_folded_solutions(executed: Path) -> None:
    page = notebooks.markdown(executed)
    assert ":class: output\n\nstep 2" in page
    _, _, rest = page.partition('<details class="solution"><summary>Solution</summary>')
    folded, _, after = rest.partition("</details>")
    assert "It is 2." in folded
    assert "<b>2</b>" in folded
    assert "## More" in after


def test_changed_code_is_outdated(executed: Path) -> None:
    book = json.loads(executed.read_text())
    assert labs.outdated(book) == ""
    book["metadata"]["grappe"]["words"] = "other"
    assert labs.outdated(book) == "words"
    book["cells"][1]["source"] = ["print(3)"]
    assert labs.outdated(book) == "code"
