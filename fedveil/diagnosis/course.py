"""Rules about the course of a run: its loss, its steps, and whether clients pull together."""

from __future__ import annotations

import math

import numpy as np

from fedveil.diagnosis.bounding import CLIPPED, OVERSHOT
from fedveil.diagnosis.noise import LOW
from fedveil.diagnosis.rule import Numbers, Rule, figure
from fedveil.diagnosis.run import Run
from fedveil.parts.bound import Unbounded

GREW = 2.0  # loss at the end over its least: no spread of evaluations doubles a loss
FELL = 0.05  # of accuracy: a loss that grows while accuracy stays is overconfidence instead
BACK = -0.2  # cosine below which updates undo the last step, 102° and more
ONWARD = 0.9  # cosine above which they all repeat it, 26° and less
ACROSS = 0.15  # |cosine| below which they have nothing in common with it, 81° to 99°
FEW = 8  # rounds of which too little can be said


def _losses(run: Run) -> Numbers | None:
    losses = run.column("loss")
    evaluated = np.array([row.get("loss") is not None for row in run.rows if not row.get("void")])
    if evaluated.sum() < 2 or not _felt(run):
        return None
    rounds, losses = np.flatnonzero(evaluated) + 1, losses[evaluated]
    losses = np.where(np.isfinite(losses), losses, math.inf)
    least = int(losses.argmin())
    scores = run.column("accuracy")[evaluated]
    fell = scores[least] - scores[-1] if np.isfinite(scores[[least, -1]]).all() else 1.0
    return {
        "least": float(losses[least]),
        "round": float(rounds[least]),
        "last": float(losses[-1]),
        "fell": float(fell),
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


def _angles(run: Run) -> Numbers | None:
    late, early = run.cosine("late"), run.cosine("early")
    if late is None or early is None or run.rounds < FEW or not _felt(run):
        return None
    clip, norm = run.clip, run.mean("norm") or 0.0
    cut = clip is not None and (run.mean("shrunk") or 0) >= CLIPPED and norm >= OVERSHOT * clip
    bare = isinstance(run.recipe.bound, Unbounded)
    return {
        "late": late,
        "early": early,
        "degrees": math.degrees(math.acos(late)),
        "early_degrees": math.degrees(math.acos(early)),
        "cut": float(cut),
        "bounded": float(not bare),
        "remembers": float(run.recipe.memory.kept),
    }


OVERSTEPPED = Rule(
    "steps too long",
    _angles,
    lambda n: n["late"] < BACK,
    lambda n: (
        f"updates point back at {figure(n['degrees'])}° to the last global update: each round "
        "undoes some of the one before"
    ),
    lambda n: "lower the learning rate, the server's or the clients'",
    needs=("cosine",),
)

TIMID = Rule(
    "steps too short",
    _angles,
    lambda n: n["late"] > ONWARD and not n["cut"],
    lambda n: (
        f"updates still point the way of the last global update, at {figure(n['degrees'])}° to it"
    ),
    lambda n: "raise the learning rate, or play more rounds",
    needs=("cosine",),
)

DISAGREEING = Rule(
    "clients disagree",
    _angles,
    lambda n: abs(n["early"]) < ACROSS and not n["remembers"] and bool(n["bounded"]),
    lambda n: (
        f"angles to the last global update are near 90° ({figure(n['early_degrees'])}° in the "
        "first quarter of the rounds): clients disagree"
    ),
    lambda n: "error compensation helps here (fed_alpha_normec)",
    needs=("cosine",),
)

RULES = (DIVERGED, OVERSTEPPED, TIMID, DISAGREEING)
