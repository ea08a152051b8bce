"""Runs the command line and prints its results; errors, signals and a closed pipe become exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from cyclopts import App, CycloptsError

from grappe.errors import EXIT_FAILURE, EXIT_OK, EXIT_USAGE, GrappeError, ProcessDied, UsageError, of_file
from grappe.errors.causes import broken_package, hiding, refused_process
from grappe.language import translated_cell, unknown_language
from grappe.launch.openmp import let_threads_sleep
from grappe.launch.rank import is_main_process, rank_from_environment
from grappe.launch.terminal import NARROWEST, clear, complain, show_any_text, wrapped, write
from grappe.words import VERSION

EXIT_SIGINT = 130
FORM = 1
"""Version of the form of what --json prints: it rises when a name goes or changes its meaning."""
LAUNCH_OPTIONS = ("--plan", "-p", "--run", "--runs", "--save-every", "--idle")
"""Options of `grappe launch` that a value follows."""
BUG = "a bug in grappe"
"""Words for an exception that nobody foresaw; attacks and fuzzers search output for them."""


def run(app: App, words: Sequence[str] | None = None) -> NoReturn:
    """Runs the command of these words, by default those of sys.argv, and ends this process with its exit code."""
    words = sys.argv[1:] if words is None else words
    let_threads_sleep()
    show_any_text()
    if (unknown := unknown_language()) is not None and is_main_process():
        complain(f"grappe: {unknown}")
    if 0 < shutil.get_terminal_size().columns < NARROWEST:  # where rich wraps letter by letter, for minutes
        os.environ["COLUMNS"] = str(NARROWEST)
    arguments = [text for text in words if text != "--debug"]
    all_commands = arguments == ["help", "all"]
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1 + all_commands :], "--help"]
    elif arguments == ["version"]:
        arguments = ["--version"]
    if len(arguments) < 2 or {"--help", "-h"} & set(arguments):
        from grappe.cli.help import set_formatter

        set_formatter(app, all_commands=all_commands)
    debug = "--debug" in words
    try:
        code = execute(app, script_apart(arguments))
    except GrappeError as error:
        code = _complain(error, debug)
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        complain("grappe: ended at once; earlier checkpoints are kept")
        code = EXIT_SIGINT
    except BrokenPipeError:  # the pipe's reader (`head`) has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_OK
    except Exception as error:
        explanation = refused_process(error) or broken_package(error)
        unforeseen = f"{type(error).__name__}: {error} ({BUG}: --debug shows more)"
        mistake = UsageError(explanation) if explanation else ProcessDied(unforeseen)
        mistake.details = "".join(traceback.format_exception(error))
        code = _complain(mistake, debug)
    if isinstance(code, int) and "torch" in sys.modules:
        _leave_communication(code)
    sys.exit(code)


def script_apart(words: list[str]) -> list[str]:
    """Puts -- before the script of `grappe launch`, so that what follows it is the script's own."""
    if words[:1] == ["measure"]:  # whose -- is --script
        return ["--script" if word == "--" and "--" not in words[:place] else word for place, word in enumerate(words)]
    if words[:1] != ["launch"]:
        return words
    place = 1
    while place < len(words) and words[place].startswith("-"):
        place += 1 + (words[place] in LAUNCH_OPTIONS)
    asks = {"--help", "-h", "--"}.intersection(words[: place + 1])
    return words if asks else [*words[:place], "--", *words[place:]]


def _leave_communication(code: int) -> None:
    """Ends this process at once, if it failed with communication threads, or if a launcher started it.

    Communication threads of a failed step may never join, and after a successful one they may outlive the interpreter,
    which makes torch abort (PyTorch's pull request 179291). The processes of a local command end so, too.
    """
    from torch import distributed

    failed = code in (EXIT_FAILURE, EXIT_USAGE)
    leaves = failed and distributed.is_available() and distributed.is_initialized()
    if not failed:
        with contextlib.suppress(UsageError):  # `doctor` reports it, and continues
            leaves = rank_from_environment() is not None
    if leaves:
        with contextlib.suppress(OSError):  # a reader who has left
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def typed(arguments: list[str]) -> Iterator[None]:
    """Context in which these words were typed after `grappe`: messages then say how to resume them."""
    before, sys.argv = sys.argv, ["grappe", *arguments]
    try:
        yield
    finally:
        sys.argv = before


def execute(app: App, arguments: list[str]) -> int:
    """Runs a command; returns its exit code. Raises a GrappeError for wrong words, and for a file that is refused."""
    try:
        code = app(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        from grappe.cli.corrections import corrected

        raise corrected(error, arguments, app) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise (UsageError(refused) if (refused := refused_process(error)) else of_file(error)) from error
    return code if isinstance(code, int) else EXIT_OK


def _complain(error: GrappeError, debug: bool) -> int:
    """Prints an error, once for all processes that raised it, and returns the exit code."""
    from grappe.launch.start import leave_error

    if error.by or is_main_process():
        details = error.details or "".join(traceback.format_exception(error))
        if debug:
            write(details, sys.stderr)
        for folder, names in hiding(details, os.environ.get("PYTHONPATH", "")).items():
            complain(f"grappe: PYTHONPATH={folder} hides installed modules ({names}): unset PYTHONPATH if that is why")
        complain(f"grappe: {error}")
        return leave_error(error)
    return error.exit_code


def show(content: Any) -> None:
    """Prints a result, on the main process only."""
    from grappe.launch.safe_console import wide_console

    if is_main_process() and isinstance(content, str):
        write(wrapped(translated_cell(content, sys.stdout), sys.stdout))
    elif is_main_process():
        clear(sys.stdout)
        wide_console(sys.stdout).print(content)


def show_json(kind: str, **content: Any) -> None:
    """Prints the answer to --json: one line, an object of the form FORM; on the main process only.

    Args:
        content: dataclasses and paths may be in it; NaN and infinities become null.
    """
    if is_main_process():
        write(json.dumps(json_form(kind, content), allow_nan=False))


def json_form(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object of the form FORM that --json prints and --out writes."""
    return {"grappe": VERSION, "form": FORM, "kind": kind} | json_values(content)


def json_values(value: Any) -> Any:
    """Converts dataclasses, paths and collections to JSON's values; NaN and infinities become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(name): json_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_values(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def show_either(json: bool, kind: str, shown: Any, **content: Any) -> None:
    """Prints a result: with --json the content, as `show_json` does, else `shown`, a text or a table."""
    if json:
        show_json(kind, **content)
    else:
        show(shown)


def show_answer(json: bool, kind: str, facts: Iterable[tuple[str, object]], **content: Any) -> None:
    """Prints a result as `show_either` does: with --json the content, else a table of names and values."""
    from grappe.launch.safe_console import fact_table

    show_either(json, kind, fact_table(facts), **content)


def show_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Prints a table of two columns without a header: names and values."""
    from grappe.launch.safe_console import fact_table

    show(fact_table(facts))
