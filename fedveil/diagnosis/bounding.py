"""Rules about the bound: what clipping takes away, and what it lets noise cost."""

from __future__ import annotations

from fedveil.diagnosis.rule import Numbers, Rule, figure
from fedveil.diagnosis.run import Run
from fedveil.parts.bound import AdaptiveClip

CLIPPED = 0.75  # a clip at the median shortens half; three quarters are well beyond that
VARIED = 3.0  # ninetieth over tenth percentile of norms: above, clients' weights differ as much
OVERSHOT = 3.0  # median norm over C, or B over c: steps, or all error terms, are off by as much
ALIGNED = 0.5  # cosine above which one round goes the way of the last, so longer steps would do
LOOSE = 0.05  # of updates clipped: so few that C bounds nothing
SLACK = 2.0  # C over the ninetieth percentile of norms: the noise is larger than needed by this
FELT = 1.0  # signal to noise below which less noise is worth having


def _clipping(run: Run) -> Numbers | None:
    clip = run.clip
    if clip is None or run.recipe.unit == "example":
        return None
    median = run.quantile(0.5) or run.mean("norm")
    clipped = run.mean("shrunk")
    if median is None or clipped is None:
        return None
    low, high = run.quantile(0.1), run.quantile(0.9)
    private = run.recipe.private
    onward = run.persistence()
    return {
        "clip": clip,
        "clipped": clipped,
        "median": median,
        "overshoot": median / clip,
        "low": median if low is None else low,
        "high": median if high is None else high,
        "varied": 1.0 if low is None or high is None else high / max(low, 1e-30),
        "adaptive": float(isinstance(run.recipe.bound, AdaptiveClip)),
        "persistence": 1.0 if onward is None else onward,
        # Noise grows with C, so that of a private run follows the median (Andrew et al. 2021).
        "raise_to": median if private or high is None else high,
    }


def _raised(n: Numbers) -> str:
    what = "the first C of the adaptive clip" if n["adaptive"] else "C"
    return f"raise {what} to {figure(n['raise_to'])}"


BIASED = Rule(
    "clipping bias",
    _clipping,
    lambda n: n["clipped"] >= CLIPPED and n["varied"] >= VARIED and n["raise_to"] > n["clip"],
    lambda n: (
        f"{n['clipped']:.0%} of updates are clipped at C = {figure(n['clip'])} and their norms "
        f"vary {figure(n['varied'])}× (from {figure(n['low'])} to {figure(n['high'])}, tenth to "
        "ninetieth percentile), so that clients count unequally"
    ),
    lambda n: f"normalize, or {_raised(n)}",
    needs=("norm_median",),
)

SHORT = Rule(
    "C too small",
    _clipping,
    lambda n: (
        n["clipped"] >= CLIPPED
        and n["overshoot"] >= OVERSHOT
        and n["varied"] < VARIED
        and n["persistence"] >= ALIGNED
    ),
    lambda n: (
        f"{n['clipped']:.0%} of updates are clipped at C = {figure(n['clip'])}, the median one to "
        f"1/{figure(n['overshoot'])} of its norm {figure(n['median'])}, and the model still goes "
        "one way"
    ),
    lambda n: f"{_raised(n)}, or make the server's rate {figure(n['overshoot'])}× as large",
)


def _slack(run: Run) -> Numbers | None:
    clip, ratio = run.clip, run.signal_to_noise
    high, clipped = run.quantile(0.9), run.mean("shrunk")
    if clip is None or ratio is None or high is None or clipped is None:
        return None
    return {
        "clip": clip,
        "clipped": clipped,
        "high": high,
        "slack": clip / max(high, 1e-30),
        "signal_to_noise": ratio,
        "lower_to": high,
    }


SLACKENED = Rule(
    "C too large",
    _slack,
    lambda n: n["clipped"] <= LOOSE and n["slack"] >= SLACK and n["signal_to_noise"] < FELT,
    lambda n: (
        f"noise is made for C = {figure(n['clip'])}, but 90% of updates are shorter than "
        f"{figure(n['high'])}, and signal to noise is {figure(n['signal_to_noise'])}"
    ),
    lambda n: (
        f"lower C to {figure(n['lower_to'])}, which makes noise {figure(n['slack'])}× smaller, or "
        "normalize"
    ),
    needs=("norm_median",),
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
        f"B/c is {figure(n['ratio'])} (root mean square of what clipping at c = "
        f"{figure(n['clip'])} takes away, over c), with {n['clipped']:.0%} of updates clipped"
    ),
    lambda n: (
        f"raise c to {figure(n['raise_to'])}, or take more local steps of a smaller rate (DP-LSGD)"
    ),
    needs=("second_moment",),
)

RULES = (BIASED, SHORT, SLACKENED, MOMENT)
