"""Verify a ledger: read every entry, and recompute every ε from the recorded events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fedveil.accounting import accountant as accounting
from fedveil.accounting.rounding import rounded_up, short
from fedveil.ledger.chain import Entry
from fedveil.ledger.ledger import ACCOUNTANT, Account, Books, Ledger, released_twice

TOLERANCE = 1e-6  # relative difference of a recorded and a recomputed ε
REFINED = 0.01  # how much more another revision of the accountant may find, relatively


@dataclass
class Verification:
    """What was checked, and the problems found."""

    entries: int = 0
    rounds: int = 0
    uncommitted: int = 0  # reserved but not committed: spent all the same
    epsilons: int = 0  # of runs, recomputed
    trusted: int = 0  # times that the database was accepted without its head
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # statements by other accountants


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
            verdict.problems += _too_few(books, entry)
            _judge(verdict, books, entry)
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


def _too_few(books: Books, entry: Entry) -> Iterator[str]:
    """Problems of a statement about fewer rounds than were planned.

    Versions before 0.2 stated the ε of the rounds run so far.
    """
    body, stream = entry.body, books.stream_of(entry.body["run"])
    planned = int(stream.body["rounds"]) + body["redrawn"]
    if "of" in body and body["rounds"] < planned:
        yield (
            f"entry {entry.position}: {stream.body['recipe']} stated {body['rounds']} rounds, but "
            f"{planned} were planned"
        )


def _judge(verdict: Verification, books: Books, entry: Entry) -> None:
    """A run's own ε must not be less than that of its events, unless another accountant found it.

    It may be more: an accountant that has become tighter finds less.
    """
    body, said, found = entry.body, _said(entry), _recomputed(books, entry)
    if found <= said + TOLERANCE * max(said, 1.0):
        return
    recipe = books.stream_of(body["run"]).body["recipe"]
    stated = (
        f"entry {entry.position}: {recipe} stated ε = {short(said)} for {body['rounds']} rounds"
    )
    if body.get("accountant") != ACCOUNTANT and found <= (1 + REFINED) * said:
        other = f"by another version of the accountant; this one gives {short(found)}"
        verdict.notes.append(f"{stated}, {other}")
    else:
        verdict.problems.append(f"{stated}, but its events give {short(found)}")


def _recomputed(books: Books, entry: Entry) -> float:
    """ε of the events that a statement is about: of all rounds, unless the run's own ε limits it.

    Then it is what was stated, but not less than that of the drawn rounds.
    """
    body, stream = entry.body, books.stream_of(entry.body["run"])
    delta, plan = stream.body["delta"], stream.plans[body["view"]].redrawn(body["redrawn"])
    found = accounting.epsilon(plan.spent(body["rounds"]), delta)
    if not body.get("limited"):
        return found
    drawn = books.releases_of(stream.body["run"])
    if plan.over_the_run:  # lost rounds are counted as if lost one by one: without them
        plan, drawn = plan.redrawn(0), drawn - body["redrawn"]
    return min(max(_said(entry), accounting.epsilon(plan.spent(drawn), delta)), found)


def _said(entry: Entry) -> float:
    return math.inf if entry.body["epsilon"] is None else float(entry.body["epsilon"])
