"""The HTML page: sections, style, one copy of Plotly, and no external resources.

Text from users' files is escaped, and the content security policy allows two scripts only, by
their SHA-256, so that no script can come from data.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from fedveil import __version__
from fedveil.reporting import curves, grids, people, words
from fedveil.reporting.chart import COLOURS, DASHES, Chart, text
from fedveil.reporting.load import Story
from fedveil.reporting.sketch import STROKES, sketched

MARK = "<!-- fedveil report -->"  # marks a file that a later report may overwrite
PRIVATE = (
    "This page contains private data: norms, angles, counts, accuracy curves and results of "
    "individual clients. No guarantee covers them. Store the page as securely as the run."
)


@dataclass(frozen=True)
class Section:
    """A section of the page; omitted if it has neither text nor charts."""

    id: str
    title: str
    text: str = ""  # HTML
    charts: Sequence[Chart] = ()


def page(story: Story) -> str:
    """One self-contained HTML file."""
    sections = [s for s in _sections(story) if s.text or s.charts]
    title = html.escape(words.title(story))
    plotly = _asset("plotly", "package_data/plotly.min.js")
    script = _asset("fedveil.reporting", "page.js")
    if story.alone is None:
        sections = _with_one_legend(sections, story)
    else:
        sections = [replace(s, charts=[_own_legend(c) for c in s.charts]) for s in sections]
    charts = [chart for section in sections for chart in section.charts]
    numbers = itertools.count()  # of charts, across all sections
    first = next((sketch for chart in charts if (sketch := sketched(chart))), "")
    lined = next((i for i, chart in enumerate(charts) if sketched(chart)), -1)
    body = "".join(_section(section, numbers) for section in sections)
    body = body.replace(f"<!--{lined}-->", first)
    links = "".join(f'<li><a href="#{s.id}">{html.escape(s.title)}</a></li>' for s in sections)
    return (
        f'<!doctype html>\n{MARK}\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(plotly, script)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title} – fedveil</title><style>{_asset('fedveil.reporting', 'page.css')}</style>"
        f'</head><body><a class="skip" href="#main">Skip to the report</a>'
        f"<header><div><p>fedveil report</p><h1>{title}</h1></div>{_THEMES}</header>"
        f'<nav aria-label="Contents"><details open><summary>Contents</summary><ol>{links}</ol>'
        f'</details></nav><main id="main">{words.verdict(story)}'
        f'<p class="private" role="note">{PRIVATE}</p>{body}</main>'
        f"<footer><p>Made by fedveil {__version__}. Charts by Plotly (MIT licence).</p></footer>"
        f'<script type="application/json" id="charts">{_data(charts)}</script>'
        f'<script type="text/plain" id="plotly">{plotly}</script><script>{script}</script>'
        "</body></html>\n"
    )


_THEMES = (
    '<fieldset class="themes"><legend>Theme</legend>'
    + "".join(
        f'<label><input type="radio" name="theme" value="{name}"{" checked" * (name == "system")}>'
        f"<span>{name.capitalize()}</span></label>"
        for name in ("system", "light", "dark")
    )
    + "</fieldset>"
)


def _sections(story: Story) -> list[Section]:
    best = ""
    if len(story.members) > curves.MOST_LINES:
        best = f"<p>Curves show the best {curves.MOST_LINES} of {len(story.members)} settings.</p>"
    learning = curves.learning(story)
    bounding = curves.bounding(story)
    return [
        Section("result", "Result", words.headline(story)),
        Section("scores", "Metrics and classes", words.scores(story)),
        _drawn("learning", _listing([c.title for c in learning]), best, learning),
        _drawn("grid", "Comparison of settings", "", grids.heat_maps(story)),
        Section("privacy", "Privacy", words.privacy(story), curves.spending(story)),
        _drawn("sent", "Communication", "", curves.sending(story)),
        _drawn("noise", "Signal to noise", "", curves.signal(story)),
        _drawn("angles", "Norms and angles", "", people.angles(story)),
        Section("bound", "Updates and the bound", _listed(curves.unchanging(story)), bounding),
        _drawn("path", "Path of the model", "", grids.paths(story)),
        _drawn(
            "served",
            "Accuracy per client",
            _listed(people.in_short(story)),
            people.served(story),
        ),
        _drawn("confusion", "Confusion matrix", "", people.confusion(story)),
        Section("recipe", "Recipe", words.recipes(story)),
        Section("again", "Reproduce this run", words.again(story)),
    ]


def _listing(titles: Sequence[str]) -> str:
    """`AUC, accuracy and loss`."""
    rest = [title[:1].lower() + title[1:] for title in titles[1:]]
    shown = [*titles[:1], *rest]
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def _with_one_legend(sections: Sequence[Section], story: Story) -> list[Section]:
    """The members' colours once, in the first section with lines.

    Charts of some members only, or of lines that coincide, keep a legend of their own.
    """
    members = {text(m.label): place for place, m in enumerate(curves.shown(story))}
    common = False
    told = []
    for section in sections:
        charts = [replace(c, named=_differs(c, members)) for c in section.charts]
        above = ""
        if not common and any(_named(c) for c in charts):
            common, above = True, _common_legend(members)
        told.append(replace(section, text=section.text + above, charts=charts))
    return told


def _own_legend(chart: Chart) -> Chart:
    """A chart with several lines needs a legend."""
    return replace(chart, named=len(_named(chart)) > 1)


def _named(chart: Chart) -> list[str]:
    return [t["name"] for t in chart.traces if "name" in t and t.get("showlegend", True)]


def _differs(chart: Chart, members: Mapping[str, int]) -> bool:
    names = _named(chart)
    return bool(names) and set(names) != set(members)


def _common_legend(members: Mapping[str, int]) -> str:
    keys = [
        {"name": name, "line": {"color": f"@c{place % COLOURS}", "dash": DASHES[place % COLOURS]}}
        for name, place in members.items()
    ]
    return f'<ul class="legend common">{"".join(map(_key, keys))}</ul>'


def _drawn(id: str, title: str, text: str, charts: Sequence[Chart]) -> Section:
    """A section that is omitted if it has no charts."""
    return Section(id, title, text if charts else "", charts)


def _listed(sentences: Sequence[str]) -> str:
    told = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="told">{told}</ul>' if told else ""


def _section(section: Section, numbers: Iterator[int]) -> str:
    figures = "".join(_figure(chart, next(numbers), section.title) for chart in section.charts)
    grid = f'<div class="charts">{figures}</div>' if figures else ""
    return (
        f'<section id="{section.id}" aria-labelledby="{section.id}-title">'
        f'<h2 id="{section.id}-title">{html.escape(section.title)}</h2>{section.text}{grid}'
        "</section>"
    )


def _figure(chart: Chart, number: int, above: str) -> str:
    """A chart; a title equal to the section's heading is for screen readers only."""
    wide = ' class="wide"' if chart.wide else ""
    hidden = ' class="visually-hidden"' if chart.title == above else ""
    slider = _slider(chart, number) if chart.kind == "rounds" else ""
    return (
        f"<figure{wide}><h3{hidden}>{html.escape(chart.title)}</h3>{slider}"
        f'{_legend(chart)}<div class="chart" id="chart-{number}" role="img" '
        f'style="height:{chart.height}px" '
        f'aria-label="{html.escape(chart.alt)}"><!--{number}--></div>'
        f"<figcaption>{html.escape(chart.caption)}</figcaption>"
        f"<details><summary>Numbers<span class='visually-hidden'> of {html.escape(chart.title)}"
        f"</span></summary>{words.table(chart.table, chart.title, hidden=True)}</details></figure>"
    )


def _legend(chart: Chart) -> str:
    """The legend of a chart that needs its own; names in traces are already escaped."""
    named = [t for t in chart.traces if "name" in t and t.get("showlegend", True)]
    if not chart.named:
        return ""
    return f'<ul class="legend">{"".join(map(_key, named))}</ul>'


def _key(trace: dict[str, Any]) -> str:
    colour, dash = trace["line"]["color"].removeprefix("@"), trace["line"].get("dash", "solid")
    stroke = f'style="stroke:var(--{colour})" stroke-dasharray="{STROKES[dash]}"'
    swatch = f'<svg width="36" height="8" aria-hidden="true"><path d="M1 4H35" {stroke}/></svg>'
    return f"<li>{swatch}{trace['name']}</li>"


def _slider(chart: Chart, number: int) -> str:
    told = chart.frames["members"]
    last = len(told[0]["rounds"]) - 1
    options = "".join(f'<option value="{i}">{m["label"]}</option>' for i, m in enumerate(told))
    choice = (
        f'<label for="member-{number}">Run</label>'
        f'<select id="member-{number}" data-chart="{number}">{options}</select>'
    )
    return (
        f'<div class="slider">{choice if len(told) > 1 else ""}'
        f'<label for="slider-{number}">Round</label>'
        f'<input type="range" id="slider-{number}" min="0" max="{last}" value="0" step="1" '
        f'data-chart="{number}"><output id="said-{number}" for="slider-{number}" '
        'aria-live="polite"></output></div>'
    )


def _data(charts: Sequence[Chart]) -> str:
    """The charts as JSON in which no HTML tag can start or end."""
    plain = [{"traces": c.traces, "layout": c.layout, "frames": c.frames} for c in charts]
    found = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return found.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(*scripts: str) -> str:
    """No network access, and no scripts except these."""
    sums = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = " ".join(f"'sha256-{found}'" for found in sums)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _asset(package: str, name: str) -> str:
    found: Any = resources.files(package).joinpath(name)
    return str(found.read_text(encoding="utf-8"))
