"""What an audit found: lower bounds on ε beside the proven ones, what they assume, and alarms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fedveil.privacy.statement import VIEWS, rounded_up
from fedveil.recipe import View

ALARM = 1e-6  # a p-value below it contradicts the proof; an audit looks at four at most


@dataclass(frozen=True)
class Bound:
    """ε is at least this, at the audit's confidence, if what it assumes is true."""

    epsilon: float
    method: str
    assumes: str


@dataclass(frozen=True)
class Estimate:
    """ε is about this: no bound, and no part of an alarm."""

    epsilon: float
    method: str
    assumes: str


@dataclass(frozen=True)
class Finding:
    """What the canaries tell of one view."""

    view: View
    proven: float
    bounds: tuple[Bound, ...] = ()  # the first is the one to read
    estimate: Estimate | None = None
    p_value: float = 1.0  # of what was seen, if the proof is true of this run
    silent: str = ""  # why there is nothing to audit

    @property
    def audited(self) -> float:
        """The lower bound on ε; 0 where there is none."""
        return self.bounds[0].epsilon if self.bounds else 0.0

    @property
    def alarm(self) -> bool:
        """Whether this run contradicts its proof."""
        return self.p_value < ALARM

    def sentence(self, confidence: float) -> str:
        """The finding in a line."""
        if self.silent:
            return f"not audited: {self.silent}"
        found = f"ε ≥ {down(self.audited)} found ({confidence:.0%})"
        text = f"{found}, ε ≤ {rounded_up(self.proven)} proven"
        if self.estimate is not None:
            text += f"; estimate {down(self.estimate.epsilon)}"
        for other in self.bounds[1:]:
            text += f"; by {other.method} ε ≥ {down(other.epsilon)}"
        if self.alarm:
            text += f"; CONTRADICTS the proof (p = {self.p_value:.1g})"
        return text


@dataclass(frozen=True)
class Audit:
    """One run's findings, view by view, and how often its canaries took part."""

    name: str
    unit: str
    data: str
    canaries: int
    population: int
    rounds: int
    dim: int
    delta: float
    alpha: float
    findings: tuple[Finding, ...]
    attendance: float  # p-value of how often canaries took part
    cosine: float | None = None  # mean of a canary with its releases; N(0, 1/d) without a leak

    @property
    def alarm(self) -> bool:
        """Whether anything contradicts the proof."""
        return self.attendance < ALARM or any(finding.alarm for finding in self.findings)

    def towards(self, view: View) -> Finding:
        """The finding of one view."""
        return self.findings[VIEWS.index(view)]

    def entries(self) -> Iterator[tuple[str, str]]:
        """Labels and texts, as a reader needs them."""
        yield (
            "Audited",
            f"{self.name} on {self.data}: {self.canaries:,} canary {self.unit}s among "
            f"{self.population:,}, {self.rounds} rounds, δ = {self.delta:g}.",
        )
        for finding in self.findings:
            yield f"  {finding.view}", finding.sentence(1 - self.alpha) + "."
        yield from self._methods()
        if self.cosine is not None:
            spread = 1 / math.sqrt(self.dim)
            text = f"a canary's mean cosine with its releases is {self.cosine:.3g}"
            yield "Statistic", f"{text}; a single one without a leak is about N(0, {spread:.3g}²)."
        yield "Attendance", self._attendance()
        yield "Verdict", self.verdict()

    def _methods(self) -> Iterator[tuple[str, str]]:
        bounds = {bound.method: bound for found in self.findings for bound in found.bounds}
        for bound in bounds.values():
            yield "Method", f"{bound.method}; it assumes {bound.assumes}."
        estimates = {one.method: one for found in self.findings if (one := found.estimate)}
        for one in estimates.values():
            yield "Estimate", f"{one.method}, no bound; it assumes {one.assumes}."

    def _attendance(self) -> str:
        if self.attendance < ALARM:
            return f"canaries took part more often than accounted (p = {self.attendance:.1g})."
        return "canaries took part no more often than accounted."

    def verdict(self) -> str:
        """Whether the proof stands."""
        if self.alarm:
            return "this run CONTRADICTS its proof; do not rely on the proven ε."
        calm = "nothing in this run contradicts the proven ε"
        if not any(finding.audited > finding.proven for finding in self.findings):
            return f"{calm}."
        often = f"{self.alpha:.0%} of runs with a tight proof"
        return f"{calm}; a bound above it is seen in {often}, so audit with another seed."

    def plain(self) -> dict[str, Any]:
        """As plain values, for JSON; what is not finite is null."""
        return {**_finite(asdict(self)), "alarm": self.alarm, "verdict": self.verdict()}


def _finite(value: Any) -> Any:
    """The same with None for every number that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def down(number: float) -> str:
    """A number in three digits, never larger than it is.

    >>> down(3.6279), down(0.0), down(float("inf"))
    ('3.62', '0', '∞')
    """
    if not math.isfinite(number):
        return "∞"
    if number == 0:
        return "0"
    step = 10.0 ** (math.floor(math.log10(abs(number))) - 2)
    return f"{math.floor(number / step) * step:.3g}"
