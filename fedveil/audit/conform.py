"""conform: test another framework's private aggregation against the contract it claims.

An aggregator is a class constructed without arguments that declares `name`, `clip`,
`noise_multiplier` and `cohort`. Called with (updates, counts, seed) it returns the mean update
that one round releases. It claims: (Σ clip(u_i) + N(0, (multiplier·clip)²I))/cohort, with each
client's part bounded whatever the client sends. With a `threshold`, its clip adapts to the median.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedveil.accounting.rounding import short
from fedveil.audit import bounds
from fedveil.audit.report import ALARM
from fedveil.errors import UserError

DIM, WIDE, ROUNDS = 40, 4000, 40
DELTA = 1e-5
SLACK = 1e-3  # relative, of a norm: float32 means
NOISE_SLACK = 0.06  # relative, of a deviation estimated from WIDE numbers: over five std. errors
COUNTS = 300  # rounds used to estimate the noise of a count
OWN = 0x0A4D17  # separates the canaries' stream from any aggregator's noise
SOON = 160  # rounds within which a threshold must reach the median


class ForeignAggregator(Protocol):
    """The private mean of one round's updates, and its claims."""

    name: str
    clip: float  # of one update; the initial one if it adapts
    noise_multiplier: float  # standard deviation of the noise on the sum, over the clip
    cohort: int  # clients per round, and the denominator

    def __call__(
        self, updates: Sequence[np.ndarray], counts: Sequence[int], seed: int
    ) -> np.ndarray:
        """The released mean update; `counts` are the clients' numbers of examples."""


Make = Callable[[], ForeignAggregator]
Check = Callable[[Make], tuple[bool, str]]


@dataclass(frozen=True)
class ClauseResult:
    """One clause of the contract, whether it holds, and what was measured."""

    clause: str
    kept: bool
    measured: str


def conform(make: Make) -> list[ClauseResult]:
    """Check all clauses; a clause fails if its check ends with an error.

    An aggregator may refuse a round of hostile input with a ValueError.
    """
    _refuse_unplayable(make)
    checks = [*CLAUSES, *(ADAPTIVE if hasattr(make(), "threshold") else ())]
    return [_checked(check, make) for check in checks]


def _refuse_unplayable(make: Make) -> None:
    """Refuse an adapter that fails on an ordinary round, before its aggregator is tested."""
    claim = make()
    try:
        released = _round(make, _people(claim.cohort, DIM, claim.clip / 2))
    except Exception as problem:
        why = str(problem).partition("\n")[0].rstrip(".")
        raise UserError(
            f"The adapter of '{claim.name}' fails on an ordinary round with "
            f"{type(problem).__name__}: {why}. Fix the adapter first."
        ) from problem
    if released.shape != (DIM,):
        raise UserError(
            f"The adapter of '{claim.name}' returns the shape {list(released.shape)} for updates "
            f"of {DIM} numbers. Return the mean update."
        )


def _checked(check: Check, make: Make) -> ClauseResult:
    clause = (check.__doc__ or "").partition("\n")[0].rstrip(".")
    try:
        kept, measured = check(make)
    except Exception as problem:  # third-party code can raise anything
        refused = isinstance(problem, ValueError) and check in MAY_REFUSE
        text = str(problem).partition("\n")[0].rstrip(".")
        how = "the round is refused" if refused else f"failed with {type(problem).__name__}"
        return ClauseResult(clause, refused, f"{how}: {text}")
    return ClauseResult(clause, kept, measured)


# ------------------------------------------------------------------------------ inputs


def _people(cohort: int, dim: int, length: float) -> list[np.ndarray]:
    """Updates of this length in random directions."""
    rng = np.random.default_rng(7)
    rows = rng.normal(size=(cohort, dim))
    return list((length * rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32))


def _round(
    make: Make, updates: Sequence[np.ndarray], counts: Sequence[int] | None = None, seed: int = 0
) -> np.ndarray:
    """The first round of a new aggregator, on copies, so that it cannot modify the originals."""
    counts = [10] * len(updates) if counts is None else counts
    with np.errstate(all="ignore"):
        released = make()([np.array(update) for update in updates], list(counts), seed)
    return np.asarray(released, dtype=np.float64)


def _with(updates: Sequence[np.ndarray], first: np.ndarray) -> list[np.ndarray]:
    return [first, *updates[1:]]


# ------------------------------------------------------------------------------ clauses


def zero_update(make: Make) -> tuple[bool, str]:
    """A zero update is accepted."""
    claim = make()
    people = _people(claim.cohort, DIM, claim.clip)
    released = _round(make, _with(people, np.zeros(DIM, dtype=np.float32)))
    return bool(np.isfinite(released).all()), "the round succeeded"


def bounded_influence(make: Make) -> tuple[bool, str]:
    """One client moves the mean by at most clip/cohort."""
    claim = make()
    people = _people(claim.cohort, DIM, claim.clip / 2)
    tiny = np.full(DIM, 1e-6 * claim.clip, dtype=np.float32)
    still = _round(make, _with(people, tiny))
    long = [(10.0**power) * claim.clip * people[0] for power in (-1, 0, 1, 4, 12)]
    moves = [np.linalg.norm(_round(make, _with(people, row)) - still) for row in long]
    worst, allowed = float(max(moves)), claim.clip / claim.cohort
    return worst <= allowed * (1 + SLACK), f"at most {worst / allowed:.3g} times as much"


def broken_update(make: Make) -> tuple[bool, str]:
    """An update with NaN or ±∞ does not reach the mean."""
    claim = make()
    people = _people(claim.cohort, DIM, claim.clip / 2)
    reached = []
    for value in (math.nan, math.inf, -math.inf):
        broken = people[0].copy()
        broken[-1] = value
        if not np.isfinite(_round(make, _with(people, broken))).all():
            reached.append(f"{value}")
    return not reached, f"reached by {', '.join(reached)}" if reached else "rejected"


def example_counts(make: Make) -> tuple[bool, str]:
    """A client with many examples moves the mean no more than any other."""
    claim = make()
    people = _people(claim.cohort, DIM, claim.clip)
    counts = [1000] + [1] * (claim.cohort - 1)
    move = _round(make, people, counts) - _round(make, _with(people, 1e-6 * people[0]), counts)
    share = float(np.linalg.norm(move)) / (claim.clip / claim.cohort)
    return share <= 1 + SLACK, f"{share:.3g} times clip/cohort with 1000 examples next to 1"


def public_denominator(make: Make) -> tuple[bool, str]:
    """With half of the clients the mean is half as long: the denominator is fixed."""
    claim = make()
    same = [_people(1, DIM, claim.clip)[0]] * claim.cohort
    direction = same[0] / np.linalg.norm(same[0])
    all_of, half = (
        float(np.mean([_round(make, same[:came], seed=seed) @ direction for seed in range(ROUNDS)]))
        for came in (claim.cohort, claim.cohort // 2)
    )
    noise = claim.noise_multiplier * claim.clip / claim.cohort / math.sqrt(ROUNDS)
    share, wanted = half / all_of, (claim.cohort // 2) / claim.cohort
    doubt = 6 * noise / max(abs(all_of), 1e-12)
    return abs(share - wanted) <= 0.05 + doubt, f"it is {share:.2f} times as long"


def _noise(make: Make, arrived: int, seed: int = 0) -> np.ndarray:
    """The noise of a round with negligible updates."""
    tiny = 1e-9 * make().clip
    return _round(make, _people(arrived, WIDE, tiny), seed=seed)


def _playable(make: Make) -> list[int]:
    """Numbers of clients to test: the cohort, and half of it unless such a round is refused."""
    cohort = make().cohort
    try:
        _noise(make, cohort // 2)
    except ValueError:
        return [cohort]
    return [cohort, cohort // 2]


def enough_noise(make: Make) -> tuple[bool, str]:
    """Noise on the mean has at least the deviation multiplier·clip/cohort, for any attendance."""
    claim = make()
    wanted = claim.noise_multiplier * claim.clip / claim.cohort
    found = [float(np.std(_noise(make, came))) for came in _playable(make)]
    least, most = min(found) / wanted, max(found) / wanted
    return least >= 1 - NOISE_SLACK, f"{least:.3g} to {most:.3g} times as much"


def noise_everywhere(make: Make) -> tuple[bool, str]:
    """Noise is Gaussian and the same in every coordinate."""
    from scipy.stats import kurtosis

    rows = np.stack([_noise(make, make().cohort, seed) for seed in range(20)])
    spread = rows.std(axis=0) / rows.std()
    tails = float(kurtosis(rows, axis=None))
    low, high = float(spread.min()), float(spread.max())
    even = low > 0.25 and high < 2.1  # of 20 draws each: beyond six standard errors
    text = f"deviations from {low:.2f} to {high:.2f} of their mean, excess kurtosis {tails:.2f}"
    return even and abs(tails) < 0.2, text


def fresh_noise(make: Make) -> tuple[bool, str]:
    """No two rounds have the same noise."""
    aggregator = make()
    rows = _people(aggregator.cohort, WIDE, 1e-9 * aggregator.clip)
    rounds = [
        np.asarray(aggregator([np.array(row) for row in rows], [10] * len(rows), seed), dtype=float)
        for seed in (1, 2)
    ]
    alike = _correlation(*rounds)
    return abs(alike) < 6 / math.sqrt(WIDE), f"correlation of two rounds: {alike:.3f}"


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    return float(first @ second / max(np.linalg.norm(first) * np.linalg.norm(second), 1e-300))


def audited(make: Make) -> tuple[bool, str]:
    """Canaries find no more than the claimed ε of one release."""
    mu = 1 / make().noise_multiplier
    rounds = [one for seed in range(ROUNDS) for one in _aligned(make(), seed)]
    lower = bounds.alignment_mu(rounds)
    found, claimed = (bounds.gaussian_epsilon(level, DELTA) for level in (lower, mu))
    text = f"ε ≥ {found:.3g} found, ε = {claimed:.3g} claimed, at δ = {short(DELTA)}"
    said = "canaries report 100 examples, the others 10"
    return bounds.alignment_p(rounds, mu) >= ALARM, f"{text}; {said}"


def _aligned(aggregator: ForeignAggregator, seed: int) -> list[bounds.Aligned]:
    """One round in which a fifth are canaries with many examples, and the others send nothing."""
    rng = np.random.default_rng([seed, OWN])
    count = max(aggregator.cohort // 5, 1)
    canaries = rng.normal(size=(count, WIDE))
    canaries /= np.linalg.norm(canaries, axis=1, keepdims=True)
    rest = _people(aggregator.cohort - count, WIDE, 1e-9 * aggregator.clip)
    rows = [(1e3 * aggregator.clip * row).astype(np.float32) for row in canaries] + rest
    counts = [100] * count + [10] * len(rest)
    released = np.asarray(aggregator(rows, counts, seed), dtype=np.float64)
    return bounds.Aligned.of(canaries.sum(axis=0), released)


MAY_REFUSE: tuple[Check, ...] = (broken_update, example_counts, public_denominator)
CLAUSES: tuple[Check, ...] = (
    zero_update,
    bounded_influence,
    broken_update,
    example_counts,
    public_denominator,
    enough_noise,
    noise_everywhere,
    fresh_noise,
    audited,
)


# ------------------------------------------------------------------------------ adaptive clips


def _lengths(cohort: int, median: float) -> np.ndarray:
    spread = np.exp(np.random.default_rng(3).normal(size=cohort))
    return np.asarray(spread * median / np.median(spread))


def finds_the_median(make: Make) -> tuple[bool, str]:
    """A threshold far below or above the median converges to it."""
    found = [_went_to(make, factor) for factor in (1e3, 1e-3)]
    kept = all(0.5 < place < 2 for place in found)
    return kept, f"from below to {found[0]:.3g}, from above to {found[1]:.3g} medians"


def _went_to(make: Make, factor: float) -> float:
    """The threshold after some rounds, over the median of the lengths."""
    aggregator: Any = make()
    median = factor * aggregator.clip
    directions = _people(aggregator.cohort, DIM, 1.0)
    rows = [
        (length * row).astype(np.float32)
        for length, row in zip(_lengths(aggregator.cohort, median), directions, strict=True)
    ]
    for seed in range(SOON):
        aggregator([np.array(row) for row in rows], [10] * len(rows), seed)
    reached: float = float(aggregator.threshold) / median
    return reached


def noise_of_its_round(make: Make) -> tuple[bool, str]:
    """Noise covers the threshold that the round's updates were clipped to."""
    least = _least_multiplier(make)
    share = least / make().noise_multiplier
    return share >= 1 - NOISE_SLACK, f"at least {share:.3g} times the claimed deviation"


def _least_multiplier(make: Make) -> float:
    """The deviation of a first round's noise over the first threshold, for long and short updates.

    Taken from the difference of two rounds with the same updates, which cancel.
    """
    claim = make()
    found = []
    for length in (1e-9, 1e3):
        people = _people(claim.cohort, WIDE, length * claim.clip)
        pair = [_round(make, people, seed=seed) for seed in (1, 2)]
        found.append(float(np.std(pair[0] - pair[1])) / math.sqrt(2) * claim.cohort / claim.clip)
    return min(found)


def sum_and_count(make: Make) -> tuple[bool, str]:
    """Sum and count together are as private as one release of the claimed multiplier.

    A client that is added or removed moves the count by `move` standard deviations of its noise.
    The noise is taken to be as large as its draws allow.
    """
    claim = make()
    people = _people(claim.cohort, DIM, claim.clip / 2)
    noise = _at_most(np.array([_log_step(make, people, seed) for seed in range(COUNTS)]))
    if noise == 0:
        return False, "the count has no noise"
    moves = [
        _log_step(make, [length * people[0], *people[1:]], 0) - _log_step(make, people[1:], 0)
        for length in (1.0, 1e3)
    ]
    move = max(abs(step) for step in moves) / noise
    joint = (_least_multiplier(make) ** -2 + move**2) ** -0.5
    share = joint / claim.noise_multiplier
    text = f"at most {share:.3g} times the claimed multiplier"
    text += f"; one client moves the count by at least {move:.3g} σ"
    return share >= 1 - NOISE_SLACK, text


def _at_most(draws: np.ndarray) -> float:
    """An upper bound on the deviation of normal numbers, which fails with probability ALARM."""
    from scipy.stats import chi2

    low = float(chi2.ppf(ALARM, len(draws) - 1))
    return float(np.std(draws, ddof=1)) * math.sqrt((len(draws) - 1) / low)


def _log_step(make: Make, rows: Sequence[np.ndarray], seed: int) -> float:
    aggregator: Any = make()
    before = float(aggregator.threshold)
    aggregator([np.array(row) for row in rows], [10] * len(rows), seed)
    return math.log(float(aggregator.threshold) / before)


ADAPTIVE: tuple[Check, ...] = (finds_the_median, noise_of_its_round, sum_and_count)
