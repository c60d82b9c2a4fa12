"""Reads the dictionaries of CIFAR's Python batches without Python's unpickler.

A batch is a small program for a stack machine. This machine knows only what such a batch needs:
numbers, byte strings, lists, tuples, dictionaries and arrays of bytes. It can call nothing and
import nothing, and its memory stays within a multiple of the batch's own length.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Array:
    """An array of bytes under construction."""

    values: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))

    def fill(self, state: Any) -> None:
        """Set the state that numpy writes: version, shape, type, order and bytes."""
        _, shape, _, fortran, raw = state
        flat = np.frombuffer(raw, np.uint8)
        self.values = flat.reshape(shape, order="F" if fortran else "C")


@dataclass(frozen=True)
class _Name:
    """A class or function that the batch refers to; it is compared by name and never imported."""

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
    """A stack, a memo, and one method per kind of instruction."""

    def __init__(self, room: int) -> None:
        self.room = room  # bytes that text may still expand to; the same text can recur
        self.stack: list[Any] = []
        self.notes: dict[int, Any] = {}

    def since_mark(self) -> list[Any]:
        """Pop everything above the last mark, and the mark."""
        place = (
            len(self.stack)
            - 1
            - next(i for i, entry in enumerate(reversed(self.stack)) if entry is _MARK)
        )
        above = self.stack[place + 1 :]
        del self.stack[place:]
        return above

    def tuple_of(self, count: int) -> None:
        """Replace the last entries by one tuple."""
        if len(self.stack) < count:
            raise ValueError("it pops more than the stack holds")
        self.stack[len(self.stack) - count :] = [tuple(self.stack[len(self.stack) - count :])]

    def extend(self, entries: list[Any]) -> None:
        """Append entries to the list below."""
        self.stack[-1].extend(entries)

    def update(self, entries: list[Any]) -> None:
        """Add alternating keys and values to the dictionary below."""
        self.stack[-1].update(zip(entries[::2], entries[1::2], strict=True))

    def ask(self, module: Any, name: Any) -> None:
        """Push a name, if arrays need it."""
        wanted = _Name(module, name)
        if wanted not in _KNOWN:
            raise ValueError(f"it refers to {module}.{name}")
        self.stack.append(wanted)

    def reduce(self) -> None:
        """Replace a name and its arguments by their value."""
        arguments, name = self.stack.pop(), self.stack.pop()
        if name == _BYTES:  # how Python 3 writes bytes in older protocols
            self.room -= len(arguments[0])
            if self.room < 0:
                raise ValueError("it expands beyond its length")
            self.stack.append(_text(arguments[0]))
        else:
            self.stack.append(_made(name, arguments))

    def build(self) -> None:
        """Set the state of the entry below; a type of single bytes has no relevant state."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Array):
            self.stack[-1].fill(state)
        elif self.stack[-1] != _TYPE:
            raise ValueError("it sets the state of an object without state")

    def note(self, place: int) -> None:
        """Store the last entry in the memo."""
        self.notes[place] = self.stack[-1]


def _made(name: Any, arguments: Any) -> Any:
    if name in _ARRAYS and arguments[0] == _CLASS:
        return Array()
    if name == _TYPE:
        if arguments[0] not in (b"u1", "u1"):
            raise ValueError(f"it has arrays of type {arguments[0]!r}, not bytes")
        return _TYPE
    raise ValueError("it calls an object that cannot be called")


def _text(value: str) -> bytes:
    """Text that encodes bytes."""
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
    """The content of a batch; raises `ValueError` or similar for anything else."""
    machine = _Machine(len(content))
    for instruction, argument, _ in pickletools.genops(content):
        step = _STEPS.get(instruction.name)
        if step is None:
            raise ValueError(f"it uses the instruction {instruction.name}")
        step(machine, argument)
    return machine.stack.pop()
