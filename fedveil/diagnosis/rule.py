"""A rule: what it looks at, when something is wrong, how it shows, and what to try."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedveil.diagnosis.run import Run

Numbers = dict[str, float]


@dataclass(frozen=True)
class Finding:
    """Something that a run shows: the evidence in numbers, and what to try."""

    rule: str
    evidence: str
    advice: str
    numbers: Numbers
    wrong: bool = True  # else only worth knowing
    command: str = ""  # the advice as flags of `fedveil train`, where it can be said so

    @property
    def sentence(self) -> str:
        """All of it in one line."""
        flags = f" ({self.command})" if self.command else ""
        return f"{self.evidence}: {self.advice}{flags}."


@dataclass(frozen=True)
class Rule:
    """condition(measure(run)) ⇒ evidence and advice.

    `measure` gives None where the rule says nothing about such a recipe, or about a run so short.
    `needs` are columns of metrics.parquet without which it cannot be judged. `command` is the first
    thing to try as flags, for the recipe at hand.
    """

    name: str
    measure: Callable[[Run], Numbers | None]
    condition: Callable[[Numbers], bool]
    evidence: Callable[[Numbers], str]
    advice: Callable[[Numbers], str]
    needs: tuple[str, ...] = ()
    wrong: bool = True
    command: Callable[[Run, Numbers], str] = lambda run, n: ""

    def judged(self, run: Run) -> bool:
        """Whether the run recorded what the rule needs."""
        return all(bool((run.column(name) == run.column(name)).any()) for name in self.needs)

    def __call__(self, run: Run) -> Finding | None:
        """What it has to say about a run."""
        numbers = self.measure(run) if self.judged(run) else None
        if numbers is None or not self.condition(numbers):
            return None
        evidence, advice = self.evidence(numbers), self.advice(numbers)
        command = self.command(run, numbers)
        return Finding(self.name, evidence, advice, numbers, self.wrong, command)


def figure(number: float) -> str:
    """A number as a person would write it.

    >>> figure(14.234), figure(0.02345), figure(7850.0), figure(123456)
    ('14', '0.023', '7,850', '123,456')
    """
    if not math.isfinite(number):
        return "no finite number"
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.0f}" if abs(number) >= 10 else f"{number:.2g}"
