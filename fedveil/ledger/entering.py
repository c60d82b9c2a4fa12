"""Enter data in the ledger: open it for a session, unless the data belong to another account."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedveil.data.federated import Federated
from fedveil.data.sketch import ALIKE, overlap
from fedveil.errors import UserError
from fedveil.ledger.ledger import PEOPLE, Account, Granted, Ledger, open_ledger


@contextmanager
def entered(
    path: Path, account: Account, data: Federated, trace: Mapping[str, Any] | None = None
) -> Iterator[Ledger]:
    """The ledger for a session that charges these data to an account.

    It is the right ledger for the trace, if any, and neither the data's clients nor its examples
    have a budget elsewhere that the session would evade. The session owns the ledger and closes it.
    It is closed here only if something is refused.
    """
    ledger = open_ledger(path)
    try:
        if trace is not None:
            ledger.check_trace(trace)
        refuse_elsewhere(ledger, account, data)
        yield ledger
    except BaseException:
        ledger.close()
        raise


def refuse_elsewhere(ledger: Ledger, account: Account, data: Federated) -> None:
    """Refuse data whose clients or examples have a budget elsewhere, and none in the account."""
    refuse_shared_clients(ledger, account, data)
    refuse_other_split(ledger, account, data)


def refuse_other_split(ledger: Ledger, account: Account, data: Federated) -> None:
    """Refuse data without a budget whose examples have one in another unit or split."""
    if ledger.limits(account):
        return
    related = ledger.related_budget(data.contents)
    if related is not None:
        raise UserError(
            f"A budget is set for these examples ('{related.data}'), but for another unit or split "
            "over clients. Train on that unit and split, set a budget for this one too (`fedveil "
            "budget set` with its settings file), or remove that budget: "
            f"`{related.lift_command}`."
        )


def refuse_shared_clients(ledger: Ledger, account: Account, data: Federated) -> None:
    """Refuse data whose account has no budget, but whose clients have one in another account.

    Another export of a table (fewer rows, fewer columns) is other data, but the same people. A
    second account for them needs a budget of its own.
    """
    if ledger.limits(account):
        return
    people = ledger.people(data)
    for other, views in ledger.granted.items():
        if other.unit != account.unit or not views:
            continue
        if shared := _shared(people, ledger, other, data):
            raise UserError(_to_one_account(shared, account, other, next(iter(views.values()))))


def _to_one_account(shared: float, account: Account, other: Account, granted: Granted) -> str:
    """How to charge data to the account that their clients have."""
    known = f"{other.name} ('{granted.data}')" if other.name else f"'{granted.data}' ({other})"
    join = (
        f"Charge the run to it: --account {other.name}"
        if other.name
        else "Charge both to one account: name it with --account, here and in `fedveil budget set`"
    )
    second = f" {account.name}" if account.name else ""
    return (
        f"About {shared:.0%} of these data are about clients of {known}, which has a budget. "
        f"{join}. To give these people a second account{second} on purpose, set its budget first. "
        "If they are other people with the same ids, change the ids."
    )


def _shared(people: tuple[str, ...], ledger: Ledger, other: Account, data: Federated) -> float:
    """The share of clients that both have; of a table's rows, where one does not name them.

    A saved copy does not name its clients, and neither do budgets before version 0.3.
    """
    granted = list(ledger.granted[other].values())
    runs = [tuple(stream.body.get("people", ())) for stream in ledger.of(other)]
    known = [one for one in (*(each.people for each in granted), *runs) if one]
    if known and people:
        return max(overlap(people, one, PEOPLE) for one in known)
    rows = max(overlap(data.sketch, each.sketch) for each in granted)
    return rows if rows >= ALIKE else 0.0
