"""Reads a pickle of plain values and numpy arrays without unpickling it, so that no code can be executed.

Unpickling calls what the file names. A restricted `pickle.Unpickler` would still hash tuples that share their
parts for hours, reserve 64 GB for one index of its memo, and trust numpy's __setstate__ with any shape. Here
pickletools, which executes nothing, decodes the opcodes, and a call is only recorded: `Rebuilt`.
"""

from __future__ import annotations

import dataclasses
import pickletools
from typing import Any

_FUNCTIONS = {
    "numpy.core.multiarray _reconstruct": "_reconstruct",
    "numpy._core.multiarray _reconstruct": "_reconstruct",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    "_codecs encode": "encode",
}


class Refused(Exception):
    """The pickle contains code; the message names it."""


@dataclasses.dataclass(eq=False, repr=False)  # either could take for ever on what a hostile file nests
class Rebuilt:
    """A call in a pickle, recorded and never made: `function` is a value of the table above."""

    function: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


def values(pickled: bytes) -> Any:
    """Reads the pickle's object, of lists, tuples, dictionaries with text as keys, numbers, text and `Rebuilt`.

    Python 2's strings, which are bytes, become text of the same codes (latin-1). Time and memory are
    proportional to the pickle's length.

    Raises:
        Refused: the pickle names a function or class other than those that numpy's arrays need.
        ValueError: the pickle is damaged, or has opcodes that plain values do not need.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            machine.step(opcode.name, argument)
        return machine.stack.pop()
    except (LookupError, TypeError, AttributeError):
        raise ValueError("its parts do not fit together") from None


class _Machine:
    """The stack machine that a pickle is a program for; the opcodes have pickletools' names."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        match name:
            case "BININT1" | "SHORT_BINSTRING" | "BINSTRING" | "BININT" | "BININT2" | "LONG1":
                self.stack.append(argument)
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = self.stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = self.stack[-1]
            case "BINGET" | "LONG_BINGET":
                self.stack.append(self._memo[argument])
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINBYTES" | "SHORT_BINBYTES":
                self.stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                self.stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "GLOBAL" | "INST":
                self.stack.append(_function(argument))
            case "STACK_GLOBAL":
                self.stack.append(_function(" ".join(self._popped(2))))
            case "REDUCE":
                self.stack.append(_called(*self._popped(2)))
            case "BUILD":
                state = self.stack.pop()
                _noted(self.stack[-1]).state = state
            case _:
                self._container(name)

    def _container(self, name: str) -> None:
        match name:
            case "MARK":
                self._below.append(self.stack)
                self.stack = []
            case "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_TUPLE":
                self.stack.append({"EMPTY_LIST": [], "EMPTY_DICT": {}, "EMPTY_TUPLE": ()}[name])
            case "TUPLE":
                items = self._marked()
                self.stack.append(tuple(items))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self.stack.append(tuple(self._popped(int(name[-1]))))
            case "APPEND" | "APPENDS":
                items = self._marked() if name == "APPENDS" else self._popped(1)
                self.stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._marked() if name == "SETITEMS" else self._popped(2)
                for key, value in zip(items[::2], items[1::2], strict=True):
                    self.stack[-1][_text(key)] = value
            case _:
                raise ValueError(f"it has the opcode {name}, for which plain values and arrays have no use")

    def _popped(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _marked(self) -> list[Any]:
        items, self.stack = self.stack, self._below.pop()
        return items


def _function(name: str) -> Rebuilt:
    if name not in _FUNCTIONS:
        raise Refused(f"carries code ({ascii(name.replace(' ', '.'))[1:-1][:80]})")
    return Rebuilt(_FUNCTIONS[name])


def _called(function: Any, arguments: Any) -> Any:
    """Records the call; text that Python 3 wrapped to distinguish it from bytes is unwrapped."""
    if not isinstance(arguments, tuple):
        raise TypeError
    if _noted(function).function != "encode":
        return Rebuilt(function.function, arguments)
    text, encoding = arguments
    if _text(encoding) != "latin1":
        raise ValueError("it has text in an encoding other than latin1")
    return _text(text)


def _noted(value: Any) -> Rebuilt:
    if not isinstance(value, Rebuilt):
        raise TypeError
    return value


def _text(value: Any) -> str:
    """Returns `found`, which must be text: a nested tuple as a key could take very long to hash."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if not isinstance(value, str):
        raise TypeError
    return value
