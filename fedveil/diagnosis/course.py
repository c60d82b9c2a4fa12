"""Rules about convergence: loss, step length, and agreement of clients."""

from __future__ import annotations

import math

import numpy as np

from fedveil.diagnosis.bounding import BIASED, MOMENT, SHORT, SLACKENED
from fedveil.diagnosis.change import stretched_steps
from fedveil.diagnosis.rule import Numbers, Rule, figure
from fedveil.diagnosis.run import DiagnosedRun

LOW = 0.3  # late signal-to-noise ratio below which over 90% of a step's squared norm is noise
GREW = 2.0  # final over minimum loss: more than evaluations vary by chance
FELL = 0.05  # of accuracy: a loss that grows at constant accuracy is overconfidence instead
BACK = -0.5  # p below which a step two thirds as long would have been better
FLOOR = -0.75  # p with noise: at -1 a round makes no progress
CONVERGED = 0.5  # late over early mean update: oscillating in ever shorter steps is convergence
ONWARD = 0.9  # p above which a step uses less than a tenth of its slope
STILL = 0.9  # late over early mean update: it shrinks near an optimum
FALLING = 0.05  # of the loss, from the third to the last quarter of the evaluations
JUMPY = 0.25  # of the loss between two evaluations: confirms the angles
SOLVED = 0.95  # accuracy: separable classes let the loss fall forever, with little to gain
MANY = 8  # evaluations: two per quarter
MAX_FACTOR = 4.0  # of longer steps: the parabola is not reliable beyond
ORTHOGONAL = 0.15  # |cosine| below which clients have nothing in common, 81° to 99°
FEW = 8  # rounds: too few to judge a shorter run


def _losses(run: DiagnosedRun) -> Numbers | None:
    evaluated = [row for row in run.rows if row.get("loss") is not None]
    if len(evaluated) < 2 or not _above_noise(run) or run.recipe.evaluation is not None:
        return None  # a private evaluation's loss changes by its noise alone
    losses = [row["loss"] if math.isfinite(row["loss"]) else math.inf for row in evaluated]
    least = losses.index(min(losses))
    before, after = (row.get("accuracy") for row in (evaluated[least], evaluated[-1]))
    fell = math.nan if before is None or after is None else before - after
    return {
        "least": losses[least],
        "round": float(evaluated[least]["round"]),
        "last": losses[-1],
        "fell": 1.0 if math.isnan(fell) else fell,
    }


def _above_noise(run: DiagnosedRun) -> bool:
    """Whether steps exceed the noise, so that angles and loss carry information on clients."""
    ratio = run.signal_to_noise
    return ratio is None or ratio >= LOW


DIVERGED = Rule(
    "diverging",
    _losses,
    lambda n: not math.isfinite(n["last"]) or (n["last"] >= GREW * n["least"] and n["fell"] > FELL),
    lambda n: (
        f"the loss diverged: its minimum was {figure(n['least'])} after round {n['round']:.0f}, "
        f"and it ended at {figure(n['last'])}"
    ),
    lambda n: "halve the learning rate of the server or of the clients",
    command=lambda run, n: stretched_steps(run.recipe, 0.5),
)


def _steps(run: DiagnosedRun) -> Numbers | None:
    slope = run.persistence()
    early, late = run.mean("signal", "early"), run.mean("signal", "late")
    if slope is None or not early or late is None or run.rounds < FEW or DIVERGED(run):
        return None
    noisy = run.signal_to_noise is not None
    return {
        "slope": slope.value,
        "error": slope.error,
        "left": late / early,
        "falling": _falling(run),
        "noisy": float(noisy),
        "onward": float(run.onward),
        "solved": float((run.mean("accuracy") or 0.0) > SOLVED),
        "jumps": _jumps(run),
        "cut": float(any(rule(run) for rule in (BIASED, SHORT, MOMENT))),
        "loose": float(SLACKENED(run) is not None),
        "shorter": 1 / (1 - min(slope.value, 0.0)),
        "longer": min(1 / max(1 - slope.value, 1e-9), MAX_FACTOR),
    }


def _falling(run: DiagnosedRun) -> float:
    """Relative decrease of the loss from the third to the last quarter of evaluations."""
    losses = run.column("loss")
    losses = losses[np.isfinite(losses)]
    quarter = len(losses) // 4
    if len(losses) < MANY or run.recipe.evaluation is not None:
        return 0.0
    before, after = losses[-2 * quarter : -quarter].mean(), losses[-quarter:].mean()
    return float(1 - after / before) if before > 0 else 0.0


def _jumps(run: DiagnosedRun) -> float:
    """Median relative change of the loss between late evaluations."""
    losses = run.column("loss", "late")
    losses = losses[np.isfinite(losses)]
    if len(losses) < MANY // 2 or run.recipe.evaluation is not None:
        return 0.0
    return float(np.median(np.abs(np.diff(losses)) / np.maximum(losses[:-1], 1e-30)))


def _too_long(n: Numbers) -> bool:
    if n["noisy"]:
        return n["slope"] + n["error"] < FLOOR and not n["loose"]
    margin = n["error"] if n["jumps"] > JUMPY else 2 * n["error"]
    return n["slope"] + margin < BACK and n["left"] > CONVERGED


def _too_short(n: Numbers) -> bool:
    onward = n["slope"] > ONWARD and n["left"] > STILL
    falling = bool(n["onward"]) and n["falling"] > FALLING
    return (onward or falling) and not n["cut"] and not n["solved"]


TOO_LONG = Rule(
    "steps too long",
    _steps,
    _too_long,
    lambda n: (
        "global steps are too long: at the end of a step, the directional derivative of the loss "
        f"has reversed, to {-n['slope']:.0%} of its initial size. 0% is optimal. At 100% or more, "
        "rounds make no progress"
    ),
    lambda n: (
        f"make steps {figure(n['shorter'])} times as long"
        + (". Shorter steps also add less noise" if n["noisy"] else "")
    ),
    needs=("cosine",),
    command=lambda run, n: stretched_steps(run.recipe, n["shorter"]),
)

TOO_SHORT = Rule(
    "steps too short",
    _steps,
    _too_short,
    lambda n: (
        "global steps are too short: at the end of a step, the directional derivative of the loss "
        f"is still {min(n['slope'], 1.0):.0%} of its initial size. {_unfinished(n)}"
    ),
    lambda n: (
        f"make steps {figure(n['longer'])}× as long"
        + (". ε stays the same" if n["noisy"] else ", or train for more rounds")
    ),
    needs=("cosine",),
    command=lambda run, n: stretched_steps(run.recipe, n["longer"]),
)


def _unfinished(n: Numbers) -> str:
    if n["falling"] > FALLING:
        return f"The loss still fell by {n['falling']:.0%} in the last quarter of evaluations"
    return (
        f"The norm of the mean update is still {n['left']:.0%} of its value in the first quarter "
        "of rounds"
    )


def _angles(run: DiagnosedRun) -> Numbers | None:
    cosine = run.cosine("early")
    bare = not run.recipe.bound.norms(1).bounded
    if cosine is None or run.rounds < FEW or not _above_noise(run):
        return None
    if bare or run.recipe.memory.kept or run.recipe.unit == "example" or TOO_LONG(run):
        return None
    degrees, moving = math.degrees(math.acos(cosine)), float(_moving(run))
    return {"cosine": cosine, "degrees": degrees, "moving": moving}


def _moving(run: DiagnosedRun) -> bool:
    """Whether updates do not cancel yet: the mean update is still long, and steps too short."""
    early, late = run.mean("signal", "early"), run.mean("signal", "late")
    return run.onward and (late or 0.0) > CONVERGED * (early or math.inf)


DISAGREEING = Rule(
    "clients disagree",
    _angles,
    lambda n: abs(n["cosine"]) < ORTHOGONAL and not n["moving"],
    lambda n: (
        f"clients disagree: in the first quarter of the rounds their updates are at "
        f"{figure(n['degrees'])}° to the previous global update (90° means no agreement). "
        "When bounded updates cancel, training stops where unbounded updates would continue"
    ),
    lambda n: "use error compensation: clients keep what the bound removed",
    needs=("cosine",),
    command=lambda run, n: "--algorithm fed_alpha_normec",
)

RULES = (DIVERGED, TOO_LONG, TOO_SHORT, DISAGREEING)
