"""`fedveil client`: take part in a federation with your own data, keys and budget."""

from __future__ import annotations

import logging
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.commands import flags
from fedveil.errors import UserError

if TYPE_CHECKING:
    from fedveil.federation.agreement import Agreement

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, suggest_commands=False)
At = Annotated[Path, typer.Option("--home", help="The client's own directory.")]
HOME = Path("fedveil-client")
NODE, SOCKET = "node", "agent.sock"
WIDTH = 13


@app.callback()
def client() -> None:
    """Take part in a federation with your own data, keys and budget."""


@app.command(cls=flags.Command)
@flags.from_settings("dataset", "path", "client", "label", "data")
def init(
    home: At = HOME,
    asked: flags.Asked = flags.NOTHING,
    name: Annotated[
        str | None, typer.Option(help="Name on the roster. [default: the directory's name]")
    ] = None,
) -> None:
    """Create the client's keys, and record which data it trains on."""
    from fedveil.commands.progress import entry
    from fedveil.federation.flower.keys import write_node_key
    from fedveil.federation.home import PUBLIC, SETTINGS, Home
    from fedveil.training.settings import read_settings
    from fedveil.training.sources import check_columns

    if (home / SETTINGS).exists():
        raise UserError(
            f"{home} already contains a client. Edit its client.toml, or choose another --home."
        )
    settings = read_settings(None, asked)  # refuses what no data can be loaded by
    data = dict(asked.get("data", {}))
    if "path" not in data and "dataset" not in data:
        raise UserError("No data are named. Give this client's own with --path.")
    if "path" in data:
        data["path"] = str(Path(data["path"]).resolve())
        if not Path(data["path"]).exists():
            raise UserError(f"{data['path']} does not exist. Give this client's own data.")
    check_columns(settings.data)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    node = write_node_key(home / NODE)
    Home.create(home, name or home.resolve().name, data, node)
    entry("Public", f"{home / PUBLIC}: send it to the coordinator", WIDTH)
    entry("Private", f"{home / 'identity'}, {home / NODE}: keep them here", WIDTH)
    entry("Next", f"once everybody is enrolled: fedveil client check DIR --home {home}", WIDTH)


@app.command()
def check(
    directory: Annotated[Path, typer.Argument(help="Directory with federation.toml, roster.toml.")],
    home: At = HOME,
) -> None:
    """Show what an agreement asks of you: the guarantee, and what the server will see."""
    from fedveil.commands.federate import show_terms
    from fedveil.commands.progress import entry
    from fedveil.federation.home import Home
    from fedveil.federation.participant import own_data

    place = Home.open(home)
    agreement = place.offer(directory)
    if not agreement.complete:
        raise UserError(
            f"The roster has {len(agreement.roster)} of {agreement.clients} clients. Check the "
            "agreement again once it is complete."
        )
    examples = len(own_data(place, agreement).labels)
    show_terms(agreement)
    entry("Your data", f"{examples:,} example{'s' * (examples != 1)} of this form", WIDTH)
    entry("Accept", f"fedveil client accept {agreement.hash} --epsilon …", WIDTH)


@app.command()
def accept(
    hash: Annotated[str, typer.Argument(help="Hash of the agreement, as `client check` shows it.")],
    epsilon: Annotated[
        float | None, typer.Option(help="Your total privacy budget ε over all federations.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="The δ of that budget. [default: the agreement's]")
    ] = None,
    not_private: Annotated[
        bool, typer.Option("--not-private", help="Accept an agreement without a guarantee.")
    ] = False,
    home: At = HOME,
) -> None:
    """Accept an agreement by its hash, with your own privacy budget."""
    from fedveil.accounting.rounding import rounded_up
    from fedveil.commands.progress import entry
    from fedveil.federation.described import limit
    from fedveil.federation.home import Home
    from fedveil.federation.participant import own_data

    place = Home.open(home)
    agreement = place.offered(hash)
    own_data(place, agreement)  # refuses data of another form
    needed = limit(agreement)
    if not agreement.recipe.private:
        if not not_private:
            raise UserError(
                "This agreement has no privacy guarantee. Accept it with --not-private only if "
                "your messages may be public."
            )
        epsilon = math.inf
    elif epsilon is None:
        raise UserError(
            f"Give the ε that you allow: this agreement needs --epsilon {rounded_up(needed)}."
        )
    place.accept(agreement.hash, epsilon, delta)
    entry("Accepted", f"{agreement.name}, {agreement.hash}", WIDTH)
    if agreement.recipe.private:
        entry("Budget", f"ε = {epsilon:g}; the agreement needs {rounded_up(needed)}", WIDTH)
        if epsilon < needed:
            entry("Note", f"{_short_of(agreement)}: your ε is smaller", WIDTH)


def _short_of(agreement: Agreement) -> str:
    """What a client does whose ε is smaller than the agreement's."""
    recipe = agreement.recipe
    whole = recipe.noise.correlated or (recipe.hidden(recipe.view) and not recipe.in_silos)
    if whole:  # all rounds are charged at first contact
        return "you will take part in no round"
    return "you will leave before the last round"


@app.command()
def run(
    home: At = HOME,
    join: Annotated[
        str | None,
        typer.Option(help="Connect to this SuperLink (host:port) directly, without a SuperNode."),
    ] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(help="Certificate authority of the SuperLink (PEM).")
    ] = None,
    socket: Annotated[
        Path | None, typer.Option(help="Socket for the SuperNode. [default: HOME/agent.sock]")
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="Group that may use the socket, for another OS user.")
    ] = None,
) -> None:
    """Run the client: answer requests until stopped, directly or as the agent of a SuperNode."""
    from fedveil.commands.progress import entry
    from fedveil.federation.home import Home
    from fedveil.federation.participant import Participant

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(message)s")
    logging.getLogger("fedveil").setLevel(logging.INFO)
    place = Home.open(home)
    me = Participant(place)
    try:
        entry("Client", f"{place.name}, {me.index + 1} of {me.agreement.clients}", WIDTH)
        entry("Agreement", f"{me.agreement.name}, {me.agreement.hash}", WIDTH)
        sys.stdout.flush()
        if join is not None:
            from fedveil.federation.flower.join import join as connect

            connect(join, me.handle, home / NODE, root_certificates)
        else:
            from fedveil.federation.flower.agent import listen

            listen(socket or home / SOCKET, me.handle, group=group)
    finally:
        me.close()
