"""The least noise that a release can have, from its privacy event."""

from __future__ import annotations

import math

from fedveil.accounting import events


def least_deviation(release: events.Round, move: float) -> float:
    """The deviation without which the release cannot be as private as it says; 0 if it may be.

    A Gaussian release names it. Any law has Var ≥ move²/(e^{D₂} − 1), by Hammersley 1950 and
    Chapman and Robbins 1951, for the Rényi divergence D₂ between it and itself moved.

    >>> least_deviation(events.GaussianRelease(2.0), 0.5)
    1.0
    """
    match release:
        case events.GaussianRelease(ratio) | events.Correlated(ratio):
            return ratio * move
        case events.RenyiRelease(divergences):
            second = divergences[events.ORDERS.index(2.0)]
            return move / math.sqrt(math.expm1(second)) if second < 700 else 0.0
        case events.Dominated(events.GaussianRelease(ratio)):
            return move / math.sqrt(math.expm1(min(ratio**-2, 700.0)))
        case events.Proven(ways):
            return max(least_deviation(way, move) for way in ways)
        case _:
            return 0.0
