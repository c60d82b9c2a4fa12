"""will work · hard · hopeless: it would take n clients.

A server that needs a way of length D to the optimum walks it with steps β·signal, K of them; noise
has then moved it β·noise·√K sideways, D/run_ratio in all. So the criterion is the run's ratio
√K·signal/noise, with thresholds from measured runs (docs/planning.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

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
    """The least number of clients, to 1%, whose run has this ratio: same share, same (ε, δ).

    Bracketed by leaps (the ratio grows with √n at least), then by secants on logarithmic scales.
    """
    low, high = math.log(case.population), None
    ratio_low = _ratio(case, low)
    leap = 2 * math.log(target / ratio_low) if 0 < ratio_low < target else 0.0
    top = min(low + leap * 1.05 + 0.1, math.log(MOST_CLIENTS))
    ratio_high = _ratio(case, top)
    if ratio_low >= target:
        return case.population
    if ratio_high < target:
        return None
    high = top
    while high - low > 0.01:
        share = math.log(target / ratio_low) / math.log(ratio_high / ratio_low)
        middle = low + (high - low) * min(max(share, 0.02), 0.98)
        for guess in (middle + 0.004, middle - 0.004):
            if low < guess < high:
                ratio = _ratio(case, guess)
                if ratio >= target:
                    high, ratio_high = guess, ratio
                else:
                    low, ratio_low = guess, ratio
    return math.ceil(math.exp(high))


def _ratio(case: Case, log_clients: float) -> float:
    other = varied(case, "clients", math.ceil(math.exp(log_clients) - 1e-6))
    return 0.0 if other is None else forecast(other).run_ratio
