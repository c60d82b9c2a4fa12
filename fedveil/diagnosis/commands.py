"""`fedveil diagnose`: what is wrong with a run, and what to try."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

WIDTH = 13
LEAK = (
    "This was read from private data without noise; settings that are chosen by it are covered "
    "by no ε."
)


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run's directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what is wrong with a run and what to try, with the evidence in numbers."""
    from fedveil.diagnosis.diagnose import diagnose as examine
    from fedveil.progress import entry

    found = examine(run)
    if as_json:
        print(json.dumps(found.plain(), indent=2, ensure_ascii=False, allow_nan=False))
        return
    entry("Run", f"{found.run.recipe.name}: {found.facts()}.", WIDTH)
    for finding in found.wrong:
        entry("Wrong", f"{_capital(finding.evidence)}.", WIDTH)
        entry("  try", f"{_capital(finding.advice)}.", WIDTH)
        if finding.command:
            entry("  flags", finding.command, WIDTH)
    if not found.wrong:
        entry("Wrong", "Nothing that these numbers show.", WIDTH)
    for finding in found.findings:
        if not finding.wrong:
            entry("To know", f"{_capital(finding.sentence)}", WIDTH)
    if found.unjudged:
        entry("Not judged", _missing(found.unjudged), WIDTH)
    if found.wrong and found.run.recipe.private:
        entry("Privacy", LEAK, WIDTH)


def _missing(rules: tuple[str, ...]) -> str:
    return (
        f"{', '.join(rules)}: norms and angles of single clients were not recorded; train with "
        "--diagnostics to have them, where that is no deployment."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
