"""What a report says in words: headline, privacy statement, and how to run it again."""

from __future__ import annotations

import html
import math
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedveil.errors import UserError
from fedveil.privacy.statement import BRIEFLY, VIEWS, rounded_up
from fedveil.reporting.chart import Table, few_digits, share, size
from fedveil.reporting.load import Member, Run, Story
from fedveil.reporting.picture import pictures

MOST_PICTURES = 8
MOST_STATEMENTS = 24
escape = html.escape


def title(story: Story) -> str:
    """What the page is called."""
    names = list(dict.fromkeys(str(m.first.summary["algorithm"]) for m in story.members))
    told = names[0] if len(names) == 1 else f"{len(story.members)} settings compared"
    return f"{told} on {story.members[0].first.summary['data']}"


def headline(story: Story) -> str:
    """The result in a few large figures; of a comparison those of its best member, and a table."""
    member = story.alone or best(story)
    cards = [_result_card(member), _guarantee_card(member.costliest), *_other_cards(member)]
    lead = (
        "" if story.alone else f"<p>The best of {len(story.members)}: {escape(member.label)}.</p>"
    )
    shown = "".join(
        f'<div class="card"><dt>{escape(name)}</dt><dd><strong>{escape(value)}</strong>'
        f"<span>{escape(note)}</span></dd></div>"
        for name, value, note in cards
    )
    stopped = "".join(
        f"<p class='note'>{escape(r.path.name)} stopped after {r.summary['rounds']} of "
        f"{r.summary['rounds_planned']} rounds.</p>"
        for m in story.members
        for r in m.runs
        if r.summary["rounds"] < r.summary["rounds_planned"]
    )
    several = "" if story.alone else members_table(story)
    return f'{lead}<dl class="cards">{shown}</dl>{stopped}{several}{_selection(story)}'


def best(story: Story) -> Member:
    """The member of the greatest mean accuracy, or the least loss where there is none.

    A run without privacy is a yardstick, not a winner, where there are private ones.
    """
    private = [m for m in story.members if m.first.private]
    return max(private or story.members, key=_merit)


def _merit(member: Member) -> float:
    accuracy, loss = member.results("accuracy"), member.results("loss")
    return float(np.mean(accuracy)) if accuracy else -float(np.mean(loss or [math.inf]))


def _result_card(member: Member) -> tuple[str, str, str]:
    accuracy = member.results("accuracy")
    if accuracy:
        return "Test accuracy", share(float(np.mean(accuracy))), _spread(accuracy, percent=True)
    loss = member.results("loss")
    value = few_digits(float(np.mean(loss))) if loss else "not finite"
    return "Loss", value, _spread(loss, percent=False)


def _spread(values: Sequence[float], percent: bool) -> str:
    if len(values) < 2:
        return "one seed" if values else ""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return f"± {share(error) if percent else few_digits(error)} standard error, {len(values)} seeds"


def _guarantee_card(run: Run) -> tuple[str, str, str]:
    said = run.guarantee
    if said["epsilon"] is None:
        return "Guarantee", "none", str(said.get("reason") or "this run is not private")
    note = (
        f"δ = {rounded_up(said['delta'])}, for one {said['unit']} ({said['adjacency']}), "
        f"{BRIEFLY.get(said['view'], said['view'])}{_leak(run)}"
    )
    return "Guarantee", f"ε = {rounded_up(said['epsilon'])}", note


def _leak(run: Run) -> str:
    leaks = "Leak" in run.summary["privacy"]["statement"]
    return "; it does not cover the clipping threshold, see Leak" if leaks else ""


def _other_cards(member: Member) -> Iterable[tuple[str, str, str]]:
    run = member.first
    privacy = run.summary["privacy"]
    people = f"{privacy['population']:,} {privacy['unit']}s"
    mean = float(np.nanmean(run.columns["participants"]))
    yield "Rounds", f"{run.summary['rounds']:,}", f"{few_digits(round(mean))} of {people} a round"
    yield "Model", f"{privacy['dimension']:,}", f"parameters, {run.settings.get('model', 'own')}"
    sent = float(np.mean([r.summary["bytes_sent"] for r in member.runs]))
    yield "Sent", size(sent), f"{size(privacy.get('bytes_per_message') or 0)} a message"


def members_table(story: Story) -> str:
    """All members with their results, the best first."""
    accurate = all(m.results("accuracy") for m in story.members)
    name = "accuracy" if accurate else "loss"
    show = share if accurate else few_digits
    rows = []
    for member in sorted(story.members, key=_merit, reverse=True):
        values = member.results(name)
        said = member.costliest.guarantee
        error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
        epsilon = "none" if said["epsilon"] is None else rounded_up(said["epsilon"])
        rows.append([
            member.label, show(float(np.mean(values))) if values else "–",
            "–" if error is None else f"± {show(error)}", str(len(member.runs)), epsilon,
        ])  # fmt: skip
    head = ["run", f"test {name}", "standard error", "seeds", "ε"]
    return table(Table(head, rows), "Results of all settings, the best first")


def _selection(story: Story) -> str:
    private = [run for member in story.members for run in member.runs if run.private]
    if not story.selection:
        told = (
            f"Each ε on this page is that of one run. All {len(private)} private runs together "
            "cost more; choosing the best by looking at results on private data is itself a "
            "release, and no ε on this page covers it."
        )
        return f'<p class="note">{told}</p>' if len(private) > 1 else ""
    known = ((name, story.selection.get(name)) for name in ("law", "eta", "gamma", "expected"))
    facts = ((n, few_digits(v) if isinstance(v, float) else v) for n, v in known if v is not None)
    told = "; ".join(f"{name}: {value}" for name, value in facts)
    return f'<p class="note">Private selection: {escape(told)}.</p>'


def table(content: Table, caption: str, hidden: bool = False) -> str:
    """An HTML table that can be scrolled sideways on a phone; all text is escaped."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in content.head)
    body = "".join(
        "<tr>"
        + f'<th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td{_short(cell)}>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in content.rows
    )
    label = "visually-hidden" if hidden else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f'<caption class="{label}">{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _short(cell: str) -> str:
    """A number is not broken into two lines."""
    return ' class="short"' if len(cell) < 16 else ""


def privacy(story: Story) -> str:
    """The statement, and each view's guarantee; of several members each different one once."""
    statements: dict[str, list[Member]] = {}
    for member in story.members:
        statements.setdefault(_statement(member.costliest), []).append(member)
    lead = f'<p class="lead">{escape(str(best(story).costliest.guarantee["sentence"]))}</p>'
    if len(statements) == 1:
        views = table(_views(story.members[0].costliest), "The guarantee towards each view")
        return f"{lead}{views}{next(iter(statements))}"
    found = "".join(
        f"<details><summary>{escape(_names(members))}</summary>{told}</details>"
        for told, members in list(statements.items())[:MOST_STATEMENTS]
    )
    left = len(statements) - MOST_STATEMENTS
    more = f'<p class="note">{left} more statements are in the runs\' privacy.txt.</p>'
    views = table(_views_of_all(story), "The guarantee of each run towards each view")
    return f"{lead}{views}<h3>Statements</h3>{found}{more if left > 0 else ''}"


def _names(members: Sequence[Member]) -> str:
    few = ", ".join(member.label for member in members[:3])
    return few if len(members) <= 3 else f"{few} and {len(members) - 3} more"


def _views(run: Run) -> Table:
    said = run.summary["privacy"]
    views = [view for view in VIEWS if view in said["views"]]
    kept = None if run.budget is None else said["view"]
    rows = [_view_row(view, said["views"][view], view == kept) for view in views]
    head = ["who sees what", "ε", "ε over fair coins", "δ", "neighbours", "remark"]
    shown = [i for i, name in enumerate(head) if any(row[i] not in ("–", "") for row in rows)]
    return Table([head[i] for i in shown], [[row[i] for i in shown] for row in rows])


def _views_of_all(story: Story) -> Table:
    rows = []
    for member in story.members:
        run = member.costliest
        views = run.summary["privacy"]["views"]
        shown = [_epsilon(views[view]) if view in views else "–" for view in VIEWS]
        delta = rounded_up(run.guarantee["delta"])
        rows.append([member.label, *shown, delta, str(run.guarantee["adjacency"])])
    head = ["run", *(f"ε, {BRIEFLY[view]}" for view in VIEWS), "δ", "neighbours"]
    return Table(head, rows)


def _epsilon(said: dict[str, Any]) -> str:
    return "no finite ε" if said["epsilon"] is None else rounded_up(said["epsilon"])


def _view_row(view: str, said: dict[str, Any], own: bool) -> list[str]:
    drawn = said.get("drawn")
    known = said["epsilon"] is not None
    remark = "the budget is kept against this view" if own and known else said.get("reason") or ""
    return [
        f"{view}: {BRIEFLY[view]}",
        _epsilon(said),
        rounded_up(drawn) if known and drawn is not None else "–",
        rounded_up(said["delta"]),
        str(said["adjacency"]),
        remark,
    ]


def _statement(run: Run) -> str:
    """The whole statement, but for the views, which have their own table."""
    entries = "".join(
        f"<div><dt>{escape(str(label))}</dt><dd>{escape(str(told))}</dd></div>"
        for label, told in run.summary["privacy"]["statement"].items()
        if label not in (*VIEWS, "Privacy")  # which stand above it
    )
    return f'<dl class="statement">{entries}</dl>'


def recipes(story: Story) -> str:
    """The recipe of each algorithm as a picture."""
    drawn: dict[str, tuple[str, str]] = {}
    for member in story.members:
        plain = member.first.settings.get("recipe")
        if not isinstance(plain, dict):
            continue
        try:
            kinds = str([part.get("kind") for part in plain.values() if isinstance(part, dict)])
            drawn.setdefault(kinds, (member.label, pictures(plain)))
        except UserError as problem:
            raise UserError(f"{member.first.path / 'recipe.toml'}: {problem}") from problem
    several = len(drawn) > 1
    return "".join(
        (f"<h3>{escape(label)}</h3>" if several else "") + picture
        for label, picture in list(drawn.values())[:MOST_PICTURES]
    )


def again(story: Story) -> str:
    """recipe.toml, command, versions and the data's fingerprint of each member."""
    run = story.members[0].first
    facts = [["data", str(run.summary["data"])]]
    if run.summary.get("fingerprint"):
        facts.append(["fingerprint of the data", str(run.summary["fingerprint"])])
    facts.append(["engine", str(run.summary.get("engine", "–"))])
    facts += [[f"version of {k}", str(v)] for k, v in run.summary.get("versions", {}).items()]
    known = table(Table(["what", "value"], facts), "What it ran on")
    return known + "".join(_again(member, story.alone is not None) for member in story.members)


def _again(member: Member, alone: bool) -> str:
    run = member.first
    commands = "\n".join(
        f"fedveil train {shlex.quote(str(r.path / 'recipe.toml'))}" for r in member.runs
    )
    toml = f'<div class="code"><pre tabindex="0">{escape(run.toml)}</pre></div>'
    command = f'<div class="code"><pre tabindex="0">{escape(commands)}</pre></div>'
    if alone:
        return (
            f"<h3>Commands</h3>{command}<h3>recipe.toml</h3>"
            f"<details open><summary>Seed {run.seed}</summary>{toml}</details>"
        )
    return f"<details><summary>{escape(member.label)}</summary>{command}{toml}</details>"
