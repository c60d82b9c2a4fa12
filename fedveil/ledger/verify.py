"""Verify a ledger: read every entry, and recompute every ε from the recorded events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fedveil.accounting import accountant as accounting
from fedveil.accounting.rounding import rounded_up, short
from fedveil.ledger.chain import Entry
from fedveil.ledger.ledger import Account, Books, Ledger, released_twice

TOLERANCE = 1e-6  # relative difference of a recorded and a recomputed ε


@dataclass
class Verification:
    """What was checked, and the problems found."""

    entries: int = 0
    rounds: int = 0
    uncommitted: int = 0  # reserved but not committed: spent all the same
    epsilons: int = 0  # of runs, recomputed
    trusted: int = 0  # times that the database was accepted without its head
    problems: list[str] = field(default_factory=list)


def verify(ledger: Ledger) -> Verification:
    """Recompute the ε of each run's statement, and check that every budget was kept.

    Opening the ledger has already checked that its entries are complete and unaltered.
    """
    ledger.chain.check_file()
    verdict, books = Verification(), Books()
    before: dict[Account, int] = {}  # rounds charged when the account's budgets were last set
    for entry in ledger.chain.entries():
        verdict.entries += 1
        if entry.kind == "budget":
            account = Account.in_entry(entry.body)
            verdict.problems += _overspent(books, account, before)
        books.apply(entry)
        verdict.trusted += entry.kind == "anchored"
        if entry.kind == "budget":
            before[account] = _rounds(books, account)
        if entry.kind == "end":
            verdict.epsilons += 1
            verdict.problems += _misstated(books, entry)
    for account in books.accounts():
        verdict.problems += _overspent(books, account, before)
    for stream in books.streams.values():
        verdict.rounds += stream.releases
        verdict.uncommitted += len(stream.rounds - stream.digests.keys())
    for noise, rounds in released_twice(books.streams.values()).items():
        entries = books.entries_of(noise)
        recipe = books.stream_of(entries[0]).body["recipe"]
        verdict.problems.append(
            f"{recipe} on {noise[0]}: {_spans([round + 1 for round in rounds])} released in two "
            f"versions with the same noise, by the runs of entries {', '.join(map(str, entries))} "
            "(`fedveil budget history`). Both are charged, but if they share noise, no ε covers "
            "their difference. Release at most one of their models, and train the other again with "
            "another seed"
        )
    return verdict


def _spans(rounds: Sequence[int]) -> str:
    """
    >>> _spans([1, 2, 3, 7]), _spans([4])
    ('rounds 1–3, 7 were', 'round 4 was')
    """
    spans: list[list[int]] = []
    for round in rounds:
        if spans and round == spans[-1][-1] + 1:
            spans[-1][1:] = [round]
        else:
            spans.append([round])
    listed = ", ".join("–".join(map(str, span)) for span in spans)
    return f"round {listed} was" if len(rounds) == 1 else f"rounds {listed} were"


def _rounds(books: Books, account: Account) -> int:
    return sum(stream.releases for stream in books.of(account))


def _overspent(books: Books, account: Account, before: dict[Account, int]) -> Iterator[str]:
    """Problems of rounds that were charged beyond a budget."""
    if _rounds(books, account) == before.get(account, 0):
        return
    for view, budget in books.budgets(account).items():
        spent = books.spent(account, view, budget.delta, budget.epsilon)
        if spent > budget.epsilon:
            yield (
                f"{account}: ε = {rounded_up(spent)} was spent in view '{view}' under a budget of "
                f"{short(budget.epsilon)}"
            )


def _misstated(books: Books, entry: Entry) -> Iterator[str]:
    """Problems of a run's own ε, which must be that of its events for all planned rounds.

    Versions before 0.2 stated the ε of the rounds run so far.
    """
    body, stream = entry.body, books.stream_of(entry.body["run"])
    plan = stream.plans[body["view"]].redrawn(body["redrawn"])
    planned = int(stream.body["rounds"]) + body["redrawn"]
    if "of" in body and body["rounds"] < planned:
        yield (
            f"entry {entry.position}: {stream.body['recipe']} stated {body['rounds']} rounds, but "
            f"{planned} were planned"
        )
    found = accounting.epsilon(plan.spent(body["rounds"]), stream.body["delta"])
    said = math.inf if body["epsilon"] is None else body["epsilon"]
    if body.get("limited"):  # by the run's own ε, between that of its drawn rounds and that of all
        drawn = books.releases_of(stream.body["run"])
        if plan.over_the_run:  # lost rounds are counted as if lost one by one: without them
            plan, drawn = plan.redrawn(0), drawn - body["redrawn"]
        least = accounting.epsilon(plan.spent(drawn), stream.body["delta"])
        found = min(max(said, least), found)
    if found != said and not abs(found - said) <= TOLERANCE * max(found, 1.0):
        yield (
            f"entry {entry.position}: {stream.body['recipe']} stated ε = {short(said)} for "
            f"{body['rounds']} rounds, but its events give {short(found)}"
        )
