"""Events as plain values and back, for storage: no code, and every digit kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from fedveil.accounting import events
from fedveil.accounting.correlation import Column
from fedveil.errors import UserError

KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        events.NonPrivate,
        events.GaussianRelease,
        events.ApproximateRelease,
        events.RenyiRelease,
        events.PoissonSampled,
        events.SampledWithoutReplacement,
        events.Dominated,
        events.Proven,
        events.Correlated,
        events.CyclicSampled,
        events.InSilos,
        Column,
    )
}


def event_to_plain(event: events.Round) -> dict[str, Any]:
    """An event as its kind and its fields; Rényi divergences come with their orders.

    >>> event_to_plain(events.PoissonSampled(0.1, events.GaussianRelease(2.0)))["event"]
    {'kind': 'GaussianRelease', 'ratio': 2.0}
    """
    fields = {f.name: _plain(getattr(event, f.name)) for f in dataclasses.fields(event)}
    orders = {"orders": list(events.ORDERS)} if isinstance(event, events.RenyiRelease) else {}
    return {"kind": type(event).__name__, **fields, **orders}


def event_from_plain(plain: Mapping[str, Any]) -> events.Round:
    """Restore the event that `event_to_plain` wrote; anything else is refused."""
    values = {name: value for name, value in plain.items() if name != "kind"}
    if values.pop("orders", list(events.ORDERS)) != list(events.ORDERS):
        raise UserError(
            "An event was recorded at Rényi orders that this version does not use. "
            "Use the version of fedveil that recorded it."
        )
    try:
        kind = KINDS[plain["kind"]]
        event: events.Round = kind(**{name: _value(value) for name, value in values.items()})
    except (KeyError, TypeError, ValueError) as problem:
        raise UserError(
            f"{str(plain)[:80]} is not an event known to this version of fedveil. "
            "Use the version that recorded it."
        ) from problem
    return event


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    return event_to_plain(value) if type(value) in KINDS.values() else value


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_value(item) for item in value)
    if value in ("inf", "-inf", "nan"):
        return float(value)
    return event_from_plain(value) if isinstance(value, Mapping) else value
