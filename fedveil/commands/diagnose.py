"""`fedveil diagnose`: what is wrong with a run, and what to try."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.commands import flags

if TYPE_CHECKING:
    from fedveil.diagnosis.diagnose import Diagnosis

WIDTH = 13


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run's directory.")],
    as_json: flags.AsJson = False,
) -> None:
    """Say what is wrong with a run, and what to try.

    Each with its evidence in numbers; and where nothing is wrong, that.
    """
    from fedveil.diagnosis.diagnose import diagnose as examine
    from fedveil.progress import entry, show_json

    found = examine(run)
    if as_json:
        show_json(found.plain())
        return
    entry("Run", f"{found.run.recipe.name}: {found.facts()}.", WIDTH)
    for finding in found.wrong:
        entry("Wrong", f"{_capital(finding.evidence)}.", WIDTH)
        entry("  try", f"{_capital(finding.advice)}.", WIDTH)
        if finding.command:
            entry("  flags", finding.command, WIDTH)
    if not found.wrong:
        entry("Healthy", "Nothing is wrong that these numbers show.", WIDTH)
    for finding in found.findings:
        if not finding.wrong:
            entry("To know", f"{_capital(finding.sentence)}", WIDTH)
    if found.unjudged:
        entry("Not judged", _missing(found.unjudged), WIDTH)
    if found.leak is not None:
        entry("Privacy", f"{_capital(found.leak)}.", WIDTH)
    for index, line in enumerate(_advice(run, found)):
        entry("" if index else "Next", line, WIDTH)


def _advice(path: Path, found: Diagnosis) -> Iterator[str]:
    """The first change that can be typed, where the run names its data; and a page to look at."""
    from fedveil.settings import read_settings

    here, recipe = shlex.quote(str(path)), shlex.quote(str(path / "recipe.toml"))
    data = read_settings(path / "recipe.toml", {}).data
    changes = [finding.command for finding in found.wrong if finding.command]
    if changes and (data.dataset is not None or data.path is not None):
        yield f"fedveil train {recipe} {changes[0]}   the same with that change"
    yield f"fedveil report {here}   the run as a page"


def _missing(rules: tuple[str, ...]) -> str:
    return (
        f"{', '.join(rules)}: norms and angles of single clients were not recorded; train with "
        "--diagnostics to have them, where that is no deployment."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
