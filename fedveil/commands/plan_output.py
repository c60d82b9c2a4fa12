"""A plan on the terminal: the verdict, its numbers, and a table of alternatives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from fedveil.accounting.rounding import rounded_up, short
from fedveil.commands.progress import console, entry
from fedveil.data.origin import footnote
from fedveil.planning.correlation import advice
from fedveil.planning.forecast import Forecast
from fedveil.planning.pilot import LEAK
from fedveil.planning.plan import FACTORS, Plan, PlannedSilos, Sweep, moves
from fedveil.planning.verdict import HOPELESS, WORKS, word_for
from fedveil.privacy.guarantee import written
from fedveil.training.metrics import titled

WIDTH = 11
COLOURS = {"will work": "green", "hard": "yellow", "hopeless": "red", "not known": ""}
LABELS = {"epsilon": "ε", "dim": "d", "clip": "C"}
MOVED = {
    "clients": "clients, same rate",
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
    (0.0, "10 or more points"),
)
BAR = 30  # characters of a bar's whole length
TOP = 100.0  # a run's ratio that fills a bar; a tenth is empty


def show(plan: Plan) -> None:
    """Print the plan."""
    for label, text in lines(plan):
        entry(label, text, width=WIDTH)
    if plan.theory:
        show_theory(plan)
    elif plan.recipe.private and plan.forecast.noise is not None:
        print()
        console().print(moving(plan))


def lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """The labelled lines of a plan."""
    case = plan.case
    yield "Plan", planned(plan)
    if plan.silos is not None:
        yield "Silos", in_silos(plan.silos)
    yield "Verdict", verdict(plan)
    yield "Privacy", privacy(plan)
    if plan.guarantee.private and plan.guarantee.origin.mark:
        yield "", footnote([plan.guarantee.origin])
    if plan.recipe.private:
        yield "Noise", signal_to_noise(plan)
        assumed = case.updates.describe()
        if plan.silos is not None:  # a pilot of silos is refused
            assumed = assumed.partition(". Measure both")[0]
        yield "Updates", f"{assumed}."
    if len(plan.noises) > 1:
        yield "Correlated", advice(plan.noises, case.dim)
    if plan.pilot is not None and plan.pilot.private:
        yield "Leak", LEAK
    yield "Messages", messages(plan)
    yield "Compute", computing(plan)


def planned(plan: Plan) -> str:
    """The algorithm and its sizes."""
    case, unit = plan.case, plan.known.unit
    often = f"{unit}s per round{_capped(plan)}, {case.rounds:,} rounds"
    if plan.silos is not None:
        steps, rounds = plan.silos.steps, plan.silos.rounds
        often = f"records of a silo per step, {steps} steps in each of {rounds:,} rounds"
    return (
        f"{plan.recipe.name}: {_limit(plan)}{plan.participants:,.0f} of {case.population:,} "
        f"{often}, {case.dim:,} parameters"
    )


def _capped(plan: Plan) -> str:
    """That participants become fewer, if a cap makes them so."""
    cohort, unit = plan.recipe.cohort, plan.known.unit
    if cohort.cap is None or cohort.cap >= plan.case.rounds:
        return ""
    first = cohort.expected(plan.case.population)
    return f" on average ({first:,.0f} in round 1, fewer as {unit}s reach the cap of {cohort.cap})"


def _limit(plan: Plan) -> str:
    """What numbers are called if only a bound on the number of participants is known."""
    return "" if plan.participants_exact else "at most "


def in_silos(silos: PlannedSilos) -> str:
    """What the plan of one silo leaves out."""
    return (
        f"the figures below are for one of {silos.count:,} silos, of mean size. Its "
        f"{silos.rounds * silos.steps:,} steps appear as rounds. The mean of {silos.count:,} such "
        f"silos has {short(silos.count**0.5, 2)} times less noise, which is not included."
    )


def verdict(plan: Plan) -> str:
    """The verdict, its reason, and what it would take."""
    word, ratio = plan.verdict.word, plan.forecast.run_ratio
    if word == "not private":
        return "not private: no noise is added, so there is no guarantee."
    if ratio is None:
        kind = type(plan.recipe.noise).__name__
        return (
            f"not known: noise {kind} does not define `deviation_of_sum`, so the signal-to-noise "
            "ratio is not known. Define it to get a verdict."
        )
    text = f"{word}: the signal-to-noise ratio over the run is {_limit(plan)}{short(ratio, 2)}."
    if not plan.guarantee.private:
        text = f"no guarantee, whatever the noise. Training itself: {text}"
    if not plan.recipe.memory.kept:  # with memory, runs lost more at the same ratio
        text += f" Measured runs at this ratio lost {_lost(ratio)} of accuracy."
        if plan.metric not in (None, "accuracy"):
            text += f" Their loss of {titled(plan.metric or '')} was not measured."
    if word == "will work":
        return f"{text} A ratio of {WORKS:g} is enough."
    text += f" A ratio of {WORKS:g} is enough. Below {HOPELESS:g}, runs are hopeless."
    return text if plan.silos is not None else f"{text} {needed(plan)}."


def _lost(ratio: float) -> str:
    """The accuracy lost at a run's ratio.

    >>> _lost(1.5), _lost(0.1)
    ('0 to 11 points', '10 or more points')
    """
    return next(points for least, points in LOST if ratio >= least)


def signal_to_noise(plan: Plan) -> str:
    """The noise on the mean against the signal, in a round and over the run."""
    found = plan.forecast
    signal = f"against a signal of {short(found.signal, 3)} in round 1"
    if found.noise is None:
        return f"not known, {signal}."
    fewer = ""
    if found.below_cap < 1:
        fewer = f", and {_limit(plan)}{short(found.below_cap, 2)} times because of the cap"
    return (
        f"{short(found.noise, 3)} on the mean, {signal}; signal-to-noise ratio "
        f"{_ratio(found.ratio)} per round, {_limit(plan)}{_ratio(found.run_ratio)} over the run "
        f"(√K times that{fewer}){_average(found)}."
    )


def needed(plan: Plan) -> str:
    """The number of clients it would take."""
    clients, unit = plan.verdict.clients, plan.known.unit
    if clients is None:
        kind = type(plan.recipe.cohort).__name__
        return (
            f"How many {unit}s it would take is not known, because cohort {kind} does not define "
            "`with_population`"
        )
    if math.isinf(clients):
        return f"No number of {unit}s would be enough"
    share = plan.participants / plan.case.population
    cohort = f"{_two_digits(clients * share)} of them per round"
    least = "" if plan.participants_exact else "at least "
    return f"It would take {least}{_two_digits(clients)} {unit}s, {cohort}, at the same ε"


def privacy(plan: Plan) -> str:
    """(ε, δ) and the noise behind it."""
    said, noise = plan.guarantee, plan.recipe.noise
    if not said.private:
        return f"none: {said.reason}."
    amount = noise.noise_multiplier
    kind = type(noise).__name__ if amount is None else f"noise multiplier z = {short(amount)}"
    sigma = noise.deviation_of_message(plan.recipe.message(plan.case.dim))
    steps = "" if sigma is None else f", σ = {short(sigma, 3)} grid steps per message"
    budget = f"ε = {rounded_up(said.epsilon)}{said.origin.mark} at δ = {rounded_up(said.delta)}"
    meant = f"per {said.unit}, view {said.view}, {written(said.adjacency)}"
    return f"{said.warning()}{budget} {meant}; {kind}{steps}."


def messages(plan: Plan) -> str:
    """Bytes per client, round and run."""
    cost, rounds = plan.cost, plan.case.rounds
    if plan.silos is not None:
        sent = cost.up * plan.silos.count
        return (
            f"{size(cost.up)} up and {size(cost.down)} down per silo and round; {size(sent)} up "
            f"per round, {size(sent * plan.silos.rounds)} in total."
        )
    if plan.known.unit == "example":
        return "none: the trainer holds all examples."
    up, most = cost.up * plan.participants, _limit(plan)
    return (
        f"{size(cost.up)} up and {size(cost.down)} down per client and round; {most}{size(up)} up "
        f"per round, {most}{size(up * rounds)} in total."
    )


def computing(plan: Plan) -> str:
    """Multiplications per unit, and seconds on this machine."""
    cost = plan.cost
    how = "timed" if cost.tried else "estimated"
    return (
        f"{_scientific(cost.products)} multiplications per {plan.known.unit} and round; on one "
        f"core of this machine {duration(cost.seconds)} per round, "
        f"{duration(cost.seconds * plan.case.rounds)} in total ({how})."
    )


def moving(plan: Plan) -> Table:
    """Signal-to-noise ratio, per round and over the run, as one quantity is varied."""
    table = Table(box=None, padding=(0, 3, 0, 0))
    most = "" if plan.participants_exact else ", at most"
    table.add_column(f"signal-to-noise ratio:\nper round (over the run{most})")
    for factor in FACTORS:
        table.add_column(_factor(factor), justify="right")
    for name, row in moves(plan.case).items():
        cells = [_cell(found) for found in row]
        if len({cell.plain for cell in cells}) > 1:  # else nothing depends on it
            table.add_row(MOVED[name], *cells)
    return table


def show_sweep(plan: Plan, sweeps: Sequence[Sweep], found: list[list[Forecast | None]]) -> None:
    """One quantity as a table with bars, two as a grid."""
    out = console()
    entry("Plan", next(iter(lines(plan)))[1], width=WIDTH)
    entry("Updates", plan.case.updates.describe() + ".", width=WIDTH)
    if plan.pilot is not None and plan.pilot.private:
        entry("Leak", LEAK, width=WIDTH)
    print()
    if len(sweeps) == 1:
        out.print(_bars(sweeps[0], found))
    else:
        first, second = (LABELS.get(sweep.name, sweep.name) for sweep in sweeps)
        entry("", f"Signal-to-noise ratio over the run: {first} down, {second} across", width=0)
        out.print(_grid(sweeps, found))
    entry(
        "",
        f"A ratio over the run of {WORKS:g} or more will work; below {HOPELESS:g} is hopeless.",
        width=0,
    )


def _bars(sweep: Sweep, found: list[list[Forecast | None]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in (
        LABELS.get(sweep.name, sweep.name),
        "noise",
        "signal",
        "per round",
        "over the run",
    ):
        table.add_column(head, justify="right")
    table.add_column("over the run, from 0.1 to 100")
    for value, (one,) in zip(sweep.values, found, strict=True):
        if one is None:
            continue
        cells = (
            "–" if one.noise is None else short(one.noise, 3),
            short(one.signal, 3),
            _ratio(one.ratio),
            _ratio(one.run_ratio),
        )
        table.add_row(_axis(value), *cells, bar(one.run_ratio or 0.0))
    return table


def _grid(sweeps: Sequence[Sweep], found: list[list[Forecast | None]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for value in sweeps[1].values:
        table.add_column(_axis(value), justify="right")
    for value, row in zip(sweeps[0].values, found, strict=True):
        cells = [_coloured(_ratio(None if one is None else one.run_ratio), one) for one in row]
        table.add_row(_axis(value), *cells)
    return table


def _axis(value: float) -> str:
    """A value of a sweep, with thousands separated.

    >>> _axis(3000), _axis(0.5), _axis(1e-5)
    ('3,000', '0.5', '1e-5')
    """
    return short(value) if not 1e-4 <= value < 1e6 else f"{value:,g}"


def bar(ratio: float) -> Text:
    """A run's ratio on a logarithmic scale, with a mark where runs start to work."""
    filled, mark = _place(ratio), _place(WORKS)
    drawn = "█" * filled + " " * (BAR - filled)
    edge = "|" if filled <= mark else "█"
    text = Text(drawn[:mark], style=COLOURS[word_for(ratio)])
    text.append(edge, style="bold")
    text.append(drawn[mark + 1 :].rstrip(), style=COLOURS[word_for(ratio)])
    return text


def show_theory(plan: Plan) -> None:
    """What each paper recommends, and the constants used."""
    for one in plan.theory:
        print()
        entry(one.paper, "", width=0)
        for label, text in one.lines:
            entry(f"  {label}", text, width=WIDTH)
    constants = plan.constants
    if constants is not None and constants.values:
        print()
        values = [
            f"{name} = {short(value, 3)}{'' if name in constants.given else '*'}"
            for name, value in constants.values.items()
        ]
        entry("Constants", ", ".join(values) + " (* estimated by the pilot).", width=WIDTH)


def size(count: float) -> str:
    """Bytes in a readable unit.

    >>> size(31_400), size(3.768e9)
    ('31.4 kB', '3.768 GB')
    """
    power = min(int(math.log10(max(count, 1.0)) / 3), 4)
    return f"{count / 1000**power:.4g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


def duration(seconds: float) -> str:
    """Seconds in a readable unit.

    >>> duration(0.0123), duration(90), duration(7200)
    ('0.012 s', '1.5 min', '2 h')
    """
    if seconds < 60:
        return f"{short(seconds, 2)} s"
    return f"{seconds / 60:.2g} min" if seconds < 3600 else f"{seconds / 3600:,.3g} h"


def _average(found: Forecast) -> str:
    mean = found.mean_ratio
    return (
        ""
        if mean is None
        else f"; {short(mean, 2)} on average, since updates cancel near an optimum"
    )


def _place(ratio: float) -> int:
    if not ratio > 0:
        return 0
    share = math.log10(min(ratio, TOP) / 0.1) / math.log10(TOP / 0.1)
    return max(0, min(BAR, round(BAR * share)))


def _cell(found: Forecast | None) -> Text:
    if found is None:
        return Text("–")
    return _coloured(f"{_ratio(found.ratio)} ({_ratio(found.run_ratio)})", found)


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else short(ratio, 2)


def _coloured(text: str, found: Forecast | None) -> Text:
    return Text(text, style="" if found is None else COLOURS[word_for(found.run_ratio)])


def _factor(factor: float) -> str:
    if factor == 1:
        return "as planned"
    return f"×{factor:g}" if factor > 1 else f"÷{1 / factor:g}"


def _two_digits(value: float) -> str:
    """Rounded up to two digits, as an estimate."""
    return f"{float(rounded_up(value, 2).replace(',', '')):,.0f}"


def _scientific(value: float) -> str:
    return f"{value:,.0f}" if value < 1e5 else short(value, 2)
