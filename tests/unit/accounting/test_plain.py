from __future__ import annotations

import json
import math

import pytest

from fedveil.accounting import events
from fedveil.accounting.correlation import Column, square_root
from fedveil.accounting.plain import KINDS, event_from_plain, event_to_plain
from fedveil.errors import UserError

RENYI = events.RenyiRelease((*(0.1 * a for a in events.ORDERS[:-1]), math.inf), 1e-9, 1e-12)
EVENTS: list[events.Round] = [
    events.NonPrivate("no noise is added"),
    events.GaussianRelease(0.1 + 0.2),
    events.ApproximateRelease(1 / 3, 1e-7),
    RENYI,
    events.PoissonSampled(0.1, events.GaussianRelease(2.0)),
    events.SampledWithoutReplacement(20, 100, events.ApproximateRelease(1.0, 0.0)),
    events.Dominated(
        events.SampledWithoutReplacement(20, 100, events.GaussianRelease(1 / 3)), 1e-20, 1e-30
    ),
    events.Proven((events.ApproximateRelease(1.0, 1e-6), RENYI)),
    events.Correlated(1 / 3, square_root(3), 2, None, 1e-9, 4, 1),
    events.CyclicSampled(0.1, events.Correlated(2.0, square_root(5), 5, most=3)),
    events.Correlated(2.0, Column(weights=(0.3,), decays=(0.9,)), 5, most=3),
    events.InSilos(
        (
            events.PoissonSampled(0.1, events.GaussianRelease(2.0)),
            events.PoissonSampled(1 / 3, events.GaussianRelease(2.0)),
        ),
        10,
    ),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_comes_back_from_json_to_the_last_digit(event: events.Round) -> None:
    text = json.dumps(event_to_plain(event), allow_nan=False)
    assert event_from_plain(json.loads(text)) == event


def test_every_kind_of_round_is_known() -> None:
    assert {type(event) for event in EVENTS} == set(KINDS.values()) - {Column}


@pytest.mark.parametrize(
    "plain",
    [
        {"kind": "Path", "a": 1},
        {"kind": "GaussianRelease"},
        {"kind": "GaussianRelease", "ratio": 1.0, "more": 2},
        {"ratio": 1.0},
        {"kind": "PoissonSampled", "rate": 0.1, "event": {"kind": "__import__"}},
        {"kind": ["GaussianRelease"], "ratio": 1.0},
    ],
)
def test_what_is_no_event_is_refused(plain: dict[str, object]) -> None:
    with pytest.raises(UserError, match="Use the version that recorded it"):
        event_from_plain(plain)


def test_divergences_at_other_orders_are_refused() -> None:
    plain = event_to_plain(RENYI)
    plain["orders"][3] = 1.25
    with pytest.raises(UserError, match="Rényi orders"):
        event_from_plain(plain)
