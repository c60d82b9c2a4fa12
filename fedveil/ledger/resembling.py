"""Warn about data without a budget that resemble data with one.

Accounts are identified by the exact training data, so another hold-out, another encoding or one
more row makes a new account with nothing spent. Nothing is refused here: the resemblance is a
guess, from the name of the data and from a sketch of their examples recorded with the budget.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.accounting.rounding import rounded_up, short
from fedveil.data.federated import same_contents
from fedveil.data.sketch import ALIKE, overlap
from fedveil.ledger.chain import Chain
from fedveil.ledger.ledger import PEOPLE, Account, Granted, Ledger, ledger_path

if TYPE_CHECKING:
    from fedveil.data.federated import Federated


def resembling(data: Federated, name: str | None = None, ledger: Path | None = None) -> str:
    """A warning about the most similar data with a budget; empty if there are none."""
    where = ledger_path(ledger)
    if not Chain.exists(where):
        return ""
    with contextlib.closing(Ledger(where)) as books:
        account = Account.of(data, name)
        if books.limits(account):
            return elsewhere(books, account, data)
        if not any(books.granted.values()):
            return ""
        contents, granted = data.contents(), [g for v in books.granted.values() for g in v.values()]
        if any(same_contents(each.contents, contents) for each in granted):
            return ""  # the same examples in another split are refused by `charging`
        found = _nearest(books, data)
        return "" if found is None else _sentence(books, account, data.name, *found)


def elsewhere(books: Ledger, account: Account, data: Federated) -> str:
    """A warning if most clients have another account with a budget too; empty if they do not.

    Budgets of two accounts are not added up, so together they allow more than each of them.
    """
    people = books.people(data)
    for other, views in books.granted.items():
        shared = max((overlap(people, one.people, PEOPLE) for one in views.values()), default=0.0)
        if other.whole == account.whole or other.unit != account.unit or shared < ALIKE:
            continue
        return (
            f"About {shared:.0%} of these clients also have the account {other}. "
            f"{'. '.join(_spent(books, other))}. What is spent there is not counted in the account "
            f"{account}. Use one account for all data about the same people."
        )
    return ""


def _nearest(books: Ledger, data: Federated) -> tuple[Account, Granted, float] | None:
    """The account with a budget that shares the most examples, or the name."""
    sketch, people, best = data.resemblance(), books.people(data), None
    for account, views in books.granted.items():
        for granted in list(views.values())[:1]:
            shared = max(overlap(sketch, granted.sketch), overlap(people, granted.people, PEOPLE))
            if shared < ALIKE and granted.data != data.name:
                continue
            if best is None or shared > best[2]:
                best = account, granted, shared
    return best


def _sentence(
    books: Ledger, account: Account, name: str, other: Account, granted: Granted, shared: float
) -> str:
    new = "another" if books.of(account) else "a new"
    why = [f"about {shared:.0%} of the rows or clients are the same"] if shared >= ALIKE else []
    why += ["the name is the same"] if granted.data == name else []
    spent = ". ".join(_spent(books, other))
    return (
        f"These data are {new} account ({account}) without a budget. They resemble "
        f"'{granted.data}' ({other}), which has one: {' and '.join(why)}. {spent}. "
        "This run is not charged to that budget, although it may be about the same people."
    )


def _spent(books: Ledger, account: Account) -> list[str]:
    """What is spent of each budget of an account."""
    found = []
    for view, budget in books.budgets(account).items():
        used = books.spent(account, view, budget.delta, budget.epsilon)
        found.append(
            f"There, ε = {rounded_up(used)} of {short(budget.epsilon)} is spent in view '{view}'"
        )
    return found
