"""Events check their numbers: what is no number must not pass for a small loss."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.correlation import Column, square_root
from fedveil.accounting.losses import least_epsilon
from fedveil.errors import UserError
from fedveil.parts.correlated import BufferedNoise

NAN, ORDERS = math.nan, len(events.ORDERS)
NOISY = events.GaussianRelease(2.0)


class Quiet(events.Correlated):
    """Accounts for itself."""

    def whole(self, rounds: int) -> events.GaussianRelease:
        return events.GaussianRelease(1e6)


BROKEN: dict[str, Callable[[], object]] = {
    "ratio": lambda: events.GaussianRelease(NAN),
    "negative ratio": lambda: events.GaussianRelease(-1.0),
    "infinite ratio": lambda: events.GaussianRelease(math.inf),
    "epsilon": lambda: events.ApproximateRelease(NAN, 1e-9),
    "negative epsilon": lambda: events.ApproximateRelease(-1.0, 1e-9),
    "delta": lambda: events.ApproximateRelease(1.0, NAN),
    "divergences": lambda: events.RenyiRelease((NAN,) * ORDERS),
    "negative divergences": lambda: events.RenyiRelease((-1.0,) * ORDERS),
    "one divergence": lambda: events.RenyiRelease((1.0,)),
    "escape": lambda: events.Dominated(NOISY, escape=NAN),
    "negative escape": lambda: events.Dominated(NOISY, escape=-1.0),
    "negative distance": lambda: events.RenyiRelease((1.0,) * ORDERS, distance=-1.0),
    "rate": lambda: events.PoissonSampled(NAN, NOISY),
    "negative rate": lambda: events.PoissonSampled(-0.1, NOISY),
    "large cohort": lambda: events.SampledWithoutReplacement(5, 3, NOISY),
    "correlated ratio": lambda: events.Correlated(NAN, square_root(2)),
    "separation": lambda: events.Correlated(1.0, square_root(2), separation=0),
    "lost": lambda: events.Correlated(1.0, square_root(2), lost=-1),
    "coefficients": lambda: Column((1.0, NAN)),
    "weights": lambda: Column(weights=(0.5, NAN), decays=(0.5, 0.5)),
    "buffers": lambda: BufferedNoise(1.0, weights=(0.5, NAN), decays=(0.5, 0.5)),
    "count": lambda: events.Composed(NOISY, -1),
    "many rounds": lambda: events.Composed(NOISY, 10**400),
    "many units": lambda: events.SampledWithoutReplacement(1, 10**330, NOISY),
    "an event of one's own": lambda: events.Composed(Quiet(1.0, square_root(2)), 3),
    "a proof over the run": lambda: events.Proven((events.Correlated(1.0, square_root(2)),)),
    "silos over the run": lambda: events.InSilos((events.Correlated(1.0, square_root(2)),), 2),
}


@pytest.mark.parametrize("make", BROKEN.values(), ids=BROKEN)
def test_what_is_no_number_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UserError):
        make()


def test_events_keep_plain_numbers() -> None:
    ratio = torch.tensor(5.0)
    before = events.GaussianRelease(ratio)  # type: ignore[arg-type]
    ratio.fill_(0.5)
    after = events.GaussianRelease(ratio)  # type: ignore[arg-type]
    assert before == events.GaussianRelease(5.0)
    assert accounting.epsilon(after, 1e-5) > accounting.epsilon(before, 1e-5)


def test_lists_of_events_are_kept_as_tuples() -> None:
    proven = events.Proven([NOISY])  # type: ignore[arg-type]
    silos = events.InSilos([proven], 1)  # type: ignore[arg-type]
    assert accounting.epsilon(silos, 1e-5) == accounting.epsilon(NOISY, 1e-5)
    assert math.isinf(accounting.epsilon(events.Proven(()), 1e-5))
    assert accounting.delta(events.Proven(()), 1.0) == 1.0


def test_no_epsilon_is_found_where_delta_is_no_number() -> None:
    assert math.isinf(least_epsilon(lambda epsilon: NAN, 1e-5))
