"""Parses text into the typed fields of a dataclass: one grammar for plans, tasks' fields and durations."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import textwrap
import types
from collections.abc import Callable, Container, Iterable, Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from grappe.errors import UsageError, nearest

T = TypeVar("T")

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
PLAIN = re.compile(r"(\d{1,12}(?:\.\d{0,12})?|\.\d{1,12}) *([smhd]?)", re.ASCII)
CLOCK = re.compile(r"(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})", re.ASCII)
DAYS = re.compile(r"(\d{1,9})-(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", re.ASCII)
"""Slurm's form with days: hours come next, D-HH, D-HH:MM or D-HH:MM:SS (man sbatch, --time)."""
LARGEST = 2**63
"""Whole numbers are below it, as in torch's tensors."""
WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
    **dict.fromkeys(("none", "auto", "null"), None),
}
"""Words for True, False and None."""
DIGITS = 18
"""Most digits of a number in a list."""


def hints(cls: type) -> dict[str, Any]:
    """Returns the resolved type of each dataclass field of `cls`, by name."""
    try:
        resolved = get_type_hints(cls)
    except NameError as error:
        raise UsageError(f"{cls.__name__}: a field's type cannot be resolved: {error}") from error
    return {field.name: resolved[field.name] for field in dataclasses.fields(cls) if field.init}


def split(texts: Iterable[str]) -> dict[str, str]:
    """Splits `["lr=0.2", "deep"]` into `{"lr": "0.2", "deep": "true"}`: a name without a value is a flag.

    Raises:
        UsageError: a text is empty, or a name is given twice.
    """
    texts_by_name: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name, value = name.strip(), value.strip()
        if not name or (equals and not value):
            raise UsageError(f"'{text}' is not of the form name=value")
        if name in texts_by_name:
            raise UsageError(f"{name} is given twice: {texts_by_name[name]} and {value or 'true'}")
        texts_by_name[name] = value if equals else "true"
    return texts_by_name


def typed_name(field: str) -> str:
    """Returns a field's name as users type it: `optimizer` for `optimizer_`, as a task has a method of that name."""
    return field.removesuffix("_")


def field_name(name: str, names: Container[str]) -> str:
    """Returns the field that a user's `name` means."""
    return name if name in names else f"{name}_"


def parse(cls: type, texts: Mapping[str, str], what: str) -> dict[str, Any]:
    """Converts `texts` to typed values for the fields of dataclass `cls`.

    Args:
        what: the word for these names in a message, for example "plan".

    Raises:
        UsageError: there is no such field, or a value has the wrong type.
    """
    types_by_name = hints(cls)
    values = {}
    for name, text in texts.items():
        field = field_name(name, types_by_name)
        if field not in types_by_name:
            raise UsageError(f"{what} has no '{name}': {nearest(name, map(typed_name, types_by_name))}")
        try:
            values[field] = convert(types_by_name[field], text)
        except ValueError as error:
            if text == "true":  # written without a value, as a flag is
                raise UsageError(f"{what}: {name} needs a value, {error}: {name}=…") from error
            raise UsageError(f"{what}: {name}={text} is not {error}") from error
    return values


def convert(kind: Any, text: str) -> Any:
    """Converts `text` to a value of type `kind`: int, float, bool, str, Literal, or a union of those with None.

    Raises:
        ValueError: `text` is not such a value; the message says what is expected ("a whole number").
    """
    origin, lower = get_origin(kind), text.lower()
    if origin is Literal:
        for choice in get_args(kind):
            if str(choice) == text:
                return choice
        raise ValueError(f"one of {', '.join(str(choice) for choice in get_args(kind))}")
    if origin in (Union, types.UnionType):
        messages = []
        # None before str, so that `none` means nothing and not the word.
        for part in sorted(get_args(kind), key=lambda part: (part is str, part is not type(None))):
            try:
                return convert(part, text)
            except ValueError as error:
                messages.append(str(error))
        raise ValueError(" or ".join(messages))
    if kind in (bool, type(None)):
        if lower not in WORDS or not isinstance(WORDS[lower], kind):
            raise ValueError("true or false" if kind is bool else "none")
        return WORDS[lower]
    if kind in (int, float):
        try:
            number = kind(text.replace("_", "") if kind is int else text)
        except ValueError:
            raise ValueError("a whole number" if kind is int else "a number") from None
        if kind is int and not -LARGEST <= number < LARGEST:
            raise ValueError("a whole number below 2^63")
        return number
    if kind is not str:
        raise ValueError(f"settable from text (its type is {kind}): set it in Python")
    return text


def text_of(value: object) -> str:
    """Returns the text that `convert` reads as `value`: of a number, a text, True, False or None.

    Raises:
        UsageError: it is of another type.
    """
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int | float | str):
        return str(value)
    raise UsageError(f"{value!r} is neither a number nor a text: set it in Python, on the task itself")


def from_json(kind: type[T], value: Any) -> T:
    """Converts what a JSON or TOML file holds to `kind`, usually a dataclass. Names that it does not have are ignored.

    Raises:
        ValueError: the value does not fit; the message names the place: "rungs[0]: Expected `float`, got `str`".
    """
    import msgspec  # 20 ms that few commands need

    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `")
        place = place.rstrip("`").removeprefix("$").removeprefix(".")
        raise ValueError(f"{place}: {message}" if place else message) from error


def check_values(value: Any) -> None:
    """Checks the fields of a dataclass instance that was made in Python, which does not check them.

    Raises:
        UsageError: a field's value is not one of its choices, or a text where a number belongs.
    """
    numbers = {int: "a whole number", float: "a number", bool: "True or False"}
    for name, kind in hints(type(value)).items():
        chosen = getattr(value, name)
        if kind in numbers and isinstance(chosen, str):
            raise UsageError(f"{type(value).__name__}: {name}={chosen!r} is a text, and not {numbers[kind]}")
        if get_origin(kind) is Literal and chosen not in get_args(kind):
            raise UsageError(
                f"{type(value).__name__}: {name}={chosen!r} is not one of {', '.join(map(str, get_args(kind)))}"
            )


def docs(cls: type) -> dict[str, str]:
    """Returns the docstring under each field of a dataclass, by the field's name, in the order of the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    texts = {}
    for pair in pairwise(body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = inspect.cleandoc(text)
    return texts


def seconds(text: str, name: str) -> float:
    """Converts a duration to seconds: 90, 90s, 30m, 2h, or Slurm's form 1-02:30:00.

    Args:
        name: the option's name, for the message.

    Raises:
        UsageError: the text is no duration.
    """
    if plain := PLAIN.fullmatch(text.strip()):
        duration = float(plain[1]) * UNITS[plain[2]]
    elif clock := DAYS.fullmatch(text.strip()) or CLOCK.fullmatch(text.strip()):
        hours, minutes, rest = (int(part or 0) for part in clock.groups()[-3:])
        days = int(clock[1]) if clock.re is DAYS else 0
        duration = days * 86400.0 + hours * 3600.0 + minutes * 60.0 + rest
    else:
        duration = 0.0
    if duration <= 0:
        raise UsageError(f"{name}={text}: give seconds, or a time like 90s, 30m, 2h or 02:30:00")
    return duration


def part(text: str, name: str) -> float:
    """Converts a part of a whole to a number above 0, at most 1: 0.25, 1/9.

    Args:
        name: the option's name, for the message.

    Raises:
        UsageError: the text is no such part.
    """
    try:
        fraction = float(Fraction(text.strip()))
    except (ValueError, ZeroDivisionError, OverflowError):
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise UsageError(f"{name}={text}: give a part of the whole, above 0 and at most 1: 0.5, 1/9")
    return fraction


def with_variables(text: str) -> str:
    """The text with `$NAME` and `${NAME}` in it expanded from the environment.

    Raises:
        UsageError: a variable is not set here, or empty.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not os.environ.get(name):
            raise UsageError(f"${name} is empty on this machine")
        return os.environ[name]

    return re.sub(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", value, text)


def comma_separated(text: str, name: str) -> tuple[str, ...]:
    """Splits a text like "tensorboard,wandb"."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def whole_numbers(text: str, name: str, least: int = 1) -> tuple[int, ...]:
    """Converts a text like "32,64,128" to numbers.

    Raises:
        UsageError: a part is no whole number, or is below `least`.
    """
    parts = comma_separated(text, name)
    if not all(part.isdecimal() and len(part) <= DIGITS and int(part) >= least for part in parts):
        raise UsageError(f"{name}={text}: give whole numbers from {least}, with commas between")
    return tuple(map(int, parts))


class NumberRange(NamedTuple):
    """A range of whole numbers, both ends included, written 2-8."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}-{self.most}" if self.most > self.least else str(self.least)


def number_or_range(text: str, name: str) -> int | NumberRange:
    """Converts a text like "2" or "2-8".

    Raises:
        UsageError: an end is no whole number, or the first is the greater one.
    """
    ends = text.split("-")
    if len(ends) > 2 or not all(end.isdecimal() and len(end) < 7 for end in ends) or int(ends[0]) > int(ends[-1]):
        raise UsageError(f"{name}={text}: give a whole number, or a range such as 2-8")
    least, most = int(ends[0]), int(ends[-1])
    return NumberRange(least, most) if most > least else least


def count_or_part(text: str, name: str) -> int | float:
    """Converts a whole number, or a part of a whole: 50, 0.1, 1/10.

    Raises:
        UsageError: the text is neither, or 0.
    """
    return int(text) if text.isdecimal() and len(text) <= DIGITS and int(text) else part(text, name)


@dataclasses.dataclass(frozen=True)
class TextForm:
    """Marks a type with a special form on the command line; `read(text, name of the option)` parses it."""

    read: Callable[[str, str], Any]


Duration = Annotated[float, TextForm(seconds)]
DurationOrNone = Annotated[float, TextForm(lambda text, name: 0.0 if text == "none" else seconds(text, name))]
Part = Annotated[float, TextForm(part)]
CountOrPart = Annotated[int | float, TextForm(count_or_part)]
Names = Annotated[tuple[str, ...], TextForm(comma_separated)]
Numbers = Annotated[int | NumberRange, TextForm(number_or_range)]
Counts = Annotated[tuple[int, ...], TextForm(whole_numbers)]
Ranks = Annotated[tuple[int, ...], TextForm(lambda text, name: whole_numbers(text, name, least=0))]


def text_form(kind: Any) -> TextForm | None:
    """Returns the form of an annotation like `Duration | None`; None if the type needs no special form."""
    for annotation in (kind, *get_args(kind)):
        for mark in getattr(annotation, "__metadata__", ()):
            if isinstance(mark, TextForm):
                return mark
    return None


def at_least(instance: Any, least: int, *names: str) -> None:
    """Checks that numbers of an options dataclass are not too small; None is allowed.

    Raises:
        UsageError: one is below `least`; the message names the option as the command line does.
    """
    for name in names:
        value = getattr(instance, name)
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')}={value}: it must be at least {least}")
