"""will work · hard · hopeless: it would take n clients.

A server that needs a way of length D to the optimum walks it with steps β·signal, K of them; noise
has then moved it β·noise·√K sideways, D/run_ratio in all. So the criterion is the run's ratio
√K·signal/noise, with thresholds from measured runs (docs/planning.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedveil.planning.forecast import Case, forecast, varied

WORKS, HOPELESS = 4.0, 0.5  # of the run's signal to noise
MOST_CLIENTS = 10**10  # more people than there are
Word = Literal["will work", "hard", "hopeless", "not private", "no guarantee"]


@dataclass(frozen=True)
class Verdict:
    """A word, and how many clients it would take to work (None if it does, or none would do)."""

    word: Word
    clients: int | None = None


def judged(case: Case) -> Verdict:
    """By the run's signal to noise."""
    found = forecast(case)
    if not found.recipe.private:
        return Verdict("not private")
    if found.run_ratio >= WORKS:
        return Verdict("will work")
    word: Word = "hard" if found.run_ratio >= HOPELESS else "hopeless"
    return Verdict(word, clients_for(case, WORKS))


def word_for(ratio: float) -> Word:
    """The word for a run's ratio."""
    if ratio >= WORKS:
        return "will work"
    return "hard" if ratio >= HOPELESS else "hopeless"


def clients_for(case: Case, target: float) -> int | None:
    """The least number of clients, to 1%, whose run has this ratio: the same share, the same ε.

    Bracketed by leaps (the ratio grows about as √n or n), then by secants on logarithmic scales.
    A δ that was not given follows the number of clients.
    """
    low = _Tried(math.log(case.population), _ratio(case, math.log(case.population)))
    if low.ratio >= target:
        return case.population
    high = _leap(case, low, target)
    while high is not None and high.clients - low.clients > 0.01:
        share = math.log(target / low.ratio) / math.log(high.ratio / low.ratio)
        middle = low.clients + (high.clients - low.clients) * min(max(share, 0.02), 0.98)
        for guess in (middle + 0.004, middle - 0.004):
            if low.clients < guess < high.clients:
                found = _Tried(guess, _ratio(case, guess))
                low, high = (low, found) if found.ratio >= target else (found, high)
    return None if high is None else math.ceil(math.exp(high.clients))


class _Tried(NamedTuple):
    clients: float  # their logarithm
    ratio: float


def _leap(case: Case, low: _Tried, target: float) -> _Tried | None:
    """Enough clients, by leaps as if the ratio grew as √n; None where there are not so many."""
    here, most = low, math.log(MOST_CLIENTS)
    while here.ratio < target and here.clients < most:
        leap = 2 * math.log(target / here.ratio) + 0.1 if here.ratio > 0 else 5.0
        clients = min(here.clients + leap, most)
        here = _Tried(clients, _ratio(case, clients))
    return here if here.ratio >= target else None


def _ratio(case: Case, log_clients: float) -> float:
    other = varied(case, "clients", math.ceil(math.exp(log_clients) - 1e-6))
    return 0.0 if other is None else forecast(other).run_ratio
