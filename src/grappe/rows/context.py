"""RowsContext: the processes that share the rows, and what was gathered and sent between them so far."""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from grappe.errors.user_line import is_users_file

SHARE = 0.03  # of the time: gathering below it is not worth a line
LINES = 5


class GatheredAt(NamedTuple):
    """An operator that no rule computes from own rows, and the place of the user's code that calls it."""

    operator: str
    line: str
    """File's name and line of the script, or "backward"."""


_numbers = itertools.count(1)


@dataclass(kw_only=True)
class RowsContext:
    """The processes that share the rows of this process's tensors, with counts of what they did."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """The process group that messages go through; None: torch's default group."""
    gathers: bool = True
    """Whether an operator without a rule is computed from all rows, gathered; otherwise it is refused by name."""
    pretended: bool = False
    """Whether the other processes do not exist: this one's rows stand for theirs, where placements alone matter."""
    exchanges: bool = False
    """Whether operators that work along the dimension of the rows get those that they need of other processes.

    Then rows are parts of samples. Otherwise such an operator is one without a rule.
    """
    lengths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By a dimension's length, the parts that it had last: gradients that may have any have these."""
    draw: Callable[..., Any] = lambda operator, *arguments, **options: operator(*arguments, **options)
    """Function that calls an operator that draws for all rows."""
    script_folder: str = ""
    """The folder of the user's code, whose lines are named; "": they are in no library's file."""
    gathered: Counter[GatheredAt] = field(default_factory=Counter)
    """Calls whose arguments were gathered and which every process computed for all rows."""
    seconds: Counter[GatheredAt] = field(default_factory=Counter)
    """Wall time of those calls."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes that this process sent, by purpose."""
    sends: Counter[str] = field(default_factory=Counter)
    """Messages of these bytes."""
    thread: threading.Thread = field(default_factory=threading.current_thread)
    """The thread that may send messages, with those of torch's backward."""
    twin: Callable[[Any], Any] = lambda parameter: None
    """Function that returns the leaf that stands for a parameter where own rows are; None for one without."""
    is_watched: bool = False
    """Whether a hook of the script may look at parameters' gradients while the next backward runs."""
    within: int = 0
    """Modules that run on own rows now, one within another."""
    dispatched: int = 0
    """Operators that met rows."""
    trace: int = 0
    """A hash of the operators that met rows so far, with their shapes: the same on all processes."""
    messages: int = 0
    """Messages of rows and terms so far."""

    def __post_init__(self) -> None:
        self.key = (self.rank, next(_numbers) if self.exchanges else 0)
        """The part of a layout's key by which contexts differ.

        What was decided in one is no other's: another process may not have been in it, as where one foresees a plan.
        """

    def note(self, purpose: str, sizes: Sequence[int]) -> None:
        """Counts messages of these numbers of bytes."""
        self.sends[purpose] += len(sizes)
        self.sent[purpose] += sum(sizes)

    def line(self) -> str:
        """Names the innermost line of the user's code that runs now; "backward" if none does."""
        for frame, line in traceback.walk_stack(sys._getframe(1)):
            file = frame.f_code.co_filename
            if file.startswith(self.script_folder) if self.script_folder else is_users_file(file):
                return f"{file.rpartition('/')[2]}:{line}"
        return "backward"

    def gathering(self, elapsed: float) -> str:
        """Returns what was gathered, with its shares of `elapsed` seconds; "" for less than is worth a line."""
        total = sum(self.seconds.values()) / elapsed
        if total < SHARE:
            return ""
        shares = ((at, seconds / elapsed) for at, seconds in self.seconds.most_common(LINES))
        lines = "; ".join(f"{at.line}, {at.operator}: {share:.0%}" for at, share in shares if share >= 0.01)
        return (
            f"{total:.0%} of the time went to operators without a rule for rows, which every process computes for the "
            f"whole batch; the result is right, only slower: {lines}"
        )


class _Active:
    """Not per thread: backward runs in threads of its own on a GPU."""

    context = RowsContext()


NOW = _Active()
"""Holds the active context; without any, that of a process alone."""
