"""Verdicts: each kind of claim has a rule that decides it, with a confidence interval.

Differences are paired by seed. An interval is Student's, two-sided, 95 %. A claim is decided only
if its whole interval lies on one side, and only if the baseline has reached its stated level.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedveil.reproducing.item import Claim, Item, Scale

Verdict = Literal["holds", "fails", "inconclusive", "not testable at this scale", "not run"]
LEVEL = 0.95
Values = Mapping[str, Mapping[int, float]]  # of each arm, by seed
Interval = tuple[float, float, float]  # mean, lower and upper end


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim, and the numbers that decided it."""

    claim: Claim
    verdict: Verdict
    why: str
    intervals: tuple[Interval, ...] = ()


def judged(
    item: Item, scale: Scale, values: Values, ends: Mapping[str, Sequence[str]] | None = None
) -> list[Judgement]:
    """The verdict on every claim; `ends` are arms whose settings are at an end of their grid."""
    found = [_judged(item, scale, claim, values) for claim in item.claims]
    return [_if_tuned(judgement, ends or {}) for judgement in found]


def _if_tuned(found: Judgement, ends: Mapping[str, Sequence[str]]) -> Judgement:
    """A claim about tuned arms is undecided if the loser is at an end: more might have helped."""
    claim = found.claim
    if not claim.tuned or found.verdict not in ("holds", "fails"):
        return found
    loser = claim.arms[1 if found.verdict == "holds" else 0]
    if not ends.get(loser):
        return found
    why = f"{found.why}, but {loser} is at an end of its grid ({', '.join(ends[loser])})"
    return replace(found, verdict="inconclusive", why=why)


def _judged(item: Item, scale: Scale, claim: Claim, values: Values) -> Judgement:
    if not scale.decides and claim.kind != "exact":
        return Judgement(claim, "not testable at this scale", scale.changes)
    missing = [arm for arm in claim.arms if not values.get(arm)]
    if missing:
        return Judgement(claim, "not testable at this scale", f"{missing[0]} is not run")
    sign = -1.0 if item.better == "lower" else 1.0
    if (weak := _powerless(scale, values, sign)) is not None:
        return Judgement(claim, "not testable at this scale", weak)
    return RULES[claim.kind](claim, values, sign)


def _powerless(scale: Scale, values: Values, sign: float) -> str | None:
    """Why nothing can be decided: the baseline is missing or undertrained."""
    power = scale.power
    if power is None:
        return None
    known = list(values.get(power.arm, {}).values())
    reached = float(np.mean(known)) if known else math.nan
    if sign * reached >= sign * power.at_least:
        return None
    return f"{power.arm} reached {reached:.4g}, not {power.at_least:g}"


def _order(claim: Claim, values: Values, sign: float) -> Judgement:
    """Better by more than −tolerance: holds if lower > −tolerance, fails if upper < −tolerance."""
    found = difference(values, claim.arms[0], claim.arms[1], sign)
    return _sided(claim, found, -claim.tolerance)


def _gap(claim: Claim, values: Values, sign: float) -> Judgement:
    """Better by at least `at_least`."""
    found = difference(values, claim.arms[0], claim.arms[1], sign)
    return _sided(claim, found, claim.at_least or 0.0)


def _level(claim: Claim, values: Values, sign: float) -> Judgement:
    """The arm reaches `at_least` (with "lower is better": at most), give or take the tolerance."""
    mean, low, high = interval(list(values[claim.arms[0]].values()))
    ends = sorted((sign * low, sign * high))
    found = (sign * mean, ends[0], ends[1])
    judgement = _sided(claim, found, sign * (claim.at_least or 0.0) - claim.tolerance)
    return Judgement(claim, judgement.verdict, judgement.why, ((mean, low, high),))


def _trend(claim: Claim, values: Values, sign: float) -> Judgement:
    """Every arm is better than the next: holds if all do, fails if any pair fails."""
    pairs = [difference(values, a, b, sign) for a, b in itertools.pairwise(claim.arms)]
    each = [_sided(claim, pair, -claim.tolerance).verdict for pair in pairs]
    verdict: Verdict = (
        "fails" if "fails" in each else "holds" if set(each) == {"holds"} else "inconclusive"
    )
    why = f"{each.count('holds')} of {len(each)} neighbors in this order, {each.count('fails')} not"
    return Judgement(claim, verdict, why, tuple(pairs))


def _exact(claim: Claim, values: Values, sign: float) -> Judgement:
    """Equal to the value within the tolerance, for every seed."""
    found = list(values[claim.arms[0]].values())
    wanted = claim.value or 0.0
    off = max(abs(value - wanted) for value in found)
    verdict: Verdict = "holds" if off <= claim.tolerance else "fails"
    mean = float(np.mean(found))
    return Judgement(claim, verdict, f"off by {off:.2g} at most", ((mean, min(found), max(found)),))


RULES = {"order": _order, "gap": _gap, "level": _level, "trend": _trend, "exact": _exact}


def _sided(claim: Claim, found: Interval, bar: float) -> Judgement:
    mean, low, high = found
    if not all(map(math.isfinite, found)):
        return Judgement(claim, "inconclusive", "too few seeds, or a run diverged", (found,))
    verdict: Verdict = "holds" if low > bar else "fails" if high < bar else "inconclusive"
    return Judgement(
        claim, verdict, f"{mean:+.3g} [{low:+.3g}, {high:+.3g}] against {bar + 0.0:g}", (found,)
    )


def difference(values: Values, one: str, other: str, sign: float = 1.0) -> Interval:
    """The interval of one − other, paired by seed; positive if `one` is better."""
    seeds = [seed for seed in values[one] if seed in values[other]]
    return interval([sign * (values[one][seed] - values[other][seed]) for seed in seeds])


def interval(values: Sequence[float]) -> Interval:
    """Mean and Student's 95 % interval; infinite with fewer than two values.

    >>> tuple(round(end, 2) for end in interval([1.0, 2.0, 3.0]))
    (2.0, -0.48, 4.48)
    """
    from scipy.special import stdtrit

    if len(values) < 2:
        mean = float(values[0]) if values else math.nan
        return mean, -math.inf, math.inf
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = float(stdtrit(len(values) - 1, (1 + LEVEL) / 2)) * error
    return mean, mean - half, mean + half
