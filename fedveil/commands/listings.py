"""`fedveil datasets` and `fedveil algorithms`: what is available."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.commands import flags
from fedveil.errors import UserError

if TYPE_CHECKING:
    from fedveil.algorithms.citations import Described

WIDE = 35  # of a name, and whether it is installed
NAME = 26  # of an algorithm


@flags.from_settings("client", "label")
def datasets(
    path: Annotated[
        Path | None, typer.Argument(help="Table, or directory written by save_federated.")
    ] = None,
    asked: flags.Asked = flags.NOTHING,
) -> None:
    """List the data sets, and whether they are installed.

    With PATH, check and describe your own data: a table (with --client and --label, as for
    train), or a directory written by fedveil.save_federated.
    """
    from fedveil.commands.progress import entry
    from fedveil.data.catalog import CATALOG

    if path is not None:
        _describe(path, asked.get("data", {}))
        return
    for known in CATALOG.values():
        here = "installed" if known.here() else "not installed"
        entry(f"{known.name:18} {here}", known.summary, width=WIDE)
        entry("", known.citation, width=WIDE)
    print()
    entry("Your own", "--path table.csv --client user_id --label y", width=WIDE)
    entry("", "--path images.zip (or a directory) with a folder per class;", width=WIDE)
    entry("", "example-level, or with --simulate-clients N", width=WIDE)
    entry("", "--path roles.txt, a play: roles and their lines", width=WIDE)
    entry("", "--path saved, a directory written by fedveil.save_federated", width=WIDE)


def algorithms(
    name: Annotated[
        str | None, typer.Argument(help="Algorithm: a name, or package.module:function.")
    ] = None,
) -> None:
    """List the algorithms with their update rules and citations.

    With NAME, show an algorithm's parameters.
    """
    from fedveil.algorithms import ALGORITHMS
    from fedveil.algorithms.calling import method_named
    from fedveil.algorithms.citations import described
    from fedveil.commands.progress import entry

    if name is not None:
        _show_algorithm(name, described(method_named(name)))
        return
    for text in map(described, ALGORITHMS.values()):
        entry(text.name, text.citation, width=NAME)
        entry("", text.rule, width=4)
    print("\n`fedveil algorithms NAME` shows an algorithm's parameters.")


def _show_algorithm(name: str, text: Described) -> None:
    from fedveil.commands.progress import entry

    entry(name, "", width=0)
    entry("", text.rule, width=4)
    if text.citation:
        entry("", text.citation, width=4)
    for parameter, meaning in text.parameters.items():
        entry("", parameter, width=4)
        if meaning:
            entry("", meaning, width=8)


def _describe(path: Path, columns: dict[str, Any]) -> None:
    """Read all of a table or a saved directory, and count its clients and classes."""
    from fedveil.commands.progress import entry
    from fedveil.data.describe import describe
    from fedveil.data.frames import TABLES, is_table
    from fedveil.data.saved import open_federated, verify_federated
    from fedveil.training.settings import DataSettings
    from fedveil.training.sources import load_data

    if is_table(path):
        data = load_data(DataSettings(path=path, **{"holdout": "rows", **columns}))
        for note in data.notes:
            entry("", note, width=0)
        print(describe(data))
        return
    if path.exists() and not path.is_dir():
        raise UserError(
            f"{path} is neither a table ({', '.join(TABLES)}) nor a directory written by "
            "fedveil.save_federated."
        )
    verify_federated(path)
    print(f"{describe(open_federated(path))}\n{path} is intact: every file is as it was saved.")
