"""Data without a budget that look like data with one: a new account, which has to be said.

Accounts are known by the exact training data, so another hold-out, another encoding or one row more
is another account with nothing spent. Nothing is refused here: what is told is a guess, from the
name of the data and from a sketch of their examples that was entered with the budget.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.data.sketch import ALIKE, overlap
from fedveil.privacy.chain import Chain
from fedveil.privacy.ledger import Account, Granted, Ledger, ledger_path
from fedveil.privacy.statement import rounded_up

if TYPE_CHECKING:
    from fedveil.data.federated import Federated


def resembling(data: Federated, fingerprint: str, ledger: Path | None = None) -> str:
    """A sentence on the budget of the data that these resemble most; nothing where none does."""
    where = ledger_path(ledger)
    if not Chain.exists(where):
        return ""
    with contextlib.closing(Ledger(where)) as books:
        account = Account(fingerprint, data.unit)
        if books.budgets(account) or not any(books.granted.values()):
            return ""
        contents, granted = data.contents(), [g for v in books.granted.values() for g in v.values()]
        if any(each.contents == contents for each in granted):
            return ""  # the very same examples in another split: refused by `charging`
        found = _nearest(books, data)
        return "" if found is None else _sentence(books, account, data.name, *found)


def _nearest(books: Ledger, data: Federated) -> tuple[Account, Granted, float] | None:
    """The account with a budget that shares most examples, or else the name."""
    sketch, best = data.resemblance(), None
    for account, views in books.granted.items():
        for granted in list(views.values())[:1]:
            shared = overlap(sketch, granted.sketch)
            if shared < ALIKE and granted.data != data.name:
                continue
            if best is None or shared > best[2]:
                best = account, granted, shared
    return best


def _sentence(
    books: Ledger, account: Account, name: str, other: Account, granted: Granted, shared: float
) -> str:
    new = "another" if books.of(account) else "a new"
    why = [f"about {shared:.0%} of the rows are the same"] if shared >= ALIKE else []
    why += ["the name is the same"] if granted.data == name else []
    spent = []
    for view, budget in books.budgets(other).items():
        used = books.spent(other, view, budget.delta, budget.epsilon)
        spent.append(
            f"ε = {rounded_up(used)} of {budget.epsilon:g} is spent there in view '{view}'"
        )
    return (
        f"These data are {new} account ({account}) without a budget. They resemble "
        f"'{granted.data}' ({other}), which has one: {' and '.join(why)}. {', '.join(spent)}. "
        "This run is not counted there, although it may be about the same people."
    )
