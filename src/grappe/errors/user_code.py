"""User code: finds the line of the user's own code that raised or passed on an exception, for the message."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from grappe.errors import GrappeError, OutOfMemory, TaskError
from grappe.errors.causes import is_out_of_memory
from grappe.errors.remedies import OVERWRITTEN, WITHOUT_GRADIENT, remedy
from grappe.errors.user_line import FRAME, WORKER, at, definition, line_of

Function = TypeVar("Function", bound=Callable[..., Any])

LAYERS = os.path.join("torch", "nn", "modules")  # noqa: PTH118 - a part of frames' file names
WRAPPERS = os.path.join("grappe", "private_api")  # noqa: PTH118 - through which torch calls its own operators
CALLED_BY_LAYERS = (os.path.join("nn", "functional.py"), os.path.join("torch", "overrides.py"))  # noqa: PTH118
PARTS: dict[tuple[str, str], str] = {}
"""Functions of grappe's that call what a task gave, by file and name, and the words for what they call."""
# Parts of a task that are at fault where backward fails, in which no line of the user's runs.
IN_BACKWARD = ((WITHOUT_GRADIENT, "loss"), (OVERWRITTEN, "model"))


def method_error(task: object, method: str, what: str) -> TaskError:
    """Returns the error that `method` of the task does `what`, with the line of the user's."""
    return TaskError(f"{type(task).__name__}.{method}() {what}{at(task, method)}")


def layer_of(error: BaseException) -> str | None:
    """Names the layer of torch.nn whose forward raised the exception."""
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__) if WRAPPERS not in f.f_code.co_filename]
    while frames and frames[-1].f_code.co_filename.endswith(CALLED_BY_LAYERS):
        frames.pop()
    if not frames or LAYERS not in frames[-1].f_code.co_filename:
        return None
    return f"{type(frames[-1].f_locals.get('self')).__name__}.{frames[-1].f_code.co_name}()"


def calls_users(part: str) -> Callable[[Function], Function]:
    """Decorator of a function that calls a part of the user's task: messages name the part where no line of theirs led.

    Args:
        part: the words for it: "a sample of data()".
    """

    def mark(function: Function) -> Function:
        code = function.__code__  # type: ignore[attr-defined]
        PARTS[code.co_filename, code.co_name] = part
        return function

    return mark


def part_of(error: BaseException) -> str | None:
    """Finds the part of a task that an exception came from, without a line of the user's: a list for a dataset."""
    places = [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    if WORKER.match(str(error)):
        places += [(file, name) for file, _, name in FRAME.findall(str(error))]
    return next((PARTS[place] for place in reversed(places) if place in PARTS), None)


def is_users(error: BaseException) -> bool:
    """Returns whether `error` came through the user's own code, or out of what it gives: layers, samples, metrics."""
    ways = (line_of, layer_of, part_of, _part_in_backward)
    return any(way(error) is not None for way in ways)


def sentence(error: BaseException, task: object = None, part: str = "") -> str:
    """Formats `error` as one line: with the user's own line that led to it, and with what to do, where that is known.

    Args:
        part: the method of the task to name where no line of the user's led to it.
    """
    text = str(error)
    name = type(error).__name__
    if isinstance(error, SyntaxError):
        text = error.msg
    elif WORKER.match(text):
        name, _, text = text.rstrip().splitlines()[-1].partition(": ")
    text = " ".join(part.strip() for part in text.splitlines())
    line, advice = line_of(error) or _place(error, task, part), remedy(text)
    return (f"{name}: {text}" if text else name) + (f" ({line})" if line else "") + (f". {advice}" if advice else "")


def _place(error: BaseException, task: object, part: str) -> str | None:
    """Describes where an exception came from that has no line of the user's: a layer of model(), or a part."""
    layer, part = layer_of(error), part or _part_in_backward(error) or ""
    defined = definition(task, part or "model") if layer or part else None
    return ", ".join(str(place) for place in (layer, defined) if place) or part_of(error)


def _part_in_backward(error: BaseException) -> str | None:
    return next((part for pattern, part in IN_BACKWARD if pattern.search(str(error))), None)


@contextlib.contextmanager
def naming_user_line(task: object) -> Iterator[None]:
    """Context in which an exception from the task's own code becomes one message that names the line."""
    try:
        yield
    except (Exception, SystemExit) as raised:
        # Python says "generator raised StopIteration" of a sample that raises one.
        error = raised.__cause__ if isinstance(raised.__cause__, StopIteration) else raised
        if isinstance(error, GrappeError) or not is_users(error):
            raise
        raise TaskError(f"{type(task).__name__} failed: {sentence(error, task)}") from error


def user_call(task: object, method: str, *arguments: Any) -> Any:
    """Calls a method of the task; an exception in the method becomes one message that names the line.

    Raises:
        OutOfMemory: the method got no more memory.
        TaskError: it failed for another reason.
    """
    called = f"{type(task).__name__}.{method}()"
    try:
        return getattr(task, method)(*arguments)
    except GrappeError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise OutOfMemory(
                f"{called} ran out of memory: {sentence(error)}. Give the process more (the job's --mem, `ulimit -d`), "
                "or make the model smaller"
            ) from error
        raise TaskError(f"{called} failed: {sentence(error)}") from error
