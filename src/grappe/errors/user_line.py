"""User line: finds the line of the user's own code in a traceback or a stack, in the form that messages show."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
SHIPPED = PACKAGE / "tasks"  # written as a user would write them
STANDARD_LIBRARY = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))  # a millisecond each
COMMAND = sys.argv[0] if Path(sys.argv[0]).name == "grappe" else ""  # what pip has installed to start grappe
TYPED = ("<stdin", "<console", "<ipython")
WORKER = re.compile(r"^Caught \w+ in DataLoader worker process")
FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the user's code, in the form that messages show."""

    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        """Reads the line; "" if its file cannot be read."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        inside = "" if self.function.startswith("<") else f", in {self.function}()"
        return f"{self.file}, line {self.number}{inside}{self.text and ': '}{self.text}"


def line_of(error: BaseException) -> Line | None:
    """Finds the innermost line of the user's own code in `error`'s traceback, also a data worker's."""
    if isinstance(error, SyntaxError) and error.filename and is_users_file(error.filename):
        return Line(error.filename, error.lineno or 0, "<module>")
    lines = [Line(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    if WORKER.match(str(error)):
        lines += [Line(file, int(number), name) for file, number, name in FRAME.findall(str(error))]
    own = [line for line in lines if is_users_file(line.file)]
    if own:
        return own[-1]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames or frames[-1].f_code.co_name != "_call_impl":
        return None
    return definition(type(frames[-1].f_locals.get("self")), "forward")  # torch could not call it with its arguments


def definition(owner: object, name: str) -> Line | None:
    """Finds the line that defines a function of the user's: of a task or a class; None where that is a library's."""
    code = getattr(inspect.unwrap(getattr(owner, name, None)), "__code__", None)  # type: ignore[arg-type]
    if code is None or not is_users_file(code.co_filename):
        return None
    return Line(code.co_filename, code.co_firstlineno, name)


def at(owner: object, name: str) -> str:
    """Formats the line that defines a function of the user's, to follow a message: ` (task.py, line 3 …)`, or ""."""
    line = definition(owner, name)
    return f" ({line})" if line else ""


def place_in(stack: Sequence[traceback.FrameSummary]) -> str:
    """Finds the innermost line of the user's own code in a stack; without one, of a library other than grappe."""
    lines = [Line(frame.filename, frame.lineno or 0, frame.name) for frame in stack]
    own = [line for line in lines if is_users_file(line.file)]
    others = [line for line in lines if not Path(line.file).is_relative_to(PACKAGE)]
    return str((own or others or lines)[-1]) if lines else "nowhere"


@functools.cache
def is_users_file(file: str) -> bool:
    """Returns whether a frame's file is the user's own, and not Python's, an installed package's, or grappe's."""
    if file.startswith("<"):
        return file.startswith(TYPED)
    if "site-packages" in file or "dist-packages" in file or file == COMMAND:
        return False
    path = Path(os.path.abspath(file))  # noqa: PTH100 - links are left alone, as in the frame
    if any(path.is_relative_to(folder) for folder in STANDARD_LIBRARY):
        return False
    return not path.is_relative_to(PACKAGE) or (path.parent == SHIPPED and path.name != "__init__.py")
