"""The contract of a noise: as much as its event was computed from, whoever came."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.deviation import least_deviation
from fedveil.accounting.norms import Norms
from fedveil.errors import UserError
from fedveil.parts.bound import within
from fedveil.parts.checks import repeatable
from fedveil.parts.noise import Noise, Share
from fedveil.parts.part import Begin, Tensors
from fedveil.parts.quantize import StochasticRound
from fedveil.testing.states import check_same_form, first_state

LEVELS, EXPECTED, DRAWS = 8, 6.0, 40_000
LEAST, MOST = 0.97, 1.03  # of a deviation estimated from DRAWS numbers: more than five errors
EPSILONS = (0.1, 0.5, 1.0, 2.0)


def check_noise(noise: Noise) -> None:
    """Raise unless the noise is as much as its event was computed from, whoever came.

    Draws 40,000 coordinates: their deviation is at least the accounted one however many clients
    arrive, they are centred and independent, and a round's noise is new given the rounds before
    it. Where one client's noise is accounted alone, each of those that arrive brings as much. Where
    noise has a table of probabilities, draws follow it, and δ(ε) is computed from it exactly. More
    noise costs less, unless its amount is fixed, and noise without an amount does not draw. Equal
    streams give equal noise.

    Pass calibrated noise of about twice the sensitivity, so that the check has power. It does not
    see the tails of a noise without a table: one that is cut off far out passes.
    """
    if noise.by_silo:
        _added_inside_alone(noise)
        return
    _kind_of_numbers(noise)
    _draws_from_its_stream(noise)
    _enough_whoever_came(noise)
    _enough_of_each_client(noise)
    _as_accounted(noise)
    _independent_draws(noise)
    _new_in_every_round(noise)
    _divergence_of_the_law(noise)
    _more_level_costs_less(noise)
    _unsettled_does_not_draw(noise)


def _added_inside_alone(noise: Noise) -> None:
    """The noise of each silo keeps the contract, and the sum of messages gets nothing more."""
    for silo in range(noise.listed or 1):
        check_noise(noise.inside(silo))
    outside = noise.draw(messages_of(3), 2, EXPECTED, np.random.default_rng(0))
    assert not outside.any(), f"{noise} is added to the sum, but the messages already carry it"


def messages_of(dim: int) -> Norms:
    """Messages of length 1 on a grid of a few levels."""
    return StochasticRound(LEVELS).norms(within(1.0, dim))


def wide(message: Norms) -> Norms:
    """The same bounds in many coordinates, so that one draw is a large sample."""
    return replace(message, dim=DRAWS)


def own_noise(noise: Noise, seed: int = 0) -> np.ndarray:
    """A sample of one coordinate of what a message carries, in units of the message."""
    message = messages_of(1)
    drawn = noise.each(wide(message), np.random.default_rng(seed))
    return np.asarray(drawn * (message.grid or 1.0))


def summed_noise(noise: Noise, arrived: int, seed: int = 0) -> np.ndarray:
    """A sample of one coordinate of what meets the sum, in units of the message."""
    message = messages_of(1)
    drawn = noise.draw(wide(message), arrived, EXPECTED, np.random.default_rng(seed)).double()
    return (drawn * ((message.grid or 1.0) if noise.needs_grid else 1.0)).numpy()


def claimed(noise: Noise, noise_shares: float = EXPECTED) -> events.Release:
    """The event of messages in one dimension, of which one is blanked out."""
    message = messages_of(1)
    return noise.event(message, message, noise_shares, EXPECTED)


def _kind_of_numbers(noise: Noise) -> None:
    message = messages_of(5)
    drawn = noise.draw(message, 3, EXPECTED, np.random.default_rng(0))
    wanted = torch.int64 if noise.needs_grid else torch.float64
    assert drawn.dtype == wanted, f"{noise} drew {drawn.dtype} where {wanted} is added"
    assert drawn.shape == (5,), f"{noise} drew a shape of {tuple(drawn.shape)} for 5 coordinates"
    own = noise.each(wide(message), np.random.default_rng(0))
    assert own.dtype == np.int64, f"{noise} puts {own.dtype} on messages of whole steps"
    reach = noise.max_magnitude(message)
    assert abs(own).max() <= reach, f"{noise} put {abs(own).max()} steps on a message, over {reach}"
    if not noise.on_messages:
        assert not own.any(), f"{noise} is added to the sum, but messages carry it as well"


def _draws_from_its_stream(noise: Noise) -> None:
    message = wide(messages_of(1))
    for draw in (lambda rng: noise.draw(message, 3, EXPECTED, rng), partial(noise.each, message)):
        assert repeatable(draw), (
            f"{noise} draws other numbers from an equal stream; draw from `rng` alone"
        )


def _enough_whoever_came(noise: Noise) -> None:
    """Noise on the sum never falls below what `expected` clients are accounted with."""
    if noise.on_messages:
        return
    needed = least_deviation(claimed(noise), messages_of(1).l2)
    for arrived in (0, 1, int(EXPECTED), 3 * int(EXPECTED)):
        found = float(np.std(summed_noise(noise, arrived)))
        assert found >= LEAST * needed, (
            f"{noise} draws a deviation of {found:.4g} when {arrived} of {EXPECTED:g} arrived, "
            f"but {needed:.4g} is accounted"
        )


def _enough_of_each_client(noise: Noise) -> None:
    """The clients' noise together is that of one client, as accounted alone, √clients times."""
    if noise.at != "client" or noise.on_messages:
        return
    needed = math.sqrt(EXPECTED) * least_deviation(claimed(noise, 1.0), messages_of(1).l2)
    found = float(np.std(summed_noise(noise, int(EXPECTED))))
    assert found >= LEAST * needed, (
        f"{noise}: {EXPECTED:g} clients together add a deviation of {found:.4g}, but one of them "
        f"is accounted with {needed / math.sqrt(EXPECTED):.4g}; `event` leaves out noise_shares"
    )


def _as_accounted(noise: Noise) -> None:
    """One message's own noise, or the sum's, has the deviation that the event speaks of."""
    if noise.on_messages:
        sample, release = own_noise(noise), claimed(noise, 1.0)
    else:
        sample, release = summed_noise(noise, int(EXPECTED)), claimed(noise)
    needed, found = least_deviation(release, messages_of(1).l2), float(np.std(sample))
    assert found >= LEAST * needed, (
        f"{noise} has a deviation of {found:.4g}, accounted {needed:.4g}"
    )
    assert abs(np.mean(sample)) <= 6 * found / math.sqrt(DRAWS), f"{noise} is not centred at 0"
    if isinstance(release, events.GaussianRelease):
        assert found <= MOST * needed, f"{noise} has {found:.4g}, more than its own {needed:.4g}"
    if hasattr(noise, "table"):
        _follows_its_table(noise, sample)


def _follows_its_table(noise: Any, sample: np.ndarray) -> None:
    """The frequencies of the draws are those of the law that is accounted."""
    message = wide(messages_of(1))
    table = noise.table(message)
    law = masses(noise, message)
    steps = np.rint(sample / (message.grid or 1.0)).astype(int) - table.low
    seen = np.bincount(steps, minlength=len(law)) / len(sample)
    error = 6 * np.sqrt(law * (1 - law) / len(sample)) + 6 / len(sample)
    worst = int(np.argmax(np.abs(seen - law) - error))
    assert (np.abs(seen - law) <= error).all(), (
        f"{noise} drew {worst + table.low} with frequency {seen[worst]:.4g}, not {law[worst]:.4g}"
    )


def _independent_draws(noise: Noise) -> None:
    """Other streams give other noise, and coordinates know nothing of each other."""
    sample = own_noise if noise.on_messages else lambda n, seed: summed_noise(n, 6, seed)
    first, second = sample(noise, 1), sample(noise, 2)
    if not first.any():
        return
    for other, what in ((second, "two streams"), (np.roll(first, 1), "neighbouring coordinates")):
        alike = float(first @ other / (np.linalg.norm(first) * np.linalg.norm(other)))
        assert abs(alike) < 6 / math.sqrt(DRAWS), f"{noise}: {what} correlate ({alike:.3f})"


def _new_in_every_round(noise: Noise) -> None:
    """Given what earlier rounds added, a round's noise still has the accounted deviation."""
    if noise.on_messages:
        return
    message, rng = wide(messages_of(1)), np.random.default_rng(3)
    state = first_state(noise, Begin(torch.zeros(message.dim), 8, 4, rng))
    if not noise.correlated:
        _the_same_after_any_round(noise, message, state)
    needed, before = least_deviation(claimed(noise), messages_of(1).l2), np.zeros((DRAWS, 0))
    for round in range(4):
        drawn, after = noise.step(message, int(EXPECTED), EXPECTED, rng, state)
        check_same_form(noise, state, after)
        column = drawn.double().numpy()[:, None] * (
            (message.grid or 1.0) if noise.needs_grid else 1
        )
        known = before @ np.linalg.lstsq(before, column, rcond=None)[0] if round else 0.0
        found = float(np.std(column - known))
        assert found >= LEAST * needed, (
            f"{noise}: given the rounds before, the noise of round {round + 1} has a deviation of "
            f"{found:.4g}, but {needed:.4g} is accounted"
        )
        before, state = np.hstack([before, column]), after


def _the_same_after_any_round(noise: Noise, message: Norms, state: Tensors) -> None:
    """Noise that is accounted as independent is a function of its round's stream."""
    pasts = [
        noise.step(message, 6, EXPECTED, np.random.default_rng(seed), state)[1] for seed in (1, 2)
    ]
    one, other = (
        noise.step(message, 6, EXPECTED, np.random.default_rng(0), past)[0] for past in pasts
    )
    assert torch.equal(one, other), (
        f"{noise} depends on the noise of earlier rounds, but does not say that it is correlated"
    )


def masses(noise: Any, message: Norms) -> np.ndarray:
    """P(y) of one coordinate's noise on a message, from its sampler's own thresholds."""
    counts = noise.table(message).counts()
    return np.array([count / 2**124 for count in counts])


def hockey_stick(law: np.ndarray, move: int, epsilon: float) -> float:
    """Σ_y max(P(y) − e^ε·P(y − move), 0), exactly, for a law of whole numbers."""
    moved = np.pad(law, (move, 0))[: len(law)] if move < len(law) else np.zeros_like(law)
    return float(np.maximum(law - math.exp(epsilon) * moved, 0).sum())


def _divergence_of_the_law(noise: Noise) -> None:
    """δ(ε) of the law itself is never above the event's, for one message and for a sum of two."""
    if not hasattr(noise, "table"):
        return
    law = masses(noise, messages_of(1))
    for noise_shares in (1, 2) if noise.adds_up else (1,):
        release = claimed(noise, float(noise_shares))
        if isinstance(release, events.NonPrivate):
            continue
        total = law if noise_shares == 1 else np.convolve(law, law)
        for epsilon in EPSILONS:
            allowed = accounting.delta(release, epsilon)
            for move in range(1, int(messages_of(1).steps.linf) + 1):
                true = hockey_stick(total, move, epsilon)
                assert true <= allowed + 1e-12, (
                    f"{noise}: a coordinate that moves by {move} steps has δ({epsilon}) = "
                    f"{true:.3g}, but the event of {noise_shares} says {allowed:.3g}"
                )


def _more_level_costs_less(noise: Noise) -> None:
    """ε falls as the level grows. Noise without a guarantee, or of a fixed amount, has no level."""
    message = messages_of(1)

    def epsilon(level: float) -> float:
        scaled = noise.scaled(level, message, message, Share(EXPECTED, 1.0, 1e-6))
        assert scaled.calibrated, f"{noise} scaled to level {level} is not calibrated"
        return accounting.epsilon(scaled.event(message, message, EXPECTED, EXPECTED), 1e-5)

    if isinstance(claimed(noise), events.NonPrivate):
        assert _refused(lambda: epsilon(1.0)), f"{noise} has no guarantee, but accepts a budget"
        return
    if _fixed(lambda: epsilon(1.0)):
        return
    found = [epsilon(level) for level in (1.0, 2.0, 4.0, 8.0)]
    falls = all(more < less for less, more in itertools.pairwise(found))
    assert falls, f"{noise}: ε over growing levels is {found}"


def _unsettled_does_not_draw(noise: Noise) -> None:
    """Without an amount there is neither a draw nor an event."""
    try:
        waiting: Noise = type(noise)()
    except TypeError:
        return
    if waiting.calibrated:
        return
    message, rng = messages_of(3), np.random.default_rng(0)
    calls = {
        "event": lambda: waiting.event(message, message, EXPECTED, EXPECTED),
        "each" if noise.on_messages else "draw": lambda: (
            waiting.each(message, rng) if noise.on_messages else waiting.draw(message, 1, 1.0, rng)
        ),
    }
    for name, call in calls.items():
        assert _refused(call), f"{waiting} is not calibrated, but answers {name}"


def _fixed(scale: Callable[[], Any]) -> bool:
    """Whether a noise refuses a level with a sentence: its amount is fixed."""
    try:
        scale()
    except UserError:
        return True
    return False


def _refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except (UserError, TypeError):  # a sentence, or arithmetic with None
        return True
    return False
