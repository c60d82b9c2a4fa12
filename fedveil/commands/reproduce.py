"""`fedveil reproduce`: re-run a published table or figure, and judge its claims."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.commands import flags
from fedveil.errors import UserError, unknown

if TYPE_CHECKING:
    from fedveil.reproducing.item import Item

OUT = Path("reproductions")
WIDTH = 13

Names = Annotated[
    list[str] | None,
    typer.Argument(help="Items, such as das2022/table1a; see --list. [default: all]"),
]
ScaleName = Annotated[str, typer.Option(help="Scale: ci (seconds), small (minutes) or full.")]
Listing = Annotated[bool, typer.Option("--list", help="List the items and their verdicts.")]
Papers = Annotated[
    Path | None, typer.Option(help="Folder of the items. [default: papers, here or in the clone]")
]
Out = Annotated[Path, typer.Option(help="Folder of the runs.")]
Write = Annotated[
    Path | None,
    typer.Option(
        "--settings", help="Train nothing, and write the settings of every arm to this folder."
    ),
]
Save = Annotated[
    bool, typer.Option("--save", help="Write the results to papers/results, to be committed.")
]
Page = Annotated[
    bool, typer.Option("--page", help="Print docs/reproductions.md from the committed results.")
]


def reproduce(
    names: Names = None,
    scale: ScaleName = "ci",
    list_items: Listing = False,
    papers: Papers = None,
    out: Out = OUT,
    settings: Write = None,
    save: Save = False,
    page: Page = False,
    ledger: flags.Ledger = None,
    as_json: flags.AsJson = False,
) -> None:
    """Reproduce published tables and figures.

    Trains the arms of an item at one scale, and prints published and measured values side by side,
    with a verdict on every claim. Settings are chosen on held-out training examples. Repeat the
    command to resume it. For example:

    fedveil reproduce das2022/table1a --scale small
    """
    from fedveil.reproducing.item import SCALES, item_named, items, papers_folder

    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    folder = papers_folder(papers)
    if page:
        from fedveil.reproducing.page import as_markdown

        print(as_markdown(folder), end="")
        return
    chosen = [item_named(folder, name) for name in names] if names else list(items(folder))
    if list_items:
        _list(folder, chosen)
        return
    for item in chosen if settings is not None else ():
        _write(item, scale, settings or OUT)
    for item in chosen if settings is None else ():
        if names and (item.not_run or scale not in item.scales):
            why = item.not_run or f"it has no scale '{scale}'"
            raise UserError(f"{item.name} cannot be run: {why}. Name another item or scale.")
        if not item.not_run and scale in item.scales:
            _reproduce(item, scale, folder, out, save, ledger, as_json)


def _reproduce(
    item: Item, scale: str, folder: Path, out: Path, save: bool, ledger: Path | None, as_json: bool
) -> None:
    from fedveil.commands.progress import entry, show_json
    from fedveil.reproducing import results
    from fedveil.reproducing.runner import Reproduction

    try:
        outcome = Reproduction(item, scale, out, ledger, _say).run()
    except KeyboardInterrupt:
        print(f"fedveil reproduce {item.name} --scale {scale}   resume", file=sys.stderr)
        sys.exit(130)
    found = results.plain(outcome)
    if as_json:
        show_json(found)
    else:
        _show(item, found)
    if save:
        file = results.save(folder, found)
        if not as_json:
            entry("Saved", str(file), WIDTH)


def _write(item: Item, scale: str, folder: Path) -> None:
    """A settings file for each arm, at the first point of its grid: to plan, or to train alone."""
    import tomli_w

    from fedveil.commands.progress import entry
    from fedveil.comparing.members import plain_settings

    for arm in item.arms_at(item.scale(scale)):
        file = folder / item.name / f"{arm.name}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        plain = plain_settings(item.points(arm, item.scale(scale))[0])
        file.write_text(tomli_w.dumps(plain), encoding="utf-8")
        entry("Written", f"{file}   fedveil plan {file}", WIDTH)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(item: Item, found: dict[str, Any]) -> None:
    """The table of arms, and the claims."""
    from fedveil.commands.progress import entry

    entry("Item", f"{item.name}: {item.title} ({item.citation})", WIDTH)
    entry("Scale", f"{found['scale']}: {found['changes']}", WIDTH)
    for arm in found["arms"]:
        entry(arm["name"], f"measured {_number(arm)}, published {_published(arm)}", 24)
    for claim in found["claims"]:
        entry(claim["verdict"], f"{claim['text']} ({claim['why']})", 28)
    entry("CPU", f"{found['cpu_seconds']} seconds", WIDTH)


def _number(arm: dict[str, Any]) -> str:
    low, high = arm["interval"]
    shown = "diverged" if arm["mean"] is None else f"{arm['mean']:.4g}"
    return shown if low is None or high is None else f"{shown} [{low:.4g}, {high:.4g}]"


def _published(arm: dict[str, Any]) -> str:
    if arm["published"] is None:
        return "no number"
    spread = "" if arm["spread"] is None else f" ± {arm['spread']:g}"
    return f"{arm['published']:g}{spread}"


def _list(folder: Path, chosen: list[Item]) -> None:
    from fedveil.commands.progress import entry
    from fedveil.reproducing import results
    from fedveil.reproducing.hours import predicted_hours
    from fedveil.reproducing.page import duration

    for item in chosen:
        verdicts = [
            f"{scale}: {', '.join(claim['verdict'] for claim in found['claims']) or 'no claims'}"
            for scale, found in results.read(folder, item).items()
        ]
        hours = [f"{scale} {duration(predicted_hours(item, scale))}" for scale in item.scales]
        entry(item.name, f"{item.title} ({item.citation})", 30)
        entry(
            "", "; ".join(verdicts) or f"not run{': ' + item.not_run if item.not_run else ''}", 30
        )
        entry("", f"predicted CPU hours: {', '.join(hours)}", 30)
