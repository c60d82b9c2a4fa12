"""report: runs and comparisons as one HTML page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedveil.errors import UserError


def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs or of a comparison.")],
    out: Annotated[
        Path | None, typer.Option(help="The page; report.html in the directory, if it is one.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write runs, or a comparison, as one page of HTML.

    It needs no network, and holds private data as the runs do.
    """
    from fedveil.progress import entry
    from fedveil.reporting.load import load_story
    from fedveil.reporting.page import page

    place = out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    _refuse_taken(place)
    text = page(load_story(runs))
    write(place, text)
    size = f"{len(text.encode()) / 1e6:.1f} MB"
    entry("", f"{place}   {size}; it holds private data, as the run does", width=0)
    if open_:
        import webbrowser

        webbrowser.open(place.resolve().as_uri())


def write(place: Path, text: str) -> None:
    """The page for its owner only, whole or not at all."""
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


def _refuse_taken(place: Path) -> None:
    """An earlier report is replaced; nothing else is."""
    from fedveil.reporting.page import MARK

    if place.is_dir():
        raise UserError(f"{place} is a directory; give --out a file, such as {place}/report.html.")
    if not place.is_file():
        return
    with place.open("rb") as file:
        start = file.read(100)
    if MARK.encode() not in start:
        raise UserError(f"{place} is there and is not a report of fedveil; choose another --out.")
