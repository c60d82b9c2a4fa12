"""The one exception a user meets: a sentence that says what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input. The message is one clear sentence; the command line prints it and exits with 2."""


class LostError(UserError):
    """A process of the run is gone, and the run ends with it: what happened; what to do."""

    def __init__(self, what: str, teller: int = 0) -> None:
        super().__init__(what)
        self.advice = "start it again"
        self.teller = teller  # the process that says it

    def __str__(self) -> str:
        return f"{self.args[0]}; {self.advice}."


def unknown(what: str, given: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a list, with the nearest known name.

    >>> str(unknown("algorithm", "dp_fedavgg", ["fedavg", "dp_fedavg"]))
    "There is no algorithm 'dp_fedavgg'; did you mean 'dp_fedavg'? Known: dp_fedavg, fedavg."
    """
    names, given = sorted(known), given[:80]
    near = difflib.get_close_matches(given, names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    return UserError(f"There is no {what} '{given}'{hint} Known: {', '.join(names)}.")
