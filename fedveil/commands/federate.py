"""`fedveil federate`: make a federation, enrol its clients, and show what they agree to."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.commands import flags
from fedveil.errors import UserError

if TYPE_CHECKING:
    from fedveil.federation.agreement import Agreement
    from fedveil.runs.opened import Interface
    from fedveil.training.settings import Settings

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, suggest_commands=False)
Directory = Annotated[Path, typer.Argument(help="Directory of the federation.")]
WIDTH = 13
SHOWN = 20  # clients of a roster, at most


@app.callback()
def federate() -> None:
    """Create a federation of clients that keep their own data."""


@app.command(cls=flags.Command)
@flags.from_settings(*flags.ALGORITHM, "model", "rounds", "seed", *flags.RELEASE)
def new(
    directory: Annotated[Path, typer.Argument(help="New directory for the federation.")],
    clients: Annotated[int, typer.Option(help="Number of clients of the federation.")],
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Settings file, or the directory of a simulated run, to start from."
        ),
    ] = None,
    asked: flags.Asked = flags.NOTHING,
    name: Annotated[
        str | None, typer.Option(help="Name of the federation. [default: the directory's name]")
    ] = None,
    dropouts: Annotated[
        int | None,
        typer.Option(help="Clients that may drop out of a round. [default: a tenth, in view sum]"),
    ] = None,
    corrupt: Annotated[
        int | None,
        typer.Option(
            help="Clients that may collude with the server. [default: a tenth, in view sum]"
        ),
    ] = None,
    records: Annotated[
        int,
        typer.Option(
            help="Number of records in all silos together. Clients are then silos, and the privacy "
            "unit is a record. [default: the unit is a client]",
            show_default=False,
        ),
    ] = 0,
    trial: Annotated[
        bool, typer.Option("--trial", help="Clients are simulated: no real person is protected.")
    ] = False,
    deadline: Annotated[
        float, typer.Option(help="Timeout of each request in a round, in seconds.")
    ] = 60.0,
    test: Annotated[
        bool, typer.Option(help="Evaluate on the public test set of the named data set.")
    ] = True,
) -> None:
    """Calibrate a recipe, and write the agreement, the roster and the Flower app."""
    from fedveil.federation.flower.writing import write_app
    from fedveil.federation.founding import Trust, found
    from fedveil.runs.saved import settings_file
    from fedveil.training.settings import read_settings, resolve_recipe

    settings = read_settings(None if source is None else settings_file(source), asked)
    _refuse_private_evaluation(settings)
    interface, class_names = _interface(source, settings)
    trust = None
    if dropouts is not None or corrupt is not None:
        trust = Trust(dropouts or 0, corrupt or 0)
    title = name or directory.resolve().name
    agreement = found(
        directory,
        title,
        resolve_recipe(settings),
        interface,
        clients,
        settings.model or "softmax",
        settings.rounds,
        settings.epsilon,
        settings.delta,
        settings.seed,
        trust,
        deadline,
        class_names,
        _encoding(settings),
        _evaluation(settings) if test else {},
        records,
        trial,
    )
    write_app(directory, _app_name(title))
    _show(agreement)
    _next(directory, agreement)


@app.command()
def enrol(
    directory: Directory,
    files: Annotated[list[Path], typer.Argument(help="public.toml files of clients.")],
) -> None:
    """Add clients to the roster, each by its public.toml."""
    from fedveil.federation.founding import enrol as add
    from fedveil.federation.home import read_seat

    agreement = add(directory, [read_seat(file) for file in files])
    print(f"{len(agreement.roster)} of {agreement.clients} clients are on the roster.")
    _next(directory, agreement)


@app.command()
def show(directory: Directory, as_json: flags.AsJson = False) -> None:
    """Show the agreement: its hash, its guarantee, and what the server sees."""
    from fedveil.commands.progress import show_json
    from fedveil.federation.agreement import Agreement
    from fedveil.federation.described import stated

    agreement = Agreement.read(directory)
    if as_json:
        promised = stated(agreement).plain()
        show_json({"hash": agreement.hash, "privacy": promised, **agreement.plain()})
        return
    _show(agreement)


def _show(agreement: Agreement) -> None:
    from fedveil.commands.progress import entry

    entry("Federation", f"{agreement.name}, view {agreement.recipe.view}", WIDTH)
    show_terms(agreement)


def show_terms(agreement: Agreement) -> None:
    """Print what a client agrees to."""
    from fedveil.commands.progress import entry
    from fedveil.federation.described import seen_by_server, stated

    recipe, n = agreement.recipe, agreement.clients
    model = f"{agreement.model}, {agreement.dim:,} parameters"
    entry("Algorithm", f"{recipe.name}, {agreement.rounds} rounds, model {model}", WIDTH)
    for label, text in stated(agreement).entries():
        entry(label, text, WIDTH)
    entry("Server sees", seen_by_server(agreement), WIDTH)
    entry("Clients", f"{len(agreement.roster)} of {n} on the roster", WIDTH)
    for seat in agreement.roster.seats[:SHOWN]:
        entry("", f"{seat.identity[:16]}…  {seat.name}", WIDTH)
    if len(agreement.roster) > SHOWN:
        entry("", f"and {len(agreement.roster) - SHOWN} more in roster.toml", WIDTH)
    if agreement.complete:
        entry("Hash", agreement.hash, WIDTH)


def _next(directory: Path, agreement: Agreement) -> None:
    from fedveil.commands.progress import entry

    here = shlex.quote(str(directory))
    if not agreement.complete:
        entry("Next", f"fedveil federate enrol {here} CLIENT/public.toml …", WIDTH)
        return
    entry("Next", f"clients: fedveil client check {here}, then client accept and client run", WIDTH)
    entry("", f"server: flwr run {here} SUPERLINK --stream", WIDTH)


def _interface(source: Path | None, settings: Settings) -> tuple[Interface, tuple[str, ...]]:
    """The shapes of examples: from a run's model, or from the data that the settings name."""
    from fedveil.runs.opened import Interface
    from fedveil.runs.saved import MODEL, SavedRun
    from fedveil.training.sources import load_data

    if source is not None and source.is_dir() and SavedRun.open(source).has(MODEL):
        from fedveil.runs.opened import open_run

        run = open_run(source)
        return run.interface, run.class_names
    if settings.data.dataset is None and settings.data.path is None:
        raise UserError(
            "The shape of an example is not known. Give --from with the directory of a simulated "
            "run, or a settings file that names a data set."
        )
    data = load_data(settings.data)
    return Interface.of(data), data.class_names


def _encoding(settings: Settings) -> dict[str, Any]:
    """The data settings that all clients must share."""
    from fedveil.federation.agreement import ENCODING

    plain = settings.data.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    if isinstance(plain.get("classes"), int):
        del plain["classes"]
    return {name: plain[name] for name in ENCODING if name in plain}


def _refuse_private_evaluation(settings: Settings) -> None:
    if settings.private_evaluation is not None:
        raise UserError(
            "Clients of a federation do not send evaluations yet: the server evaluates on public "
            "test examples. Remove private_evaluation."
        )
    if settings.patience is not None:
        raise UserError("A federation trains all its rounds. Remove patience.")


def _evaluation(settings: Settings) -> dict[str, Any]:
    """server.toml: the public test set."""
    if settings.data.dataset is None:
        return {}
    return {"test": {"dataset": settings.data.dataset, "clients": 1}}


def _app_name(title: str) -> str:
    kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in title.lower()).strip("-")
    return kept[:32].strip("-") or "federation"
