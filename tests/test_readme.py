"""What the README and the guides show is true: the task runs, every file is listed, every link leads somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from grappe import cli, engines
from grappe.plan import Plan

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_task_in_the_readme_learns(tmp_path) -> None:
    code = re.search(r"```python\n(# spiral\.py\n.*?)```", README.read_text(), re.DOTALL)
    assert code
    (tmp_path / "spiral.py").write_text(code[1])
    command = [
        sys.executable,
        "-m",
        "grappe",
        "train",
        "spiral.py",
        "epochs=12",
        "--plan",
        "threads=1,device=cpu",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    accuracy = re.search(r"accuracy +([\d.]+)%", done.stdout)
    assert accuracy, done.stdout
    assert float(accuracy[1]) > 90


def test_generated_parts_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_plans_that_are_shown_can_be_asked_for(page: Path) -> None:
    for text in set(re.findall(r"--plan ([a-z][a-z0-9_=,:$/A-Z-]*)", page.read_text())):
        if re.search(r"=[A-Z]+\b", text):  # replicate=N
            continue
        plan = Plan.parse(text)
        assert plan.asked() - {"engine"} <= engines.find(plan.engine).axes, text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_are_shown_exist(page: Path) -> None:
    code = "\n".join(re.findall(r"```\n(.*?)```", page.read_text(), re.DOTALL))
    inline = re.findall(r"`grappe ([a-z]+)", page.read_text())
    for verb in {*re.findall(r"^grappe ([a-z]+)", code, re.MULTILINE), *inline}:
        assert verb in cli.app, verb
