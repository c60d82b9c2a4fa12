"""Claimed and true privacy of each paper's own noise formula at its own setting, by view.

Writes docs/claims.md:  python experiments/claims.py > docs/claims.md
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from string import Template
from typing import Any, Literal

import numpy as np

from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.wire import bits_for

INFINITE = "no finite ε"
POINTS = 10_000  # of a loss's grid in `by_chance`
LENGTHS = (100, 300, 1000, 3000)  # rounds to compare if a paper does not give their number


def classic(rate: float, rounds: int, epsilon: float, delta: float) -> float:
    """q·√(T·ln(1/δ))/ε: σ over sensitivity, as Abadi et al. 2016, Thm. 1 has it with c₂ = 1."""
    return rate * math.sqrt(rounds * math.log(1 / delta)) / epsilon


@dataclass(frozen=True)
class Claim:
    """A paper's (ε, δ) for a setting, and the noise that its formula gives.

    `multiplier` is the deviation of the noise in the sum of a full cohort, over the largest norm of
    one message. With noise at the clients, each message holds one share of that variance.
    """

    name: str
    epsilon: float
    delta: float
    rounds: int
    cohort: int
    population: int
    sampler: Literal["poisson", "fixed-size", "everyone"]
    at: Literal["client", "server"]
    multiplier: float
    silent: bool = False  # whether the paper leaves out the number of rounds

    @property
    def rate(self) -> float:
        """The probability that a unit takes part in a round."""
        return self.cohort / self.population

    @property
    def ratio(self) -> float:
        """σ over sensitivity of the sum: a fixed-size cohort is accounted under replace-one."""
        return self.multiplier / (2 if self.sampler == "fixed-size" else 1)

    def louder(self, factor: float) -> Claim:
        """The same claim with σ multiplied by a factor."""
        return replace(self, multiplier=factor * self.multiplier)

    def lasting(self, rounds: int) -> Claim:
        """The same claim over another number of rounds; its formula has σ ∝ √rounds."""
        factor = math.sqrt(rounds / self.rounds)
        return replace(self, rounds=rounds, multiplier=factor * self.multiplier)


def models(claim: Claim) -> float:
    """ε against an observer of the models, with the noise of the full cohort in every round."""
    base = events.GaussianRelease(claim.ratio)
    match claim.sampler:
        case "everyone":
            return gaussian(claim.ratio / math.sqrt(claim.rounds), claim.delta)
        case "poisson":
            event: events.Round = events.PoissonSampled(claim.rate, base)
        case _:
            event = events.SampledWithoutReplacement(claim.cohort, claim.population, base)
    return accounting.epsilon(events.Composed(event, claim.rounds), claim.delta)


def sum_always(claim: Claim) -> float:
    """ε against an observer of the cohort and its sum, for a unit in every round."""
    return _always(claim, claim.ratio)


def sum_by_chance(claim: Claim) -> float:
    """The same for a unit that takes part with the sampling probability."""
    return _by_chance(claim, claim.ratio)


def messages_always(claim: Claim) -> float:
    """ε against an observer of each message, for a unit in every round."""
    return _always(claim, claim.ratio / math.sqrt(claim.cohort))


def messages_by_chance(claim: Claim) -> float:
    """The same for a unit that takes part with the sampling probability."""
    return _by_chance(claim, claim.ratio / math.sqrt(claim.cohort))


def _always(claim: Claim, ratio: float) -> float:
    if claim.at == "server":  # the receiver of the sum or the messages gets them without noise
        return math.inf
    return gaussian(ratio / math.sqrt(claim.rounds), claim.delta)


def _by_chance(claim: Claim, ratio: float) -> float:
    if claim.at == "server" or claim.rate == 1:
        return _always(claim, ratio)
    return by_chance(ratio, claim.rate, claim.rounds, claim.delta)


def gaussian(ratio: float, delta: float) -> float:
    """The ε with Φ(½/ρ − ερ) − e^ε·Φ(−½/ρ − ερ) = δ.  Balle and Wang 2018, Thm. 8; exact."""
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    def excess(epsilon: float) -> float:
        high = log_ndtr(0.5 / ratio - epsilon * ratio)
        low = epsilon + log_ndtr(-0.5 / ratio - epsilon * ratio)
        return float(high + np.log(-np.expm1(min(low - high, -1e-300))) - math.log(delta))

    top = 0.5 / ratio**2 + math.sqrt(2 * math.log(1 / delta)) / ratio
    return float(brentq(excess, 0.0, top)) if excess(0.0) > 0 else 0.0


def by_chance(ratio: float, rate: float, rounds: int, delta: float) -> float:
    """ε of `rounds` rounds, each a Gaussian release with probability `rate` and else nothing.

    Participation is observed, so a round's curve is rate·δ(ε) + (1 − rate)·(1 − e^ε)₊ exactly. It
    is discretized from above.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_mechanism
    from dp_accounting.pld import privacy_loss_distribution as pld

    release = privacy_loss_mechanism.GaussianPrivacyLoss(ratio)
    bounds = release.connect_dots_bounds()
    interval = (bounds.epsilon_upper - bounds.epsilon_lower) / POINTS
    low, high = (math.floor(b / interval) for b in (bounds.epsilon_lower, bounds.epsilon_upper))
    losses = np.arange(low, high + 2) * interval
    nothing = np.maximum(-np.expm1(np.minimum(losses, 0.0)), 0.0)
    curve = rate * np.asarray(release.get_delta_for_epsilon(losses)) + (1 - rate) * nothing
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high + 1, curve)
    composed: Any = pld.PrivacyLossDistribution(pmf).self_compose(rounds)
    return float(composed.get_epsilon_for_delta(delta))


def factor_needed(claim: Claim, view: Callable[[Claim], float]) -> float:
    """The factor on σ at which the view's ε equals the claimed one, to 0.1% and from above."""
    from scipy.optimize import newton

    def excess(log_factor: float) -> float:
        return math.log(view(claim.louder(math.exp(log_factor))) / claim.epsilon)

    # ε decreases with a power of σ between 1 and 2, so a secant in logarithms is nearly straight.
    root = newton(excess, 0.0, x1=excess(0.0) / 1.5, tol=5e-4)
    return math.exp(root + 5e-4)


def needed(claim: Claim, view: Callable[[Claim], float]) -> str:
    """The factor for the table; no amount of noise helps where the view does not contain it."""
    if claim.at == "server" and view is not models:
        return "none suffices"
    return up(factor_needed(claim, view))


def zhang() -> Iterator[Claim]:
    """Zhang et al. 2022, Thm. 3.2 and section 4; the noise is in each message (Alg. 3, line 10)."""
    settings = ((1.5, 1000, "most models"), (5.0, 3000, "ResNet-18 on EMNIST"))
    for epsilon, rounds, task in settings:
        multiplier = classic(80 / 1920, rounds, epsilon, 1e-5)
        claim = Claim(
            f"Zhang 2022, {task}", epsilon, 1e-5, rounds, 80, 1920, "fixed-size", "client",
            multiplier, silent=True,
        )  # fmt: skip
        yield claim
        if epsilon == 1.5:
            yield replace(claim, name=claim.name + ", read as Poisson", sampler="poisson")


def das2022() -> Iterator[Claim]:
    """Das et al. 2022, Thm. 1 (eq. 5), Alg. 1, sections 5.3 and 6."""
    for epsilon in (5.0, 1.5):
        yield Claim(
            "Das 2022, Fashion-MNIST", epsilon, 1e-5, 200, 600, 3000, "poisson", "client",
            classic(0.2, 200, epsilon, 1e-5), silent=True,
        )  # fmt: skip
    yield Claim(
        "Das 2022, quadratics", 5.0, 1e-6, 500, 100, 100, "everyone", "client",
        classic(1.0, 500, 5.0, 1e-6),
    )  # fmt: skip


def shulgin() -> Iterator[Claim]:
    """Shulgin et al. 2025, Cor. 2 and section 5: σ is that of each message."""
    printed = math.sqrt(math.log(1e5))  # section 5 prints ln(1/δ) outside the root
    for extra, source in ((1.0, "Cor. 2"), (printed, "as printed in sec. 5")):
        for chance in (1.0, 0.25):
            cohort = round(20 * chance)
            message = extra * classic(chance, 300, 8.0, 1e-5)
            yield Claim(
                f"Shulgin 2025, {source}, p = {chance:g}", 8.0, 1e-5, 300, cohort, 20,
                "everyone" if chance == 1 else "poisson", "client", math.sqrt(cohort) * message,
            )  # fmt: skip


def dp_lsgd() -> Iterator[Claim]:
    """DP-LSGD, Lemma 1, Alg. 1 (eq. 3), Tables 1, 3 and 4; the server adds the noise."""
    for epsilon, rounds in ((1.0, 500), (2.0, 1000), (4.0, 2000)):
        yield Claim(
            "DP-LSGD, CIFAR-10", epsilon, 1e-5, rounds, 1000, 50_000, "poisson", "server",
            classic(0.02, rounds, epsilon, 1e-5),
        )  # fmt: skip


def claims() -> list[Claim]:
    """Every Gaussian claim, paper by paper."""
    return [*zhang(), *das2022(), *shulgin(), *dp_lsgd()]


@dataclass(frozen=True)
class Quantized:
    """QTDL with the published α and m.  Das et al. 2021, Thm. 1, with the sensitivities given."""

    name: str
    dim: int
    levels: int
    epsilon: float
    one: float  # Δ₁ in grid steps
    largest: float  # Δ∞ in grid steps

    @property
    def alpha(self) -> float:
        """α = ε/Δ₁."""
        return self.epsilon / self.one

    @property
    def support(self) -> int:
        """m = ⌈−log(1 − (e^α − 1)Δ∞)/α⌉."""
        return math.ceil(-math.log1p(-math.expm1(self.alpha) * self.largest) / self.alpha)

    @property
    def bits(self) -> int:
        """t = ⌈log2(2(s + m) + 1)⌉.  Das et al. 2021, eq. 7."""
        top = self.levels + self.support
        return bits_for(-top, top)

    def escape(self, steps: int) -> float:
        """δ of a message with one coordinate moved by `steps`: the mass of the top values."""
        grown = math.expm1(self.alpha)
        tail = math.exp(-self.alpha * self.support)
        return tail * math.expm1(self.alpha * steps) / grown / (1 + 2 * (1 - tail) / grown)

    def digits_of_safety(self) -> float:
        """−log10(1 − δ) of a message if moves as large as Δ∞ use up all of Δ₁."""
        steps = math.floor(self.largest)
        coordinates = math.floor(self.one / steps)
        return -coordinates * math.log1p(-self.escape(steps)) / math.log(10)


def published() -> list[Quantized]:
    """Das et al. 2021, Tables 2 and 4: ε = 10 per round and eq. 6 with μ = 0.1."""
    tasks = (("Fashion-MNIST", 328_810, (6, 12)), ("CIFAR-10", 2_210_410, (9, 20)))
    return [
        Quantized(
            f"{task}, s = 2^{power}", dim, 2**power, 10.0,
            2 * dim + 0.1 * 2**power * math.sqrt(dim), 2 + 0.1 * 2**power,
        )
        for task, dim, powers in tasks
        for power in powers
    ]  # fmt: skip


def unassuming(levels: int = 2**20, rounds: int = 1000) -> Quantized:
    """Das et al. 2021, section 6 (ii): (0.1, 1e-9) over all rounds with Δ∞ = 2s and Δ₁ = 2ds."""
    dim = 328_810
    epsilon = 0.1 / math.sqrt(2 * rounds * math.log(1e9))
    return Quantized("Table 3", dim, levels, epsilon, 2.0 * dim * levels, 2.0 * levels)


def up(number: float) -> str:
    """Three digits, rounded up.

    >>> up(4.9912), up(0.05301), up(17303.4), up(math.inf)
    ('5.00', '0.0531', '17,400', 'no finite ε')
    """
    if math.isinf(number):
        return INFINITE
    places = 2 - math.floor(math.log10(number))
    raised = math.ceil(number * 10**places * (1 - 1e-12)) / 10**places
    return f"{raised:,.{max(places, 0)}f}"


VIEWS = (models, sum_always, sum_by_chance, messages_always, messages_by_chance)
ADJACENCY = {"poisson": "add-remove", "everyone": "zero-out", "fixed-size": "replace-one"}


def table(head: str, rows: Iterator[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [tuple(cell.strip() for cell in head.split("|"))]
    lines.append(("---",) * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in (*lines, *rows))


def by_view() -> str:
    """ε of every Gaussian claim in every view."""
    head = "setting | rounds | cohort | adjacency | σ/C | claimed | models | sum, every round | "
    head += "sum, as drawn | messages, every round | messages, as drawn"
    return table(
        head,
        (
            (
                claim.name,
                f"{claim.rounds:,}{'?' if claim.silent else ''}",
                f"{claim.cohort:,} of {claim.population:,}",
                ADJACENCY[claim.sampler],
                f"{claim.multiplier:.3g}",
                f"({claim.epsilon:g}, {claim.delta:.0e})",
                *(up(view(claim)) for view in VIEWS),
            )
            for claim in claims()
        ),
    )


def by_length() -> str:
    """ε in view `models` of claims whose number of rounds is not known."""
    lengths = " | ".join(f"{rounds:,} rounds" for rounds in LENGTHS)
    return table(
        f"setting | claimed ε | {lengths}",
        (
            (
                claim.name,
                f"{claim.epsilon:g}",
                *(up(models(claim.lasting(rounds))) for rounds in LENGTHS),
            )
            for claim in claims()
            if claim.silent
        ),
    )


def by_factor() -> str:
    """How much larger σ would have to be."""
    return table(
        "setting | claimed ε | models | sum, every round | messages, every round",
        (
            (
                claim.name,
                f"{claim.epsilon:g}",
                *(needed(claim, view) for view in (models, sum_always, messages_always)),
            )
            for claim in claims()
        ),
    )


def quantized() -> str:
    """Das 2021's bits, which are right, and its δ, which is not."""
    head = "setting | m | t bits | claimed δ | δ, one coordinate by one level | "
    head += "the same in a sum of 25 | δ, worst case within Δ₁ and Δ∞"
    return table(
        head,
        (
            (
                case.name,
                f"{case.support:,}",
                str(case.bits),
                f"2^−{case.dim:,}",
                up(case.escape(1)),
                f"10^−{math.floor(-25 * math.log10(case.escape(1)))}",
                f"1 − 10^−{math.floor(case.digits_of_safety()):,}",
            )
            for case in published()
        ),
    )


def hidden_alone() -> float:
    """Shulgin 2025, Cor. 2, p = 0.25: one message's noise alone, if who takes part were hidden."""
    (claim,) = (c for c in shulgin() if c.name.endswith("Cor. 2, p = 0.25"))
    return models(claim.louder(1 / math.sqrt(claim.cohort)))


def known_batches() -> str:
    """DP-LSGD: ε for who sees the noisy sums and knows every batch."""
    found = (gaussian(c.ratio / math.sqrt(c.rounds), c.delta) for c in dp_lsgd())
    return ", ".join(up(epsilon) for epsilon in found)


def document() -> str:
    """docs/claims.md."""
    return Template(TEXT).substitute(
        by_view=by_view(),
        by_length=by_length(),
        by_factor=by_factor(),
        quantized=quantized(),
        hidden_alone=up(hidden_alone()),
        known_batches=known_batches(),
        opposite=up(unassuming().escape(2 * unassuming().levels)),
    )


TEXT = """\
# Claimed and true privacy of the papers

Generated by `python experiments/claims.py > docs/claims.md`.
Checked by `tests/unit/test_claims.py`.

Each paper states an (ε, δ) and a formula for the noise. This document computes the ε that the
formula's noise gives at the paper's own setting. There is one result for each of three adversary
views (docs/privacy.md):

- **models**: sees only the released models. Sampling amplifies. The accounting assumes that every
  round's sum contains the noise of a full cohort, no matter how many participate.
- **sum**: sees who participates, and the sum of their messages with the noise of all of them.
- **messages**: sees who participates, and every message with only its own noise.

The last two views have no amplification. *Every round* is for a unit that participates in all
rounds, the worst case. *As drawn* is for a unit that participates with the sampling probability p:
each round is the mechanism with probability p and nothing otherwise, and rounds are composed
exactly as that.

## Gaussian noise

All four formulas are that of Abadi et al. 2016, Thm. 1: σ = c₂·q·√(T·ln(1/δ))/ε times the
sensitivity, with a constant c₂ that none of the papers specifies. We set c₂ = 1. σ/C is the
standard deviation of the noise in the sum of a full cohort over the bound of one message. A
question mark means that the paper does not state the number of rounds. Numbers are upper bounds,
rounded up.

$by_view

The next table shows by which factor σ would have to be larger for the claim to be true. In view
models this is the constant c₂ that the paper leaves open (its square, where the formula is for
σ²). Below 1 the claim holds with noise to spare.

$by_factor

Where the number of rounds is not stated, the columns *every round* do not depend on it, because σ
grows with its square root. View models does:

$by_length

### Notes on the rows

**All rows.** Fixed-size cohorts are accounted under replace-one adjacency, where two neighboring
sums differ by up to 2C. Poisson cohorts are accounted under add-remove adjacency, where they
differ by up to C. Where participation is visible, read add-remove as zero-out: the unit
participates and sends only noise. The columns for models account for all T models. A paper that
releases only one of them may do better, but none of the five proves so.

**Zhang 2022, most models.** Thm. 3.2: σ² ≥ v·c²·P·T·ln(1/δ)/(N²ε²) in each message (Alg. 3, line
10), v unspecified. Section 4: N = 1920, P = 80, δ = 1e-5, ε = 1.5. Not stated: T, the accountant
that gave the variance, and therefore the noise actually used. The theorem requires
ε ≤ u·(P/N)²·T, u unspecified. With u = 1 that is T ≥ 864, so we use 1,000. Section 3 assumes an
attacker who sees only the aggregate, through secure aggregation. That is view sum if the server
knows which clients it asked, and view models if not. |P_t| = P in every round is a fixed-size
cohort. The quoted theorem is about Poisson sampling, and the proof of Thm. 3.1, in its bound after
eq. 13, samples with replacement. The threshold c is half of the mean update norm of a run without
privacy (section 4), which no ε here covers.

**Zhang 2022, most models, read as Poisson.** The same noise, if the cohorts had been drawn as in
the quoted theorem. The difference from the row above is the cost of replace-one adjacency.

**Zhang 2022, ResNet-18 on EMNIST.** ε = 5 (caption of Table 3). With u = 1 the theorem requires
T ≥ 2,880, so we use 3,000. With fewer rounds the formula gives far too little noise, see the table
by rounds.

**Das 2022, Fashion-MNIST** (both rows). Thm. 1, eq. 5: σ² = q·K·C²·log(1/δ)/(n²ε²) in the *mean*,
q an unspecified constant. Each client adds N(0, rσ²) (Alg. 1, line 10), so the sum of r messages
has standard deviation rσ. Section 6: n = 3000, r = 0.2·n, ε = 5 and 1.5, δ = 1e-5. Not stated: K,
and the q used. The theorem requires ε < O(r²K/n²), which with constant 1 is K > 125 for ε = 5. We
use 200. Each client is sampled with probability r/n (Alg. 1, line 3): Poisson. CIFAR-10 and
CIFAR-100 have n = 5000 at the same rate, hence the same numbers for models and sum, and worse ones
for messages. *The column models needs more than the paper provides*: with Poisson cohorts and
noise at the clients, the variance of the noise reveals how many clients participated. At d = 7850
this costs a privacy loss of standard deviation √(d/2)/r = 0.1 per round, for any σ
(docs/privacy.md, "Client-side noise"). Without a server that tops up the noise, use the columns
for sum. They also assume r arrivals. Eq. 2 speaks of one sample. The noise is for one client's
whole message, and so is our ε.

**Das 2022, quadratics.** Section 5.3: n = 100, all participate, K = 500, (5, 1e-6). Only the
constant is not stated. Without sampling the three views differ only in the noise, and each has an
exact closed form. With a constant of 1 the claim is false even for a trusted server.

**Shulgin 2025, Cor. 2** (p = 1 and p = 0.25). σ = c·p·√((K+1)·log(1/δ))/ε in *each* message, of
norm at most 1 (Alg. 1, line 9), c unspecified. Section 5: ε = 8, δ = 1e-5. Appendix D: 20 workers,
300 rounds, for which we write K + 1 = 300. This formula is for one message, where the others are
for the sum, so the sum has √(p·M) times as much noise. The paper calls the amplification one "in
the local privacy setting", but a server that receives a message knows who sent it. With p = 1
there is no sampling, and the ε of a message is already above 8. With p = 0.25 the noise is a
quarter of that, and an observer of the messages learns more than at p = 1. The formula is made for
one message's noise with hidden participation. At p = 0.25 that gives ε = $hidden_alone.
Participation is Poisson with noise at the clients, and five of twenty are expected. In 0.4% of the
rounds a client that participates is alone. The variance reveals how many participated (a ResNet-20
has some 270,000 parameters), so for p = 0.25 the column models needs a server that tops up the
noise.

**Shulgin 2025, as printed in sec. 5.** Here "the variance of added noise" is p·β·√K·log(1/δ)/ε,
with the logarithm outside the root and β for the scaled message. The same section has σ ∝ p·β, so
we read it as the standard deviation, with c = 1: √log(1/δ) = 3.4 times that of Cor. 2. If this is
what ran, ε = 8 holds in all columns but one: an observer of the messages of a client that
participates in every round, at p = 0.25. If it is the variance, the ratio of noise to message
depends on β, and the figures have no single ε.

**DP-LSGD, CIFAR-10** (three rows). Lemma 1: σ ≥ α₂·q·√(T·log(1/δ))/ε, α₂ unspecified, for a sum of
updates clipped to c = 1 (eq. 3; appendix G). n = 50,000 (appendix G), expected batch 1000 (Table
1), hence q = 0.02; δ = 1e-5; T = 500, 1000 and 2000 for ε = 1, 2 and 4 (Tables 3 and 4). The noise
that was used is not reported. Poisson sampling, add-remove (Def. 3), and the unit is one example.
The party that computes the sum adds the noise, so anyone who receives sums or messages receives
them without noise. For an outsider who sees the noisy sums and knows every batch, ε is
$known_batches. The lemma's condition q ≥ α₁·√(ε/T) holds for α₁ ≤ 0.44 in all three rows, and the
required constant still grows with ε.

## QTDL: Das 2021

Thm. 1 claims (ε, 2^−d) for one message, with α = ε/Δ₁ and m = ⌈−log(1 − (e^α − 1)Δ∞)/α⌉. Section
6 (i) uses ε = 10 per round, Δ₁ = 2d + μs√d and Δ∞ = 2 + μs with μ = 0.1 (eq. 6). The bits t =
⌈log2(2(s + m) + 1)⌉ (eq. 7) are those of Tables 2 and 4. The claimed δ is false: the proof
(appendix B, eq. 14) multiplies over the coordinates the probabilities of leaving the support, but
one coordinate that leaves it suffices.

$quantized

**Notes on the rows.** d is 328,810 and 2,210,410 for two hidden layers of 300 and 600 (section 6).
If the rounded messages of two neighbors differ in one coordinate by one level, an output that only
one of them can produce occurs with the probability in the fifth column. That is δ at ε = 10 and at
every larger ε. In the worst case that eq. 6 allows, moves of ⌊Δ∞⌋ levels in ⌊Δ₁/⌊Δ∞⌋⌋ coordinates,
nearly every message reveals the data. At the claimed δ there is *no finite ε in any view*: the sum
of r = 25 messages also has a finite support, and even its probability for a single level, in the
sixth column, is far above 2^−d. Hidden participation (r/n = 1/2) halves it. The ε of the sum at a
larger δ is not computed here. The paper's neighbors differ in one sample of a client (Def. 1), and
eq. 6 rests on its Assumption 3.

**Table 3, (0.1, 1e-9) over all rounds.** Section 6 (ii) uses Thm. 2 with Δ∞ = 2s and Δ₁ = 2ds. K
and s are not stated ("full precision") and do not matter: m is about 2s, and a single message
distinguishes two opposite unit vectors along one axis with probability $opposite. Thm. 2's factor
2r/n is 1 here: the claim includes no amplification.
"""


if __name__ == "__main__":
    print(document(), end="")
