"""`fedveil datasets` and `fedveil algorithms`: what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def datasets(
    path: Annotated[Path | None, typer.Argument(help="A directory of saved data.")] = None,
) -> None:
    """List the data sets by name, and whether they are here.

    With a PATH to saved data, check and describe those.
    """
    from fedveil.data.catalog import CATALOG
    from fedveil.progress import entry

    if path is not None:
        _describe(path)
        return
    for known in CATALOG.values():
        here = "here" if known.here() else "not here"
        entry(f"{known.name:17} {here}", known.summary, width=28)
        entry("", known.citation, width=28)
    print()
    entry("Your own", "--path table.csv --client user_id --label y", width=28)
    entry("", "--path images.zip (or a directory) with a folder for each class", width=28)
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


def _describe(path: Path) -> None:
    """Read all of a saved directory, and count its clients and classes."""
    from fedveil.data.describe import describe
    from fedveil.data.saved import open_federated, verify_federated

    verify_federated(path)
    print(f"{describe(open_federated(path))}\nEverything in {path} is as it was saved.")
