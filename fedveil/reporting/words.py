"""Texts of a report: headline, privacy statement, and how to reproduce the run."""

from __future__ import annotations

import html
import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from fedveil.accounting.rounding import rounded_up
from fedveil.data.origin import footnote
from fedveil.errors import UserError
from fedveil.privacy.guarantee import BRIEFLY, VIEWS, written
from fedveil.privacy.statement import OTHERS
from fedveil.reporting import answers
from fedveil.reporting.chart import ChartTable, few_digits, share, size
from fedveil.reporting.curves import merit, ranked
from fedveil.reporting.load import ReportMember, Run, Story
from fedveil.reporting.picture import pictures
from fedveil.training.metrics import shown as scored
from fedveil.training.metrics import titled

MOST_PICTURES = 8
MOST_FIRST = 8  # result rows that are not folded
MOST_STATEMENTS = 24
escape = html.escape


class Markup(str):
    """HTML generated here, not to be escaped again."""

    __slots__ = ()


def title(story: Story) -> str:
    """The page's title."""
    names = list(dict.fromkeys(str(m.first.summary["algorithm"]) for m in story.members))
    told = ", ".join(names) if len(names) <= 3 else f"{len(names)} algorithms"
    many = f", {len(story.members)} settings," if len(story.members) > len(names) else ""
    return f"{told}{many} on {story.members[0].first.summary['data']}"


def headline(story: Story) -> str:
    """The main figures of the run, or of a comparison's best member and a table."""
    member = story.alone or best(story)
    cards = [_result_card(member), _privacy_card(story, member), *_other_cards(member)]
    lead = "" if story.alone else f"<p>{escape(_winner(story, member))}</p>"
    shown = "".join(
        f'<div class="card"><dt>{escape(name)}</dt><dd><strong>{escape(value)}</strong>'
        f"<span>{escape(note)}</span></dd></div>"
        for name, value, note in cards
    )
    remarks = "".join(f'<p class="note">{escape(told)}</p>' for told in _remarks(story))
    several = "" if story.alone else members_table(story)
    return f'{lead}<dl class="cards">{shown}</dl>{remarks}{several}{_selection(story)}'


def verdict(story: Story) -> str:
    """What `fedveil diagnose` says first."""
    return answers.verdict(story, story.alone or best(story))


def scores(story: Story) -> str:
    """All metrics of the run, or of the best setting, and the results of each class."""
    member = story.alone or best(story)
    found = answers.scores_of(member.first)
    if found is None:
        return ""
    about = escape(answers.caption(found, len(member.runs) > 1))
    of = "" if story.alone else f"<p>{escape(member.label)}, the best setting.</p>"
    classes = table(answers.classes_table(found), "Each class") if found.classes else ""
    metrics = table(answers.metrics_table(found), "Metrics")
    return f'{of}{metrics}{classes}<p class="note">{about}</p>'


def _remarks(story: Story) -> Iterable[str]:
    """What a mean would hide: runs that stopped early, and seeds without a result."""
    for member in story.members:
        for run in member.runs:
            played, planned = run.summary["rounds"], run.summary["rounds_planned"]
            if played < planned:
                yield f"{run.path.name} stopped after {played} of {planned} rounds."
        lost = len(member.runs) - max(len(member.results(n)) for n in ("accuracy", "loss", ""))
        if 0 < lost < len(member.runs):
            yield (
                f"{lost} of {len(member.runs)} seeds of {member.label} have no finite result and "
                "are not in its mean."
            )


def best(story: Story) -> ReportMember:
    """The member with the best mean of the measure.

    A run without privacy is a baseline, not a winner, if there are private ones.
    """
    private = [m for m in story.members if m.first.private]
    return max(private or story.members, key=merit)


def _winner(story: Story, member: ReportMember) -> str:
    """The best member, and the members that may be equally good."""
    told = f"Best of {len(story.members)}: {member.label}."
    tested = [m for m in story.members if m.tested is not None]
    equal = [m for m in tested if m.tested is not None and not m.tested[0]]
    if not tested or not equal:
        return told
    if len(equal) == 1:
        return f"{told} Its lead over {equal[0].label} may be chance."
    those = "the others" if len(equal) == len(tested) else f"{len(equal)} of the others"
    return f"{told} Its lead over {those} may be chance."


def _result_card(member: ReportMember) -> tuple[str, str, str]:
    main, found = member.measure, member.results()
    if found and main.name != "loss":
        show = share if main.share else few_digits
        note = f"{_spread(found, main.share)}{_beside_constant(member)}"
        scores = member.first.scores
        noisy = "" if scores is None or scores.exact else ", noisy"
        return f"Test {titled(main.name)}{noisy}", show(float(np.mean(found))), note
    loss = member.results("loss")
    if loss:
        return "Loss", few_digits(float(np.mean(loss))), _spread(loss, percent=False)
    known = [run.summary.get(name) for run in member.runs for name in ("accuracy", "loss")]
    if any(value is not None for value in known):
        return "Result", "not finite", "the last model has neither accuracy nor loss"
    return "Result", "unknown", "the model was not evaluated"


def _beside_constant(member: ReportMember) -> str:
    """The score of a constant prediction."""
    found = answers.scores_of(member.first)
    known = {} if found is None else {m.name: m for m in found.metrics}
    main = known.get(member.measure.name)
    if main is None or main.baseline is None:
        return ""
    return f"; constant baseline {scored(main.baseline, main.share)}"


def _spread(values: Sequence[float], percent: bool) -> str:
    if len(values) < 2:
        return "one seed" if values else ""
    return f"± {_error(values, percent)} standard error, {len(values)} seeds"


def _error(values: Sequence[float], percent: bool) -> str:
    """The standard error of the mean, in two digits."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return f"{error:.2%}" if percent else f"{error:.2g}"


def _privacy_card(story: Story, member: ReportMember) -> tuple[str, str, str]:
    """The guarantee of a run, or what choosing the best of several runs cost."""
    single = _guarantee_card(member.costliest)
    spent = story.together
    if story.alone or story.selection or spent is None or not member.costliest.private:
        return single
    mark = member.costliest.origin.mark
    whose = written(spent.get("adjacency") or "their adjacencies cannot be combined")
    note = (
        f"δ = {rounded_up(spent['delta'])}, all {int(spent['runs'])} runs that the best was chosen "
        f"from ({whose}). One run alone: {single[1]}"
    )
    note += f"; {member.costliest.origin.caveat}" if mark else ""
    epsilon = rounded_up(float(spent["epsilon"] or math.inf))
    return "Cost of the choice", f"ε = {epsilon}{mark}", note


def _guarantee_card(run: Run) -> tuple[str, str, str]:
    said = run.guarantee
    if said["epsilon"] is None:
        return "Guarantee", "none", str(said.get("reason") or "this run is not private")
    note = (
        f"δ = {rounded_up(said['delta'])}, for one {said['unit']} ({written(said['adjacency'])}), "
        f"{BRIEFLY.get(said['view'], said['view'])}{_leak(run)}"
    )
    note += f"; {run.origin.caveat}" if run.origin.mark else ""
    return "Guarantee", f"ε = {rounded_up(said['epsilon'])}{run.origin.mark}", note


def _leak(run: Run) -> str:
    leaks = "Leak" in run.summary["privacy"]["statement"]
    return "; it does not cover the clipping threshold, see Leak" if leaks else ""


def _other_cards(member: ReportMember) -> Iterable[tuple[str, str, str]]:
    run = member.first
    privacy = run.summary["privacy"]
    people = f"{privacy['population']:,} {privacy.get('population_of', privacy['unit'])}s"
    mean = float(np.nanmean(run.columns["participants"]))
    yield "Rounds", f"{run.summary['rounds']:,}", f"{few_digits(round(mean))} of {people} per round"
    yield "Model", f"{privacy['dimension']:,}", f"parameters, {run.settings.get('model', 'own')}"
    sent = float(np.mean([r.summary["bytes_sent"] for r in member.runs]))
    yield "Communication", size(sent), f"{size(privacy.get('bytes_per_message') or 0)} per message"


def members_table(story: Story) -> str:
    """All members with their results, best first; a long table is folded after the first rows."""
    order = ranked(story.members)
    open_ = len(order) if len(order) <= MOST_FIRST + 2 else MOST_FIRST
    told = table(
        _results(story, order[:open_]),
        "Results, best first (s.e.: standard error over seeds)",
    )
    if not order[open_:]:
        return told + _footnote(story)
    more = f"The other {len(order) - open_} settings"
    rest = table(_results(story, order[open_:]), more, hidden=True)
    return f"{told}<details><summary>{more}</summary>{rest}</details>{_footnote(story)}"


def _footnote(story: Story) -> str:
    """The meaning of the mark on an ε, below the tables that use it."""
    runs = (member.costliest for member in story.members)
    told = footnote(run.origin for run in runs if _finite(run))
    return f'<p class="note">{escape(told)}</p>' if told else ""


def _results(story: Story, members: Sequence[ReportMember]) -> ChartTable:
    show = share if story.measure.share else few_digits
    values = [value for member in members for value in member.results()]
    low, high = min(values, default=0.0), max(values, default=1.0)
    rows = [_result_row(story, member, (low, high)) for member in members]
    seeds = f"each seed, {show(low)} to {show(high)}"
    head = [
        "setting",
        f"test {titled(story.measure.name)}",
        "± s.e.",
        seeds,
        "compared with the best",
        "ε",
    ]
    kept = [i for i in range(len(head)) if i < 2 or any(row[i] not in ("", "–") for row in rows)]
    return ChartTable([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _result_row(
    story: Story, member: ReportMember, reach: tuple[float, float]
) -> list[str | Markup]:
    values, percent = member.results(), story.measure.share
    show = share if percent else few_digits
    said = member.costliest.guarantee
    return [
        member.label,
        show(float(np.mean(values))) if values else "–",
        f"± {_error(values, percent)}" if len(values) > 1 else "–",
        _strip(values, reach, show) if len(values) > 1 else "",
        _beside(story, member),
        "none" if said["epsilon"] is None else _epsilon(said, member.costliest),
    ]


def _beside(story: Story, member: ReportMember) -> str:
    """The result of a comparison's test (docs/comparing.md, "Significance marks")."""
    if member.tested is None:
        return "best" if member is best(story) and any(m.tested for m in story.members) else "–"
    worse, p = member.tested
    return f"worse (p = {p:.2g})" if worse else f"may be chance (p = {p:.2g})"


def _strip(
    values: Sequence[float], reach: tuple[float, float], show: Callable[[float], str]
) -> Markup:
    """Each seed as a dot and their mean as a bar, on a scale common to all members."""
    low, high = reach
    at = [6 + 148 * (v - low) / (high - low or 1) for v in [*values, float(np.mean(values))]]
    dots = "".join(f'<circle cx="{x:.1f}" cy="9" r="4"/>' for x in at[:-1])
    told = ", ".join(show(value) for value in values)
    return Markup(
        f'<svg class="strip" width="160" height="18" role="img" aria-label="{escape(told)}">'
        f'<path class="rail" d="M2 9H158"/>{dots}<path d="M{at[-1]:.1f} 1V17"/></svg>'
    )


def _selection(story: Story) -> str:
    """The privacy cost of choosing among all runs."""
    if story.selection:
        known = ((name, story.selection.get(name)) for name in ("law", "eta", "gamma", "expected"))
        facts = [
            (n, few_digits(v) if isinstance(v, float) else v) for n, v in known if v is not None
        ]
        told = "; ".join(f"{name}: {value}" for name, value in facts)
        return f'<p class="note">Private selection: {escape(told)}.</p>'
    private = sum(run.private for member in story.members for run in member.runs)
    if private < 2:
        return ""
    cost = (
        f"Each ε on this page is for one run. All {private} private runs together cost more. "
        "Choosing the best by its results on private data is itself a release: "
    )
    if story.together is None:
        return f'<p class="note">{cost}no ε on this page covers it.</p>'
    spent = story.together
    since = f", because {spent['reason']}" if spent.get("reason") else ""
    return (
        f'<p class="note">{cost}it costs what all {int(spent["runs"])} runs cost '
        f"together, ε = {escape(rounded_up(float(spent['epsilon'] or math.inf)))} at δ = "
        f"{escape(rounded_up(spent['delta']))} ({escape(written(str(spent.get('adjacency', ''))))})"
        f"{escape(since)}. "
        "This number is informative only: a guarantee needs a budget set before the runs.</p>"
    )


def table(content: ChartTable, caption: str, hidden: bool = False) -> str:
    """An HTML table that scrolls sideways on a phone; all text is escaped."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in content.head)
    body = "".join(
        "<tr>"
        + f'<th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td{_short(cell)}>{_escaped(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in content.rows
    )
    label = "visually-hidden" if hidden else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f'<caption class="{label}">{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _escaped(cell: str) -> str:
    return cell if isinstance(cell, Markup) else escape(cell)


def _short(cell: str) -> str:
    """Keeps a number on one line."""
    return ' class="short"' if len(cell) < 16 or isinstance(cell, Markup) else ""


def privacy(story: Story) -> str:
    """The statement and each view's guarantee; every distinct statement of several members once."""
    statements: dict[str, list[ReportMember]] = {}
    for member in story.members:
        statements.setdefault(_statement(member.costliest), []).append(member)
    lead = f'<p class="lead">{escape(str(best(story).costliest.guarantee["sentence"]))}</p>'
    if not any(_finite(member.costliest) for member in story.members):
        return lead
    if len(statements) == 1:
        views = table(_views(story.members[0].costliest), "The guarantee in each view")
        return f"{lead}{views}{_footnote(story)}{next(iter(statements))}"
    found = "".join(
        f"<details><summary>{escape(_names(members))}</summary>{told}</details>"
        for told, members in list(statements.items())[:MOST_STATEMENTS]
    )
    left = len(statements) - MOST_STATEMENTS
    more = f'<p class="note">{left} more statements are in the runs\' privacy.txt.</p>'
    views = table(_views_of_all(story), "The guarantee of each run in each view")
    return f"{lead}{views}{_footnote(story)}<h3>Statements</h3>{found}{more if left > 0 else ''}"


def _finite(run: Run) -> bool:
    """Whether it is private in any view."""
    return any(view["epsilon"] is not None for view in run.summary["privacy"]["views"].values())


def _names(members: Sequence[ReportMember]) -> str:
    few = ", ".join(member.label for member in members[:3])
    return few if len(members) <= 3 else f"{few} and {len(members) - 3} more"


def _views(run: Run) -> ChartTable:
    said = run.summary["privacy"]
    views = [view for view in VIEWS if view in said["views"]]
    kept = None if run.budget is None else said["view"]
    rows = [_view_row(run, view, view == kept) for view in views]
    head = ["adversary view", "ε", "ε over fair coins", "δ", "adjacency", "remark"]
    shown = [i for i, name in enumerate(head) if any(row[i] not in ("–", "") for row in rows)]
    return ChartTable([head[i] for i in shown], [[row[i] for i in shown] for row in rows])


def _views_of_all(story: Story) -> ChartTable:
    rows = []
    for member in story.members:
        run = member.costliest
        views = run.summary["privacy"]["views"]
        shown = [_epsilon(views[view], run) if view in views else "–" for view in VIEWS]
        rows.append([member.label, *shown, *_terms(run.guarantee)])
    head = ["run", *(f"ε, {BRIEFLY[view]}" for view in VIEWS), "δ", "adjacency"]
    return ChartTable(head, rows)


def _epsilon(said: dict[str, Any], run: Run) -> str:
    known = said["epsilon"] is not None
    return f"{rounded_up(said['epsilon'])}{run.origin.mark}" if known else "no guarantee"


def _view_row(run: Run, view: str, own: bool) -> list[str]:
    said = run.summary["privacy"]["views"][view]
    drawn = said.get("drawn")
    known = said["epsilon"] is not None
    remark = "the budget applies to this view" if own and known else said.get("reason") or ""
    return [
        f"{view}: {BRIEFLY[view]}",
        _epsilon(said, run),
        f"{rounded_up(drawn)}{run.origin.mark}" if known and drawn is not None else "–",
        *_terms(said),
        remark,
    ]


def _terms(said: dict[str, Any]) -> tuple[str, str]:
    """δ and adjacency of a guarantee, if there is one."""
    if said["epsilon"] is None:
        return "–", "–"
    return rounded_up(said["delta"]), written(str(said["adjacency"]))


def _statement(run: Run) -> str:
    """The whole statement, without the views, which have their own table."""
    entries = "".join(
        f"<div><dt>{escape(str(label))}</dt><dd>{escape(str(told))}</dd></div>"
        for label, told in run.summary["privacy"]["statement"].items()
        if label not in (*VIEWS, OTHERS, "Privacy")  # shown above
    )
    return f'<dl class="statement">{entries}</dl>'


def recipes(story: Story) -> str:
    """A diagram of each algorithm's recipe."""
    found: dict[str, tuple[ReportMember, dict[str, Any]]] = {}
    for member in ranked(story.members):
        plain = member.first.settings.get("recipe")
        if isinstance(plain, dict):
            kinds = str([part.get("kind") for part in plain.values() if isinstance(part, dict)])
            found.setdefault(kinds, (member, plain))
    chosen = list(found.values())[:MOST_PICTURES]
    if len(chosen) == 1:
        member, plain = chosen[0]
        of = "" if story.alone else f"<p>The recipe of {escape(member.label)}.</p>"
        return of + _picture(member, plain)
    return "".join(
        f"<h3>{escape(str(member.first.summary['algorithm']))}{_differs(i, chosen)}</h3>"
        f"{_picture(member, plain, chosen[0][1])}"
        for i, (member, plain) in enumerate(chosen)
    )


def _differs(place: int, chosen: Sequence[tuple[ReportMember, dict[str, Any]]]) -> str:
    first = escape(str(chosen[0][0].first.summary["algorithm"]))
    return f" <small>(shaded: differs from {first})</small>" if place else ""


def _picture(
    member: ReportMember, plain: dict[str, Any], unlike: dict[str, Any] | None = None
) -> str:
    try:
        return pictures(plain, unlike)
    except UserError as problem:
        raise UserError(f"{member.first.path / 'recipe.toml'}: {problem}") from problem


def again(story: Story) -> str:
    """recipe.toml, command, versions and data fingerprint of each member."""
    run = story.members[0].first
    facts = [["data", str(run.summary["data"])]]
    if run.summary.get("fingerprint"):
        facts.append(["data fingerprint", str(run.summary["fingerprint"])])
    facts.append(["engine", str(run.summary.get("engine", "–"))])
    facts += [[f"{k} version", str(v)] for k, v in run.summary.get("versions", {}).items()]
    known = table(ChartTable(["what", "value"], facts), "Environment")
    return known + "".join(_again(member, story.alone is not None) for member in story.members)


def _again(member: ReportMember, alone: bool) -> str:
    run = member.first
    commands = "\n".join(
        f"fedveil train {shlex.quote(str(r.path / 'recipe.toml'))}" for r in member.runs
    )
    toml = f'<div class="code"><pre tabindex="0">{escape(run.toml)}</pre></div>'
    command = f'<div class="code"><pre tabindex="0">{escape(commands)}</pre></div>'
    if "data" not in run.settings:
        command = (
            '<p class="note">Started from Python: recipe.toml has everything but the data and, if '
            "it was your own, the model. Pass them to fedveil.train.</p>"
        )
    if alone:
        return (
            f"<h3>How</h3>{command}<h3>recipe.toml</h3>"
            f"<details open><summary>Seed {run.seed}</summary>{toml}</details>"
        )
    return f"<details><summary>{escape(member.label)}</summary>{command}{toml}</details>"
