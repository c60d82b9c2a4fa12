"""Rules about the bound: what clipping takes away, and what it lets noise cost."""

from __future__ import annotations

import numpy as np

from fedveil.diagnosis.change import flags
from fedveil.diagnosis.rule import Numbers, Rule, figure
from fedveil.diagnosis.run import Part, Run
from fedveil.parts.bound import AdaptiveClip
from fedveil.planning.verdict import WORKS

CLIPPED = 0.75  # a clip at the median shortens half; three quarters are well beyond that
VARIED = 3.0  # ninetieth over tenth percentile of norms: above, clients' weights differ as much
OVERSHOT = 3.0  # median norm over C, or B over c: steps, or all error terms, are off by as much
SLACK = (
    1.5  # times more signal to noise with C at the median, or where norms vary the 90th percentile
)


def _part(run: Run) -> Part:
    """An adaptive clip finds its way in time: what is wrong with it is its start."""
    return "early" if isinstance(run.recipe.bound, AdaptiveClip) else "late"


def _threshold(run: Run) -> float | None:
    adaptive = isinstance(run.recipe.bound, AdaptiveClip)
    return run.mean("threshold", "early") if adaptive else run.clip


def _clipping(run: Run) -> Numbers | None:
    clip, part = _threshold(run), _part(run)
    if clip is None or run.recipe.unit == "example":
        return None
    median = run.quantile(0.5, part) or run.mean("norm", part)
    clipped = run.mean("shrunk", part)
    if median is None or clipped is None:
        return None
    low, high = run.quantile(0.1, part), run.quantile(0.9, part)
    return {
        "clip": clip,
        "clipped": clipped,
        "median": median,
        "overshoot": median / clip,
        "low": median if low is None else low,
        "high": median if high is None else high,
        "varied": 1.0 if low is None or high is None else high / max(low, 1e-30),
        "adaptive": float(isinstance(run.recipe.bound, AdaptiveClip)),
        "onward": float(run.onward or run.clients is None),
        # Noise grows with C, so that of a private run follows the median (Andrew et al. 2021).
        "raise_to": median if run.recipe.private or high is None else high,
    }


def _named(n: Numbers) -> str:
    return "the adaptive clip's first C" if n["adaptive"] else "C"


def _clip_flags(run: Run, value: float) -> str:
    adaptive = isinstance(run.recipe.bound, AdaptiveClip)
    return flags(run.recipe, start=value) if adaptive else flags(run.recipe, clip=value)


BIASED = Rule(
    "clipping bias",
    _clipping,
    lambda n: n["clipped"] >= CLIPPED and n["varied"] >= VARIED and n["raise_to"] > n["clip"],
    lambda n: (
        f"{n['clipped']:.0%} of updates are clipped at C = {figure(n['clip'])} and their norms "
        f"vary {figure(n['varied'])}× (from {figure(n['low'])} to {figure(n['high'])}, tenth to "
        "ninetieth percentile), so that clients count unequally"
    ),
    lambda n: f"normalize, or raise {_named(n)} to {figure(n['raise_to'])}",
    needs=("norm_median",),
    command=lambda run, n: _clip_flags(run, n["raise_to"]),
)

SHORT = Rule(
    "C too small",
    _clipping,
    lambda n: (
        n["clipped"] >= CLIPPED
        and n["overshoot"] >= OVERSHOT
        and n["varied"] < VARIED
        and bool(n["onward"])
    ),
    lambda n: (
        f"{n['clipped']:.0%} of updates are clipped at C = {figure(n['clip'])}, the median one to "
        f"1/{figure(n['overshoot'])} of its norm {figure(n['median'])}, and every round goes on "
        "the way of the last, so that steps are too short"
    ),
    lambda n: (
        f"raise {_named(n)} to {figure(n['raise_to'])}, or make the server's rate "
        f"{figure(n['overshoot'])}× as large"
    ),
    command=lambda run, n: _clip_flags(run, n["raise_to"]),
)


def _slack(run: Run) -> Numbers | None:
    clip, part = _threshold(run), _part(run)
    norms = run.norms(part)
    if clip is None or run.run_ratio is None or norms is None or not len(norms):
        return None
    low, median, high = (float(np.quantile(norms, share)) for share in (0.1, 0.5, 0.9))
    lowered = median if high < VARIED * low else high
    return {
        "clip": clip,
        "median": median,
        "run_ratio": run.run_ratio,
        "gain": _filled(norms, lowered) / _filled(norms, clip),
        "lower_to": lowered,
        "adaptive": float(isinstance(run.recipe.bound, AdaptiveClip)),
    }


def _filled(norms: np.ndarray, clip: float) -> float:
    """mean min(‖w‖, C)/C: signal over noise, up to what is common to every C."""
    return max(float(np.minimum(norms, clip).mean()) / max(clip, 1e-30), 1e-9)


SLACKENED = Rule(
    "C too large",
    _slack,
    lambda n: n["lower_to"] < n["clip"] and n["gain"] >= SLACK and n["run_ratio"] < WORKS,
    lambda n: (
        f"noise is made for C = {figure(n['clip'])}, but half of the updates are shorter than "
        f"{figure(n['median'])}, and over the run the signal is only {figure(n['run_ratio'])} "
        "times the noise"
    ),
    lambda n: (
        f"lower {_named(n)} to {figure(n['lower_to'])}, for {figure(n['gain'])}× more signal to "
        "noise, or normalize"
    ),
    needs=("norm_median",),
    command=lambda run, n: _clip_flags(run, n["lower_to"]),
)


def _moment(run: Run) -> Numbers | None:
    clip, moment, clipped = run.clip, run.mean("second_moment"), run.mean("shrunk")
    if clip is None or moment is None or clipped is None or run.recipe.unit != "example":
        return None
    raised = run.quantile(0.5) or clip
    return {"clip": clip, "clipped": clipped, "ratio": moment / clip, "raise_to": raised}


MOMENT = Rule(
    "clipping bias of examples",
    _moment,
    lambda n: n["clipped"] >= CLIPPED and n["ratio"] >= OVERSHOT and n["raise_to"] > n["clip"],
    lambda n: (
        f"clipping examples at C = {figure(n['clip'])} takes away {figure(n['ratio'])} times as "
        f"much as it leaves (B/c, root mean square), with {n['clipped']:.0%} of them clipped"
    ),
    lambda n: (
        f"raise C to {figure(n['raise_to'])}, or take more local steps of a smaller rate, dp_lsgd"
    ),
    needs=("second_moment",),
    command=lambda run, n: flags(run.recipe, clip=n["raise_to"]),
)

RULES = (BIASED, SHORT, SLACKENED, MOMENT)
