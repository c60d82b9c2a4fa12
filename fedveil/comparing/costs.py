"""Privacy cost of a comparison by the ledger: before it starts, and in total."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.accounting.rounding import rounded_up, short
from fedveil.comparing.members import Comparison
from fedveil.errors import UserError

if TYPE_CHECKING:
    from fedveil.ledger.ledger import Ledger, Limit, Stream
    from fedveil.recipe import View
    from fedveil.training.run import Training

Cost = Mapping[str, Any] | str | None  # in total, or why it is not known
ALIKE = 0.02  # relative differences of ε up to this are ignored


@dataclass(frozen=True)
class Room:
    """How many of the runs, in their order, fit into the budgets of the data."""

    runs: int
    budgeted: bool  # whether the data have a budget, which allows one run at a time


def room_for(comparison: Comparison, where: Path, cut: bool) -> Room:
    """The room in the budgets; without `cut`, a comparison that does not fit is refused."""
    from fedveil.ledger.chain import Chain
    from fedveil.ledger.entering import refuse_elsewhere
    from fedveil.ledger.ledger import Ledger

    runs = list(comparison.runs())
    ledger = Ledger(where) if Chain.exists(where) else None
    if ledger is None or not any(ledger.granted.values()):
        return Room(len(runs), False)
    try:
        trainings = _prepared(comparison, where)
        account = trainings[0].spec.account
        refuse_elsewhere(ledger, account, trainings[0].data)
        limits = ledger.limits(account)
        if not limits:
            return Room(len(runs), False)
        fit = min(_fitting(ledger, trainings, limit) for limit in limits)
    finally:
        ledger.close()
    if fit < len(runs) and not (cut and fit):
        raise UserError(_full(trainings[0], limits, fit, len(runs)))
    return Room(fit, True)


def new_account(comparison: Comparison, where: Path) -> str:
    """A warning if the data resemble data with a budget but have an account of their own.

    They are refused if they are about the same people.
    """
    from fedveil.ledger.chain import Chain
    from fedveil.ledger.entering import refuse_shared_clients
    from fedveil.ledger.ledger import Account, open_ledger
    from fedveil.ledger.resembling import resembling
    from fedveil.training.settings import resolve_recipe
    from fedveil.training.sources import load_for

    if not Chain.exists(where):
        return ""
    settings = comparison.members[0].settings
    data = load_for(settings)
    data = data.by_example() if resolve_recipe(settings).unit == "example" else data
    with contextlib.closing(open_ledger(where)) as books:
        refuse_shared_clients(books, Account.of(data, settings.account), data)
    return resembling(data, settings.account, where)


def refuse_unequal_noise(comparison: Comparison, where: Path) -> None:
    """Refuse members with noise of their own whose ε differ."""
    from fedveil.training.settings import from_settings, resolve_recipe
    from fedveil.training.sources import load_for

    members = [m for m in comparison.members if resolve_recipe(m.settings).private]
    if not members or members[0].settings.epsilon is not None:
        return
    data = load_for(members[0].settings)
    spent = []
    for member in members:
        training = from_settings(member.at(comparison.seeds[0]), data, ledger=where)
        spent.append(training.statement().main.epsilon)
    refuse_apart([member.label for member in members], spent)


def refuse_apart(names: Sequence[str], spent: Sequence[float]) -> None:
    """Refuse values of ε that differ by more than the tolerance of calibration."""
    for name, epsilon in zip(names[1:], spent[1:], strict=True):
        if not math.isclose(epsilon, spent[0], rel_tol=ALIKE):
            raise UserError(
                f"{names[0]} and {name} cannot be compared: their own noise gives ε = "
                f"{rounded_up(spent[0])} for one and {rounded_up(epsilon)} for the other. Pass "
                "--epsilon."
            )


def _full(training: Training, limits: Sequence[Limit], fit: int, runs: int) -> str:
    each = " and ".join(
        f"ε = {short(limit.budget.epsilon)} in view '{limit.view}'" for limit in limits
    )
    advice = "Pass --cut to train those, or compare fewer" if fit else "See `fedveil budget show`"
    return (
        f"The budget of '{training.data.name}', {each}, has room for {fit} of these {runs} runs. "
        f"No run was trained. {advice}."
    )


def _prepared(comparison: Comparison, where: Path) -> list[Training]:
    """All runs at round 0, on data loaded once."""
    from fedveil.training.settings import from_settings
    from fedveil.training.sources import load_for

    data = load_for(comparison.members[0].settings)
    return [
        from_settings(member.at(seed), data, ledger=where) for member, seed in comparison.runs()
    ]


def _fitting(ledger: Ledger, trainings: Sequence[Training], limit: Limit) -> int:
    """How many complete runs fit into a budget, in their order."""
    from fedveil.ledger.ledger import spent_on

    streams = ledger.of(limit.account)
    rounds: dict[Stream, int] = {}
    epsilon, delta = limit.budget.epsilon, limit.budget.delta
    for count, training in enumerate(trainings):
        stream = _planned(ledger, training)
        streams += [] if stream in streams else [stream]
        rounds[stream] = training.rounds
        spent = spent_on(streams, limit.view, delta, epsilon, limit.account.silo, rounds)
        if spent > epsilon:
            return count
    return len(trainings)


def _planned(ledger: Ledger, training: Training) -> Stream:
    """The stream of a run; that of the ledger if the run has started."""
    from fedveil.ledger.charging import facts_of, named
    from fedveil.ledger.ledger import Stream, stream_key

    body = named(facts_of(training.spec), training.spec, ledger).plain()
    return ledger.streams.get(stream_key(body)) or Stream(body)


def total_cost(paths: Sequence[Path], view: View, ledger: Path | None = None) -> Cost:
    """ε at δ of all rounds that the runs have reserved; None if no ledger records any of them.

    It is a sentence if the ledger is another one than the runs know, or an older copy of it.
    """
    from fedveil.ledger.ledger import released_twice, spent_on
    from fedveil.privacy import composition

    try:
        drawn = _ledger_streams([path for path in paths if path.is_dir()], ledger)
    except UserError as mismatch:
        return str(mismatch)
    own = [stream for key, stream in drawn.streams.items() if key in drawn.mine]
    if not own:
        return None
    every, mine = list(drawn.streams.values()), [stream.charged(view) for stream in own]
    delta = min(float(stream.body["delta"]) for stream in own)
    return {
        "epsilon": _finite(spent_on(own, view, delta)),
        "reason": composition.reason(mine),
        "delta": delta,
        "view": view,
        "adjacency": composition.adjacency(mine),
        "runs": drawn.runs,
        "unrecorded": drawn.unrecorded,
        "account": _finite(spent_on(every, view, delta)),
        "others": len(every) - len(mine),
        "released_twice": bool(released_twice(drawn.streams[key] for key in drawn.mine)),
    }


@dataclass(frozen=True)
class LedgerStreams:
    """Noise streams on the data of some runs, by their ledgers, and which are the runs' own."""

    streams: dict[str, Stream]
    mine: set[str]  # keys of the runs' own streams
    runs: int
    unrecorded: int  # runs that no ledger records, so their cost is not counted


def _ledger_streams(paths: Sequence[Path], given: Path | None) -> LedgerStreams:
    from fedveil.ledger.chain import Chain
    from fedveil.ledger.ledger import Ledger
    from fedveil.ledger.tracing import place_of
    from fedveil.runs.saved import METRICS, SavedRun

    traces = [t for path in paths if (t := SavedRun(path).trace) is not None]
    streams: dict[str, Stream] = {}
    own: dict[str, set[str]] = {}  # of each run
    for where in dict.fromkeys(place_of(trace, given) for trace in traces):
        if not Chain.exists(where):
            continue
        with contextlib.closing(Ledger(where)) as ledger:
            found = _own_streams(ledger, [t for t in traces if place_of(t, given) == where])
            accounts = {ledger.streams[key].account for keys in found.values() for key in keys}
            streams |= {k: s for k, s in ledger.streams.items() if s.account in accounts}
            own |= found
    trained = sum(SavedRun(path).has(METRICS) for path in paths)
    mine = {key for keys in own.values() for key in keys}
    count = sum(bool(keys) for keys in own.values())
    return LedgerStreams(streams, mine, count, max(trained - count, 0))


def _own_streams(ledger: Ledger, traces: Sequence[Mapping[str, Any]]) -> dict[str, set[str]]:
    """The streams of each run, which this ledger must record up to the run's last entry."""
    for trace in traces:
        ledger.check_trace(trace)
    names = {str(trace["run"]) for trace in traces}
    return {name: {key for key, _ in ledger.drawn.get(name, ())} for name in names}


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None
