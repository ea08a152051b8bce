"""docs/from-a-script.md: its scripts with grappe print the same on several processes; its lines; its tables."""

import difflib
import re
import shlex
from pathlib import Path

import pytest
from docs import translations

from grappe import engines
from grappe.cli.commands import app
from grappe.plan import Plan
from tests.docs.test_pieces import first, opened
from tests.processes import Pool

GUIDE = Path(__file__).parents[2] / "docs" / "from-a-script.md"
PAGES = (GUIDE, Path(__file__).with_name("with_accelerate.md"))
OPENED = (opened(block) for page in PAGES for block in translations.blocks(page.read_text()))
BLOCKS = {first(text): text for language, text in OPENED if language}
PLANS = {"classifier": "replicate=2", "tokens": "replicate=3"}
CELL = re.compile(r"^\| (.+?) \| (.+) \|$", re.MULTILINE)


@pytest.mark.parametrize("name", PLANS)
def test_a_plain_script_runs(name: str, capsys: pytest.CaptureFixture) -> None:
    exec(BLOCKS[f"# {name}.py"], {"__name__": "script"})
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.parametrize("name", PLANS)
def test_a_script_prints_the_same_on_several_processes(pool: Pool, name: str) -> None:
    text = BLOCKS[f"# {name}.py with grappe"]
    alone, several = (
        pool.run("tests.training.loops:printed", Plan.parse(plan).processes, text, plan)[0]
        for plan in ("replicate=1", PLANS[name])
    )
    assert len(alone) >= 3
    for line, other in zip(alone, several, strict=True):
        numbers, others = ([float(each) for each in re.findall(r"\d+\.\d+", text)] for text in (line, other))
        assert others == pytest.approx(numbers, rel=1e-5)
        assert numbers


def changed(name: str, library: str) -> int:
    """Counts the lines of a script with a library that its plain form does not have, indentation aside."""
    plain, other = (
        [line.strip() for line in BLOCKS[f"# {name}.py{which}"].splitlines()[1:]] for which in ("", f" with {library}")
    )
    return sum(line.startswith("+ ") and bool(line[2:]) for line in difflib.ndiff(plain, other))


def test_the_lines_are_as_counted_and_no_more_than_accelerates() -> None:
    rows = re.findall(r"^\| \[.*\]\(#.*\) \| (\d+) \| (\d+) \|$", GUIDE.read_text(), re.MULTILINE)
    counted = [(changed(name, "Accelerate"), changed(name, "grappe")) for name in PLANS]
    assert [(int(theirs), int(ours)) for theirs, ours in rows] == counted
    assert all(ours <= theirs for theirs, ours in counted)


def test_every_line_of_the_tables_is_of_a_script_a_command_or_a_plan() -> None:
    scripts = " ".join(text for name, text in BLOCKS.items() if name.endswith("with grappe"))
    _, *tables = GUIDE.read_text().split("## Line by line")
    cells = [code for _, here in CELL.findall(tables[0]) for code in re.findall("`([^`]+)`", here)]
    assert len(cells) > 30
    for code in cells:
        if code.startswith("grappe "):
            app.parse_args(shlex.split(code)[1:], print_error=False, exit_on_error=False)
        elif re.fullmatch(r"[a-z_]+(=\w+)?(,[a-z_]+(=\w+)?)*", code):
            plan = Plan.parse(code)
            assert plan.changed_keys() - {"engine"} <= engines.find(plan.engine).supported_keys, code
        else:
            assert code in scripts or code in NAMED, code


NAMED = {
    'loop = grappe.Loop(run="runs/a")': "tests/training/test_own_loop.py, as the next",
    "loop.keep(schedule=schedule)": "",
    'grappe.Loop.launch(train, 0.1, plan="replicate=2")': "",
}
"""Code of the tables that other tests run."""
