"""The result of an audit: lower bounds on ε next to the proven ones, assumptions, and alarms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fedveil.accounting.rounding import rounded_up, short
from fedveil.privacy.guarantee import VIEWS
from fedveil.recipe import View

ALARM = 1e-6  # a p-value below it contradicts the proof; an audit computes four at most


@dataclass(frozen=True)
class LowerBound:
    """A lower bound on ε at the audit's confidence, if its assumptions hold."""

    epsilon: float
    method: str
    assumes: str


@dataclass(frozen=True)
class EpsilonEstimate:
    """An estimate of ε: not a bound, and not part of an alarm."""

    epsilon: float
    method: str
    assumes: str


@dataclass(frozen=True)
class ViewFinding:
    """What the canaries reveal in one view."""

    view: View
    proven: float
    bounds: tuple[LowerBound, ...] = ()  # the first is the one to read
    estimate: EpsilonEstimate | None = None
    p_value: float = 1.0  # of the observations, if the proof holds for this run
    silent: str = ""  # why there is nothing to audit

    @property
    def audited(self) -> float:
        """The lower bound on ε; 0 if there is none."""
        return self.bounds[0].epsilon if self.bounds else 0.0

    @property
    def alarm(self) -> bool:
        """Whether this run contradicts its proof."""
        return self.p_value < ALARM

    def sentence(self, confidence: float) -> str:
        """The finding in one line."""
        if self.silent:
            return f"not audited: {self.silent}"
        found = f"ε ≥ {down(self.audited)} found ({confidence:.0%})"
        text = f"{found}, ε ≤ {rounded_up(self.proven)} proven"
        if self.estimate is not None:
            text += f". Estimate: {down(self.estimate.epsilon)}"
        for other in self.bounds[1:]:
            text += f". By {other.method}: ε ≥ {down(other.epsilon)}"
        if self.alarm:
            text += f". CONTRADICTS the proof (p = {self.p_value:.1g})"
        return text


@dataclass(frozen=True)
class Audit:
    """The findings of one run by view, and the participation of its canaries."""

    name: str
    unit: str
    data: str
    canaries: int
    population: int
    rounds: int
    dim: int
    delta: float
    alpha: float
    findings: tuple[ViewFinding, ...]
    attendance: float  # p-value of the canaries' participations
    cosine: float | None = None  # mean of a canary with its releases; N(0, 1/d) without a leak

    @property
    def alarm(self) -> bool:
        """Whether anything contradicts the proof."""
        return self.attendance < ALARM or any(finding.alarm for finding in self.findings)

    def towards(self, view: View) -> ViewFinding:
        """The finding of one view."""
        return self.findings[VIEWS.index(view)]

    def entries(self) -> Iterator[tuple[str, str]]:
        """Labels and texts for display."""
        yield (
            "Audited",
            f"{self.name} on {self.data}: {self.canaries:,} canary {self.unit}s among "
            f"{self.population:,}, {self.rounds} rounds, δ = {short(self.delta)}.",
        )
        for finding in self.findings:
            yield f"  {finding.view}", finding.sentence(1 - self.alpha) + "."
        yield from self._methods()
        if self.cosine is not None:
            spread = 1 / math.sqrt(self.dim)
            text = f"the mean cosine of a canary with its releases is {self.cosine:.3g}"
            yield "Statistic", f"{text}. Without a leak, one cosine is about N(0, {spread:.3g}²)."
        yield "Attendance", self._attendance()
        yield "Verdict", self.verdict()

    def _methods(self) -> Iterator[tuple[str, str]]:
        bounds = {bound.method: bound for found in self.findings for bound in found.bounds}
        for bound in bounds.values():
            yield "Method", f"{bound.method}. Assumes {bound.assumes}."
        estimates = {one.method: one for found in self.findings if (one := found.estimate)}
        for one in estimates.values():
            yield "Estimate", f"{one.method}, not a bound. Assumes {one.assumes}."

    def _attendance(self) -> str:
        if self.attendance < ALARM:
            return f"canaries took part more often than accounted (p = {self.attendance:.1g})."
        return "canaries were sampled no more often than accounted for."

    def verdict(self) -> str:
        """Whether the proof holds up."""
        if self.alarm:
            return "this run CONTRADICTS its proof. Do not rely on the proven ε."
        calm = "nothing in this run contradicts the proven ε"
        if not any(finding.audited > finding.proven for finding in self.findings):
            return f"{calm}."
        often = f"{self.alpha:.0%} of runs with a tight proof"
        return f"{calm}. A bound above it occurs in {often}: audit with another seed."

    def plain(self) -> dict[str, Any]:
        """Plain values for JSON; numbers that are not finite become null."""
        return {**_finite(asdict(self)), "alarm": self.alarm, "verdict": self.verdict()}


def _finite(value: Any) -> Any:
    """The same with None for every number that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def down(number: float) -> str:
    """A number in three digits, rounded down.

    >>> down(3.6279), down(0.0), down(float("inf"))
    ('3.62', '0', '∞')
    """
    if not math.isfinite(number):
        return "∞"
    if number == 0:
        return "0"
    step = 10.0 ** (math.floor(math.log10(abs(number))) - 2)
    return f"{math.floor(number / step) * step:.3g}"
