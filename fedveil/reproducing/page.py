"""docs/reproductions.md: every item with its published and measured values, and its verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from fedveil.accounting.rounding import short
from fedveil.algorithms.citations import PAPERS
from fedveil.reproducing import results
from fedveil.reproducing.hours import predicted_hours
from fedveil.reproducing.item import Item, items

HEADER = """# Reproductions

Every experimental table and figure of the five papers, with published and measured values side by
side. Each is a file in `papers/`, which `fedveil reproduce PAPER/ITEM --scale ci|small|full` runs.
`make papers` runs all `ci` scales. This page is generated from `papers/` and the committed results
in `papers/results` by `make docs`.

A verdict is *holds* or *fails* only if the whole 95 % interval (Student's, paired by seed) lies on
one side, and only if the baseline has reached its stated level. Otherwise it is *inconclusive* or
*not testable at this scale*. Settings are chosen on a tenth of the training examples, never on test
examples. The result files have every configuration tried. The privacy of these runs is accounted by
fedveil, not by the papers' formulas ([claims.md](claims.md)).

CPU minutes were measured on one core. Predicted hours are the multiplications of all local steps,
at 10 billion per second. They estimate what was not run, within a factor of about ten. Small models
take longer, because overhead outweighs their arithmetic.
"""
BARS = "▁▂▃▄▅▆▇█"


def as_markdown(folder: Path) -> str:
    """The page for all items in a folder."""
    known = list(items(folder))
    found = {item.name: results.read(folder, item) for item in known}
    lines = [HEADER, *_overview(known, found)]
    for paper, members in groupby(known, key=lambda item: item.name.partition("/")[0]):
        lines += ["", f"## {_title(paper, known)}"]
        for item in members:
            lines += ["", *_item(item, found[item.name])]
    return "\n".join(lines) + "\n"


def _title(paper: str, known: list[Item]) -> str:
    """The paper's citation, from the first of its items."""
    citation = next(item.citation for item in known if item.name.startswith(f"{paper}/"))
    return next((name for name in PAPERS if citation.startswith(name)), paper)


def _overview(
    known: list[Item], found: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> Iterator[str]:
    yield "| item | scale | verdicts | CPU minutes | predicted hours |"
    yield "|---|---|---|---|---|"
    for item in known:
        for scale in item.scales:
            result = found[item.name].get(scale)
            if result is not None or scale != "ci":
                hours = duration(predicted_hours(item, scale))
                yield f"| {_link(item)} | {scale} | {_counted(result)} | {hours} |"


def _counted(result: Mapping[str, Any] | None) -> str:
    """How often each verdict was given, and the minutes that it took."""
    if result is None:
        return "not run | –"
    verdicts = [claim["verdict"] for claim in result["claims"]]
    counted = (f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
    return f"{', '.join(counted) or '–'} | {result['cpu_seconds'] / 60:.1f}"


def duration(hours: float) -> str:
    """Predicted hours with two digits, without a false precision below a minute.

    >>> [duration(hours) for hours in (0.0001, 0.168, 23.36, 7510.0)]
    ['< 0.02', '0.17', '23', '7,500']
    """
    if hours < 1 / 60:
        return "< 0.02"
    return f"{float(f'{hours:.2g}'):,.2f}".rstrip("0").rstrip(".")


def _link(item: Item) -> str:
    return f"[{item.name}](#{item.name.replace('/', '').replace('.', '')})"


def _item(item: Item, found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield f"### {item.name}"
    yield ""
    yield f"{item.title} ({item.citation}). Measure: {item.unit or item.measure}."
    for text in (item.note, f"Not run: {item.not_run}." if item.not_run else ""):
        if text:
            yield ""
            yield text
    if item.silent:
        yield ""
        yield f"The paper does not say: {'; '.join(item.silent)}."
    for scale, result in found.items():
        yield ""
        yield from _result(scale, result)
    if not found:
        yield ""
        yield from _published(item)


def _published(item: Item) -> Iterator[str]:
    """The published values and claims of an item without results."""
    yield "| arm | published |"
    yield "|---|---|"
    yield from (f"| {arm.name} | {_number(arm.published)} |" for arm in item.arms)
    for claim in item.claims:
        yield ""
        yield f"- **not run**: {claim.text}"


def _result(scale: str, result: Mapping[str, Any]) -> Iterator[str]:
    yield f"**{scale}**: {result['changes']}"
    yield ""
    yield "| arm | published | measured | interval | seeds | settings | ε | noise | course |"
    yield "|---|---|---|---|---|---|---|---|---|"
    yield from (_row(arm, result["curves"].get(arm["name"], [])) for arm in result["arms"])
    if result["tuning"]:
        yield ""
        count = len(result["tuning"])
        yield f"{count} configurations were tried on held-out examples.{_edges(result)}"
    yield ""
    for claim in result["claims"]:
        own = " (our question, not the paper's)" if claim["source"] == "ours" else ""
        yield f"- **{claim['verdict']}**: {claim['text']}{own} ({claim['why']})"


def _edges(result: Mapping[str, Any]) -> str:
    """The arms whose chosen settings are at an end of what was tried: more might be better."""
    ends = [f"{a['name']} ({', '.join(a['at_ends'])})" for a in result["arms"] if a["at_ends"]]
    return f" At an end of the grid: {'; '.join(ends)}." if ends else ""


def _row(arm: Mapping[str, Any], curve: list[list[float]]) -> str:
    low, high = arm["interval"]
    span = "–" if low is None or high is None else f"{_number(low)} to {_number(high)}"
    published = _number(arm["published"])
    published += "" if arm["spread"] is None else f" ± {_number(arm['spread'])}"
    settings = ", ".join(f"{name}={value}" for name, value in arm["parameters"].items())
    epsilon = "not private" if arm["epsilon"] is None else f"{arm['epsilon']:.2f}"
    epsilon += f" ({arm['view']})" if arm["epsilon"] is not None and arm["view"] else ""
    noise = _number(arm["noise"].get("multiplier"))
    cells = (
        arm["name"], published, _number(arm["mean"]), span, str(len(arm["values"])), settings,
        epsilon, noise, sparkline([value for _, value in curve]),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def sparkline(values: list[float]) -> str:
    """A curve in one line of text.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    low, high = min(values, default=0.0), max(values, default=0.0)
    width = (high - low) or 1.0
    return "".join(BARS[round((value - low) / width * (len(BARS) - 1))] for value in values)


def _number(value: float | None) -> str:
    return "–" if value is None else short(value, 4)
