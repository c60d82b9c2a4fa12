"""The exception for bad input. Its message says what is wrong, where, and how to fix it."""

from __future__ import annotations

import difflib
import math
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Number

FLAGS = ContextVar("FLAGS", default=False)  # whether the command line is calling
HUGE = sys.float_info.max  # no larger number can be computed with


class UserError(ValueError):
    """Bad input. The command line prints the message and exits with code 2.

    >>> raise UserError("rounds is 0. Give at least 1.")
    Traceback (most recent call last):
    fedveil.errors.UserError: rounds is 0. Give at least 1.
    """


class LostError(UserError):
    """A process of the run was lost, and the run ends. The message has the cause and the fix."""

    def __init__(self, what: str, teller: int = 0) -> None:
        super().__init__(what)
        self.advice = "Start it again"
        self.teller = teller  # the rank of the process that prints the error

    def __str__(self) -> str:
        return f"{self.args[0]}. {self.advice}."


def unknown(what: str, given: str, known: Iterable[str], listed: str = "") -> UserError:
    """The error for an unknown name, with the name that it begins, or the nearest one.

    All known names follow, or the sentence `listed` that says where they are.

    A dotted name, where a user's own is allowed, lacks the colon before its last part.

    >>> str(unknown("algorithm", "dp_fedavgg", ["fedavg", "dp_fedavg"]))
    "There is no algorithm 'dp_fedavgg'. Did you mean 'dp_fedavg'? Known: dp_fedavg, fedavg."
    """
    names, given = sorted(known), given[:80]
    near = _near(given, names)
    hint = f". Did you mean '{near}'?" if near else "."
    listed = listed or f"Known: {', '.join(names)}."
    return UserError(f"There is no {what} '{given}'{hint} {listed}")


def _near(given: str, names: Sequence[str]) -> str:
    module, dot, own = given.rpartition(".")
    if dot and own.isidentifier() and any(":" in name for name in names):
        return f"{module}:{own}"
    begun = [name for name in names if given and name.lower().startswith(given.lower())]
    return min(begun, key=len, default="") or next(
        iter(difflib.get_close_matches(given, names, n=1)), ""
    )


@contextmanager
def for_command_line() -> Iterator[None]:
    """Within it, messages name flags: the command line calls functions of Python too."""
    before = FLAGS.set(True)
    try:
        yield
    finally:
        FLAGS.reset(before)


def told(value: object) -> str:
    """A value in a sentence: itself if that is short, else what it is.

    >>> told("x"), told(bytearray(99)), told(int), told(10**400)
    ("'x'", 'a bytearray', 'the class int', 'an int of 401 digits')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, int) and abs(value) > HUGE:
        return f"an int of {int(value.bit_length() * math.log10(2)) + 1} digits"
    plain = isinstance(value, str | Number | list | tuple | dict | types.NoneType)
    written = repr(value) if plain else ""
    short = 0 < len(written) <= 80 and "\n" not in written
    return written if short else with_article(type(value).__name__)


def with_article(name: str) -> str:
    """A noun with its article.

    >>> with_article("int"), with_article("Module")
    ('an int', 'a Module')
    """
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
