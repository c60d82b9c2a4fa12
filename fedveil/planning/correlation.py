"""Which noise is best for a planned run: independent, or correlated over the rounds.

Compared by the root mean square error of the prefix sums Σ_{s ≤ t} noise_s, over all t. SGD follows
these sums: its model after t rounds is the first one minus β·Σ (mean + noise).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fedveil.errors import UserError
from fedveil.parts.cohort import Cohort, Poisson
from fedveil.parts.correlated import BandedNoise, BufferedNoise
from fedveil.parts.noise import Gaussian, Noise
from fedveil.parts.spaced import CyclicPoisson, Separated
from fedveil.planning.forecast import Case, with_noise

TURNS = (4, 32)  # rounds between two turns that are tried
LARGE = 1e9  # bytes of past noise: above that, advise fewer buffers
WORTH = 0.95  # of the error of independent noise: a smaller gain is not worth the trouble


@dataclass(frozen=True)
class NoiseChoice:
    """A noise with its cohort, calibrated to the plan's budget."""

    name: str
    noise: Noise
    cohort: Cohort
    clients: int  # per round
    error: float  # of prefix sums of the noise on the mean, over that of independent noise

    @property
    def flags(self) -> str:
        """The flags that select it."""
        if self.name == "turns":
            return f"--set noise=banded --set separation={self.cohort.separation}"
        return f"--set noise={self.name} --set clients={self.clients}"


def choices(case: Case) -> tuple[NoiseChoice, ...]:
    """Independent noise with Poisson sampling first, then correlated ones by error.

    Empty if the plan has no budget, or noise that cannot be exchanged.
    """
    recipe = case.recipe
    fits = recipe.noise.scale_free and recipe.noise.at == "server" and recipe.view == "models"
    if case.epsilon is None or case.per_round or not fits or recipe.foreign:
        return ()
    if recipe.bound.adapts or recipe.memory.kept or recipe.unit != "client":
        return ()
    found = [one for one in (_made(case, *made) for made in _candidates(case)) if one]
    if not found or found[0].name != "independent":
        return ()
    base = found[0].error
    scaled = [replace(one, error=one.error / base) for one in found]
    return (scaled[0], *sorted(scaled[1:], key=lambda one: one.error))


def _candidates(case: Case) -> Iterator[tuple[str, Cohort, Noise]]:
    """Names, cohorts of the planned size, and noises without an amount."""
    people, size = case.population, case.recipe.cohort.expected(case.population)
    clients, rate = max(round(size), 1), min(size / people, 1.0)
    yield "independent", Poisson(rate), Gaussian()
    apart = Separated(clients).planned(people)
    yield "banded", apart, BandedNoise()
    yield "blt", apart, BufferedNoise()
    for turns in TURNS:
        if turns * rate < 0.9:
            yield "turns", CyclicPoisson(rate, turns), BandedNoise()


def _made(case: Case, name: str, cohort: Cohort, noise: Noise) -> NoiseChoice | None:
    """The choice with its error for messages of norm 1; None if no noise meets the budget."""
    try:
        other = replace(case.recipe, cohort=cohort, noise=noise)
        made = with_noise(replace(case, recipe=other))
    except UserError:
        return None
    amount = made.noise.noise_multiplier or 0.0
    error = amount * made.noise.prefix_error(case.rounds) / cohort.expected(case.population)
    clients = max(round(cohort.expected(case.population)), 1)
    return NoiseChoice(name, made.noise, made.cohort, clients, error)


def advice(found: tuple[NoiseChoice, ...], dim: int) -> str:
    """The best choice whose past noise fits in memory, in a sentence or two."""
    best = next((one for one in found[1:] if 8 * dim * one.noise.vectors <= LARGE), found[1])
    if best.error > WORTH:
        return (
            f"noise would have {best.error:.2f} times the error in prefix sums of independent "
            "noise. It is not recommended."
        )
    kind = "banded noise in turns" if best.name == "turns" else f"{best.name} noise"
    return (
        f"{kind} would have {best.error:.2f} times the error in prefix sums of independent noise. "
        f"Use {best.flags}."
    )
