"""Verdict of a plan: will work, hard or hopeless, and the number of clients that would be enough.

A server at distance D from the optimum covers it in K steps of β·signal. Noise then moves it by
β·noise·√K = D/run_ratio in a random direction. So the criterion is the ratio of the run,
√K·signal/noise, with thresholds from measured runs (docs/planning.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedveil.planning.forecast import Case, forecast, varied

WORKS, HOPELESS = 4.0, 0.5  # signal-to-noise ratio over the run
MAX_CLIENTS = 10**10  # more than there are people
Word = Literal["will work", "hard", "hopeless", "not private", "not known"]


@dataclass(frozen=True)
class PlanVerdict:
    """A word, and the number of clients that would work.

    ∞ if no number would, None if it is not known or the planned number works.
    """

    word: Word
    clients: float | None = None


def judged(case: Case) -> PlanVerdict:
    """The verdict by the signal-to-noise ratio over the run."""
    found = forecast(case)
    if not found.recipe.private:
        return PlanVerdict("not private")
    word = word_for(found.run_ratio)
    return PlanVerdict(word, clients_for(case, WORKS) if word in ("hard", "hopeless") else None)


def word_for(ratio: float | None) -> Word:
    """The word for a ratio over the run; None is a ratio that is not known."""
    if ratio is None:
        return "not known"
    if ratio >= WORKS:
        return "will work"
    return "hard" if ratio >= HOPELESS else "hopeless"


def clients_for(case: Case, target: float) -> float | None:
    """The least number of clients, to 1%, that reaches this ratio at the same sampling rate and ε.

    ∞ if no number does, None if the case with more clients is not known.

    Bracketed by growing steps (the ratio grows about as √n or n), then refined by secants on
    logarithmic scales. A default δ changes with the number of clients.
    """
    low = _Tried(math.log(case.population), _ratio(case, math.log(case.population)))
    if low.ratio >= target:
        return case.population
    high = _bracket(case, low, target)
    if math.isnan(high.ratio):
        return None
    if high.ratio < target:
        return math.inf
    while high.clients - low.clients > 0.01:
        share = math.log(target / low.ratio) / math.log(high.ratio / low.ratio)
        middle = low.clients + (high.clients - low.clients) * min(max(share, 0.02), 0.98)
        for guess in (middle + 0.004, middle - 0.004):
            if low.clients < guess < high.clients:
                found = _Tried(guess, _ratio(case, guess))
                if math.isnan(found.ratio):
                    return None
                low, high = (low, found) if found.ratio >= target else (found, high)
    return math.ceil(math.exp(high.clients))


class _Tried(NamedTuple):
    clients: float  # their logarithm
    ratio: float


def _bracket(case: Case, low: _Tried, target: float) -> _Tried:
    """Enough clients, or the maximum, by steps as if the ratio grew as √n."""
    here, most = low, math.log(MAX_CLIENTS)
    while here.ratio < target and here.clients < most:
        step = 2 * math.log(target / here.ratio) + 0.1 if here.ratio > 0 else 5.0
        clients = min(here.clients + step, most)
        here = _Tried(clients, _ratio(case, clients))
    return here


def _ratio(case: Case, log_clients: float) -> float:
    """The ratio over the run with this many clients; NaN if it is not known."""
    other = varied(case, "clients", math.ceil(math.exp(log_clients) - 1e-6))
    found = None if other is None else forecast(other).run_ratio
    return math.nan if found is None else found
