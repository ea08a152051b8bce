"""Tests of the README and the guides: the task and the watcher run, commands exist, links have targets."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grappe import engines
from grappe.cli import commands
from grappe.errors import GrappeError
from grappe.plan import Plan
from tests.commands import GRAPPE, ran

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
WATCHER = ROOT / "examples" / "slowest_steps.py"


def test_the_task_in_the_readme_learns(tmp_path) -> None:
    code = re.search(r"```python\n(# spiral\.py\n.*?)```", README.read_text(), re.DOTALL)
    assert code
    (tmp_path / "spiral.py").write_text(code[1])
    done = ran(GRAPPE, "train", "spiral.py", "epochs=12", "--plan", "threads=1,device=cpu", cwd=tmp_path)
    accuracy = re.search(r"accuracy +([\d.]+)%", done.stdout)
    assert accuracy, done.stdout
    assert float(accuracy[1]) > 90


def test_the_watcher_of_the_guide_runs(tmp_path: Path) -> None:
    arguments = ["digits", "--callback", f"{WATCHER}:SlowestSteps", "--steps", "3", "--plan", "threads=1,device=cpu"]
    ran(GRAPPE, "train", *arguments, "--run", "run", cwd=tmp_path).check_returncode()
    found = json.loads((tmp_path / "run" / "slowest_steps.json").read_text())
    assert sorted(one["step"] for one in found) == [1, 2, 3]
    assert all(one["seconds"] > 0 for one in found)


def test_the_guide_shows_the_example_whole() -> None:
    code = WATCHER.read_text().partition('"""\n\n')[2]
    assert f"```python\n{code}```" in (ROOT / "docs" / "watchers.md").read_text()


def test_the_readme_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 300


def test_the_output_in_the_readme_is_that_of_the_script_and_of_two_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text((ROOT / "examples" / "digits_by_hand.py").read_text())
    one = ran(sys.executable, "train.py", cwd=tmp_path).stdout.splitlines()
    spread = ran(GRAPPE, "launch", "--plan", "replicate=2,device=cpu", "train.py", cwd=tmp_path)
    two = spread.stdout.splitlines()
    assert one == two and len(one) == 3
    begun = re.compile(r"^grappe: 2 processes, run in runs/train-[\w-]+$", re.MULTILINE)
    assert begun.search(spread.stderr) and begun.search(README.read_text())
    assert [one[0], two[0]] == re.findall(r"^epoch .*$", README.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "term",
    ["activation checkpointing", "callback", "gradient accumulation", "loss scaling", "mixed precision", "padding"],
)
def test_terms_of_the_field_lead_to_a_guide(term: str) -> None:
    text = (ROOT / "docs" / "guides.md").read_text()
    guides = re.findall(r"^\| (.+) \| .*\]\(([a-z-]+\.md)\).* \|$", text, re.MULTILINE)
    pages = [ROOT / "docs" / page for words, page in guides if term in words]
    assert pages, f"no guide in docs/guides.md names {term}"
    assert any(term in page.read_text().lower() for page in pages)


def test_docs_need_no_tests() -> None:
    for page in (ROOT / "docs").glob("*.py"):
        assert not re.search(r"^ *(from|import) tests\b", page.read_text(), re.MULTILINE), page.name


def test_make_targets_that_are_shown_exist() -> None:
    targets = set(re.findall(r"^([a-z.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    faults = []
    for page, text in _texts():
        lines = re.findall(r"^make ([a-z -]+?)(?:  |$)", _code(text), re.MULTILINE)
        lines += re.findall(r"`make ([a-z.-]+)", text)
        names = {name for line in lines for name in line.split()}
        faults += [f"{page}: make {name}" for name in names - targets]
    assert not faults, "\n".join(faults)


def test_generated_parts_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_lead_somewhere() -> None:
    faults = [
        f"{page}: {link}"
        for page, text in _texts()
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text)
        if not link.startswith("http") and not ((ROOT / page).parent / link).exists()
    ]
    assert not faults, "\n".join(faults)


def test_links_into_a_page_lead_to_one_of_its_headings() -> None:
    faults = []
    for page, text in _texts():
        for link, anchor in re.findall(r"\]\(([^)#]*\.md|)#([^)]+)\)", text):
            target = (ROOT / page).parent / link if link else ROOT / page
            if not link.startswith("http") and anchor not in _anchors(target.read_text()):
                faults.append(f"{page}: {link}#{anchor}")
    assert not faults, "\n".join(faults)


def _anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_plans_that_are_shown_can_be_asked_for() -> None:
    faults = []
    for page, text in _texts():
        for shown in set(re.findall(r"--plan ([a-z][a-z0-9_=,:$/A-Z-]*)", text)):
            if re.search(r"=[A-Z]+\b", shown):  # replicate=N
                continue
            try:
                plan = Plan.parse(shown)
            except GrappeError as error:
                faults.append(f"{page}: {shown}: {error}")
                continue
            refused = plan.changed_keys() - {"engine"} - engines.find(plan.engine).supported_keys
            faults += [f"{page}: {shown}: {key} is no key of engine={plan.engine}" for key in refused]
    assert not faults, "\n".join(faults)


def test_commands_that_are_shown_exist() -> None:
    faults = []
    for page, text in _texts():
        inline = re.findall(r"`grappe ([a-z]+(?:-[a-z]+)*)", text)
        for verb in {*re.findall(r"^grappe ([a-z]+(?:-[a-z]+)*)", _code(text), re.MULTILINE), *inline}:
            if verb not in commands.app:
                faults.append(f"{page}: grappe {verb}")
    assert not faults, "\n".join(faults)


def _texts() -> Iterator[tuple[Path, str]]:
    """Yields each page of the documentation, with its text."""
    for page in PAGES:
        yield page.relative_to(ROOT), page.read_text()


def _code(text: str) -> str:
    return "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))
