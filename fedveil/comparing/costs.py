"""What a comparison costs by the ledger: whether there is room, and what all runs came to."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.comparing.members import Comparison
from fedveil.errors import UserError

if TYPE_CHECKING:
    from fedveil.privacy.ledger import Account, Ledger, Stream
    from fedveil.privacy.together import Charged
    from fedveil.recipe import View
    from fedveil.training import Training

ALIKE = 0.02  # relative differences of ε that are none


@dataclass(frozen=True)
class Room:
    """How many of the runs, in their order, the budgets of these data have room for."""

    runs: int
    standing: bool  # whether there is a budget at all; then one run is played at a time


def room_for(comparison: Comparison, where: Path, cut: bool) -> Room:
    """The room there is; a comparison that would be cut is refused unless that is asked for."""
    from fedveil.charging import refuse_other_split
    from fedveil.privacy.chain import Chain
    from fedveil.privacy.ledger import Ledger

    runs = list(comparison.runs())
    ledger = Ledger(where) if Chain.exists(where) else None
    if ledger is None or not any(ledger.granted.values()):
        return Room(len(runs), False)
    try:
        trainings = _prepared(comparison, where)
        account = _account(trainings[0])
        refuse_other_split(ledger, account, trainings[0].data)
        budgets = ledger.budgets(account)
        if not budgets:
            return Room(len(runs), False)
        fit = min(_fitting(ledger, trainings, view) for view in budgets)
    finally:
        ledger.close()
    if fit < len(runs) and not (cut and fit):
        raise UserError(_full(trainings[0], budgets, fit, len(runs)))
    return Room(fit, True)


def new_account(comparison: Comparison, where: Path) -> str:
    """That these data are counted apart from data with a budget that they resemble, or nothing."""
    from fedveil.privacy.chain import Chain
    from fedveil.resembling import resembling
    from fedveil.settings import load_data, resolve_recipe

    if not Chain.exists(where):
        return ""
    settings = comparison.members[0].settings
    data = load_data(settings.data)
    data = data.by_example() if resolve_recipe(settings).unit == "example" else data
    return resembling(data, data.fingerprint(), where)


def refuse_unequal_noise(comparison: Comparison, where: Path) -> None:
    """Members that bring their own noise must come to one ε, for no budget makes them equal."""
    from fedveil.settings import load_data, prepare, resolve_recipe

    members = comparison.members
    if members[0].settings.epsilon is not None or not resolve_recipe(members[0].settings).private:
        return
    data = load_data(members[0].settings.data)
    spent = []
    for member in members:
        training = prepare(member.at(comparison.seeds[0]), data, ledger=where)
        spent.append(training.statement().main.epsilon)
    refuse_apart([member.label for member in members], spent)


def refuse_apart(names: Sequence[str], spent: Sequence[float]) -> None:
    """Refuse values of ε that differ by more than what calibration leaves open."""
    for name, epsilon in zip(names[1:], spent[1:], strict=True):
        if not math.isclose(epsilon, spent[0], rel_tol=ALIKE):
            raise UserError(
                f"{names[0]} and {name} cannot be compared: their own noise comes to epsilon = "
                f"{spent[0]:.3g} for one and {epsilon:.3g} for the other; give both --epsilon."
            )


def _full(training: Training, budgets: Any, fit: int, runs: int) -> str:
    said = " and ".join(f"epsilon = {b.epsilon:g} in view '{v}'" for v, b in budgets.items())
    advice = "give --cut to play those, or compare fewer" if fit else "see `fedveil budget show`"
    return (
        f"The budget of '{training.data.name}', {said}, has room for {fit} of these {runs} runs, "
        f"and none was played; {advice}."
    )


def _prepared(comparison: Comparison, where: Path) -> list[Training]:
    """All runs at round 0, on data that are loaded once."""
    from fedveil.settings import load_data, prepare

    data = load_data(comparison.members[0].settings.data)
    return [prepare(member.at(seed), data, ledger=where) for member, seed in comparison.runs()]


def _account(training: Training) -> Account:
    from fedveil.privacy.ledger import Account

    return Account(training.fingerprint, training.recipe.unit)


def _fitting(ledger: Ledger, trainings: Sequence[Training], view: View) -> int:
    """How many of the runs fit a budget wholly, one after another."""
    from fedveil.privacy import together

    account = _account(trainings[0])
    budget = ledger.budgets(account)[view]
    streams = {id(stream): stream.charged(view) for stream in ledger.of(account)}
    for count, training in enumerate(trainings):
        key, charged = _planned(ledger, training, view)
        streams[key] = charged
        spent = together.epsilon(list(streams.values()), budget.delta, budget.epsilon)
        if spent > budget.epsilon:
            return count
    return len(trainings)


def _planned(ledger: Ledger, training: Training, view: View) -> tuple[int, Charged]:
    """A run as if all its rounds were reserved; one that has begun counts once."""
    from fedveil.charging import facts_of
    from fedveil.privacy.ledger import stream_key
    from fedveil.privacy.together import Charged

    facts = facts_of(training, _account(training))
    known = ledger.streams.get(stream_key(facts.plain()))
    key = id(training) if known is None else id(known)
    return key, Charged(facts.plans[view], training.rounds, training.rounds)


def together_of(paths: Sequence[Path], view: View) -> dict[str, Any] | None:
    """ε at δ of all rounds that runs have reserved; None where no ledger knows any of them."""
    from fedveil.privacy import together
    from fedveil.privacy.ledger import released_twice

    drawn = _drawn([path for path in paths if path.is_dir()])
    mine = [stream.charged(view) for key, stream in drawn.streams.items() if key in drawn.mine]
    if not mine:
        return None
    every = [stream.charged(view) for stream in drawn.streams.values()]
    delta = min(float(drawn.streams[key].body["delta"]) for key in drawn.mine)
    return {
        "epsilon": _finite(together.epsilon(mine, delta)),
        "reason": together.reason(mine),
        "delta": delta,
        "view": view,
        "adjacency": together.adjacency(mine) if together.fitting(mine) else None,
        "runs": drawn.runs,
        "unrecorded": drawn.unrecorded,
        "account": _finite(together.epsilon(every, delta)),
        "others": len(every) - len(mine),
        "released_twice": bool(released_twice(drawn.streams[key] for key in drawn.mine)),
    }


@dataclass(frozen=True)
class Drawn:
    """What was drawn on some runs' data, by their ledgers, and what of it by these runs."""

    streams: dict[str, Stream]
    mine: set[str]  # of their names
    runs: int
    unrecorded: int  # runs that no ledger knows, so that what they cost is not counted


def _drawn(paths: Sequence[Path]) -> Drawn:
    from fedveil.privacy.chain import Chain
    from fedveil.privacy.ledger import Ledger
    from fedveil.runs.directory import RunDirectory

    traces = [t for path in paths if (t := RunDirectory(path).load_trace()) is not None]
    streams: dict[str, Stream] = {}
    own: dict[str, set[str]] = {}  # of each run
    for where in dict.fromkeys(Path(trace["path"]) for trace in traces):
        if not Chain.exists(where):
            continue
        with contextlib.closing(Ledger(where)) as ledger:
            names = {str(t["run"]) for t in traces if t["path"] == str(where)}
            found = {name: {key for key, _ in ledger.drawn.get(name, ())} for name in names}
            accounts = {ledger.streams[key].account for keys in found.values() for key in keys}
            streams |= {k: s for k, s in ledger.streams.items() if s.account in accounts}
            own |= found
    played = sum((path / "metrics.parquet").is_file() for path in paths)
    mine = {key for keys in own.values() for key in keys}
    count = sum(bool(keys) for keys in own.values())
    return Drawn(streams, mine, count, max(played - count, 0))


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None
