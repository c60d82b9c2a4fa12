"""Samplers: laws by enumeration of their thresholds, draws against the laws and against OpenDP."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtri

from fedveil.errors import UserError
from fedveil.random import samplers
from fedveil.random.samplers import (
    BITS,
    SamplingTable,
    binomial_table,
    gaussian_table,
    laplace_table,
    normals,
    rounded_gaussian,
)

EXACT = mpmath.MPContext()
EXACT.dps = 80
UNIT = Fraction(1, 2**BITS)


class Scripted:
    """A generator whose words are given: the first ones drawn at once, the others as asked."""

    def __init__(self, *words: int) -> None:
        self.words = list(words)

    def integers(self, limit: int, size: int, dtype: type) -> np.ndarray:
        assert limit == 2**64
        drawn, self.words = self.words[:size], self.words[size:]
        assert len(drawn) == size
        return np.array(drawn, dtype=dtype)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def chi_square(values: np.ndarray, masses: np.ndarray, low: int) -> float:
    """The p-value of values low.. against masses; cells under 10 expected join the last other."""
    observed = np.bincount(values - low, minlength=len(masses)).astype(float)
    expected = masses * len(values)
    rare = expected < 10
    cells = [np.append(x[~rare][:-1], x[~rare][-1] + x[rare].sum()) for x in (observed, expected)]
    return float(stats.chisquare(*cells, sum_check=False).pvalue)


def floats(table: SamplingTable) -> np.ndarray:
    return np.array([count / 2**BITS for count in table.counts()])


def ideal(weight: Callable[[int], object], support: int) -> list[Fraction]:
    """Masses on −m..m from 80-digit weights, as fractions."""
    half = [weight(y) for y in range(support + 1)]
    total = 2 * EXACT.fsum(half) - half[0]
    masses = [Fraction(int(w / total * 2**240), 2**240) for w in half]
    return [*masses[:0:-1], *masses]


def laplace(alpha: float, support: int) -> list[Fraction]:
    return ideal(lambda y: EXACT.exp(-EXACT.mpf(alpha) * y), support)


def gaussian(sigma: float, support: int) -> list[Fraction]:
    return ideal(lambda y: EXACT.exp(-(EXACT.mpf(y) ** 2) / (2 * EXACT.mpf(sigma) ** 2)), support)


def binomial(trials: int) -> list[Fraction]:
    return [Fraction(math.comb(trials, k), 2**trials) for k in range(trials + 1)]


def variation(table: SamplingTable, law: list[Fraction]) -> Fraction:
    """Total-variation distance between a table's own law and another on the same values."""
    counts = table.counts()
    gaps = (abs(count * UNIT - mass) for count, mass in zip(counts, law, strict=True))
    return sum(gaps, Fraction(0)) / 2


CASES = [
    ("laplace", lambda: laplace_table(0.3, 12), lambda: laplace(0.3, 12)),
    ("laplace-flat", lambda: laplace_table(1e-6, 40), lambda: laplace(1e-6, 40)),
    ("laplace-deep", lambda: laplace_table(1.0, 200), lambda: laplace(1.0, 200)),
    ("gaussian", lambda: gaussian_table(2.5, 20), lambda: gaussian(2.5, 20)),
    ("gaussian-odd", lambda: gaussian_table(10 / 3, 30), lambda: gaussian(10 / 3, 30)),
    ("gaussian-cut", lambda: gaussian_table(300.0, 500), lambda: gaussian(300.0, 500)),
    ("gaussian-tiny", lambda: gaussian_table(0.05, 3), lambda: gaussian(0.05, 3)),
    ("binomial", lambda: binomial_table(40), lambda: binomial(40)),
    ("binomial-2", lambda: binomial_table(2), lambda: binomial(2)),
]


@pytest.mark.parametrize(("make", "law"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_table_is_the_stated_law_to_within_its_error(make, law) -> None:
    table, masses = make(), law()
    assert sum(table.counts()) == 2**BITS
    assert table.counts() == table.counts()[::-1]
    assert variation(table, masses) <= Fraction(table.error) <= 1001 * UNIT


def test_a_wrong_law_lies_outside_the_error() -> None:
    table = gaussian_table(2.5, 20)
    assert variation(table, gaussian(2.5 * (1 + 1e-12), 20)) > 1000 * Fraction(table.error)


def test_tails_keep_their_digits_where_float_sums_lose_them() -> None:
    table = laplace_table(1.0, 60)
    law = laplace(1.0, 60)
    assert law[0] < Fraction(1, 10**26)
    assert table.counts()[0] * UNIT / law[0] == pytest.approx(1.0, rel=1e-9)


def test_a_wide_gaussian_keeps_its_precision_to_the_end_of_the_recurrence() -> None:
    """After 70,000 products each mass is still right to two units of 2^-124."""
    sigma, support = 6000.3, 100_000
    counts = gaussian_table(sigma, support).counts()
    total = EXACT.sqrt(2 * EXACT.pi) * EXACT.mpf(sigma)  # Σ over all integers, to 60 digits
    for y in (0, 1, 100, 30_000, 60_000, 70_000):
        mass = EXACT.exp(-(EXACT.mpf(y) ** 2) / (2 * EXACT.mpf(sigma) ** 2)) / total
        assert abs(counts[y + support] - mass * 2**BITS) <= 2


def test_a_large_binomial_is_cut_where_no_mass_is_left() -> None:
    trials = 100_000
    table = binomial_table(trials)
    assert table.high < trials // 2
    assert table.error >= 2.0**-125 + (2 * table.high + 1) * 2.0**-BITS
    assert 2 * math.exp(-2 * table.high**2 / trials) < 2.0**-125
    for y in (0, 1, 1000, 2000):
        exact = Fraction(math.comb(trials, trials // 2 + y), 2**trials)
        assert abs(table.counts()[y + table.high] - exact / UNIT) <= 2
    assert binomial_table(10**7).high == math.isqrt(44 * 10**7) + 1


DRAWN = [
    (lambda: laplace_table(0.3, 12), lambda: laplace_table(0.31, 12)),
    (lambda: gaussian_table(4.0, 60), lambda: gaussian_table(4.05, 60)),
    (lambda: gaussian_table(900.0, 4000), lambda: gaussian_table(940.0, 4000)),
    (lambda: binomial_table(64), lambda: gaussian_table(4.1, 32)),
]


@pytest.mark.parametrize(("make", "wrong"), DRAWN)
def test_draws_match_their_law_and_no_other(make, wrong) -> None:
    table = make()
    drawn = table.draw((400, 1000), rng(1))
    assert drawn.shape == (400, 1000)
    assert drawn.dtype == np.int64
    assert chi_square(drawn.ravel(), floats(table), table.low) > 1e-3
    assert chi_square(drawn.ravel(), floats(wrong()), table.low) < 1e-6


def test_a_sum_of_draws_has_the_law_of_the_sum() -> None:
    table = laplace_table(0.5, 6)
    law = np.array([1.0])
    for _ in range(7):
        law = np.convolve(law, floats(table))
    drawn = table.draw_sum(200_000, 7, rng(2))
    assert chi_square(drawn, law, 7 * table.low) > 1e-3
    assert chi_square(drawn + rng(3).integers(2, size=len(drawn)), law, 7 * table.low) < 1e-6


def test_a_sum_of_many_draws_has_their_variance_and_independent_coordinates() -> None:
    table = gaussian_table(100.0, 1000)
    sums = table.draw_sum(7850, 60, rng(4)) / math.sqrt(60 * 100.0**2)
    assert abs(sums.var() - 1) < 4 * math.sqrt(2 / 7850)
    assert abs(np.corrcoef(sums[1:], sums[:-1])[0, 1]) < 4 / math.sqrt(7850)


@pytest.mark.parametrize("dim", [0, 1, 3, 40_000])
def test_sums_of_any_shape(dim: int) -> None:
    assert laplace_table(0.5, 6).draw_sum(dim, 5, rng()).shape == (dim,)
    assert laplace_table(0.5, 6).draw_sum(dim, 0, rng()).tolist() == [0] * dim


def test_the_guide_decides_only_cells_without_a_threshold() -> None:
    """All of a decided cell's numbers, first to last, have the same place."""
    cell = 2 ** (BITS - 16)
    edges = (3 * cell, 5 * cell - 1, 7 * cell + 1, 2**BITS)
    guide = SamplingTable(0, edges, 0.0)._guide
    assert np.flatnonzero(guide < 0).tolist() == [3, 4, 7]
    for leading in (0, 2, 5, 6, 8, 2**16 - 1):
        first, last = leading * cell, (leading + 1) * cell - 1
        for number in (first, last):
            assert guide[leading] == sum(edge <= number for edge in edges)


def test_every_bit_of_a_threshold_counts() -> None:
    """Numbers just below, at and above each threshold, fed in by hand, fall where they should."""
    edges = (0, 5, 2**62 + 9, 2**62 + 10, 7 << 108, (7 << 108) + 1, 2**BITS - 1, 2**BITS)
    table = SamplingTable(-3, edges, 0.0)
    around = {edge + step for edge in edges for step in (-1, 0, 1)}
    for number in sorted(n for n in around if 0 <= n < 2**BITS):
        place = sum(edge <= number for edge in edges)
        leading, middle, last = number >> 108, number >> 62 & (2**46 - 1), number & (2**62 - 1)
        drawn = table.draw(1, Scripted(leading, middle << 18, last << 2))
        assert drawn.tolist() == [place - 3], number


def test_tables_are_made_once() -> None:
    assert gaussian_table(2.5, 20) is gaussian_table(2.5, 20)
    assert "thresholds" not in repr(gaussian_table(2.5, 20))


@pytest.mark.parametrize(
    "make",
    [
        lambda: laplace_table(0.0, 5),
        lambda: laplace_table(math.nan, 5),
        lambda: laplace_table(1.0, 0),
        lambda: gaussian_table(-1.0, 5),
        lambda: gaussian_table(math.inf, 5),
        lambda: gaussian_table(1.0, 0),
        lambda: binomial_table(3),
        lambda: binomial_table(0),
        lambda: rounded_gaussian(0.001, 5, rng()),
        lambda: rounded_gaussian(2.0**41, 5, rng()),
        lambda: rounded_gaussian(math.nan, 5, rng()),
        lambda: SamplingTable(0, (5, 4), 0.0),
        lambda: SamplingTable(0, (2**BITS + 1,), 0.0),
    ],
)
def test_bad_input_is_refused_in_one_sentence(make) -> None:
    with pytest.raises(UserError, match=r"^[^\n]+\. (Give|Sort) [^\n]+\.$"):
        make()


def opendp_draws(kind: str, scale: float, size: int) -> np.ndarray:
    """OpenDP's exact samplers on integers; their randomness cannot be seeded."""
    dp = pytest.importorskip("opendp.prelude", reason="OpenDP is not installed")
    dp.enable_features("contrib")
    domain = dp.vector_domain(dp.atom_domain(T=int))
    if kind == "gaussian":
        release = dp.m.make_gaussian(domain, dp.l2_distance(T=float), scale=scale)
    else:
        release = dp.m.make_laplace(domain, dp.l1_distance(T=int), scale=scale)
    return np.array(release([0] * size))


def two_sample(a: np.ndarray, b: np.ndarray) -> float:
    """The p-value of two samples from one law; values seen under 20 times join their neighbours."""
    low = min(a.min(), b.min())
    size = int(max(a.max(), b.max()) - low) + 1
    both = np.stack([np.bincount(x - low, minlength=size) for x in (a, b)])
    often = both.sum(axis=0) >= 20
    cells = np.column_stack([both[:, often], both[:, ~often].sum(axis=1)])
    return float(stats.chi2_contingency(cells[:, cells.sum(axis=0) > 0]).pvalue)


@pytest.mark.parametrize(
    ("kind", "table", "wrong"),
    [
        ("gaussian", lambda: gaussian_table(3.0, 60), lambda: gaussian_table(3.25, 60)),
        ("laplace", lambda: laplace_table(1 / 3, 200), lambda: laplace_table(1 / 2.7, 200)),
    ],
)
def test_draws_agree_with_opendp(kind: str, table, wrong) -> None:
    """A false alarm has probability 1e-7; a scale off by about a tenth is noticed."""
    theirs = opendp_draws(kind, 3.0, 40_000)
    assert two_sample(theirs, table().draw(40_000, rng(5))) > 1e-7
    assert two_sample(theirs, wrong().draw(40_000, rng(5))) < 1e-7


def rounded_masses(sigma: float, reach: int) -> np.ndarray:
    """Φ((k+½)/σ) − Φ((k−½)/σ) for k = −reach..reach."""
    edges = (np.arange(-reach, reach + 2) - 0.5) / sigma
    return np.diff(stats.norm.cdf(edges))


@pytest.mark.parametrize("sigma", [0.2, 0.4, 1.0, 7.3])
def test_the_rounded_gaussian_has_its_exact_masses(sigma: float) -> None:
    drawn = rounded_gaussian(sigma, 400_000, rng(6))
    reach = max(1, math.ceil(8 * sigma))
    assert drawn.dtype == np.int64
    assert chi_square(drawn, rounded_masses(sigma, reach), -reach) > 1e-3
    assert chi_square(drawn, rounded_masses(sigma * 1.02, reach), -reach) < 1e-6


def test_the_narrowest_rounded_gaussian_is_never_anything_but_zero() -> None:
    """P(|X| > ½) = 2·P(Z > 50) < 1e-544."""
    assert not rounded_gaussian(0.01, 400_000, rng(6)).any()
    assert rounded_gaussian(0.01, 1, Scripted(0, 0, 0, 2**50)).tolist() == [0]


@pytest.mark.parametrize("sigma", [1e4, 2.0**20, 2.0**33])
def test_a_wide_rounded_gaussian_is_a_gaussian(sigma: float) -> None:
    scores = rounded_gaussian(sigma, (200, 500), rng(7)).ravel() / sigma
    assert stats.kstest(scores, "norm").pvalue > 1e-3
    assert stats.kstest(scores * 1.04, "norm").pvalue < 1e-3
    for power, moment, spread in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((scores**power).mean() - moment) < 4 * math.sqrt(spread / scores.size)


def test_the_widest_rounded_gaussian_fills_every_bit() -> None:
    """With σ = 2^40 the last bit is a fair coin, and float64 alone could not give it."""
    drawn = rounded_gaussian(2.0**40, 4000, rng(8))
    assert abs((drawn / 2.0**40).var() - 1) < 4 * math.sqrt(2 / 4000)
    assert abs((drawn & 1).mean() - 0.5) < 2 / math.sqrt(4000)


def upper_quantile(u: object) -> object:
    """v with P(Z > v) = u, by Newton's method in 80 digits."""
    v = EXACT.mpf(float(-ndtri(float(u))))
    for _ in range(4):
        density = EXACT.npdf(v)
        v += (EXACT.erfc(v / EXACT.sqrt(2)) / 2 - u) / density
    return v


def test_scipy_s_quantile_errs_by_far_less_than_the_margin() -> None:
    """Over the middle, both seams of its three formulas, and tails to 2^-190."""
    at = rng(9)
    points = [
        at.random(300) / 2,
        0.5 - 2.0 ** -at.uniform(2, 50, 150),
        2.0 ** -at.uniform(1, 190, 300),
        math.exp(-2) + at.normal(size=80) * 1e-3,
        math.exp(-32) * (1 + at.normal(size=80) * 1e-2),
    ]
    for u in np.concatenate(points):
        v = upper_quantile(EXACT.mpf(u))
        assert abs(-float(ndtri(u)) - v) <= samplers.MARGIN / 16 * v, u


def exact_round(leading: int, bits: int, sigma: float) -> int:
    """round(σ·v) in the middle of u's interval, in 80 digits."""
    v = upper_quantile((EXACT.mpf(leading) + 0.5) / EXACT.mpf(2) ** bits)
    return int(EXACT.floor(EXACT.mpf(sigma) * v + 0.5))


def doubtful_cases(sigma: float, wanted: int, seed: int) -> list[int]:
    """63-bit numbers whose σ·v falls next to a half-integer, found from the half-integers."""
    at, cases = rng(seed), []
    for k in at.integers(0, max(1, int(3 * sigma)), size=wanted):
        edge = int(samplers._tail(int(k), sigma, 64))
        cases += [edge - 2, edge - 1, edge + 1, edge + 2]
    return cases


@pytest.mark.parametrize("sigma", [3.7, 1000.0, 2.0**25])
def test_where_float64_is_wrong_about_a_half_integer_the_resolver_is_right(sigma: float) -> None:
    """Numbers within two units of an edge: the float answer is wrong for many, ours for none."""
    wrong = 0
    for leading in doubtful_cases(sigma, 60, 10):
        right = exact_round(leading, 64, sigma)
        score = -ndtri((leading + 0.5) * 2.0**-64)
        wrong += math.floor(sigma * score + 0.5) != right
        assert samplers._resolved(leading, 64, sigma, Scripted()) == right
        drawn = rounded_gaussian(sigma, 2, Scripted(leading << 1, leading << 1 | 1, 0))
        assert drawn.tolist() == [right, -right]
    assert wrong >= 20


def test_a_number_on_an_edge_draws_further_bits_until_they_decide() -> None:
    sigma, k = 3.7, 5
    leading = int(samplers._tail(k, sigma, 64))
    following = int(samplers._tail(k, sigma, 128)) - (leading << 64)
    assert samplers._resolved(leading, 64, sigma, Scripted(following - 1)) == k + 1
    assert samplers._resolved(leading, 64, sigma, Scripted(following + 1)) == k
    assert samplers._resolved(leading, 64, sigma, Scripted(following, 0)) == k + 1
    assert samplers._resolved(leading, 64, sigma, Scripted(following, 2**64 - 1)) == k


@pytest.mark.parametrize("words", [(0, 0, 5 << 40, 77), (2, 12345, 678), (2**30, 9)])
def test_the_far_tail_goes_on_below_the_first_bits(words: tuple[int, ...]) -> None:
    """u below 2^-64, and 0 in its first 128 bits: the quantile is finite and the exact one."""
    sigma = 50.0
    u = 0
    for word in words[1:]:
        u = u << 64 | word
    u |= (words[0] >> 1) << 64 * (len(words) - 1)
    drawn = rounded_gaussian(sigma, 1, Scripted(*words))
    assert drawn.tolist() == [exact_round(u, 64 * len(words), sigma)]
    assert drawn[0] > 6 * sigma


def test_all_but_the_doubtful_are_decided_alike_by_float64_and_in_80_digits() -> None:
    """The margin is no wider than it says, and what lies outside of it is right."""
    sigma = 2.0**30
    words = rng(11).integers(2**64, size=200, dtype=np.uint64)
    leading = words >> np.uint64(1)
    scaled = sigma * -ndtri((leading.astype(float) + 0.5) * 2.0**-64)
    assert samplers._doubtful(leading, scaled, sigma).mean() < 0.01
    drawn = rounded_gaussian(sigma, 200, Scripted(*words.tolist(), *range(50)))
    for word, value in zip(words.tolist(), drawn.tolist(), strict=True):
        assert abs(value) == exact_round(word >> 1, 64, sigma)
        assert (value < 0) == bool(word & 1)


@pytest.mark.parametrize(
    ("draw", "block"),
    [(normals, samplers.PIECE), (lambda n, at: rounded_gaussian(50.0, n, at), samplers.BLOCK)],
    ids=["normals", "rounded"],
)
def test_no_block_of_a_long_vector_repeats_another(draw, block: int) -> None:
    """Two coordinates with the same noise would show the difference of what they hide."""
    drawn = draw(4 * block, rng(13)).reshape(4, block)
    alike = np.corrcoef(drawn) - np.eye(4)
    assert np.abs(alike).max() < 6 / math.sqrt(block)


def test_the_same_stream_gives_the_same_draws() -> None:
    assert np.array_equal(
        rounded_gaussian(9.0, 50_000, rng(12)), rounded_gaussian(9.0, 50_000, rng(12))
    )
    assert laplace_table(0.5, 6).draw(0, rng()).shape == (0,)
    assert rounded_gaussian(9.0, (0, 3), rng()).shape == (0, 3)
