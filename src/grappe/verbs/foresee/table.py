"""The table of foreseen plans, and a sentence on the one to take."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from grappe.profiling.memory import size
from grappe.verbs.foresee.foresee import Foreseen, Room

WORDS = {True: "yes", False: "no", None: "?"}


def table(found: Sequence[Foreseen], room: Room | None) -> Table:
    """Makes the table: bytes of the process that needs most."""
    made = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("plan", "batch", "parameters", "gradients", "optimizer", "peak of a step"):
        made.add_column(column, overflow="fold")
    if room is not None:
        made.add_column("fits")
    for one in found:
        name = one.plan or "one process"
        if one.needs is None:
            made.add_row(name, str(one.batch), "-", "-", "-", "-", *(["-"] if room is not None else []))
            continue
        states = one.needs.states
        cells = [size(states.parameters), size(states.gradients), size(states.optimizer), _peak(one)]
        made.add_row(name, str(one.batch), *cells, *([WORDS[one.fits]] if room is not None else []))
    return made


def _peak(one: Foreseen) -> str:
    needs = one.needs
    assert needs is not None
    if needs.peak is None or needs.least is None:
        return f"more than {size(needs.states.total)}"
    least, most = size(needs.least), size(needs.peak)
    return most if least == most else f"{least} to {most}"


def sentences(found: Sequence[Foreseen], room: Room | None) -> list[str]:
    """Says which plans cannot be foreseen, and which one to take for a site."""
    lines = [f"{one.plan or 'one process'}: {one.why}" for one in found if one.needs is None]
    if any(one.needs is not None and one.needs.peak is None for one in found):
        lines.append(
            "more than …: the activations of such a plan are not foreseen, so whether it fits is measured"
        )
    if room is None:
        return lines
    lines.append(
        f"a process may have {size(room.size)} ({room.whose}); counted are the peak, a tenth more for what the "
        "allocator cannot use, and 1.5 GB for CUDA and NCCL. Not measured on that GPU"
    )
    fitting = next((one for one in found if one.fits), None)
    known = [one.needs.peak for one in found if one.needs is not None and one.needs.peak is not None]
    if fitting is not None and fitting.needs is not None and fitting.needs.peak is not None:
        needed = size(Room.needed(fitting.needs.peak))
        lines.append(f"the first that fits: {fitting.plan or 'one process'}, with {needed} a process")
    elif known and not any(one.fits is None for one in found if one.needs is not None):
        lines.append(
            f"none of them fits: the smallest takes {size(Room.needed(min(known)))} a process. Take more processes "
            "with shard=, more microbatches, recompute, or a smaller batch_size"
        )
    return lines
