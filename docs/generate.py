"""Writes the generated parts of the README and the guides, or with --check says which are not up to date."""

from __future__ import annotations

import ast
import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grappe import engines
from grappe.plan import Plan
from grappe.verbs.catalogue import support

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGE = ROOT / "src" / "grappe"


def rooms() -> str:
    """A line for every entry of the package's root: the first line of its docstring."""
    lines = ["| room | its one job |", "|---|---|"]
    folders = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
    files = sorted(PACKAGE.glob("*.py"))
    for path in [*folders, *files]:
        source = path / "__init__.py" if path.is_dir() else path
        job = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]
        name = path.name + "/" * path.is_dir()
        lines.append(f"| [`{name}`]({path.relative_to(ROOT)}) | {job} |")
    return "\n".join(lines)


def plan_keys() -> str:
    """A line for every key of a plan: its default, what it is, and the engines that support it."""
    lines = ["| key | default | what it is | engines |", "|---|---|---|---|"]
    for key, default, meaning, able in support():
        shown = "all" if able == engines.names() else ", ".join(able)
        lines.append(f"| `{key}` | {default.lower()} | {meaning} | {shown} |")
    return "\n".join(lines)


def parity() -> str:
    """A line for every plan of parity.json, which `python -m tests.parity.table` measures."""
    lines = ["| engine | plan | largest difference | with dropout |", "|---|---|---|---|"]
    found = json.loads((RESULTS / "parity.json").read_text())
    for text, gap in found["gaps"].items():
        engine, drawn = Plan.parse(text).engine, found["drawn"].get(text)
        missing = "refused" if "domain" in text else "its own"
        shown = missing if drawn is None else f"{drawn:.0e}"
        lines.append(f"| {engine} | `{text.removeprefix(f'engine={engine},')}` | {gap:.0e} | {shown} |")
    return "\n".join(lines)


def foreseen() -> str:
    """A line for each task of foresee.json, which `python -m benchmarks.foresee` measures: its farthest plan."""
    gaps: dict[str, list[tuple[float, str, str, str]]] = {}
    for key, cell in json.loads((RESULTS / "foresee.json").read_text()).items():
        task, _, plan = key.partition(" | ")
        measured = max(one["peak"] for one in cell["measured"])
        said, gap = _predicted(cell["predicted"]["least"], cell["predicted"]["peak"], measured)
        if gap:
            row = (abs(float(gap.removesuffix(" %"))), plan or "one process", f"{measured / 1e6:.2f} MB", said)
            gaps.setdefault(task, []).append(row)
    lines = ["| task | plans | median error | largest error | of | measured | predicted |", "|---" * 7 + "|"]
    for task, rows in gaps.items():
        gap, plan, measured, said = max(rows)
        middle = statistics.median(row[0] for row in rows)
        lines.append(f"| `{task}` | {len(rows)} | {middle:.2f} % | {gap:.2f} % | `{plan}` | {measured} | {said} |")
    return "\n".join(lines)


def foreseen_errors() -> str:
    """Sums up how far the measured peaks of benchmarks/results/foresee.json lie outside the predicted ranges."""
    gaps, over, low = [], [], 0
    for cell in json.loads((RESULTS / "foresee.json").read_text()).values():
        least, most = cell["predicted"]["least"], cell["predicted"]["peak"]
        measured = max(one["peak"] for one in cell["measured"])
        if most is not None:
            gaps.append(abs(min(max(measured, least), most) / measured - 1))
            over.append(most / measured - 1)
            low += measured > most
    gaps.sort()
    high = gaps[math.ceil(0.95 * len(gaps)) - 1]
    return (
        f"Of {len(gaps)} cells: outside the range by {statistics.median(gaps):.2%} in the median, {high:.2%} at the "
        f"95th percentile, {gaps[-1]:.2%} at worst. Above the range's upper end, by which a plan is judged: {low}. "
        f"The upper end exceeds the measured peak by {statistics.median(over):.2%} in the median, "
        f"{max(over):.1%} at most."
    ).replace("%", " %")


def foreseen_between() -> str:
    """A line for each task: the farthest evaluation and checkpoint, where they were measured."""
    gaps: dict[str, list[tuple[float, float]]] = {}
    for key, cell in json.loads((RESULTS / "foresee.json").read_text()).items():
        if "between" in cell:
            evaluation, copied = (max(one[name] for one in cell["between"]) for name in ("evaluation", "checkpoint"))
            predicted = cell["predicted"]
            _, gap = _predicted(predicted["evaluation_least"], predicted["evaluation"], evaluation)
            pair = abs(float(gap.removesuffix(" %"))), abs(100 * (predicted["checkpoint"] / copied - 1))
            gaps.setdefault(key.partition(" | ")[0], []).append(pair)
    lines = ["| task | plans | evaluation, largest error | checkpoint's copy, largest error |", "|---" * 4 + "|"]
    for task, pairs in gaps.items():
        lines.append(
            f"| `{task}` | {len(pairs)} | " + " | ".join(f"{max(gap):.2f} %" for gap in zip(*pairs, strict=True)) + " |"
        )
    return "\n".join(lines)


def foreseen_limits() -> str:
    """Says what ran under each limit of foresee_limits.json, which `python -m benchmarks.foresee_limits` tries."""
    cells = json.loads((RESULTS / "foresee_limits.json").read_text())
    shares = sorted({share for cell in cells.values() for share in cell["ran"]}, key=float, reverse=True)
    columns = " | ".join(f"ran at {share}" for share in shares)
    lines = [f"| task | plans | foreseen peak | libraries keep | {columns} |", "|---" * (4 + len(shares)) + "|"]
    by_task: dict[str, list[dict[str, Any]]] = {}
    for key, cell in cells.items():
        by_task.setdefault(key.partition(" | ")[0], []).append(cell)
    for task, rows in by_task.items():
        ran = " | ".join(str(sum(row["ran"][share] for row in rows)) for share in shares)
        sizes = " | ".join(
            f"{min(row[name] for row in rows) / 1e6:.0f} to {max(row[name] for row in rows) / 1e6:.0f} MB"
            for name in ("peak", "libraries")
        )
        lines.append(f"| `{task}` | {len(rows)} | {sizes} | {ran} |")
    failed = sum(not cell["ran"]["1.0"] for cell in cells.values())
    small = [(share, sum(cell["ran"][share] for cell in cells.values())) for share in shares if share != "1.0"]
    too_big = ", ".join(f"{ran} of {len(cells)} at {float(share):.0%}" for share, ran in small)
    return "\n".join(
        [
            f"Of {len(cells)} plans called fitting, {failed} failed. With less memory than they were said to need, "
            f"these ran: {too_big} of it.",
            "",
            *lines,
        ]
    )


def _predicted(low: int | None, high: int | None, measured: int) -> tuple[str, str]:
    """A range of predicted bytes, and how far what was measured lies outside of it."""
    if low is None or high is None:
        return "not predicted", ""
    text = f"{high / 1e6:.2f}" if low == high else f"{low / 1e6:.2f} to {high / 1e6:.2f}"
    return text, f"{100 * (min(max(measured, low), high) / measured - 1):+.2f} %"


def optimizers() -> str:
    """A line for every plan, a column for every optimizer of grappe's."""
    found = json.loads((RESULTS / "parity.json").read_text())["optimizers"]
    lines = [f"| plan | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for text in next(iter(found.values())):
        gaps = [gaps[text] for gaps in found.values()]
        cells = " | ".join("refused" if gap is None else f"{gap:.0e}" for gap in gaps)
        lines.append(f"| `{text}` | {cells} |")
    return "\n".join(lines)


def gallery_tasks() -> str:
    """A line for every task of the gallery: what its first line says it shows, and a command."""
    lines = ["| what you have | command |", "|---|---|"]
    for path in _gallery():
        if path.suffix == ".py":
            says = ast.get_docstring(ast.parse(path.read_text())) or ""
            command = f"grappe train {path.relative_to(ROOT)}"
        else:
            says = json.loads(path.read_text())["cells"][0]["source"][-1]
            command = f"jupyter lab {path.relative_to(ROOT)}"
        lines.append(f"| {says.partition(chr(10))[0]} | [`{command}`](../{path.relative_to(ROOT)}) |")
    return "\n".join(lines)


def gallery_parity() -> str:
    """A line for every task, a column for the plans with equal verdicts, and the reasons below."""
    found = _measured("verify")
    reasons: list[str] = []
    columns: dict[tuple[str, ...], list[str]] = {}
    for plan in next(iter(found.values())):
        cells = []
        for judged in found.values():
            word = judged[plan]["verdict"].replace("same but for these", "but for").replace("failed", "refused")
            if word != "same":
                reason = _reason(judged[plan]["why"])
                reasons += [reason] * (reason not in reasons)
                word += f" ({reasons.index(reason) + 1})"
            cells.append(word)
        columns.setdefault(tuple(cells), []).append(plan)
    heads = ("; ".join(f"`{plan}`" for plan in plans) for plans in columns.values())
    lines = [f"| task | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(row)} |" for name, *row in zip(found, *columns, strict=True)]
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))])


def _reason(why: list[str]) -> str:
    """A verdict's reasons, the same words for all tasks that have the same."""
    text = re.sub(r"^a pipeline(?: of \d+ stages)?: |^tensor=\d+: ", "", "; ".join(why))
    text = re.sub(r"^[A-Z]\w+(?= does not |\.units\(\)|\.after_step| has \d|\.optimizer)", "the task", text)
    text = text.replace("the task.", "the task's ", 1)
    text = re.sub(r"^\w+(?= has no \w+ plan in transformers)", "the model", text)
    text = re.sub(r"under [\w=]+ the next forward", "the next forward", text)
    text = re.sub(r": [\w., ]+ (is|are) in none of them", "", text)
    text = re.sub(r"has \d+ units, too few for", "has too few units for", text)
    text = re.sub(r"use pipeline=\d+ or less", "use fewer", text)
    text = re.sub(r"batch normalisation \([^)]*\)", "batch normalisation", text)
    text = re.sub(r" \([\w/]+\.py, line .*|, of a gradient that Adam scales up, say", "", text)
    return re.split(r"(?<!ing)\. (?=[A-Z])|, which one process that takes each", text)[0]


def gallery_speed() -> str:
    """A line for every task of the gallery: its length and speed beside the plain loop's."""
    measured = _measured("speed")
    head = ["task", "lines", "plain loop", *(["speed of one process", "by CPU time"] if measured else [])]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for path in _gallery():
        plain = ROOT / "examples" / "gallery" / "plain" / f"{path.stem}.py"
        cells = [path.stem, *(str(len(_code(one).splitlines())) for one in (path, plain))]
        if measured:
            found = measured.get(path.stem)
            form = "{:.2f} ({:.2f} to {:.2f})"
            cells += [form.format(*found[what]) if found else "–" for what in ("speed", "cpu")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _code(path: Path) -> str:
    """A file's text; of a notebook the first two cells of code, which have the task."""
    if path.suffix == ".py":
        return path.read_text()
    cells = [one for one in json.loads(path.read_text())["cells"] if one["cell_type"] == "code"]
    return "\n".join("".join(one["source"]) for one in cells[:2])


def _gallery() -> list[Path]:
    paths = (ROOT / "examples" / "gallery").iterdir()
    return sorted((path for path in paths if path.suffix in (".py", ".ipynb")), key=lambda path: path.stem)


def _measured(part: str) -> dict[str, Any]:
    return json.loads((RESULTS / "gallery.json").read_text()).get(part, {})


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "CONTRIBUTING.md": {"rooms": rooms},
    "docs/plans.md": {"plan keys": plan_keys},
    "docs/parity.md": {"parity": parity},
    "docs/accuracy.md": {
        "foreseen": foreseen,
        "foreseen-errors": foreseen_errors,
        "foreseen-between": foreseen_between,
        "foreseen-limits": foreseen_limits,
    },
    "docs/optimizers.md": {"optimizers": optimizers},
    "docs/gallery.md": {"tasks": gallery_tasks},
    "docs/gallery-parity.md": {"parity": gallery_parity, "speed": gallery_speed},
}
"""By page: the names of its generated parts, each between `<!-- NAME -->` and `<!-- end -->`, and their text."""


def renewed(page: str) -> str:
    """The page's text, its generated parts made anew."""
    text = (ROOT / page).read_text()
    for name, make in PARTS[page].items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert pattern.search(text), f"{page} has no part '{name}'"
        text = pattern.sub(lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", text)
    return text


def main() -> int:
    """Exit code 1 when --check finds a page out of date."""
    stale = {page: text for page in PARTS if (text := renewed(page)) != (ROOT / page).read_text()}
    if "--check" in sys.argv:
        for page in stale:
            print(f"{page} is not up to date: make docs")
        return int(bool(stale))
    for page, text in stale.items():
        (ROOT / page).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
