"""Rules about the course of a run: its loss, its steps, and whether clients pull together."""

from __future__ import annotations

import math

from fedveil.diagnosis.bounding import CLIPPED, OVERSHOT
from fedveil.diagnosis.noise import LOW
from fedveil.diagnosis.rule import Numbers, Rule, figure
from fedveil.diagnosis.run import Run
from fedveil.parts.bound import Unbounded

GREW = 2.0  # loss at the end over its least: no spread of evaluations doubles a loss
FELL = 0.05  # of accuracy: a loss that grows while accuracy stays is overconfidence instead
BACK = -0.5  # cosine below which a round undoes half and more of the last one
ONWARD = 0.9  # cosine above which it goes the same way, 26° and less
STILL = 0.9  # late over early mean update: nearer to its optimum, a model's is shorter
SETTLED = 0.5  # of the same: back and forth in ever shorter steps is convergence
ACROSS = 0.15  # |cosine| below which clients have nothing in common, 81° to 99°
FEW = 8  # rounds of which too little can be said


def _losses(run: Run) -> Numbers | None:
    evaluated = [row for row in run.rows if row.get("loss") is not None]
    if len(evaluated) < 2 or not _felt(run):
        return None
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


def _felt(run: Run) -> bool:
    """Whether steps are more than noise, so that something can be said about them."""
    ratio = run.signal_to_noise
    return ratio is None or ratio >= LOW


DIVERGED = Rule(
    "diverging",
    _losses,
    lambda n: not math.isfinite(n["last"]) or (n["last"] >= GREW * n["least"] and n["fell"] > FELL),
    lambda n: (
        f"the loss was least after round {n['round']:.0f} ({figure(n['least'])}) and ended at "
        f"{figure(n['last'])}"
    ),
    lambda n: "lower the learning rate, the server's or the clients'",
)


def _steps(run: Run) -> Numbers | None:
    onward = run.persistence()
    early, late = run.mean("signal", "early"), run.mean("signal", "late")
    if onward is None or not early or late is None or run.rounds < FEW or not _felt(run):
        return None
    if DIVERGED(run):
        return None
    clip, clipped, norm = run.clip, run.mean("shrunk") or 0.0, run.mean("norm") or 0.0
    cut = clip is not None and clipped >= CLIPPED and norm >= OVERSHOT * clip
    degrees = math.degrees(math.acos(onward))
    return {"persistence": onward, "degrees": degrees, "left": late / early, "cut": float(cut)}


OVERSTEPPED = Rule(
    "steps too long",
    _steps,
    lambda n: n["persistence"] < BACK and n["left"] > SETTLED,
    lambda n: (
        f"the mean update points back at {figure(n['degrees'])}° to the last global update, and is "
        f"still {n['left']:.0%} as long as in the first quarter of the rounds"
    ),
    lambda n: "lower the learning rate, the server's or the clients'",
    needs=("cosine",),
)

TIMID = Rule(
    "steps too short",
    _steps,
    lambda n: n["persistence"] > ONWARD and n["left"] > STILL and not n["cut"],
    lambda n: (
        f"every round goes the way of the last, at {figure(n['degrees'])}° to it, and the mean "
        f"update is still {n['left']:.0%} as long as in the first quarter of the rounds"
    ),
    lambda n: "raise the learning rate, or play more rounds",
    needs=("cosine",),
)


def _angles(run: Run) -> Numbers | None:
    cosine = run.cosine("early")
    bare = isinstance(run.recipe.bound, Unbounded)
    if cosine is None or run.rounds < FEW or not _felt(run):
        return None
    if bare or run.recipe.memory.kept or run.recipe.unit == "example":
        return None
    return {"cosine": cosine, "degrees": math.degrees(math.acos(cosine))}


DISAGREEING = Rule(
    "clients disagree",
    _angles,
    lambda n: abs(n["cosine"]) < ACROSS,
    lambda n: (
        f"angles to the last global update are near 90° ({figure(n['degrees'])}° in the "
        "first quarter of the rounds): clients disagree"
    ),
    lambda n: "error compensation helps here (fed_alpha_normec)",
    needs=("cosine",),
)

RULES = (DIVERGED, OVERSTEPPED, TIMID, DISAGREEING)
