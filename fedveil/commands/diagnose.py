"""`fedveil diagnose`: find problems of a run, and what to try."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.commands import flags

if TYPE_CHECKING:
    from fedveil.diagnosis.diagnose import Diagnosis
    from fedveil.diagnosis.rule import Finding

WIDTH = 13


def diagnose(
    run: Annotated[Path, typer.Argument(help="Directory of the run.")],
    as_json: flags.AsJson = False,
) -> None:
    """Find problems in a run, and suggest what to try.

    Every problem comes with its evidence in numbers.
    """
    from fedveil.commands.progress import entry, show_json, show_next
    from fedveil.diagnosis.diagnose import diagnose as examine

    found = examine(run)
    if as_json:
        show_json(found.plain())
        return
    entry("Run", f"{found.run.recipe.name}: {found.facts()}.", WIDTH)
    for finding in found.wrong:
        _show(finding)
    if not found.wrong:
        entry("Healthy", "No problems found.", WIDTH)
    for finding in found.findings:
        if not finding.wrong:
            entry("Note", f"{_capital(finding.sentence)}", WIDTH)
    if found.unjudged:
        entry("Not judged", _missing(found), WIDTH)
    if found.leak is not None:
        entry("Privacy", f"{_capital(found.leak)}.", WIDTH)
    show_next(_advice(run, found))


def _show(finding: Finding) -> None:
    """A problem with its evidence, its advice, and the advice as flags."""
    from fedveil.commands.progress import entry

    entry("Problem", f"{_capital(finding.evidence)}.", WIDTH)
    entry("  try", f"{_capital(finding.advice)}.", WIDTH)
    if finding.command:
        entry("  flags", finding.command, WIDTH)


def _advice(path: Path, found: Diagnosis) -> Iterator[str]:
    """A command for the first suggested change, if the run names its data, and for a report."""
    from fedveil.runs.saved import RECIPE, SavedRun

    run = SavedRun.open(path)
    here, recipe = shlex.quote(str(path)), shlex.quote(str(run.file(RECIPE)))
    changes = [finding.command for finding in found.wrong if finding.command]
    if changes and run.names_data:
        yield f"fedveil train {recipe} {changes[0]}   the same run with that change"
    yield f"fedveil report {here}   an HTML report of the run"


def _missing(found: Diagnosis) -> str:
    rules = ", ".join(found.unjudged)
    if found.run.federated:
        return f"{rules}: the clients of a federation keep their norms and angles to themselves."
    return (
        f"{rules}: norms and angles of single clients were not recorded. Train with --diagnostics "
        "to record them, in simulation only."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
