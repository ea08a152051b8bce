"""grappe report: writes one HTML file of runs and measurements, which opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grappe.errors import UsageError
from grappe.launch import files
from grappe.verbs.report.gather import gather, html

NAME = "report.html"


def report(places: Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Writes a report of `places`: runs' and studies' folders, files of grappe measure and lr-find (--out).

    Args:
        out: the file; None: report.html, in the run's folder if there is only one run, else in the current folder.

    Raises:
        RunError: one of `places` is neither a run nor a measurement.
        UsageError: `places` is empty, or the file cannot be written.
    """
    if not places:
        raise UsageError("nothing to report: give one or several runs (see: grappe runs)")
    paths = [Path(place) for place in places]
    gathered = gather(paths)
    alone = len(paths) == 1 and paths[0].is_dir()
    file = Path(out) if out is not None else (paths[0] / NAME if alone else Path(NAME))
    title = (
        paths[0].resolve().name if len(paths) == 1 else f"{paths[0].resolve().name} and {len(paths) - 1} more"
    )
    try:
        files.replace(file, html(gathered, title).encode(errors="replace"))
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}: give another with --out") from error
    return file
