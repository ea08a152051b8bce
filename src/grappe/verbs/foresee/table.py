"""The table of foreseen plans, and a sentence on the one to take."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from grappe.foresight.search import Foreseen, Room
from grappe.words import format_bytes

COLUMNS = (
    "plan", "batch", "parameters", "gradients", "optimizer", "peak of a step", "of an evaluation", "checkpoint's copy",
)  # fmt: skip
WORDS = {True: "yes", False: "no", None: "?"}


def table(found: Sequence[Foreseen], room: Room | None) -> Table:
    """Makes the table: bytes of the process that needs most."""
    made = Table(box=None, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        made.add_column(column, overflow="fold")
    if room is not None:
        made.add_column("fits")
    for one in found:
        name = one.plan or "one process"
        if one.needs is None:
            made.add_row(name, str(one.batch), *["-"] * (len(COLUMNS) - 2 + (room is not None)))
            continue
        states = one.needs.states
        cells = [
            format_bytes(states.parameters),
            format_bytes(states.gradients),
            format_bytes(states.optimizer),
            _peak(one),
        ]
        cells.append(_range(one.needs.evaluation_least, one.needs.evaluation) or "?")
        cells.append("?" if one.needs.checkpoint is None else format_bytes(one.needs.checkpoint))
        made.add_row(name, str(one.batch), *cells, *([WORDS[one.fits]] if room is not None else []))
    return made


def reason(plan: str, why: str) -> str:
    """Says why a plan has no numbers; what both the plan and the reason begin with is said once."""
    begun, colon, rest = why.partition(": ")
    if colon and f"{plan},".startswith((f"{begun},", f"{begun}=")):
        why = rest
    return f"{plan or 'one process'}: {why}"


def _peak(one: Foreseen) -> str:
    assert one.needs is not None
    return _range(one.needs.least, one.needs.peak) or f"more than {format_bytes(one.needs.states.total)}"


def _range(least: int | None, most: int | None) -> str:
    if least is None or most is None:
        return ""
    texts = format_bytes(least), format_bytes(most)
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def sentences(found: Sequence[Foreseen], room: Room | None) -> list[str]:
    """Says which plans cannot be foreseen, and which one to take for a site."""
    lines = [reason(one.plan, one.why) for one in found if one.needs is None]
    if any(one.needs is not None and one.needs.peak is None for one in found):
        lines.append(
            "more than …: the activations of such a plan are not foreseen, so whether it fits is measured"
        )
    if room is None:
        return lines
    lines.append(
        f"a process may have {format_bytes(room.size)} ({room.whose}); counted are the higher of both peaks, a tenth "
        "more for what the allocator cannot use, and 1.5 GB for CUDA and NCCL. Not measured on that GPU"
    )
    fitting = next((one for one in found if one.fits), None)
    known = [one.needs for one in found if one.needs is not None and one.needs.most is not None]
    if fitting is not None and fitting.needs is not None and fitting.needs.most is not None:
        needed = format_bytes(room.taken(fitting.needs))
        lines.append(f"the first that fits: {fitting.plan or 'one process'}, with {needed} a process")
    elif known and not any(one.fits is None for one in found if one.needs is not None):
        lines.append(
            f"none of them fits: the smallest takes {format_bytes(min(map(room.taken, known)))} a process. Take more "
            "processes with shard=, more microbatches, recompute, or a smaller batch_size"
        )
    return lines
