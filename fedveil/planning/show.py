"""A plan on the screen: a verdict, a few lines, and a table of how it moves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from fedveil.data.origin import footnote
from fedveil.planning.forecast import Forecast
from fedveil.planning.pilot import LEAK
from fedveil.planning.plan import FACTORS, Plan, Sweep, moves
from fedveil.planning.verdict import HOPELESS, WORKS, word_for
from fedveil.privacy.statement import rounded_up
from fedveil.progress import console, entry

WIDTH = 11
COLOURS = {"will work": "green", "hard": "yellow", "hopeless": "red"}
LABELS = {"epsilon": "ε", "dim": "d", "clip": "C"}
MOVED = {
    "clients": "clients, same share",
    "cohort": "cohort",
    "rounds": "rounds",
    "epsilon": "ε",
    "dim": "d, parameters",
    "clip": "C, the bound",
}
LOST = (  # of test accuracy, with C and rates set well (docs/planning.md)
    (WORKS, "0 to 4 points"),
    (2.0, "0 to 5 points"),
    (1.0, "0 to 11 points"),
    (HOPELESS, "1 to 30 points"),
    (0.0, "10 points and more"),
)
BAR = 30  # characters of a bar's whole length
TOP = 100.0  # a run's ratio that fills a bar; a tenth is empty


def show(plan: Plan) -> None:
    """The plan on one screen."""
    for label, text in lines(plan):
        entry(label, text, width=WIDTH)
    if plan.theory:
        show_theory(plan)
    elif plan.recipe.private:
        print()
        console().print(moving(plan))


def lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Labels and texts."""
    case, found = plan.case, plan.forecast
    unit = plan.known.unit
    yield (
        "Plan",
        f"{plan.recipe.name}: {plan.participants:,.0f} of {case.population:,} {unit}s a round, "
        f"{case.rounds:,} rounds, {case.dim:,} parameters",
    )
    yield "Verdict", verdict(plan)
    yield "Privacy", privacy(plan)
    if plan.guarantee.private and plan.guarantee.origin.mark:
        yield "", footnote([plan.guarantee.origin])
    if plan.recipe.private:
        yield (
            "Noise",
            f"{found.noise:.3g} on the mean, against a signal of {found.signal:.3g} at first; "
            f"signal to noise {found.ratio:.2g} a round, {found.run_ratio:.2g} over the run "
            f"(√K times that){_average(found)}.",
        )
        yield "Updates", case.updates.told() + "."
    if plan.pilot is not None and plan.pilot.private:
        yield "Leak", LEAK + "."
    yield "Messages", messages(plan)
    yield "Compute", computing(plan)


def verdict(plan: Plan) -> str:
    """The word, why, and what would do."""
    word, ratio = plan.verdict.word, plan.forecast.run_ratio
    if word == "not private":
        return "not private: no noise is added, so nothing drowns and nothing is guaranteed."
    told = f"{word}: over the run the signal is {ratio:.2g} times the noise"
    if not plan.guarantee.private:
        told = f"no guarantee, whatever the noise; {told}"
    if not plan.recipe.memory.kept:  # which lost more than others at the same ratio
        told = f"{told}, where measured runs lost {_lost(ratio)} of accuracy to it"
    if word == "will work":
        return f"{told}; from {WORKS:g} on it works."
    return f"{told}; {WORKS:g} works, below {HOPELESS:g} is hopeless; {needed(plan)}."


def _lost(ratio: float) -> str:
    """In words, for a run's ratio.

    >>> _lost(1.5), _lost(0.1)
    ('0 to 11 points', '10 points and more')
    """
    return next(points for least, points in LOST if ratio >= least)


def needed(plan: Plan) -> str:
    """How many clients it would take."""
    clients, unit = plan.verdict.clients, plan.known.unit
    if clients is None:
        return f"no number of {unit}s would do"
    share = plan.participants / plan.case.population
    cohort = f"{_two_digits(clients * share)} of them a round"
    return f"it would take {_two_digits(clients)} {unit}s, {cohort}, at the same ε"


def privacy(plan: Plan) -> str:
    """(ε, δ) and the noise that keeps it."""
    said, noise = plan.guarantee, plan.recipe.noise
    if not said.private:
        return f"none: {said.reason}."
    amount = getattr(noise, "multiplier", None)
    kind = (
        type(noise).__name__ if amount is None else f"noise multiplier z = {rounded_up(amount, 4)}"
    )
    sigma = getattr(noise, "sigma", None)
    steps = "" if sigma is None else f", σ = {sigma:.3g} grid steps a message"
    return (
        f"ε = {rounded_up(said.epsilon)}{said.origin.mark} at δ = {rounded_up(said.delta)} for one "
        f"{said.unit}, view {said.view}, {said.adjacency}; {kind}{steps}.{said.remark()}"
    )


def messages(plan: Plan) -> str:
    """Bytes of a client, a round and a run."""
    cost, rounds = plan.cost, plan.case.rounds
    if plan.known.unit == "example":
        return "none: examples are with whoever trains."
    up = cost.up * plan.participants
    return (
        f"{size(cost.up)} up, {size(cost.down)} down for a client a round; {size(up)} up a "
        f"round, {size(up * rounds)} the run."
    )


def computing(plan: Plan) -> str:
    """Products of a unit, and seconds here."""
    cost = plan.cost
    how = "timed on zeros" if cost.tried else "reckoned from products"
    return (
        f"{_scientific(cost.products)} products for one {plan.known.unit} a round; here, on one "
        f"core, {duration(cost.seconds)} a round, {duration(cost.seconds * plan.case.rounds)} the "
        f"run ({how})."
    )


def moving(plan: Plan) -> Table:
    """Signal to noise, of a round and of the run, as one thing is changed."""
    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column("signal to noise:\na round (the run)")
    for factor in FACTORS:
        table.add_column(_factor(factor), justify="right")
    for name, row in moves(plan.case).items():
        table.add_row(MOVED[name], *[_cell(found) for found in row])
    return table


def show_sweep(plan: Plan, sweeps: Sequence[Sweep], found: list[list[Forecast | None]]) -> None:
    """One thing as a table with bars, two as a grid."""
    out = console()
    entry("Plan", next(iter(lines(plan)))[1], width=WIDTH)
    entry("Updates", plan.case.updates.told() + ".", width=WIDTH)
    if plan.pilot is not None and plan.pilot.private:
        entry("Leak", LEAK + ".", width=WIDTH)
    print()
    if len(sweeps) == 1:
        out.print(_bars(sweeps[0], found))
    else:
        first, second = (LABELS.get(sweep.name, sweep.name) for sweep in sweeps)
        entry("", f"Signal to noise over the run: {first} down, {second} across", width=0)
        out.print(_grid(sweeps, found))
    entry(
        "",
        f"Over the run {WORKS:g} and more will work, below {HOPELESS:g} is hopeless.",
        width=0,
    )


def _bars(sweep: Sweep, found: list[list[Forecast | None]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in (LABELS.get(sweep.name, sweep.name), "noise", "signal", "a round", "the run"):
        table.add_column(head, justify="right")
    table.add_column("the run, from 0.1 to 100")
    for value, (one,) in zip(sweep.values, found, strict=True):
        if one is None:
            continue
        cells = (
            f"{one.noise:.3g}",
            f"{one.signal:.3g}",
            f"{one.ratio:.2g}",
            f"{one.run_ratio:.2g}",
        )
        table.add_row(f"{value:,g}", *cells, bar(one.run_ratio))
    return table


def _grid(sweeps: Sequence[Sweep], found: list[list[Forecast | None]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for value in sweeps[1].values:
        table.add_column(f"{value:,g}", justify="right")
    for value, row in zip(sweeps[0].values, found, strict=True):
        cells = [_coloured("–" if one is None else f"{one.run_ratio:.2g}", one) for one in row]
        table.add_row(f"{value:,g}", *cells)
    return table


def bar(ratio: float) -> Text:
    """A run's ratio on a logarithmic scale, with a mark where it works."""
    filled, mark = _place(ratio), _place(WORKS)
    drawn = "█" * filled + " " * (BAR - filled)
    edge = "|" if filled <= mark else "█"
    text = Text(drawn[:mark], style=COLOURS[word_for(ratio)])
    text.append(edge, style="bold")
    text.append(drawn[mark + 1 :].rstrip(), style=COLOURS[word_for(ratio)])
    return text


def show_theory(plan: Plan) -> None:
    """What each paper says, and the constants it was told."""
    for one in plan.theory:
        print()
        entry(one.paper, "", width=0)
        for label, text in one.lines:
            entry(f"  {label}", text, width=WIDTH)
    constants = plan.constants
    if constants is not None and constants.values:
        print()
        told = [
            f"{name} = {value:.3g}{'' if name in constants.given else '*'}"
            for name, value in constants.values.items()
        ]
        entry("Constants", ", ".join(told) + " (* estimated by the pilot).", width=WIDTH)


def size(count: float) -> str:
    """Bytes in a unit that reads well.

    >>> size(31_400), size(3.768e9)
    ('31.4 kB', '3.768 GB')
    """
    power = min(int(math.log10(max(count, 1.0)) / 3), 4)
    return f"{count / 1000**power:.4g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


def duration(seconds: float) -> str:
    """Seconds in a unit that reads well.

    >>> duration(0.0123), duration(90), duration(7200)
    ('0.012 s', '1.5 min', '2 h')
    """
    if seconds < 60:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.2g} min" if seconds < 3600 else f"{seconds / 3600:,.3g} h"


def _average(found: Forecast) -> str:
    mean = found.mean_ratio
    return "" if mean is None else f"; {mean:.2g} on average, for updates cancel near an optimum"


def _place(ratio: float) -> int:
    if not ratio > 0:
        return 0
    share = math.log10(min(ratio, TOP) / 0.1) / math.log10(TOP / 0.1)
    return max(0, min(BAR, round(BAR * share)))


def _cell(found: Forecast | None) -> Text:
    if found is None:
        return Text("–")
    return _coloured(f"{found.ratio:.2g} ({found.run_ratio:.2g})", found)


def _coloured(text: str, found: Forecast | None) -> Text:
    return Text(text, style="" if found is None else COLOURS[word_for(found.run_ratio)])


def _factor(factor: float) -> str:
    if factor == 1:
        return "as it is"
    return f"×{factor:g}" if factor > 1 else f"÷{1 / factor:g}"


def _two_digits(number: float) -> str:
    """In two digits, never smaller than it is: an estimate that does not look like a count."""
    return f"{float(rounded_up(number, 2)):,.0f}"


def _scientific(number: float) -> str:
    return (
        f"{number:,.0f}" if number < 1e5 else f"{number:.2g}".replace("e+0", "e").replace("e+", "e")
    )
