"""`fedveil datasets` and `fedveil algorithms`: what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedveil.commands import flags
from fedveil.errors import UserError


def datasets(
    path: Annotated[
        Path | None, typer.Argument(help="A table, or a directory made by save_federated.")
    ] = None,
    client: flags.ClientColumn = None,
    label: flags.LabelColumn = None,
) -> None:
    """List the data sets by name, and whether they are here.

    With the PATH of a table, or of a directory that fedveil.save_federated made, check and
    describe those; a table needs --client and --label, as for train.
    """
    from fedveil.data.catalog import CATALOG
    from fedveil.progress import entry

    if path is not None:
        _describe(path, client, label)
        return
    for known in CATALOG.values():
        here = "here" if known.here() else "not here"
        entry(f"{known.name:17} {here}", known.summary, width=28)
        entry("", known.citation, width=28)
    print()
    entry("Your own", "--path table.csv --client user_id --label y", width=28)
    entry("", "--path images.zip (or a directory) with a folder for each class;", width=28)
    entry("", "by example, or with --simulate-clients N", width=28)
    entry("", "--path roles.txt, a text of roles and what they say", width=28)
    entry("", "--path saved, a directory made by fedveil.save_federated", width=28)


def algorithms(
    name: Annotated[
        str | None, typer.Argument(help="One of them, or package.module:function of your own.")
    ] = None,
) -> None:
    """List the algorithms with their citations.

    With a NAME, its rule and its parameters.
    """
    from fedveil.algorithms import ALGORITHMS
    from fedveil.algorithms.calling import method_named
    from fedveil.citations import described
    from fedveil.progress import entry

    for method in [method_named(name)] if name else ALGORITHMS.values():
        text = described(method)
        entry(name or text.name, "", width=0)
        entry("", text.rule, width=4)
        if text.citation:
            entry("", text.citation, width=4)
        for line in text.parameters if name else [", ".join(text.names)]:
            entry("", line, width=4)


def _describe(path: Path, client: str | None, label: str | None) -> None:
    """Read all of a table or of a saved directory, and count its clients and classes."""
    from fedveil.data.describe import describe
    from fedveil.data.saved import open_federated, verify_federated
    from fedveil.progress import entry
    from fedveil.settings import TABLES, DataSettings, load_data

    if path.suffix.lower() in TABLES:
        data = load_data(DataSettings(path=path, client=client, label=label))
        for note in data.notes:
            entry("", note, width=0)
        print(describe(data))
        return
    if path.exists() and not path.is_dir():
        raise UserError(
            f"{path} is neither a table ({', '.join(TABLES)}) nor a directory made by "
            "fedveil.save_federated; name one."
        )
    verify_federated(path)
    print(f"{describe(open_federated(path))}\nEverything in {path} is as it was saved.")
