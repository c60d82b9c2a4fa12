"""Rules: what a rule measures, its condition, its evidence and its advice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedveil.accounting.rounding import short
from fedveil.diagnosis.run import DiagnosedRun

Numbers = dict[str, float]


@dataclass(frozen=True)
class Finding:
    """What a rule found in a run: evidence in numbers, and advice."""

    rule: str
    evidence: str
    advice: str
    numbers: Numbers
    wrong: bool = True  # False: a note, not a problem
    command: str = ""  # the advice as flags of `fedveil train`, if possible

    @property
    def sentence(self) -> str:
        """Evidence, advice and flags in one line."""
        flags = f" ({self.command})" if self.command else ""
        return f"{self.evidence}. {self.advice[:1].upper()}{self.advice[1:]}{flags}."


@dataclass(frozen=True)
class Rule:
    """condition(measure(run)) ⇒ evidence and advice.

    `measure` returns None if the rule does not apply to the recipe or the run is too short. `needs`
    are the columns of metrics.parquet that the rule requires. `command` is the first suggestion as
    flags for the run's recipe.
    """

    name: str
    measure: Callable[[DiagnosedRun], Numbers | None]
    condition: Callable[[Numbers], bool]
    evidence: Callable[[Numbers], str]
    advice: Callable[[Numbers], str]
    needs: tuple[str, ...] = ()
    wrong: bool = True
    command: Callable[[DiagnosedRun, Numbers], str] = lambda run, n: ""

    def judged(self, run: DiagnosedRun) -> bool:
        """Whether the run recorded what the rule needs."""
        return all(bool((run.column(name) == run.column(name)).any()) for name in self.needs)

    def __call__(self, run: DiagnosedRun) -> Finding | None:
        """The finding for a run, if any."""
        numbers = self.measure(run) if self.judged(run) else None
        if numbers is None or not self.condition(numbers):
            return None
        evidence, advice = self.evidence(numbers), self.advice(numbers)
        command = self.command(run, numbers)
        return Finding(self.name, evidence, advice, numbers, self.wrong, command)


def figure(number: float) -> str:
    """A number in two digits, or all digits of a large one.

    >>> figure(14.234), figure(0.02345), figure(7850.0), figure(123456), figure(1e-5)
    ('14', '0.023', '7,850', '123,456', '1e-5')
    """
    if not math.isfinite(number):
        return "a value that is not finite"
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.0f}" if abs(number) >= 10 else short(number, 2)
