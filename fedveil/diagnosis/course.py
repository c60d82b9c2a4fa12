"""Rules about the course of a run: its loss, its steps, and whether clients pull together."""

from __future__ import annotations

import math

import numpy as np

from fedveil.diagnosis.bounding import BIASED, MOMENT, SHORT, SLACKENED
from fedveil.diagnosis.change import stretched_steps
from fedveil.diagnosis.rule import Numbers, Rule, figure
from fedveil.diagnosis.run import Run
from fedveil.parts.bound import Unbounded

LOW = 0.3  # late signal to noise: below, over 90% of a step's squared length is noise
GREW = 2.0  # loss at the end over its least: no spread of evaluations doubles a loss
FELL = 0.05  # of accuracy: a loss that grows while accuracy stays is overconfidence instead
BACK = -0.5  # p below which a step of two thirds would have been better
FLOOR = -0.75  # p with noise: at -1 a round loses as much as it wins, and there is no more progress
SETTLED = 0.5  # late over early mean update: back and forth in ever shorter steps is convergence
ONWARD = 0.9  # p above which a tenth of a step's slope is used up
STILL = 0.9  # late over early mean update: nearer to its optimum, a model's is shorter
FALLING = 0.05  # of the loss, from the third to the last quarter of the evaluations
JUMPY = 0.25  # of the loss between two evaluations: bears out what angles say
SOLVED = 0.95  # accuracy: where classes come apart the loss falls for ever, and little is to win
MANY = 8  # evaluations: two in a quarter
LEAP = 4.0  # times longer steps at most: a parabola is not to be trusted farther
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
    """Whether steps are more than noise, so that their angles and the loss tell of the clients."""
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
    lambda n: "lower the learning rate, the server's or the clients', to a half",
    command=lambda run, n: stretched_steps(run.recipe, 0.5),
)


def _steps(run: Run) -> Numbers | None:
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
        "longer": min(1 / max(1 - slope.value, 1e-9), LEAP),
    }


def _falling(run: Run) -> float:
    """The share of its loss that a run lost from the third to the last quarter of evaluations."""
    losses = run.column("loss")
    losses = losses[np.isfinite(losses)]
    quarter = len(losses) // 4
    if len(losses) < MANY:
        return 0.0
    before, after = losses[-2 * quarter : -quarter].mean(), losses[-quarter:].mean()
    return float(1 - after / before) if before > 0 else 0.0


def _jumps(run: Run) -> float:
    """By which share of itself the loss changes from one late evaluation to the next."""
    losses = run.column("loss", "late")
    losses = losses[np.isfinite(losses)]
    if len(losses) < MANY // 2:
        return 0.0
    return float(np.median(np.abs(np.diff(losses)) / np.maximum(losses[:-1], 1e-30)))


def _too_long(n: Numbers) -> bool:
    if n["noisy"]:
        return n["slope"] + n["error"] < FLOOR and not n["loose"]
    sure = n["error"] if n["jumps"] > JUMPY else 2 * n["error"]
    return n["slope"] + sure < BACK and n["left"] > SETTLED


def _too_short(n: Numbers) -> bool:
    onward = n["slope"] > ONWARD and n["left"] > STILL
    falling = bool(n["onward"]) and n["falling"] > FALLING
    return (onward or falling) and not n["cut"] and not n["solved"]


OVERSTEPPED = Rule(
    "steps too long",
    _steps,
    _too_long,
    lambda n: (
        "a global step goes too far: at its end the clients' mean update pulls back with "
        f"{-n['slope']:.0%} of the pull at its start (0% is best; from 100% on rounds win nothing)"
    ),
    lambda n: (
        f"make steps {figure(n['shorter'])} times as long"
        + (", which lets in less noise as well" if n["noisy"] else "")
    ),
    needs=("cosine",),
    command=lambda run, n: stretched_steps(run.recipe, n["shorter"]),
)

TIMID = Rule(
    "steps too short",
    _steps,
    _too_short,
    lambda n: (
        "global steps are too short: at the end of one the clients' mean update still pulls the "
        f"same way with {min(n['slope'], 1.0):.0%} of the pull at its start, and {_unfinished(n)}"
    ),
    lambda n: (
        f"make steps {figure(n['longer'])}× as long"
        + (", which costs no privacy" if n["noisy"] else ", or play more rounds")
    ),
    needs=("cosine",),
    command=lambda run, n: stretched_steps(run.recipe, n["longer"]),
)


def _unfinished(n: Numbers) -> str:
    if n["falling"] > FALLING:
        return f"the loss still fell by {n['falling']:.0%} in the last quarter"
    return f"is still {n['left']:.0%} as long as in the first quarter of the rounds"


def _angles(run: Run) -> Numbers | None:
    cosine = run.cosine("early")
    bare = isinstance(run.recipe.bound, Unbounded)
    if cosine is None or run.rounds < FEW or not _felt(run):
        return None
    if bare or run.recipe.memory.kept or run.recipe.unit == "example" or OVERSTEPPED(run):
        return None
    degrees, moving = math.degrees(math.acos(cosine)), float(_moving(run))
    return {"cosine": cosine, "degrees": degrees, "moving": moving}


def _moving(run: Run) -> bool:
    """Whether the mean update is as long as before and rounds go on: nothing cancels as yet."""
    early, late = run.mean("signal", "early"), run.mean("signal", "late")
    return run.onward and (late or 0.0) > SETTLED * (early or math.inf)


DISAGREEING = Rule(
    "clients disagree",
    _angles,
    lambda n: abs(n["cosine"]) < ACROSS and not n["moving"],
    lambda n: (
        f"clients disagree: their updates are at {figure(n['degrees'])}° to the last global one in "
        "the first quarter of the rounds (90° is nothing in common), and bounded updates that "
        "cancel stop a model where the real ones would not"
    ),
    lambda n: "let clients remember what the bound took away: error compensation",
    needs=("cosine",),
    command=lambda run, n: "--algorithm fed_alpha_normec",
)

RULES = (DIVERGED, OVERSTEPPED, TIMID, DISAGREEING)
