"""`fedveil budget`: the privacy budget of each data set, and what has been spent of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fedveil.accounting.rounding import short
from fedveil.commands import flags
from fedveil.errors import UserError, unknown

if TYPE_CHECKING:
    from fedveil.data.federated import Federated
    from fedveil.ledger.chain import Entry
    from fedveil.ledger.ledger import Account, Books, Ledger
    from fedveil.ledger.verify import Verification
    from fedveil.privacy.calibrate import Budget
    from fedveil.recipe import View

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, suggest_commands=False)
Target = Annotated[
    str | None,
    typer.Argument(help="Run's directory, settings file, or a data set's name or fingerprint."),
]
WIDTH = 13
SILOS = 8  # named in one line
INFORMATIONAL = "*"  # of an ε that no budget set before the runs guarantees


class Spent(NamedTuple):
    """ε of all runs at a δ: for the budget, or in hindsight where it is beyond the budget."""

    epsilon: float
    exceeds: bool  # the budget, if there is one at this δ
    informational: bool
    why: str  # there is no finite ε


@app.callback()
def budget() -> None:
    """Show, set and verify the privacy budget of a data set."""


@app.command()
def show(
    target: Target = None,
    delta: Annotated[
        float | None,
        typer.Option(help="Report ε at this δ. [default: the budget's, or the runs' smallest]"),
    ] = None,
    as_json: flags.AsJson = False,
    ledger: flags.Ledger = None,
) -> None:
    """Show what has been spent on each data set.

    Lists ε for each adversary view, and the budget if one is set.
    """
    from fedveil.accounting.accountant import check_delta
    from fedveil.commands.progress import entry, show_json

    if delta is not None:
        check_delta(delta)
    books = _existing(ledger)
    whole = dict.fromkeys(account.whole for account in _chosen(books, target))
    shown = [_summary(books, account, delta, _labels(books, target)) for account in whole]
    if as_json:
        head = books.head._asdict() if books is not None else None
        show_json({"head": head, "accounts": shown})
        return
    if books is None:
        print("The ledger is empty.")
        return
    for summary in shown:
        _show_account(summary)
    if any(INFORMATIONAL in line["text"] for summary in shown for line in summary["views"]):
        entry(INFORMATIONAL, "Informational: a guarantee needs a budget set before the runs.", 3)
        print()
    entry("Ledger", f"{books.path}", WIDTH)
    entry("Head", f"{books.head.position}:{books.head.hash}", WIDTH)
    entry("", "Keep a copy elsewhere: `fedveil budget verify --head` checks it later.", WIDTH)


def _show_account(summary: dict[str, Any]) -> None:
    from fedveil.commands.progress import entry

    entry("Data", f"{summary['data']}, {summary['population']} ({summary['account']})", WIDTH)
    for line in summary["views"]:
        entry(f"  {line['view']}", line["text"], WIDTH)
        for text in line["silos"]:
            entry("", text, WIDTH)
    entry("Recorded", summary["recorded"], WIDTH)
    print()


@app.command("set")
def set_(
    target: Annotated[
        str,
        typer.Argument(
            help="Run's directory or settings file; with --lift also a name shown by `show`."
        ),
    ],
    epsilon: Annotated[
        float | None, typer.Option(help="Privacy budget ε of all runs on the data set.")
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(help=flags.DELTA),
    ] = None,
    view: Annotated[
        str, typer.Option(help="What the adversary sees: models, sum or messages.")
    ] = "models",
    account: Annotated[
        str | None,
        typer.Option(help="Name of the account, for all data about the same people."),
    ] = None,
    silo: Annotated[
        str | None,
        typer.Option(help="Silo that the budget is for: its name, or its number from 1."),
    ] = None,
    lift: Annotated[bool, typer.Option("--lift", help="Remove the budget of this view.")] = False,
    ledger: flags.Ledger = None,
) -> None:
    """Set the privacy budget of a data set.

    It applies to every run on the data set from now on.
    """
    from fedveil.commands.progress import entry
    from fedveil.ledger.ledger import VIEWS, Account, ledger_path, open_ledger
    from fedveil.ledger.resembling import elsewhere
    from fedveil.privacy.calibrate import Budget, sensible_delta

    if view not in VIEWS:
        raise unknown("view", view, VIEWS)
    if lift == (epsilon is not None):
        raise UserError("Pass either --epsilon to set a budget, or --lift to remove one.")
    if lift and not Path(target).exists():
        _lift_named(target, view, ledger)
        return
    (data, named, unit), budget = _data_of(Path(target)), None
    if epsilon is not None:
        budget = Budget(epsilon, sensible_delta(data.clients) if delta is None else delta)
    books, charged = open_ledger(ledger_path(ledger)), Account.of(data, account or named, unit)
    if silo is not None:
        charged = _silo(books, charged, data, silo)
    sketches = data.resemblance(), books.people(data)
    books.grant(charged, view, budget, data.name, data.contents(), *sketches)
    if budget is None:
        _show_lifted(data.name, charged, view)
    else:
        _show_granted(data.name, charged, view, budget, _spent_of(books, charged, view, budget))
        if note := elsewhere(books, charged, data):
            entry("Warning", note, WIDTH)


def _lift_named(target: str, view: View, ledger: Path | None) -> None:
    """Remove the budget of data given by a name or a fingerprint, as `show` lists them."""
    books = _existing(ledger)
    standing = [
        (account, granted)
        for account in _chosen(books, target)
        if books is not None and (granted := books.granted.get(account, {}).get(view)) is not None
    ]
    if books is None or len(standing) != 1:
        raise UserError(
            f"'{target}' matches {len(standing)} budgets in view '{view}'. Name one by the start "
            "of its fingerprint, as `fedveil budget show` lists it, or as ACCOUNT/record/SILO."
        )
    account, granted = standing[0]
    books.grant(account, view, None, granted.data, granted.contents, granted.sketch)
    _show_lifted(granted.data, account, view)


def _show_granted(data: str, account: Account, view: View, budget: Budget, spent: Spent) -> None:
    from fedveil.commands.progress import entry

    allowed = f"ε = {short(budget.epsilon)} at δ = {short(budget.delta)} in view '{view}'"
    told = f"So far, {_amount(spent.epsilon)} is spent{spent.why}."
    entry("", f"Budget of all runs on {data} ({account}): {allowed}. {told}", width=0)
    if spent.exceeds:
        entry("", "This budget is already exceeded. Every new round will be refused.", width=0)


def _show_lifted(data: str, account: Account, view: View) -> None:
    from fedveil.commands.progress import entry

    entry("", f"Removed the budget of {data} ({account}) in view '{view}'.", width=0)


@app.command()
def history(target: Target = None, ledger: flags.Ledger = None) -> None:
    """List the entries of the ledger, oldest first."""
    from fedveil.commands.progress import entry as line
    from fedveil.ledger.ledger import Books

    books = _existing(ledger)
    if books is None:
        print("The ledger is empty.")
        return
    chosen = set(_chosen(books, target))
    runs, lines = Books(), dict[int, list[Any]]()
    for entry in books.chain.entries():
        runs.apply(entry)
        if entry.kind in ("reserve", "commit", "end"):
            if entry.body["run"] in lines:
                lines[entry.body["run"]].append(entry)
        elif "fingerprint" not in entry.body or _account(entry) in chosen:
            lines[entry.position] = [entry]
    for first, *rest in lines.values():
        when = first.body["at"].replace("T", " ").removesuffix("+00:00")
        line(f"{first.position:>7}  {when}  ", _line(runs, first, rest), width=30)
    print("Times are UTC.")


@app.command()
def verify(
    head: Annotated[
        str | None,
        typer.Option(help="Earlier head of the ledger (POSITION:HASH) that it must still contain."),
    ] = None,
    anchor_anew: Annotated[
        bool,
        typer.Option(
            "--trust-without-head",
            "--anchor-anew",
            help="Trust the database without its .head file; the ledger records this.",
        ),
    ] = False,
    ledger: flags.Ledger = None,
) -> None:
    """Verify that the ledger is intact, and recompute every ε.

    Checks the hash of every entry, and recomputes ε from the recorded events.
    """
    from fedveil.ledger.ledger import Ledger, ledger_path
    from fedveil.ledger.verify import verify as verdict_of

    if anchor_anew:
        trusted = Ledger(ledger_path(ledger), trusting=True)
        trusted.chain.anchor_anew()
        trusted.close()
    books = _existing(ledger)
    if books is None:
        raise UserError(f"There is no ledger at {ledger_path(ledger)}. Name one with --ledger.")
    if head is not None:
        _check_head(books, head)
    verdict = verdict_of(books)
    _show_verdict(verdict)
    if verdict.problems:
        raise typer.Exit(1)


def _show_verdict(verdict: Verification) -> None:
    from fedveil.commands.progress import entry

    entry("Entries", f"{verdict.entries:,}, all intact", WIDTH)
    entry("Rounds", _rounds(verdict.rounds, verdict.uncommitted), WIDTH)
    entry("ε of runs", f"{verdict.epsilons:,} recomputed from the recorded events", WIDTH)
    if verdict.trusted:
        times = "once" if verdict.trusted == 1 else f"{verdict.trusted} times"
        text = f"{times} the database was trusted without its .head file: see the history"
        entry("Trusted", text, WIDTH)
    for note in verdict.notes:
        entry("Note", f"{note}.", WIDTH)
    for problem in verdict.problems:
        entry("WRONG", f"{problem}.", WIDTH)
    if not verdict.problems:
        other = "other " * bool(verdict.notes)
        text = (
            f"every {other}recorded ε was confirmed, and no budget was exceeded while it applied."
        )
        entry("Verified", text, WIDTH)


def _existing(path: Path | None) -> Ledger | None:
    from fedveil.ledger.chain import Chain
    from fedveil.ledger.ledger import Ledger, ledger_path

    where = ledger_path(path)
    return Ledger(where) if Chain.exists(where) else None


def _chosen(books: Ledger | None, target: str | None) -> list[Account]:
    """The accounts given by a name, the start of a fingerprint, a run or a settings file."""
    from fedveil.ledger.ledger import Account

    known = [] if books is None else books.accounts()
    if target is None:
        return known
    if Path(target).exists():
        account = Account.of(*_data_of(Path(target)))
        return [a for a in known if a.whole == account]
    names = {a: _name(books, a) for a in known if books is not None}
    found = [
        a for a in known if target in (names[a], str(a), a.name) or a.fingerprint.startswith(target)
    ]
    if not found:
        raise unknown("data set in the ledger named", target, names.values())
    return found


def _silo(books: Ledger, account: Account, data: Federated, name: str) -> Account:
    """The account of one silo."""
    if account.unit != "record":
        raise UserError(
            f"--silo is for algorithms that protect records inside silos, and this one protects "
            f"each {account.unit}. Remove --silo."
        )
    silos = books.silos(data, account)
    if silos is None:
        raise UserError(
            f"The silos of '{data.name}' have no names that hold in the account '{account}'. Set "
            "the budget of all silos, without --silo."
        )
    found = [name] if name in silos.ids else [books.silo_id(name)]
    if found[0] not in silos.ids:
        raise UserError(
            f"'{data.name}' has no silo '{name}'. Give its name, or its number from 1 to "
            f"{data.clients} if the data do not name their silos."
        )
    return replace(account, silo=found[0])


def _data_of(target: Path) -> tuple[Federated, str | None, str]:
    """The data of a run or a settings file, the name of its account, and the unit of privacy."""
    from fedveil.runs.saved import settings_file
    from fedveil.training.settings import read_run, resolve_recipe
    from fedveil.training.sources import load_for

    settings = read_run(settings_file(target))
    data = load_for(settings)
    unit = resolve_recipe(settings).unit
    return data.by_example() if unit == "example" else data, settings.account, unit


def _name(books: Ledger, account: Account) -> str:
    for stream in books.of(account):
        return str(stream.body["data"])
    return next((g.data for g in books.granted.get(account, {}).values()), "unknown")


def _account(entry: Entry) -> Account:
    from fedveil.ledger.ledger import Account

    return Account.in_entry(entry.body)


def _labels(books: Ledger | None, target: str | None) -> dict[str, str]:
    """The names of silos by their hashes, if the target has the data that name them."""
    if books is None or target is None or not Path(target).exists():
        return {}
    names = _data_of(Path(target))[0].names
    return {} if names is None else {books.silo_id(str(name)): str(name) for name in names}


def _summary(
    books: Ledger | None, account: Account, delta: float | None, labels: Mapping[str, str]
) -> dict[str, Any]:
    from fedveil.ledger.ledger import VIEWS
    from fedveil.privacy.calibrate import sensible_delta

    assert books is not None
    streams = books.of(account)
    least = min((float(s.body["delta"]) for s in streams), default=sensible_delta(1))
    rounds = sum(stream.releases for stream in streams)
    open_ = sum(len(stream.rounds - stream.digests.keys()) for stream in streams)
    size = f"{streams[0].body['population']:,} {account.unit}s" if streams else f"{account.unit}s"
    found = (_spending(books, account, view, delta, least, labels) for view in VIEWS)
    lines = [line for line in found if line is not None]
    return {
        "account": str(account),
        "fingerprint": account.fingerprint,
        "unit": account.unit,
        "data": _name(books, account),
        "population": size,
        "views": lines,
        "rounds": rounds,
        "uncommitted": open_,
        "recorded": f"{_rounds(rounds, open_)}, from {_count(len(streams), 'noise stream')}",
    }


def _spending(
    books: Ledger,
    account: Account,
    view: Any,
    delta: float | None,
    least: float,
    labels: Mapping[str, str],
) -> dict[str, Any] | None:
    """What was spent in a view, and of its budget if that has the same δ."""
    budget = books.budgets(account).get(view)
    at = delta if delta is not None else budget.delta if budget else least
    same = budget if budget is not None and at == budget.delta else None
    spent = _spent(books, account, view, at, same)
    if budget is None and math.isinf(spent.epsilon) and not (spent.why and view == "models"):
        return None
    of = f" of {short(same.epsilon)}" if same else ""
    mark = INFORMATIONAL if spent.informational else ""
    text = (
        f"{_amount(spent.epsilon)}{mark}{of} at δ = {short(at)}"
        f"{_neighbours(books, account, view, same is not None)}"
        f"{spent.why}{_beside(budget, same, spent)}"
    )
    finite = math.isfinite(spent.epsilon)
    plain = {"epsilon": spent.epsilon if finite else None, "delta": at, "text": text}
    silos = _silo_lines(books, account, view, at, labels)
    return {"view": view, "budget": budget.epsilon if budget else None, **plain, "silos": silos}


def _spent_of(books: Ledger, account: Account, view: Any, budget: Budget) -> Spent:
    """What was spent of a budget."""
    return _spent(books, account, view, budget.delta, budget)


def _spent(books: Ledger, account: Account, view: Any, at: float, budget: Budget | None) -> Spent:
    """What was spent at a δ, which is that of the budget if there is one.

    The proof that a budget relies on has no ε far beyond the budget. There, it is the hindsight's.
    """
    spent = books.spent(account, view, at, budget.epsilon if budget else None)
    exceeds = budget is not None and spent > budget.epsilon
    hindsight = budget is None or math.isinf(spent)
    found = books.spent(account, view, at) if hindsight else spent
    why = _why_infinite(books, account, view, at) if math.isinf(found) else ""
    return Spent(found, exceeds, hindsight and 0 < found < math.inf, why)


def _why_infinite(books: Ledger, account: Account, view: Any, at: float) -> str:
    """Why there is no finite ε: a release without noise, or a δ that is too small for the runs."""
    if reason := _exposed(books, account, view):
        return f": {reason}"
    larger = (10.0**power for power in range(-12, -1) if 10.0**power > at)
    found = ((delta, books.spent(account, view, delta)) for delta in larger)
    for delta, spent in found:
        if math.isfinite(spent):
            return f": δ is too small for these runs (at δ = {short(delta)}, {_amount(spent)})"
    return ""


def _silo_lines(
    books: Ledger, account: Account, view: Any, delta: float, labels: Mapping[str, str]
) -> list[str]:
    """What each silo has spent, where silos differ or have budgets; alike ones in one line."""
    from fedveil.ledger.ledger import spent_by_silo

    own = {
        limit.account.silo: limit.budget for limit in books.limits(account) if limit.view == view
    }
    own.pop("", None)
    found: dict[str, list[str]] = {}
    spent = spent_by_silo(books.of(account), view, delta)
    for silo in dict.fromkeys([*spent, *own]):
        text = _amount(spent.get(silo, 0.0))
        if silo in own:
            budget = own[silo]
            text = (
                f"{_amount(books.spent(replace(account, silo=silo), view, *astuple(budget)[::-1]))}"
                f" of {short(budget.epsilon)} at δ = {short(budget.delta)}"
            )
        found.setdefault(text, []).append(labels.get(silo, silo))
    if len(found) < 2 and not own:
        return []
    return [f"silo {_listed(silos)}: {text}" for text, silos in found.items()]


def _listed(silos: list[str]) -> str:
    """
    >>> _listed(["1", "2"]), _listed([str(n) for n in range(20)])
    ('1, 2', '0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    more = f" and {len(silos) - SILOS} more" if len(silos) > SILOS else ""
    return ", ".join(silos[:SILOS]) + more


def _beside(budget: Budget | None, same: Budget | None, spent: Spent) -> str:
    """A budget for another δ, or the part of it that is spent."""
    if budget is None:
        return ""
    if same is None:
        return f"; the budget is {short(budget.epsilon)} at δ = {short(budget.delta)}"
    if spent.exceeds:
        return ", exceeded, so every new round is refused"
    return f", {math.ceil(100 * spent.epsilon / budget.epsilon)}% used"


def _exposed(books: Ledger, account: Account, view: Any) -> str:
    """Why a run released something without noise, if one did."""
    from fedveil.accounting.events import NonPrivate

    ways = (way for run in books.charged(account, view) for way in run.plan.ways)
    return next((way.event.reason for way in ways if isinstance(way.event, NonPrivate)), "")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _rounds(reserved: int, uncommitted: int) -> str:
    """Rounds charged; uncommitted ones were lost in a crash and still count."""
    lost = f", {uncommitted:,} of them not completed" if uncommitted else ""
    return f"{_count(reserved, 'round')} charged{lost}"


def _neighbours(books: Ledger, account: Account, view: Any, budgeted: bool) -> str:
    from fedveil.privacy.composition import adjacency
    from fedveil.privacy.guarantee import written

    runs = books.charged(account, view)
    if not runs:
        return ""
    found = adjacency(runs, budgeted)
    return f" ({written(found)})" if found else " (their adjacencies cannot be combined)"


def _amount(epsilon: float) -> str:
    from fedveil.accounting.rounding import rounded_up

    return f"ε = {rounded_up(epsilon)}"


def _line(books: Books, first: Entry, rest: list[Entry]) -> str:
    body = first.body
    match first.kind:
        case "run":
            reserved = {entry.body["round"] for entry in rest if entry.kind == "reserve"}
            committed = books.stream_of(first.position).digests.keys()
            said = [entry.body["epsilon"] for entry in rest if entry.kind == "end"]
            ended = f"; it reported {_amount(said[-1])}" if said and said[-1] is not None else ""
            return (
                f"{body['recipe']} on {body['data']} ({_account(first)}): "
                f"{_rounds(len(reserved), len(reserved - committed))}{ended}"
            )
        case "budget":
            amount = "removed"
            if body["budget"] is not None:
                epsilon, delta = body["budget"]
                amount = f"ε = {short(epsilon)} at δ = {short(delta)}"
            return f"budget of {body['data']} ({_account(first)}), {body['view']}: {amount}"
        case "anchored":
            return "the database was trusted without its .head file"
        case _:
            return f"ledger {body['ledger']} created"


def _check_head(books: Ledger, head: str) -> None:
    position, _, hash = head.partition(":")
    if not position.isdigit() or books.chain.hash_at(int(position)) != hash:
        raise UserError(
            f"The ledger {books.path} does not contain the head {head[:40]}…. It is an old copy, "
            "another ledger, or was rewritten. Restore the right one."
        )
