"""grappe report: compares runs, and writes one HTML file of runs and measurements, which opens offline."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import math
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grappe import extensions
from grappe.checkpoint.commit import LARGEST_JSON, read_json
from grappe.errors import RunError, UsageError
from grappe.errors.foreign_text import entries, html_text, number, objects, printable
from grappe.language import catalogue_of, chosen_language, translated
from grappe.launch import files
from grappe.training.job_records import failure_notes
from grappe.training.run import CODE, SCORES, USAGE, Run, all_runs
from grappe.words import plan_name

NAME = "report.html"
LIVE_SECONDS = 5.0
WINDOWS = 100  # of steps, over which a speed is a mean
LONGEST_DIFF = 400  # lines
TITLED = 3  # runs that the page's title names
POINTS = 800  # of a curve; a screen has no more
NO_SCORES = ("step", "samples", "count")  # numbers of an evaluation
NOT_CURVES = frozenset({"kind", "step", "epoch", "samples", "count", "seconds", "data", "device", "skipped"})
PARTS_OF_NOISE = frozenset({"steps", "variance", "gradient_square"})  # which the noise scale is made of
LISTS = {"measurement": "points", "lr-find": "curves"}
"""By kind of file: the list that it has."""

WORD = re.compile(r'\bt\("(?P<word>[^"]+)"')
"""A word of the page, where its sources write it: t("loss")."""
MARK = "report|"

Points = list[tuple[float, float | None]]


def report(
    places: Sequence[Path | str],
    out: Path | str | None = None,
    *,
    foresee: bool = False,
    predictions: bool = False,
    weights: bool = False,
) -> Path:
    """Writes a report of `places`: runs' and studies' folders, files of grappe measure and lr-find (--out).

    Args:
        out: the file; None: report.html, in the run's folder if there is only one run, else in the current folder.
        foresee: compare each run's memory and step with its forecast; a model that was not traced before is traced.
        predictions: predict each run's validation samples now, with its newest checkpoint.
        weights: count the values of each parameter, of its newest checkpoint.

    Raises:
        RunError: one of `places` is neither a run nor a measurement.
        UsageError: `places` is empty, or the file cannot be written.
    """
    if not places:
        raise UsageError("nothing to report: give one or several runs (see: grappe runs)")
    paths = [Path(place) for place in places]
    gathered = gather(paths, foresee=foresee, predictions=predictions, weights=weights)
    alone = len(paths) == 1 and paths[0].is_dir()
    file = Path(out) if out is not None else (paths[0] / NAME if alone else Path(NAME))
    title = ", ".join(path.resolve().name for path in paths[:TITLED])
    if (more := len(paths) - TITLED) > 0:
        title = str(translated(f"{title} and {more:,} more"))
    try:
        files.replace(file, html(gathered, title).encode(errors="replace"))
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}: give another with --out") from error
    return file


def gather(
    places: Sequence[Path], *, foresee: bool = False, predictions: bool = False, weights: bool = False
) -> dict[str, Any]:
    """Gathers the content of a report of `places`: runs' and studies' folders, files of grappe measure and lr-find.

    Raises:
        RunError: one of `places` is neither.
    """
    runs, measurements, searches, studies = list[Run](), [], [], []
    with_studies = [extensions.module(name, "report") for name in extensions.having("report")]
    for place in places:
        if makers := [part for part in with_studies if files.kind(place / part.FILE) == "file"]:
            studies.append(makers[0].gather_study(place))
        elif place.is_file() and place.suffix == ".json":
            content = _read_measurement(place)
            (searches if content["kind"] == "lr-find" else measurements).append(content)
        else:
            runs += [Run(place)] if Run.is_run(place) else all_runs(place) or [Run(place)]
    results = compared(runs)
    gathered = [_run(run, row) for run, row in zip(runs, results["rows"], strict=True)]
    for run, entry in zip(runs, gathered, strict=True):
        if foresee:
            from grappe.verbs.foresee.run_forecast import foreseen_run  # with torch, which takes two seconds

            entry["foreseen"] = foreseen_run(run).as_json()
        if predictions:
            from grappe.verbs.report.predictions import predicted  # with torch, too

            entry["predictions"] = predicted(run)
        if weights:
            from grappe.verbs.report.predictions import weights_of

            entry["weights"] = weights_of(run)
    return {
        "results": results, "runs": gathered, "measurements": measurements, "learning_rates": searches,
        "studies": studies, "code": _changed_code(runs),
    }  # fmt: skip


def _changed_code(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Compares the code of each run with the first run's that has some, where it differs: lines of a unified diff."""
    named, changes = list[tuple[str, list[str]]](), []
    for run in runs:
        with contextlib.suppress(OSError, RunError):
            if code := files.read_text(run.folder / CODE).splitlines():
                named.append((run.folder.resolve().name, code))
    for name, code in named[1:]:
        if lines := list(difflib.unified_diff(named[0][1], code, named[0][0], name, lineterm="", n=2)):
            changes.append({"from": named[0][0], "to": name, "lines": lines[:LONGEST_DIFF], "all": len(lines)})
    return changes


def _run(run: Run, row: dict[str, Any]) -> dict[str, Any]:
    description = run.read_description()
    steps, evaluations = dict[str, Points](), dict[str, Points]()
    last, seconds = 0, 0.0
    axes: list[tuple[int, float, float]] = []
    for record in run.records():
        kind = str(record.get("kind"))
        curves = {"step": steps, "evaluation": evaluations, "noise": evaluations}.get(kind)
        step = record.get("step")
        if curves is None or not isinstance(step, int):
            continue
        last = max(last, step)
        if kind == "step":
            seconds += number(record.get("seconds"))
            axes.append((step, number(record.get("samples")), seconds))
        hidden = NOT_CURVES | PARTS_OF_NOISE if kind == "noise" else NOT_CURVES
        for name, value in record.items():
            if name not in hidden and (value is None or _is_number(value)):
                rounded = None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
                curves.setdefault(name, []).append((step, rounded))
    if failures := [note for note in failure_notes(run.folder.parent) if note.run == run.folder.name]:
        description["notes on nodes"] = [
            f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(note.at))} {note.node}, job {note.start}: {note.evidence}"
            for note in failures
        ]
    usage = usage_of(run)
    sizes = description.pop("sizes", [])
    if len(sizes) > 1 or "waited" in next(iter(sizes), {}):
        description |= _sizes(sizes, usage)
    begins = [int(number(size.get("step"))) for size in sizes]
    spans = list(zip(sizes, begins, [*begins[1:], last], strict=True)) if len(sizes) > 1 else []
    processes = [(at, number(size.get("processes"))) for size, begin, end in spans for at in (begin, max(begin, end))]
    row["seconds"] = row["seconds"] or sum(number(line.get("seconds")) for line in usage) or None
    shown = [*axes[:: math.ceil(len(axes) / POINTS) or 1], *axes[-1:]]
    return {
        "name": row["run"],
        "label": row["label"],
        "status": row["status"],
        "step": last,
        "description": {name: value for name, value in description.items() if name not in ("costs", "used")},
        "training": {name: thinned(curve) for name, curve in steps.items()},
        "validation": {name: thinned(curve) for name, curve in evaluations.items()},
        "axes": [(step, samples, float(f"{at:.6g}")) for step, samples, at in shown],
        "speed": _speed(axes),
        "sizes": processes,
        "usage": usage,
        "processes": description.get("costs", []),
        "used": description.get("used", {}),
    }


def _sizes(sizes: Sequence[dict[str, Any]], usage: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Describes the sizes of a run's starts: a line for each, hours in the queue, and hours of nodes that idled."""
    lines, idle = [], 0.0
    for size, following in zip(sizes, [*sizes[1:], {}], strict=True):
        begin, end = number(size.get("at")), number(following.get("at")) if following else math.inf
        trained = [number(record.get("time")) for record in usage if begin <= number(record.get("time")) < end]
        last = end if _in_the_same_job(following) else max(trained, default=begin)
        idle += number(size.get("idle_nodes")) * (last - begin) / 3600
        where = f"{number(size.get('processes')):g} processes on {number(size.get('nodes')):g} nodes"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(begin))
        waited = f", after {number(size['waited']):g} s in the queue" if "waited" in size else ""
        again = ", in the same job" if _in_the_same_job(size) else ""
        lines.append(f"{when}, step {number(size.get('step')):g}: {where}{waited}{again}")
    waits = sum(number(size.get("waited")) for size in sizes) / 3600
    hours = {"hours in the queue": waits, "idle nodes, hours": idle}
    return {"sizes": lines, **{name: f"{value:.2f}" for name, value in hours.items() if value}}


def _in_the_same_job(size: dict[str, Any]) -> bool:
    """Returns whether a start went on in the job of the one before, whose nodes it kept."""
    return number(size.get("start")) % 10 > 0


def _speed(axes: Sequence[tuple[int, float, float]]) -> Points:
    """Returns the samples per second of steps, as means over windows of steps."""
    places = axes[:: max(1, math.ceil(len(axes) / WINDOWS))]
    return [
        (step, float(f"{(samples - samples_before) / (at - before):.5g}"))
        for (_, samples_before, before), (step, samples, at) in itertools.pairwise(places)
        if at > before and samples >= samples_before
    ]


def usage_of(run: Run) -> list[dict[str, Any]]:
    """Reads a run's usage, neighbours merged until few remain: seconds are summed; of levels, the highest is kept."""
    try:
        lines = files.read_bytes(run.folder / USAGE).splitlines()
    except OSError:
        return []
    records = [
        record for record in objects(lines) if isinstance(record.get("phases"), dict) and _is_number(record.get("time"))
    ]
    while len(records) > POINTS // 2:
        pairs = [records[place : place + 2] for place in range(0, len(records), 2)]
        records = [_merged(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return records


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    seconds = number(a.get("seconds")) + number(b.get("seconds"))
    phases = dict(a["phases"])
    for name, value in b["phases"].items():
        phases[name] = number(phases.get(name)) + number(value)
    steps = number(a.get("steps")) + number(b.get("steps"))
    merged = {**b, "seconds": seconds, "steps": steps, "phases": phases}
    for name in ("watts", "memory"):
        if isinstance(a.get(name), dict) and isinstance(b.get(name), dict):
            merged[name] = {key: max(number(a[name].get(key)), number(value)) for key, value in b[name].items()}
    return merged


def thinned(curve: Points, points: int = POINTS) -> Points:
    """Thins a curve to about `points`: keeps the lowest and highest point of each piece, and every gap."""
    if len(curve) <= points:
        return curve
    size = math.ceil(2 * len(curve) / points)
    kept: Points = []
    for begin in range(0, len(curve), size):
        piece = curve[begin : begin + size]
        finite = [point for point in piece if point[1] is not None]
        if not finite:
            kept.append(piece[0])
            continue
        chosen = {extreme(finite, key=lambda point: point[1] or 0.0) for extreme in (min, max)}
        kept += sorted(chosen)
        if len(finite) < len(piece):
            kept.append((piece[-1][0], None))
    if kept[-1] != curve[-1]:
        kept.append(curve[-1])
    return kept


def _read_measurement(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > LARGEST_JSON:
            raise RunError(f"{file} is larger than any that grappe measure writes")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind not in LISTS or not isinstance(content.get(LISTS[kind]), list):
        raise RunError(
            f"{file} is not a measurement: grappe measure TASK … --out {file.name} writes one, and so does grappe "
            "lr-find"
        )
    return {**content, "name": file.stem}


def html(gathered: dict[str, Any], title: str) -> str:
    """Renders the page, in the user's language. What was gathered is embedded as data, never as markup or code."""
    folder, language = Path(__file__).parent, chosen_language()
    names = ("page.html", "page.css", "plots.js", "page.js")
    page, style, plots, code = ((folder / name).read_text(encoding="utf-8") for name in names)
    words = dict[str, str]()
    if language != "en":  # the catalogue has the page's words after MARK, so as to match no message
        texts = [match["word"] for match in WORD.finditer(page + plots + code)]
        words = {text: catalogue_of(language).text(MARK + text).removeprefix(MARK) for text in texts}
    # "<" would end the element that the data is in; JSON may write it otherwise.
    data = json.dumps(_finite({**gathered, "words": words}), separators=(",", ":")).replace("<", "\\u003c")
    parts = {"LANGUAGE": language, "TITLE": html_text(title), "STYLE": style, "DATA": data, "CODE": plots + code}

    def part(match: re.Match[str]) -> str:
        word = match["word"]
        return parts[match[0].strip("@")] if word is None else html_text(words.get(word, word))

    # In one pass: data is not looked through.
    return re.sub(rf"@@(?:[A-Z]+|{WORD.pattern}\))@@", part, page)


def _finite(value: Any) -> Any:
    """Replaces infinities and NaN, which JSON does not have, by null; text is made visible, as the page shows it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {printable(name): _finite(entry) for name, entry in value.items()}
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Iterable):
        return [_finite(entry) for entry in value]
    return value


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, float)


SEED = "seed"
FIGURES = ("best", "loss", "training_loss", "test", "seconds", "gpu_hours", "core_hours")
"""Columns of the table of results that have a mean over seeds."""


def compared(runs: Sequence[Run]) -> dict[str, Any]:
    """Compares runs, as plain JSON.

    Returns:
        `metric`, the score that the runs are compared by, and whether a `lower` one is better; `keys`, the names of the
        fields that differ; `rows`, one for each run in order, with `label`, `differs` (by key) and FIGURES; `groups`,
        of runs that differ by seed alone: the numbers of their rows, and by figure their `mean` and `deviation`.

    Raises:
        RunError: a run.json is damaged.
    """
    descriptions = [run.read_description() for run in runs]
    settings = [_settings(description) for description in descriptions]
    names = sorted({key: 0 for each in settings for key in each}, key=lambda key: key == SEED)  # the seed last
    keys = [key for key in names if len({each.get(key) for each in settings}) > 1]
    evaluations = [list(run.records("evaluation")) for run in runs]
    lasts = [records[-1] for records in evaluations if records]
    scores = [name for last in lasts for name in last if name not in NO_SCORES and _value(last, name) is not None]
    metric = next((name for name in scores if not name.startswith("loss")), "loss")
    lower = metric.startswith("loss") or any(metric in each.get("lower_is_better", ()) for each in descriptions)
    labels = []
    for description, setting in zip(descriptions, settings, strict=True):
        differing = [
            setting.get(key, "") if key in ("task", "plan") else f"{key}={setting.get(key, '')}" for key in keys
        ]
        labels.append(printable(description.get("name") or ", ".join(differing), 100))
    rows, times = [], Counter(labels)
    for run, description, setting, records, label in zip(
        runs, descriptions, settings, evaluations, labels, strict=True
    ):
        folder = run.folder.resolve().name
        scored = [(value, record.get("step")) for record in records if (value := _value(record, metric)) is not None]
        best, step = (min if lower else max)(scored, key=lambda pair: pair[0], default=(None, None))
        test = dict[str, Any]()
        with contextlib.suppress(RunError):
            test = entries(read_json(run.folder / SCORES).get("test"))  # of grappe evaluate
        used = description.get("used", {})
        rows.append(
            {
                "run": folder,
                "label": label if label and times[label] == 1 else f"{label} ({folder})" if label else folder,
                "tags": description.get("tags", []),
                "note": printable(description.get("note") or ""),
                "status": run.read_status(description),
                "plan": plan_name(description.get("plan")),
                "differs": {key: setting.get(key, "") for key in keys if key != "plan"},
                "best": best,
                "best_step": step,
                "loss": _value(records[-1], "loss") if records else None,
                "training_loss": _value(run.last_record("step"), "loss"),
                "test": _value({**test, **entries(test.get("metrics"))}, metric),
                "test_checkpoint": printable(test.get("checkpoint", ""), 200),
                **{name: number(used.get(name)) or None for name in ("seconds", "gpu_hours", "core_hours")},
            }
        )
    return {
        "metric": printable(metric, 60),
        "lower": lower,
        "keys": [key for key in keys if key != "plan"],
        "rows": rows,
        "groups": _groups(rows, settings) if SEED in keys else [],
    }


def _settings(description: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a user chose for a run, as texts: task, plan and fields."""
    fields = {printable(name, 60): printable(value, 200) for name, value in entries(description.get("fields")).items()}
    task = Path(str(description.get("task") or "")).name
    return {"task": printable(task, 100), "plan": plan_name(description.get("plan")), **fields}


def _groups(rows: Sequence[Mapping[str, Any]], settings: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Returns the runs that differ by seed alone, with the mean and deviation of their figures."""
    groups = defaultdict(list)
    for place, setting in enumerate(settings):
        groups[tuple(item for item in setting.items() if item[0] != SEED)].append(place)
    made = []
    for places in groups.values():
        if len({settings[place].get(SEED) for place in places}) < 2:
            continue
        values = {name: [rows[place][name] for place in places if rows[place][name] is not None] for name in FIGURES}
        complete = {name: column for name, column in values.items() if len(column) == len(places)}
        mean = {name: statistics.fmean(column) for name, column in complete.items()}
        deviation = {name: statistics.stdev(column) for name, column in complete.items()}
        made.append({"rows": places, "mean": mean, "deviation": deviation})
    return made


def _value(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    return number(value) if _is_number(value) and number(value) == value else None
