"""Proof of scaling: one page of the runs of several node counts, held to the site's rule, with LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grappe import sites
from grappe.cli import output
from grappe.cli.exit import show, show_either
from grappe.data.batch import stored_in
from grappe.errors import EXIT_FAILURE, EXIT_OK, UsageError
from grappe.errors.foreign_text import entries, number, printable, spreadsheet_cell
from grappe.language import translated, translated_name
from grappe.launch import files
from grappe.plan import Plan
from grappe.sites.layout import hourly_charge
from grappe.sites.sbatch import JobOptions
from grappe.sites.schema import Site
from grappe.training.job_records import submitted
from grappe.training.run import Run
from grappe.verbs.measure.measure import gather, point_of_run
from grappe.verbs.measure.points import as_json
from grappe.verbs.report.report import gather as gather_report
from grappe.verbs.report.report import html, usage_of
from grappe.words import filled_table, format_number, format_seconds

COMPARED = 8
"""Steps whose losses are compared, as many as grappe verify trains."""
INPUT = ("task", "class", "fields", "source", "dataset", "sampling", "step")
"""Entries of run.json that are the same for the same input; of the fields all but the batch size."""
COLUMNS = {
    "scaling": ("kind", ""), "nodes": ("nodes", ""), "processes": ("processes", ""), "GPUs": ("gpus", ""),
    "batch": ("batch", ""), "samples/s": ("samples_per_second", ",.4g"), "speed-up": ("speed_up", ".2f"),
    "efficiency": ("efficiency", ".1%"), "wall time, s": ("wall", ".1f"), "start-up": ("startup", ".0%"),
    "cores busy": ("cpu", ".0%"), "GPU busy": ("gpu", ".0%"), "memory, MB": ("megabytes", ",.0f"),
    "J a sample": ("joules_per_sample", ".3g"),
}  # fmt: skip
"""The table's columns: the key of a row, and the format of its values."""
STATES = {True: "passed", False: "failed", None: "not compared"}
LATEX = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {letter: f"\\{letter}" for letter in "&%$#_{}"}
)

Row = Mapping[str, Any]


def show_proof(places: Sequence[Path], site: str | None, steps: int | None, out: Path | None, *, json: bool) -> int:
    """Writes the page of ended runs, and its table as CSV and LaTeX; shows the rules, and returns the exit code.

    Args:
        site: the site whose rule counts; None: that of the runs' jobs.
        steps: optimizer steps of the training that is applied for; None: all epochs of the task.

    Raises:
        GrappeError: a run has not ended, or is not of the same proposal as the others.
    """
    rows = rows_of(places)
    jobs = submitted(rows[0]["runs"][0].folder)
    place = sites.find(site or (jobs[-1]["site"] if jobs else "generic"))
    made, out = content(rows, place, steps), out or Path("proposal.html")
    output.write(
        out, html({**gather_report([]), "proposals": [made]}, f"{Path(made['run']['task']).name}: {made['site']}")
    )
    stream = io.StringIO()
    cells = [[spreadsheet_cell(row[key]) for key, _ in COLUMNS.values()] for row in made["rows"]]
    csv.writer(stream, lineterminator="\n").writerows([list(COLUMNS), *cells])
    output.write(out.with_suffix(".csv"), stream.getvalue())
    output.write(out.with_suffix(".tex"), latex(made["columns"], made["table"]))
    rules = [list(check.values()) for check in made["checks"]]
    show_either(json, "proposal", filled_table(("", "rule", "measured"), rules), **made)
    if not json:
        show(f"to apply for: {made['applied_for'] or 'not known: give --training-steps'}")
        show(f"written: {out}, {out.with_suffix('.csv').name}, {out.with_suffix('.tex').name}")
    return EXIT_FAILURE if any(check["state"] == STATES[False] for check in made["checks"]) else EXIT_OK


def rows_of(places: Sequence[Path]) -> list[dict[str, Any]]:
    """Gathers a row for each node count and batch size from ended runs: medians over its trainings, fewest nodes first.

    Raises:
        GrappeError: a run has not ended, or is not of the same proposal as the others.
    """
    points, of_point, rows = gather(places), defaultdict[tuple[str, int], list[Run]](list), []
    if failed := next((point for point in points if point.failure), None):
        raise UsageError(failed.failure)
    for run in map(Run, places):
        point = point_of_run(run)
        of_point[point.plan, point.batch].append(run)
    for point in points:
        runs = of_point[point.plan, point.batch]
        made = [run.read_description() for run in runs]
        gpu = [number(line["gpu"]) for run in runs for line in usage_of(run) if "gpu" in line]  # each of about a second
        starts = [max(cost["timing"]["totals"]["start"] for cost in each["costs"]) for each in made]
        used = [entries(each.get("used")) for each in made]
        walls = [number(each.get("seconds")) for each in used]
        grows = not rows or point.batch * rows[0]["slices"] == rows[0]["batch"] * point.slices
        rows.append({
            **as_json(point, points),
            "runs": runs,
            "kind": "strong" if not rows or point.batch == rows[0]["batch"] else "weak" if grows else "",
            "nodes": made[0]["sizes"][-1]["nodes"],
            "gpus": sum(cost["gpus"] for cost in made[0]["costs"]) or None,
            "wall": statistics.median(walls),
            "startup": statistics.median(a / (b or math.inf) for a, b in zip(starts, walls, strict=True)),
            "cpu": statistics.median(number(each["cpu_hours"]) / (each["core_hours"] or math.inf) for each in used),
            "gpu": statistics.fmean(gpu) if gpu else None,
            "megabytes": point.memory / 1e6,
        })  # fmt: skip
        rows[-1]["efficiency"] = rows[-1]["speed_up"] * rows[0]["nodes"] / rows[-1]["nodes"]
    if len({(row["kind"], row["nodes"]) for row in rows if row["kind"]}) < len(rows):
        raise UsageError("these runs are not of one proposal: give --gather those of its jobs, and no others")
    return sorted(rows, key=lambda row: (row["kind"], row["nodes"]))


def verdicts(rows: Sequence[Row], kept: Row, site: Site, script: str) -> list[tuple[bool | None, str, str]]:
    """Returns each rule: whether it is kept (None: not compared), its name, and what was measured."""
    rule, strong = site.scaling, [row for row in rows if row["kind"] == "strong"]
    made = [run.read_description() for row in rows for run in row["runs"]]
    inputs = [{**each, "fields": {**entries(each.get("fields")), "batch_size": None}} for each in made]
    other = [name for name in INPUT if any(each.get(name) != inputs[0].get(name) for each in inputs)]
    last, slow = strong[-1], max(rows, key=lambda row: row["startup"])
    what, key = ("GPUs", "gpu") if last["gpus"] else ("cores", "cpu")
    busy = [f"{row[key]:.0%}" for row in strong if row[key]]
    start = f"{slow['startup']:.0%} on {slow['nodes']} nodes; longer trainings make it less"
    reached = f"{last['efficiency']:.1%} on {last['nodes']} nodes; the largest count that keeps it: {kept['nodes']}"
    counts = ", ".join(str(row["nodes"]) for row in strong)
    walls = ", ".join(format_seconds(row["wall"]) for row in strong)
    return [
        (len(strong) >= rule.counts, f"at least {rule.counts} node counts", counts),
        (not other, "the same input in all", f"not the same: {', '.join(other)}" if other else "task, data and steps"),
        (slow["startup"] <= rule.startup, f"start-up takes at most {rule.startup:.0%} of the time", start),
        (last is kept, f"parallel efficiency of at least {rule.efficiency:.0%}", reached),
        (all(row["wall"] for row in strong), "wall time of each count", walls),
        (len(busy) == len(strong), f"utilisation of {what}", ", ".join(busy) or "not measured: install grappe[energy]"),
        (bool(script), "a representative batch script", "on the page" if script else "no run is of a job"),
        _losses(strong),
    ]  # fmt: skip


def _losses(strong: Sequence[Row]) -> tuple[bool | None, str, str]:
    """Compares the first losses of strong scaling, with verify's tolerance where it has measured no rounding."""
    from grappe.verbs.verify.runner import BOUND, FACTOR
    from grappe.verbs.verify.trained_by_hand import FLOORS, relative

    rule, plan = "the same losses on every count", Plan.parse(strong[0]["plan"])
    curves = [[record.get("loss") for record in row["runs"][0].records("step")][:COMPARED] for row in strong]
    if len(curves) < 2 or not all(isinstance(loss, float) for curve in curves for loss in curve or [None]):
        return None, rule, "the runs have no losses to compare"
    apart = max(relative(a, b) for curve in curves for a, b in zip(curves[0], curve, strict=False))
    allowed = FACTOR * FLOORS[stored_in(plan)] if plan.precision in ("fp32", "fp64") else BOUND
    steps = f"{len(curves[0])} steps of strong scaling: {apart:.1e} apart, at most {allowed:.0e} is rounding"
    return apart <= allowed, rule, f"{steps}; weak scaling: not compared"


def content(rows: Sequence[Row], site: Site, steps: int | None) -> dict[str, Any]:
    """Returns what the page shows of rows, as JSON's values."""
    allowed = [row for row in rows if row["kind"] == "strong" and row["efficiency"] >= site.scaling.efficiency]
    kept, run = allowed[-1], allowed[-1]["runs"][0]
    made = run.read_description()
    scripts = sorted((run.folder / "logs").glob("submit-*.sh"))
    script = files.read_text(scripts[-1]) if scripts else ""
    steps = steps or int(
        number(made["fields"].get("epochs")) * number(entries(made.get("start")).get("steps_per_epoch"))
    )
    hours = steps * kept["batch"] / kept["samples_per_second"] / 3600
    hourly = {"GPU-hours" if kept["gpus"] else "core-hours": kept["gpus"] or kept["cores"]}
    if site.charge and (units := hourly_charge(Plan.parse(kept["plan"]), site, JobOptions(nodes=kept["nodes"]))):
        hourly[site.charge.unit] = units
    shown = {name: place for name, place in COLUMNS.items() if any(row[place[0]] is not None for row in rows)}
    return {
        "site": site.title,
        "rule": site.scaling.source,
        "efficiency": site.scaling.efficiency,
        "device": kept["device"],
        "run": {name: made[name] for name in ("task", "fields", "versions", "plan")},
        "nodes": kept["nodes"],
        "steps": steps,
        "applied_for": ", ".join(f"{format_number(hours * each)} {unit}" for unit, each in hourly.items() if steps),
        "checks": [
            {"state": STATES[is_kept], "rule": str(translated(rule)), "measured": str(translated(measured))}
            for is_kept, rule, measured in verdicts(rows, kept, site, script)
        ],
        "columns": list(map(translated_name, shown)),
        "table": [["" if row[key] is None else format(row[key], form) for key, form in shown.values()] for row in rows],
        "rows": [{name: value for name, value in row.items() if name != "runs"} for row in rows],
        "script": script.splitlines(),
    }  # fmt: skip


def latex(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Makes a LaTeX table in booktabs' form; all text is escaped."""
    head, *lines = [" & ".join(printable(cell).translate(LATEX) for cell in row) + r" \\" for row in (columns, *rows)]
    begin = [r"% \usepackage{booktabs}", rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}", r"\toprule", head]
    return "\n".join([*begin, r"\midrule", *lines, r"\bottomrule", r"\end{tabular}", ""])
