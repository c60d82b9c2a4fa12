"""The dictionaries of CIFAR's python batches, read without Python's unpickler.

A batch is a small program for a stack machine. This one knows what such a batch needs: numbers,
byte strings, lists, tuples, dictionaries and arrays of bytes. It can call nothing and import
nothing, and its memory stays within a multiple of the batch's own length.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Array:
    """An array of bytes, while it is put together."""

    values: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))

    def fill(self, state: Any) -> None:
        """The state that numpy writes: version, shape, type, order and bytes."""
        _, shape, _, fortran, raw = state
        flat = np.frombuffer(raw, np.uint8)
        self.values = flat.reshape(shape, order="F" if fortran else "C")


@dataclass(frozen=True)
class _Name:
    """A class or function that the batch asks for; it is known by its name and never imported."""

    module: str
    name: str


_ARRAYS = {
    _Name("numpy.core.multiarray", "_reconstruct"),
    _Name("numpy._core.multiarray", "_reconstruct"),
}
_CLASS, _TYPE = _Name("numpy", "ndarray"), _Name("numpy", "dtype")
_BYTES = _Name("_codecs", "encode")
_KNOWN = {*_ARRAYS, _CLASS, _TYPE, _BYTES}
_MARK = object()


class _Machine:
    """A stack, what was noted down, and one method for each kind of instruction."""

    def __init__(self, room: int) -> None:
        self.room = room  # bytes that may still be made from text; the same text can come again
        self.stack: list[Any] = []
        self.notes: dict[int, Any] = {}

    def since_mark(self) -> list[Any]:
        """All above the last mark, which goes too."""
        place = (
            len(self.stack)
            - 1
            - next(i for i, entry in enumerate(reversed(self.stack)) if entry is _MARK)
        )
        above = self.stack[place + 1 :]
        del self.stack[place:]
        return above

    def tuple_of(self, count: int) -> None:
        """The last entries as one."""
        if len(self.stack) < count:
            raise ValueError("it takes more than there is")
        self.stack[len(self.stack) - count :] = [tuple(self.stack[len(self.stack) - count :])]

    def extend(self, entries: list[Any]) -> None:
        """Into the list below."""
        self.stack[-1].extend(entries)

    def update(self, entries: list[Any]) -> None:
        """Keys and values, in turn, into the dictionary below."""
        self.stack[-1].update(zip(entries[::2], entries[1::2], strict=True))

    def ask(self, module: Any, name: Any) -> None:
        """Put a name on the stack, if it is one of those that arrays need."""
        wanted = _Name(module, name)
        if wanted not in _KNOWN:
            raise ValueError(f"it asks for {module}.{name}")
        self.stack.append(wanted)

    def reduce(self) -> None:
        """A name and its arguments become what they stand for."""
        arguments, name = self.stack.pop(), self.stack.pop()
        if name == _BYTES:  # how Python 3 writes bytes in the old protocols
            self.room -= len(arguments[0])
            if self.room < 0:
                raise ValueError("it holds more than its length allows")
            self.stack.append(_text(arguments[0]))
        else:
            self.stack.append(_made(name, arguments))

    def build(self) -> None:
        """Give the entry below its state; a type of single bytes has none that matters."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Array):
            self.stack[-1].fill(state)
        elif self.stack[-1] != _TYPE:
            raise ValueError("it sets the state of what has none")

    def note(self, place: int) -> None:
        """Remember the last entry."""
        self.notes[place] = self.stack[-1]


def _made(name: Any, arguments: Any) -> Any:
    if name in _ARRAYS and arguments[0] == _CLASS:
        return Array()
    if name == _TYPE:
        if arguments[0] not in (b"u1", "u1"):
            raise ValueError(f"it has arrays of type {arguments[0]!r}")
        return _TYPE
    raise ValueError("it calls what cannot be called")


def _text(value: str) -> bytes:
    """Text that stands for bytes."""
    return value.encode("latin1")


_VALUES = (
    *("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
)
_STEPS: dict[str, Callable[[_Machine, Any], object]] = {
    **dict.fromkeys(["PROTO", "FRAME", "STOP"], lambda m, a: None),
    **dict.fromkeys(_VALUES, lambda m, a: m.stack.append(a)),
    **dict.fromkeys(["BINSTRING", "SHORT_BINSTRING"], lambda m, a: m.stack.append(_text(a))),
    **dict.fromkeys(["BINPUT", "LONG_BINPUT"], lambda m, a: m.note(a)),
    **dict.fromkeys(["BINGET", "LONG_BINGET"], lambda m, a: m.stack.append(m.notes[a])),
    "MEMOIZE": lambda m, a: m.note(len(m.notes)),
    "NONE": lambda m, a: m.stack.append(None),
    "NEWFALSE": lambda m, a: m.stack.append(False),
    "NEWTRUE": lambda m, a: m.stack.append(True),
    "MARK": lambda m, a: m.stack.append(_MARK),
    "EMPTY_TUPLE": lambda m, a: m.stack.append(()),
    "TUPLE": lambda m, a: m.stack.append(tuple(m.since_mark())),
    "TUPLE1": lambda m, a: m.tuple_of(1),
    "TUPLE2": lambda m, a: m.tuple_of(2),
    "TUPLE3": lambda m, a: m.tuple_of(3),
    "EMPTY_LIST": lambda m, a: m.stack.append([]),
    "APPEND": lambda m, a: m.extend([m.stack.pop()]),
    "APPENDS": lambda m, a: m.extend(m.since_mark()),
    "EMPTY_DICT": lambda m, a: m.stack.append({}),
    "SETITEM": lambda m, a: m.update([m.stack.pop(-2), m.stack.pop()]),
    "SETITEMS": lambda m, a: m.update(m.since_mark()),
    "GLOBAL": lambda m, a: m.ask(*a.split(" ")),
    "STACK_GLOBAL": lambda m, a: m.ask(m.stack.pop(-2), m.stack.pop()),
    "REDUCE": lambda m, a: m.reduce(),
    "BUILD": lambda m, a: m.build(),
}


def read_batch(content: bytes) -> Any:
    """What a batch holds; `ValueError` and its like for anything that is not one."""
    machine = _Machine(len(content))
    for instruction, argument, _ in pickletools.genops(content):
        step = _STEPS.get(instruction.name)
        if step is None:
            raise ValueError(f"it uses {instruction.name}")
        step(machine, argument)
    return machine.stack.pop()
