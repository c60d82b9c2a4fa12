"""`fedveil budget`: what has been spent on each data set, and what may still be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.commands import flags
from fedveil.errors import UserError, unknown

if TYPE_CHECKING:
    from fedveil.data.federated import Federated
    from fedveil.privacy.chain import Entry
    from fedveil.privacy.ledger import Account, Books, Ledger
    from fedveil.privacy.verify import Verdict
    from fedveil.recipe import View

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, suggest_commands=False)
Target = Annotated[
    str | None,
    typer.Argument(help="A run's directory, a settings file, or a data set's name or fingerprint."),
]
WIDTH = 13


@app.callback()
def budget() -> None:
    """See, set and check what all runs on data may spend."""


@app.command()
def show(
    target: Target = None,
    delta: Annotated[
        float | None, typer.Option(help="Say ε at this δ; else the budget's, or the runs' least.")
    ] = None,
    as_json: flags.AsJson = False,
    ledger: flags.Ledger = None,
) -> None:
    """Say what has been spent on each data set.

    Towards each view, and of which budget.
    """
    from fedveil.privacy.accounting import check_delta
    from fedveil.progress import entry, show_json

    if delta is not None:
        check_delta(delta)
    books = _existing(ledger)
    shown = [_summary(books, account, delta) for account in _chosen(books, target)]
    if as_json:
        head = books.head._asdict() if books is not None else None
        show_json({"head": head, "accounts": shown})
        return
    if books is None:
        print("Nothing is recorded yet.")
        return
    for summary in shown:
        entry("Data", f"{summary['data']}, {summary['population']} ({summary['account']})", WIDTH)
        for line in summary["views"]:
            entry(f"  {line['view']}", line["text"], WIDTH)
        entry("Recorded", summary["recorded"], WIDTH)
        print()
    entry("Ledger", f"{books.path}", WIDTH)
    entry("Head", f"{books.head.position}:{books.head.hash}", WIDTH)
    entry("", "Note it elsewhere: `fedveil budget verify --head` looks for it again.", WIDTH)


@app.command("set")
def set_(
    target: Annotated[
        str,
        typer.Argument(
            help="A run's directory or a settings file; with --lift also as `show` names data."
        ),
    ],
    epsilon: Annotated[float | None, typer.Option(help="What all runs together may spend.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="The δ that goes with it; 1e-5 or less if not said.")
    ] = None,
    view: Annotated[
        str, typer.Option(help="Whom it is kept against: models, sum or messages.")
    ] = "models",
    lift: Annotated[bool, typer.Option("--lift", help="End this view's budget.")] = False,
    ledger: flags.Ledger = None,
) -> None:
    """Set the budget of a data set.

    Every run on it keeps it from now on.
    """
    from fedveil.privacy.calibrate import Budget, sensible_delta
    from fedveil.privacy.ledger import VIEWS, Account, ledger_path, open_ledger
    from fedveil.progress import entry as line

    if view not in VIEWS:
        raise unknown("view", view, VIEWS)
    if lift == (epsilon is not None):
        raise UserError("Give --epsilon for a new budget, or --lift to end the one that stands.")
    if lift and not Path(target).exists():
        _lift_named(target, view, ledger)
        return
    data = _data_of(Path(target))
    account = Account(data.fingerprint(), data.unit)
    budget = None
    if epsilon is not None:
        budget = Budget(epsilon, sensible_delta(data.clients) if delta is None else delta)
    books = open_ledger(ledger_path(ledger))
    books.grant(account, view, budget, data.name, data.contents(), data.resemblance())
    if budget is None:
        _tell_lifted(data.name, account, view)
        return
    spent = books.spent(account, view, budget.delta, budget.epsilon)
    line(
        "",
        f"All runs on {data.name} ({account}) together may spend ε = {budget.epsilon:g} at "
        f"δ = {budget.delta:g} in view '{view}'; {_amount(spent)} is spent.",
        width=0,
    )


def _lift_named(target: str, view: View, ledger: Path | None) -> None:
    """End the budget of the data that `show` lists under a name or a fingerprint."""
    books = _existing(ledger)
    standing = [
        (account, granted)
        for account in _chosen(books, target)
        if books is not None and (granted := books.granted.get(account, {}).get(view)) is not None
    ]
    if books is None or len(standing) != 1:
        raise UserError(
            f"{len(standing)} budgets stand for '{target}' in view '{view}'; name one as "
            "`fedveil budget show` does, by the start of its fingerprint."
        )
    account, granted = standing[0]
    books.grant(account, view, None, granted.data, granted.contents, granted.sketch)
    _tell_lifted(granted.data, account, view)


def _tell_lifted(data: str, account: Account, view: View) -> None:
    from fedveil.progress import entry

    told = f"No budget stands for {data} ({account}) in view '{view}' any more."
    entry("", told, width=0)


@app.command()
def history(target: Target = None, ledger: flags.Ledger = None) -> None:
    """List what was entered, oldest first."""
    from fedveil.privacy.ledger import Books
    from fedveil.progress import entry as line

    books = _existing(ledger)
    if books is None:
        print("Nothing is recorded yet.")
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
        str | None, typer.Option(help="A head noted earlier, POSITION:HASH: is it still there?")
    ] = None,
    anchor_anew: Annotated[
        bool,
        typer.Option("--anchor-anew", help="Trust the database without its .head; noted in it."),
    ] = False,
    ledger: flags.Ledger = None,
) -> None:
    """Check that the ledger is whole, and derive every ε again.

    By every entry's hash, and from the recorded events.
    """
    from fedveil.privacy.ledger import Ledger, ledger_path
    from fedveil.privacy.verify import verify as verdict_of

    if anchor_anew:
        trusted = Ledger(ledger_path(ledger), trusting=True)
        trusted.chain.anchor_anew()
        trusted.close()
    books = _existing(ledger)
    if books is None:
        raise UserError(f"There is no ledger at {ledger_path(ledger)}; name it with --ledger.")
    if head is not None:
        _check_head(books, head)
    verdict = verdict_of(books)
    _tell(verdict)
    if verdict.problems:
        raise typer.Exit(1)


def _tell(verdict: Verdict) -> None:
    from fedveil.progress import entry

    entry("Entries", f"{verdict.entries:,}, all as they were written", WIDTH)
    entry("Rounds", _rounds(verdict.rounds, verdict.uncommitted), WIDTH)
    entry("ε of runs", f"{verdict.epsilons:,} derived again from the recorded events", WIDTH)
    if verdict.trusted:
        times = "once" if verdict.trusted == 1 else f"{verdict.trusted} times"
        text = f"{times} the database was taken for the whole without its .head: see the history"
        entry("Trusted", text, WIDTH)
    for problem in verdict.problems:
        entry("WRONG", f"{problem}.", WIDTH)
    if not verdict.problems:
        entry("Everything", "agrees: each ε, and each budget while it stood.", WIDTH)


def _existing(path: Path | None) -> Ledger | None:
    from fedveil.privacy.chain import Chain
    from fedveil.privacy.ledger import Ledger, ledger_path

    where = ledger_path(path)
    return Ledger(where) if Chain.exists(where) else None


def _chosen(books: Ledger | None, target: str | None) -> list[Account]:
    """The accounts that a name, a fingerprint's beginning, a run or a settings file stands for."""
    from fedveil.privacy.ledger import Account

    known = [] if books is None else books.accounts()
    if target is None:
        return known
    if Path(target).exists():
        data = _data_of(Path(target))
        return [a for a in known if a == Account(data.fingerprint(), data.unit)]
    names = {a: _name(books, a) for a in known if books is not None}
    found = [a for a in known if target in (names[a], str(a)) or a.fingerprint.startswith(target)]
    if not found:
        raise unknown("data set in the ledger named", target, names.values())
    return found


def _data_of(target: Path) -> Federated:
    """The data that a run or a settings file is about, by the unit it protects."""
    from fedveil.settings import load_data, read_run, resolve_recipe

    settings = read_run(target / "recipe.toml" if target.is_dir() else target)
    data = load_data(settings.data)
    return data.by_example() if resolve_recipe(settings).unit == "example" else data


def _name(books: Ledger, account: Account) -> str:
    for stream in books.of(account):
        return str(stream.body["data"])
    return next((g.data for g in books.granted.get(account, {}).values()), "unknown")


def _account(entry: Entry) -> Account:
    from fedveil.privacy.ledger import Account

    return Account(entry.body["fingerprint"], entry.body["unit"])


def _summary(books: Ledger | None, account: Account, delta: float | None) -> dict[str, Any]:
    from fedveil.privacy.calibrate import sensible_delta
    from fedveil.privacy.ledger import VIEWS

    assert books is not None
    streams = books.of(account)
    least = min((float(s.body["delta"]) for s in streams), default=sensible_delta(1))
    rounds = sum(len(stream.rounds) for stream in streams)
    open_ = sum(len(stream.rounds - stream.digests.keys()) for stream in streams)
    size = f"{streams[0].body['population']:,} {account.unit}s" if streams else f"{account.unit}s"
    found = (_spending(books, account, view, delta, least) for view in VIEWS)
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
    books: Ledger, account: Account, view: Any, delta: float | None, least: float
) -> dict[str, Any] | None:
    """What was spent towards a view, of its budget if that is for the same δ."""
    budget = books.budgets(account).get(view)
    at = delta if delta is not None else budget.delta if budget else least
    same = budget is not None and at == budget.delta
    spent = books.spent(account, view, at, budget.epsilon if budget and same else None)
    why = _exposed(books, account, view)
    if budget is None and math.isinf(spent) and not (why and view == "models"):
        return None
    text = _amount(spent)
    if budget is not None and same:
        text += f" of {budget.epsilon:g}"
    text += f" at δ = {at:g}{_neighbours(books, account, view)}"
    if budget is not None and not same:
        text += f"; the budget is {budget.epsilon:g} at δ = {budget.delta:g}"
    elif budget is not None and math.isfinite(spent):
        text += f", {math.ceil(100 * spent / budget.epsilon)}% of it"
    if why:
        text += f"; {why}"
    elif not same and spent:
        text += "; to look at: only a budget that is set before the runs is a guarantee"
    plain = {"epsilon": spent if math.isfinite(spent) else None, "delta": at, "text": text}
    return {"view": view, "budget": budget.epsilon if budget else None, **plain}


def _exposed(books: Ledger, account: Account, view: Any) -> str:
    """What a run has released without any noise, if one has."""
    from fedveil.privacy.events import NonPrivate

    ways = (way for run in books.charged(account, view) for way in run.plan.ways)
    return next((way.event.reason for way in ways if isinstance(way.event, NonPrivate)), "")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _rounds(reserved: int, uncommitted: int) -> str:
    """How many are charged; those that were never committed were lost in a crash and count."""
    lost = f", {uncommitted:,} of them never committed" if uncommitted else ""
    return f"{_count(reserved, 'round')} charged{lost}"


def _neighbours(books: Ledger, account: Account, view: Any) -> str:
    from fedveil.privacy.together import adjacency, fitting

    runs = books.charged(account, view)
    if not runs:
        return ""
    return f" ({adjacency(runs)})" if fitting(runs) else " (their neighbours do not fit together)"


def _amount(epsilon: float) -> str:
    from fedveil.privacy.statement import rounded_up

    return f"ε = {rounded_up(epsilon)}"


def _line(books: Books, first: Entry, rest: list[Entry]) -> str:
    body = first.body
    match first.kind:
        case "run":
            reserved = {entry.body["round"] for entry in rest if entry.kind == "reserve"}
            committed = books.stream_of(first.position).digests.keys()
            said = [entry.body["epsilon"] for entry in rest if entry.kind == "end"]
            ended = f"; it said {_amount(said[-1])}" if said and said[-1] is not None else ""
            return (
                f"{body['recipe']} on {body['data']} ({_account(first)}): "
                f"{_rounds(len(reserved), len(reserved - committed))}{ended}"
            )
        case "budget":
            amount = "lifted"
            if body["budget"] is not None:
                amount = f"ε = {body['budget'][0]:g} at δ = {body['budget'][1]:g}"
            return f"budget of {body['data']} ({_account(first)}), {body['view']}: {amount}"
        case "anchored":
            return "the database was trusted without its .head"
        case _:
            return f"ledger {body['ledger']} begins"


def _check_head(books: Ledger, head: str) -> None:
    position, _, hash = head.partition(":")
    if not position.isdigit() or books.chain.hash_at(int(position)) != hash:
        raise UserError(
            f"The ledger {books.path} does not hold the head {head[:40]}…: it is an old copy, "
            "another ledger, or was written anew; restore the right one."
        )
