"""verify: every entry read again, every ε derived again from the recorded events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fedveil.privacy import accounting
from fedveil.privacy.chain import Entry
from fedveil.privacy.ledger import Account, Books, Ledger, released_twice
from fedveil.privacy.statement import rounded_up

TOLERANCE = 1e-6  # of an ε that was recorded against the one derived now


@dataclass
class Verdict:
    """What was looked at, and what does not agree."""

    entries: int = 0
    rounds: int = 0
    uncommitted: int = 0  # reserved, but never said to be published: spent all the same
    epsilons: int = 0  # of runs, derived again
    trusted: int = 0  # times that the database was taken for the whole without its head
    problems: list[str] = field(default_factory=list)


def verify(ledger: Ledger) -> Verdict:
    """Derive again what each run's statement said and whether every budget was kept.

    That the entries are whole and unaltered was checked when the ledger was opened.
    """
    ledger.chain.check_file()
    verdict, books = Verdict(), Books()
    before: dict[Account, int] = {}  # rounds charged when an account's budgets were last set
    for entry in ledger.chain.entries():
        verdict.entries += 1
        if entry.kind == "budget":
            account = Account(entry.body["fingerprint"], entry.body["unit"])
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
        verdict.rounds += len(stream.rounds)
        verdict.uncommitted += len(stream.rounds - stream.digests.keys())
    for noise, rounds in released_twice(books.streams.values()).items():
        entries = books.entries_of(noise)
        recipe = books.stream_of(entries[0]).body["recipe"]
        verdict.problems.append(
            f"{recipe} on {noise[0]}: {_spans([round + 1 for round in rounds])} released in "
            f"two versions under the same noise, by runs of entries {', '.join(map(str, entries))} "
            "(`fedveil budget history`), whose difference no ε covers; release one of their models "
            "at most, and play the other anew under another seed"
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
    told = ", ".join("–".join(map(str, span)) for span in spans)
    return f"round {told} was" if len(rounds) == 1 else f"rounds {told} were"


def _rounds(books: Books, account: Account) -> int:
    return sum(len(stream.rounds) for stream in books.of(account))


def _overspent(books: Books, account: Account, before: dict[Account, int]) -> Iterator[str]:
    """Whether rounds were charged under a budget that had no room for them."""
    if _rounds(books, account) == before.get(account, 0):
        return
    for view, budget in books.budgets(account).items():
        spent = books.spent(account, view, budget.delta, budget.epsilon)
        if spent > budget.epsilon:
            yield (
                f"{account}: ε = {rounded_up(spent)} was spent in view '{view}' under a budget of "
                f"{budget.epsilon:g}"
            )


def _misstated(books: Books, entry: Entry) -> Iterator[str]:
    """Whether a run's own ε is what its events come to, for all the rounds that were planned.

    Versions before 0.2 stated the rounds run so far, and said nothing of the plan.
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
    if body.get("limited"):  # to the run's own ε, between what it drew and what it would have
        drawn = len(books.drawn.get(stream.body["run"], ()))
        least = accounting.epsilon(plan.spent(drawn), stream.body["delta"])
        found = min(max(said, least), found)
    if found != said and not abs(found - said) <= TOLERANCE * max(found, 1.0):
        yield (
            f"entry {entry.position}: {stream.body['recipe']} said ε = {said:.6g} after "
            f"{body['rounds']} rounds, but its events come to {found:.6g}"
        )
