"""`fedveil report`: runs and comparisons as one HTML page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedveil.errors import UserError


def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs, or of a comparison.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write. [default: report.html, in the directory if there is only one]"
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write an HTML report of runs, or of a comparison.

    The page works offline. Like the runs, it contains private data.
    """
    from fedveil.commands.progress import entry
    from fedveil.reporting.load import load_story
    from fedveil.reporting.page import page

    place = out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    refuse_taken(place)
    text = page(load_story(runs))
    write(place, text)
    size = f"{len(text.encode()) / 1e6:.1f} MB"
    entry("", f"{place}   {size}; contains private data, like the run", width=0)
    if open_:
        import webbrowser

        webbrowser.open(place.resolve().as_uri())


def write(place: Path, text: str) -> None:
    """Write the page atomically, readable by its owner only."""
    from fedveil.runs.directory import saving

    partial = place.with_name(f".{place.name}.partial")
    with saving(place):
        try:
            with os.fdopen(
                os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w"
            ) as f:
                f.write(text)
            partial.replace(place)
        finally:
            partial.unlink(missing_ok=True)


def refuse_taken(place: Path) -> None:
    """Refuse to overwrite anything but an earlier report."""
    from fedveil.reporting.page import MARK

    if place.is_dir():
        raise UserError(
            f"{place} is a directory. Pass a file as --out, such as {place}/report.html."
        )
    if not place.is_file():
        return
    with place.open("rb") as file:
        start = file.read(100)
    if MARK.encode() not in start:
        raise UserError(f"{place} exists and is not a fedveil report. Choose another --out.")
