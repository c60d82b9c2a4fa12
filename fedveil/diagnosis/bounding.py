"""Rules about the bound: clipping bias, and C too small or too large."""

from __future__ import annotations

import numpy as np

from fedveil.diagnosis.change import flags
from fedveil.diagnosis.rule import Numbers, Rule, figure
from fedveil.diagnosis.run import DiagnosedRun, Part
from fedveil.planning.verdict import WORKS

CLIPPED = 0.75  # clipping at the median norm clips half of the updates
ALL = 0.99  # clipped: what is left of the learning rate is the direction of several local steps
VARIED = 3.0  # 90th over 10th percentile of norms: clipping weights clients as unequally
OVERSHOT = 3.0  # median norm over C, or B over c: the factor by which steps or errors are off
# Gain in signal-to-noise ratio with C at the median norm (the 90th percentile if norms vary).
SLACK = 1.5


def _part(run: DiagnosedRun) -> Part:
    """The rounds to judge. An adaptive clip adapts, so only its initial threshold can be wrong."""
    return "early" if run.recipe.bound.adapts else "late"


def _threshold(run: DiagnosedRun) -> float | None:
    return run.mean("threshold", "early") if run.recipe.bound.adapts else run.clip


def _clipping(run: DiagnosedRun) -> Numbers | None:
    clip, part = _threshold(run), _part(run)
    if clip is None or run.recipe.unit == "example":
        return None
    median = run.quantile(0.5, part) or run.mean("norm", part)
    clipped = run.mean("clipped_fraction", part)
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
        "adaptive": float(run.recipe.bound.adapts),
        "onward": float(run.onward or run.clients is None),
        # Noise grows with C, so a private run uses the median (Andrew et al. 2021).
        "raise_to": median if run.recipe.private or high is None else high,
    }


def _named(n: Numbers) -> str:
    return "the initial C" if n["adaptive"] else "C"


def _clip_flags(run: DiagnosedRun, value: float) -> str:
    name = "start" if run.recipe.bound.adapts else "clip"
    return flags(run.recipe, **{name: value})


BIASED = Rule(
    "clipping bias",
    _clipping,
    lambda n: n["clipped"] >= CLIPPED and n["varied"] >= VARIED and n["raise_to"] > n["clip"],
    lambda n: (
        f"{n['clipped']:.0%} of updates are clipped at C = {figure(n['clip'])}, and their norms "
        f"vary {figure(n['varied'])}× (10th percentile {figure(n['low'])}, 90th "
        f"{figure(n['high'])}). Clipping therefore weights clients unequally"
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
        f"{n['clipped']:.0%} of updates are clipped at C = {figure(n['clip'])}. The median norm is "
        f"{figure(n['median'])}, {figure(n['overshoot'])}× as large, and successive rounds move in "
        "the same direction. Steps are too short"
    ),
    lambda n: (
        f"raise {_named(n)} to {figure(n['raise_to'])}, or multiply the server's learning rate by "
        f"{figure(n['overshoot'])}"
    ),
    command=lambda run, n: _clip_flags(run, n["raise_to"]),
)


def _slack(run: DiagnosedRun) -> Numbers | None:
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
        "adaptive": float(run.recipe.bound.adapts),
    }


def _filled(norms: np.ndarray, clip: float) -> float:
    """mean min(‖w‖, C)/C: signal over noise, up to a factor that does not depend on C."""
    return max(float(np.minimum(norms, clip).mean()) / max(clip, 1e-30), 1e-9)


SLACKENED = Rule(
    "C too large",
    _slack,
    lambda n: n["lower_to"] < n["clip"] and n["gain"] >= SLACK and n["run_ratio"] < WORKS,
    lambda n: (
        f"the noise is scaled to C = {figure(n['clip'])}, but half of the updates have norms below "
        f"{figure(n['median'])}. The signal-to-noise ratio over the run is only "
        f"{figure(n['run_ratio'])}"
    ),
    lambda n: (
        f"lower {_named(n)} to {figure(n['lower_to'])}, which multiplies the signal-to-noise ratio "
        f"by {figure(n['gain'])}, or normalize"
    ),
    needs=("norm_median",),
    command=lambda run, n: _clip_flags(run, n["lower_to"]),
)


def _moment(run: DiagnosedRun) -> Numbers | None:
    clip, moment, clipped = run.clip, run.mean("second_moment"), run.mean("clipped_fraction")
    if clip is None or moment is None or clipped is None or run.recipe.unit != "example":
        return None
    raised = run.quantile(0.5) or clip
    return {"clip": clip, "clipped": clipped, "ratio": moment / clip, "raise_to": raised}


MOMENT = Rule(
    "clipping bias of examples",
    _moment,
    lambda n: n["clipped"] >= CLIPPED and n["ratio"] >= OVERSHOT and n["raise_to"] > n["clip"],
    lambda n: (
        f"clipping at C = {figure(n['clip'])} removes {figure(n['ratio'])} times as much as it "
        f"keeps (B/c, root mean square). {n['clipped']:.0%} of examples are clipped"
    ),
    lambda n: (
        f"raise C to {figure(n['raise_to'])}, or use dp_lsgd: more local steps with a smaller "
        "learning rate"
    ),
    needs=("second_moment",),
    command=lambda run, n: flags(run.recipe, clip=n["raise_to"]),
)


def _all_clipped(run: DiagnosedRun) -> Numbers | None:
    clip, clipped = run.clip, run.mean("clipped_fraction", "all")
    if clip is None or clipped is None or run.recipe.unit != "example":
        return None
    return {"clip": clip, "clipped": clipped, "rate": run.recipe.local.rate(0)}


INERT = Rule(
    "learning rate without effect",
    _all_clipped,
    lambda n: n["clipped"] >= ALL,
    lambda n: (
        f"{n['clipped']:.1%} of examples are clipped at C = {figure(n['clip'])}, so that the "
        f"length of a step is set by C and server_rate. learning_rate = {figure(n['rate'])} only "
        "changes its direction, and not even that for a single gradient"
    ),
    lambda n: "set the length of steps with server_rate, which leaves ε as it is",
    wrong=False,
)

RULES = (BIASED, SHORT, SLACKENED, MOMENT, INERT)
