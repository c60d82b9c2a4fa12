"""Rules about noise: signal to noise over the run, and which of its factors is to blame.

    A = √K · C/‖noise‖ · mean‖b‖/C · signal/mean‖b‖

of the first rounds: later, updates cancel the more the better the model is. Without √K the factors
are what noise, cohort and dimension allow at best, how far updates fill C, and how far clients
agree. `fedveil plan` gives its verdict by A, with the same limits. Nothing is said of noise where
steps are too short or C is too large: that costs nothing to mend, and noise is judged after it.
"""

from __future__ import annotations

import math

from fedveil.diagnosis.bounding import BIASED, MOMENT, SHORT, SLACKENED
from fedveil.diagnosis.change import cohort_flags, larger_cohort
from fedveil.diagnosis.course import TIMID
from fedveil.diagnosis.people import FORGETFUL, MISSING
from fedveil.diagnosis.rule import Numbers, Rule, figure
from fedveil.diagnosis.run import Run
from fedveil.planning.verdict import HOPELESS, WORKS

WORTH = 1.15  # times less noise: accuracy hardly shows a smaller gain
FIRST = (BIASED, SHORT, SLACKENED, MOMENT, TIMID, FORGETFUL)  # what costs nothing to mend


def _factors(run: Run) -> Numbers | None:
    ratio, signal, population = run.run_ratio, run.mean("signal", "early"), run.population
    if ratio is None or not signal or population is None or MISSING(run):
        return None
    if any(rule(run) for rule in FIRST):
        return None
    reach = run.mean("threshold", "early") or run.reach
    bounded = run.bounded("early") or min(reach, run.mean("norm", "early") or reach)
    fill, agreement = (max(min(x, 1.0), 1e-9) for x in (bounded / reach, signal / bounded))
    numbers = {
        "run_ratio": ratio,
        "rounds": float(run.whole),
        "first": ratio / math.sqrt(run.whole),
        "filled": ratio / fill,
        "best": ratio / (fill * agreement),
        "agreement": agreement,
        "dim": float(run.dim or 0),
        "population": float(population),
        "wanted": population * WORKS * fill / ratio,
        "cohort": run.recipe.cohort.expected(population),
        "epsilon": 0.0 if run.budget is None else run.budget[0],
        "example": float(run.recipe.unit == "example"),
    }
    return {**numbers, **larger_cohort(run)} if ratio / fill < WORKS else numbers


def _shown(n: Numbers) -> str:
    return (
        f"over {n['rounds']:.0f} rounds the signal is {figure(n['run_ratio'])} times the noise "
        f"({figure(n['first'])} in a round at first, times √{n['rounds']:.0f}), where {WORKS:g} "
        f"would do and below {HOPELESS:g} little is learnt"
    )


def _more(n: Numbers) -> str:
    """What would make the noise smaller, the cheapest first."""
    unit = "examples" if n["example"] else "clients"
    same = " at the same ε" if n["epsilon"] else ""
    others = (
        f"about {figure(n['wanted'])} {unit} in all, where there are {figure(n['population'])}, "
        f"would reach {WORKS:g}{same}"
    )
    gain = n.get("gain", 1.0)
    if gain >= WORTH:
        return (
            f"take {figure(n['larger'])} {unit} a round instead of {figure(n['cohort'])}, for "
            f"{figure(gain)}× less noise{same}; {others}"
        )
    told = f"allow a larger ε or take a smaller model; {others}"
    if "gain" not in n or n["cohort"] >= n["population"]:
        return told
    return f"{told}; more of those a round would make noise hardly smaller ({gain:.2f}×)"


def _drawn(run: Run, n: Numbers) -> str:
    worth = n.get("gain", 0.0) >= WORTH
    return cohort_flags(run.recipe, n["larger"], n["population"]) if worth else ""


DIMENSION = Rule(
    "too much noise for the dimension",
    _factors,
    lambda n: n["filled"] < WORKS and n["best"] < WORKS,
    lambda n: (
        f"{_shown(n)}; clients that all agreed would have {figure(n['best'])}, since noise grows "
        "with √d" + (f" and d is {n['dim']:,.0f}" if n["dim"] else "")
    ),
    _more,
    command=_drawn,
)

NOISY = Rule(
    "too much noise",
    _factors,
    lambda n: n["filled"] < WORKS <= n["best"],
    lambda n: f"{_shown(n)}; updates add up to only {n['agreement']:.0%} of their norms",
    _more,
    command=_drawn,
)

RULES = (DIMENSION, NOISY)
