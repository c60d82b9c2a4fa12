"""Rules about noise: the signal-to-noise ratio over the run, and which of its factors is small.

    A = √K · C/‖noise‖ · mean‖b‖/C · signal/mean‖b‖

of the first rounds. Later, updates cancel more as the model improves. Without √K, the factors are
what noise, cohort and dimension allow at best, how much of C the updates use, and how much clients
agree. `fedveil plan` uses A and the same thresholds. Noise is judged only if no cheaper problem is
found: a wrong C or step length costs nothing to fix.
"""

from __future__ import annotations

import math

from fedveil.diagnosis.bounding import BIASED, MOMENT, SHORT, SLACKENED
from fedveil.diagnosis.change import cohort_flags, larger_cohort
from fedveil.diagnosis.course import TOO_SHORT
from fedveil.diagnosis.people import FORGETFUL, MISSING
from fedveil.diagnosis.rule import Numbers, Rule, figure
from fedveil.diagnosis.run import DiagnosedRun
from fedveil.planning.verdict import HOPELESS, WORKS

WORTH = 1.15  # times less noise: a smaller gain hardly changes accuracy
CHEAPER = (BIASED, SHORT, SLACKENED, MOMENT, TOO_SHORT, FORGETFUL)  # free to fix


def _factors(run: DiagnosedRun) -> Numbers | None:
    ratio, signal, population = run.run_ratio, run.mean("signal", "early"), run.population
    if ratio is None or not signal or population is None or MISSING(run):
        return None
    if any(rule(run) for rule in CHEAPER):
        return None
    reach = run.mean("threshold", "early") or run.reach
    bounded = run.bounded("early") or min(reach, run.mean("norm", "early") or reach)
    fill, agreement = (max(min(x, 1.0), 1e-9) for x in (bounded / reach, signal / bounded))
    numbers = {
        "run_ratio": ratio,
        "rounds": float(run.total_rounds),
        "first": ratio / math.sqrt(run.total_rounds),
        "filled": ratio / fill,
        "best": ratio / (fill * agreement),
        "agreement": agreement,
        "dim": float(run.dim or 0),
        "population": float(population),
        "cohort": run.recipe.cohort.expected(population),
        "epsilon": 0.0 if run.budget is None else run.budget[0],
        "example": float(run.recipe.unit == "example"),
    }
    if run.recipe.cohort.with_population(1.0) is not None:
        numbers["wanted"] = population * WORKS * fill / ratio
    return {**numbers, **larger_cohort(run)} if ratio / fill < WORKS else numbers


def _ratio(n: Numbers) -> str:
    return (
        f"the signal-to-noise ratio over {n['rounds']:.0f} rounds is {figure(n['run_ratio'])} "
        f"({figure(n['first'])} in the first rounds, times √{n['rounds']:.0f}). A ratio of "
        f"{WORKS:g} is enough, and below {HOPELESS:g} little is learned"
    )


def _advice(n: Numbers) -> str:
    """Ways to reduce the noise, the cheapest first."""
    unit = "examples" if n["example"] else "clients"
    same = " at the same ε" if n["epsilon"] else ""
    total = ""
    if "wanted" in n:
        total = (
            f". About {figure(n['wanted'])} {unit} in total, instead of "
            f"{figure(n['population'])}, would reach a ratio of {WORKS:g}{same}"
        )
    gain = n.get("gain", 1.0)
    if gain >= WORTH:
        return (
            f"sample {figure(n['larger'])} {unit} per round instead of {figure(n['cohort'])}, for "
            f"{figure(gain)}× less noise{same}{total}"
        )
    text = f"allow a larger ε, or use a smaller model{total}"
    if "gain" not in n or n["cohort"] >= n["population"]:
        return text
    return f"{text}. A larger cohort would hardly reduce the noise ({gain:.2f}×)"


def _flags(run: DiagnosedRun, n: Numbers) -> str:
    worth = n.get("gain", 0.0) >= WORTH
    return cohort_flags(run.recipe, n["larger"], n["population"]) if worth else ""


DIMENSION = Rule(
    "too much noise for the dimension",
    _factors,
    lambda n: n["filled"] < WORKS and n["best"] < WORKS,
    lambda n: (
        f"{_ratio(n)}. Even with full agreement between clients, the ratio would be "
        f"{figure(n['best'])}, since noise grows with √d"
        + (f" and d = {n['dim']:,.0f}" if n["dim"] else "")
    ),
    _advice,
    command=_flags,
)

NOISY = Rule(
    "too much noise",
    _factors,
    lambda n: n["filled"] < WORKS <= n["best"],
    lambda n: f"{_ratio(n)}. Updates add up to only {n['agreement']:.0%} of their norms",
    _advice,
    command=_flags,
)

RULES = (DIMENSION, NOISY)
