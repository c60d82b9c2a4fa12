"""The contract of a recipe: what its rounds do is what its events say.

Rounds are run with scripted clients (`replay`), with real noise and with none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

from fedveil.accounting import events
from fedveil.accounting.deviation import least_deviation
from fedveil.accounting.norms import Adjacency, Norms
from fedveil.loop import State, begin, run_round
from fedveil.parts.part import Begin
from fedveil.parts.quantize import by_message
from fedveil.random.streams import SecretKey
from fedveil.recipe import Recipe, View
from fedveil.testing.replay import (
    Scripted,
    adjacencies,
    adversarial,
    bound_of,
    broken,
    forgotten,
    normal_answers,
    people,
    play,
    swapped,
)
from fedveil.testing.silos import check_silos
from fedveil.testing.states import driven, failing

CLIENTS, DIM, WIDE = 8, 6, 4000
SLACK = 1 + 1e-5  # of a float32 mean of a few messages
RARE = 1e-7  # the chance with which a correct cohort exceeds one limit of its attendance
COARSE = 2**12  # grids of so few levels are found again in a float32 mean
VIEWS: tuple[View, ...] = ("models", "sum", "messages")


def check_recipe(recipe: Recipe) -> None:
    """Raise unless the loop's rounds release what the recipe's events say.

    Runs rounds of 8 clients with the same randomness, which are equal, and with one thing changed.
    One client, however
    broken its answer, moves the sum by at most the declared sensitivity, and never moves the
    denominator. The noise of a round has the accounted deviation whoever came, and no stream is
    used twice. Views that show more cost more, sampling amplifies only where nothing tells how
    many came, and a cap holds over a run. Noise must be calibrated; a fixed cohort has at most 7.

    Clients answer from a script, so it says nothing about a model or an engine, and a mistake
    that needs more clients, dimensions or rounds to show is not found.
    """
    if recipe.by_record:
        check_silos(recipe, check_recipe)
        return
    check_repeats(recipe)
    check_broken_clients(recipe)
    check_denominator(recipe)
    check_neighbours(recipe)
    check_attendance(recipe)
    check_cap(recipe)
    check_streams(recipe)
    if recipe.private:
        check_noise_of_rounds(recipe)
        check_fresh_noise(recipe)
        check_empty_cohort(recipe)
        check_views(recipe)
        check_amplification(recipe)
        check_wire(recipe)
    if recipe.private and recipe.memory.kept:
        check_history(recipe)
    if recipe.private and recipe.bound.adapts:
        check_count(recipe)
        check_noise_follows_threshold(recipe)


# ------------------------------------------------------------------ what clients can do to the sum


def check_repeats(recipe: Recipe) -> None:
    """A round with the same key is the same round: parts draw from the streams they are given."""
    answers = normal_answers(CLIENTS, DIM)
    state: State | None = None
    for _ in range(4):
        with failing():
            first, again = (play(recipe, answers, state=state, noise="real") for _ in range(2))
        same = np.array_equal(first.members, again.members)
        same = same and torch.equal(first.state.x, again.state.x)
        assert same, f"{recipe.name}: two rounds with equal streams differ; draw from `rng` alone"
        state = first.state


def check_broken_clients(recipe: Recipe) -> None:
    """A NaN, an infinity or a wrong shape counts as an update of zero, and disturbs nobody."""
    answers = normal_answers(CLIENTS, DIM)
    client = int(_members(recipe, answers)[0])
    blank = play(recipe, swapped(answers, client, torch.zeros(DIM)))
    for answer in broken(DIM):
        seen = play(recipe, swapped(answers, client, answer))
        assert torch.isfinite(seen.state.x).all(), f"{recipe.name}: {answer} reached the model"
        assert torch.equal(seen.total, blank.total), (
            f"{recipe.name}: a client that answers {answer.tolist()} is not counted as zeros"
        )
        assert seen.info.rejected == 1, f"{recipe.name}: {answer.tolist()} was not rejected"


def check_denominator(recipe: Recipe) -> None:
    """The mean is the sum over the public denominator, whoever came."""
    answers = [torch.full((DIM,), 100.0)] * CLIENTS
    one: Tensor | None = None
    for came in (1, 2, CLIENTS // 2, CLIENTS):
        seen = play(recipe, answers, members=np.arange(came))
        if seen.info.aborted:
            continue
        one = seen.total / came if one is None else one
        apart = float((seen.total / came - one).norm())
        allowed = recipe.message(DIM).grid or 0.0
        assert apart <= 2 * allowed * math.sqrt(DIM) + 1e-4 * float(one.norm()), (
            f"{recipe.name}: {came} equal messages do not sum up to {came} times one of them over "
            "a fixed denominator"
        )


def check_neighbours(
    recipe: Recipe, state: State | None = None, keys: Sequence[int] = (0,)
) -> dict[str, float]:
    """The sum before noise moves by at most the declared sensitivity; how much of it was met.

    One client's answer is blanked out, dropped or replaced, all else and the coins are the same.
    """
    if not recipe.message(DIM).bounded:
        return {}
    answers = normal_answers(CLIENTS, DIM)
    met: Counter[str] = Counter()
    for key in keys:
        for adjacency, moves in _neighbours(recipe, answers, key, state):
            met |= Counter(_check_moves(recipe, moves, adjacency, state))
    check_outsiders(recipe, answers, state)
    return dict(met)


def _neighbours(
    recipe: Recipe, answers: Sequence[Tensor], key: int, state: State | None
) -> Iterator[tuple[Adjacency, Tensor]]:
    """Moves of the sum between neighbours, [moves, dim], for some of the clients who came."""
    first = play(recipe, answers, key, state)
    members = first.members
    for client in dict.fromkeys(int(who) for who in members[[0, -1]]) if len(members) else ():
        rows = (swapped(answers, client, row) for row in adversarial(DIM))
        seen = [first, *(play(recipe, row, key, state) for row in rows)]
        if any(one.info.aborted for one in seen):
            return
        sums = torch.stack([one.total for one in seen])
        for adjacency in adjacencies(recipe):
            if adjacency == "replace-one":
                yield adjacency, (sums[:, None] - sums).flatten(0, 1)
                continue
            blank = swapped(answers, client, torch.zeros(DIM))
            yield adjacency, sums - play(recipe, blank, key, forgotten(state, client)).total
            if adjacency == "add-remove" and client == members[-1]:  # coins are drawn in order
                without = play(recipe, answers, key, state, members=members[:-1])
                yield adjacency, sums - without.total


def _check_moves(
    recipe: Recipe, moves: Tensor, adjacency: Adjacency, state: State | None
) -> dict[str, float]:
    """The largest shares of the declared L1, L2 and L∞ sensitivity that moves make up."""
    message = recipe.message(DIM, bound_of(recipe, state))
    declared = message.sensitivity(adjacency)
    shares = {}
    for name, order, allowed in _norms(declared):
        found = float(torch.linalg.vector_norm(moves, ord=order, dim=1).max())
        assert found <= allowed * SLACK, (
            f"{recipe.name} ({adjacency}): one client moved the sum by {found:.6g} in {name}, "
            f"above the declared {allowed:.6g}"
        )
        shares[f"{adjacency} {name}"] = found / allowed
    if message.grid is not None and message.steps.linf < COARSE:
        steps = moves / message.grid
        off = float((steps - steps.round()).abs().max())
        assert off < 1e-3, f"{recipe.name}: a sum is {off:.3g} steps off its grid"
    return shares


def _norms(declared: Norms) -> Iterator[tuple[str, float, float]]:
    yield from (("L1", 1, declared.l1), ("L2", 2, declared.l2), ("L∞", math.inf, declared.linf))


def check_outsiders(recipe: Recipe, answers: Sequence[Tensor], state: State | None = None) -> None:
    """One who was not drawn changes nothing."""
    seen = play(recipe, answers, state=state)
    absent = np.setdiff1d(np.arange(CLIENTS), seen.members)
    if not len(absent) or seen.info.aborted:
        return
    other = play(recipe, swapped(answers, int(absent[0]), adversarial(DIM)[1]), state=state)
    assert torch.equal(seen.total, other.total), f"{recipe.name}: an absent client was counted"


def check_history(recipe: Recipe, rounds: int = 4) -> None:
    """The same over several rounds, when all that was released before is the same.

    One client's whole life is another one: other answers, and the memory that they leave behind.
    """
    if not recipe.message(DIM).bounded:
        return
    lives = [adversarial(DIM)[i] for i in (0, 3, 5, 10)]
    answers = normal_answers(CLIENTS, DIM)
    client = int(_members(recipe, answers)[0])
    for life in lives:
        _check_life(recipe, answers, client, life, rounds)


def _check_life(
    recipe: Recipe, answers: Sequence[Tensor], client: int, life: Tensor, rounds: int
) -> None:
    blank = torch.zeros(DIM)
    pair = [swapped(answers, client, row) for row in (life, blank)]
    if recipe.adjacency("models") == "replace-one":
        pair[1] = swapped(answers, client, -life)
    first, second = (play(recipe, rows, noise="real") for rows in pair)
    for _ in range(rounds):
        here = first.state
        there = replace(here, memory=second.state.memory)  # releases are those of the first world
        other = play(recipe, pair[1], state=there)
        for now in (life, -life):  # it may turn against what it is remembered for
            one = play(recipe, swapped(answers, client, now), state=here)
            if not (one.info.aborted or other.info.aborted):
                move = one.total - other.total
                _check_moves(recipe, move[None], recipe.adjacency("models"), here)
        first, second = (
            play(recipe, rows, state=s, noise="real")
            for rows, s in zip(pair, (here, there), strict=True)
        )


# ------------------------------------------------------------------------ noise, as accounted


def check_noise_of_rounds(recipe: Recipe) -> None:
    """The noise on a round's sum has the deviation that its event was computed from."""
    for came in (1, 2, CLIENTS - 1):
        sample = noise_of_round(recipe, came)
        if sample is None:
            continue
        if recipe.noise.on_messages:
            _check_own_noise(recipe, sample, came)
        for view in VIEWS if recipe.noise.on_messages else ("models",):
            _check_accounted(recipe, view, sample, came)
    if recipe.noise.at == "client" and recipe.cohort.honest is not None:
        counted, sure = recipe.noise_shares(CLIENTS, "models"), recipe.cohort.min_honest(CLIENTS)
        assert counted <= sure, (
            f"{recipe.name}: only {sure} clients are trusted to add noise and the server adds the "
            f"shares of absent clients only, but {counted:g} shares are accounted"
        )


def _check_accounted(recipe: Recipe, view: View, sample: Tensor, came: int) -> None:
    accounted, found = accounted_deviation(recipe, view), float(sample.std())
    if recipe.noise.on_messages:
        counted = recipe.noise_shares(CLIENTS, view)
        assert counted <= came, f"{recipe.name}: noise of {counted:g} is accounted, {came} arrived"
        found *= math.sqrt(counted / came)
    assert found >= 0.95 * accounted, (
        f"{recipe.name}: with {came} arrivals the noise in view {view} has a deviation of "
        f"{found:.4g}, but {accounted:.4g} is accounted"
    )
    exact = isinstance(_release(recipe, view), events.GaussianRelease)
    if exact and recipe.noise.at == "server":
        assert found <= 1.05 * accounted, f"{recipe.name}: noise of {found}, for {accounted}"


def _release(recipe: Recipe, view: View) -> events.Release:
    """The event of the sum alone, without what an adaptive clip adds."""
    message = recipe.message(WIDE)
    sensitivity = message.sensitivity(recipe.adjacency(view))
    noise_shares, expected = recipe.noise_shares(CLIENTS, view), recipe.cohort.expected(CLIENTS)
    return recipe.noise.event(message, sensitivity, noise_shares, expected)


def accounted_deviation(recipe: Recipe, view: View) -> float:
    """The least deviation of a round's noise with which its event can be true."""
    move = recipe.message(WIDE).sensitivity(recipe.adjacency(view)).l2
    return least_deviation(_release(recipe, view), move)


def noise_of_round(recipe: Recipe, came: int, key: int = 0) -> Tensor | None:
    """The noise that a round with so many arrivals releases; None if it is rejected."""
    answers = normal_answers(CLIENTS, WIDE)
    members = np.arange(came)
    noisy = play(recipe, answers, key, noise="real", members=members)
    if noisy.info.aborted:
        return None
    clean = play(recipe, answers, key, noise="none", members=members)
    return noisy.total - clean.total


def _check_own_noise(recipe: Recipe, sample: Tensor, arrived: int) -> None:
    """Each arrival brings the noise of one message, once."""
    message = recipe.message(WIDE)
    own = recipe.noise.each(message, np.random.default_rng(5)) * (message.grid or 1.0)
    found, wanted = float(sample.std()), float(own.std()) * math.sqrt(arrived)
    assert abs(found / wanted - 1) < 0.1, (
        f"{recipe.name}: {arrived} arrivals have a deviation of {found:.4g}, not {wanted:.4g}"
    )


def check_fresh_noise(recipe: Recipe) -> None:
    """No two rounds, runs or clients share noise."""
    answers = normal_answers(CLIENTS, WIDE)
    everyone = np.arange(CLIENTS - 1)
    samples, state = [], None
    for key in (0, 0, 1):  # two rounds of one run, and another run
        state = None if key else state
        clean = play(recipe, answers, key, state, members=everyone)
        noisy = play(recipe, answers, key, state, noise="real", members=everyone)
        assert not noisy.info.aborted, f"{recipe.name}: {len(everyone)} arrivals are too few"
        samples.append(noisy.total - clean.total)
        state = noisy.state
        samples += [torch.from_numpy(own).double() for own in noisy.own]
    for place, one in enumerate(samples):
        for other in samples[place + 1 :]:
            alike = float(one @ other / (one.norm() * other.norm()))
            related = 1.2 / math.sqrt(len(everyone)) if recipe.noise.on_messages else 0.0
            related = 0.8 if recipe.noise.correlated else related  # c_1/√(1 + c_1²) of a rate 1
            assert abs(alike) < related + 6 / math.sqrt(WIDE), (
                f"{recipe.name}: noise is used twice (correlation {alike:.2f})"
            )


class RecordedKey(SecretKey):
    """A key that notes which of its streams were opened, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: Counter[tuple[int, str]] = Counter()

    def subkey(self, round: int, purpose: str) -> bytes:
        """As any key."""
        self.opened[round, purpose] += 1
        return super().subkey(round, purpose)


def check_streams(recipe: Recipe) -> None:
    """No purpose of a round draws from the stream of another one, nor one client from another's."""
    key, data = RecordedKey(), people(CLIENTS)
    engine = Scripted(normal_answers(CLIENTS, DIM))
    state = begin(recipe, torch.zeros(DIM), data, 2, key)
    for _ in range(2):
        state, _ = run_round(recipe, state, data, engine, key)
    unused = set() if by_message(recipe.quantize) else {"rounding"}  # it draws nothing
    twice = {
        (round, purpose)
        for (round, purpose), times in key.opened.items()
        if times > 1 and purpose not in unused
    }
    assert key.opened
    assert not twice, f"{recipe.name}: streams are drawn from twice: {sorted(twice)}"


def check_empty_cohort(recipe: Recipe) -> None:
    """Nobody came: noise alone is released, or nothing that hides who came; and it is charged."""
    sample = noise_of_round(recipe, 0)
    seen = play(recipe, normal_answers(CLIENTS, DIM), members=np.arange(0))
    assert seen.state.round == 1, f"{recipe.name}: an empty round is not counted as one"
    for rounds in (1, 7):
        _check_charged(recipe, recipe.spent(DIM, CLIENTS, rounds), rounds)
    if sample is None:
        return
    accounted = accounted_deviation(recipe, "models")
    if recipe.noise.on_messages:
        assert not recipe.hidden("models"), f"{recipe.name}: an empty round shows that it is empty"
    else:
        assert float(sample.std()) >= 0.95 * accounted, (
            f"{recipe.name}: an empty round has noise of {float(sample.std()):.4g}, accounted "
            f"{accounted:.4g}"
        )


def _check_charged(recipe: Recipe, spent: events.Spent, rounds: int) -> None:
    ways = spent.ways if isinstance(spent, events.Either) else (spent,)
    for way in ways:
        assert isinstance(way, events.Composed), f"{recipe.name} accounts {way} for a run"
        sampled = isinstance(
            way.event, events.PoissonSampled | events.SampledWithoutReplacement | events.Proven
        )
        least = (
            rounds if sampled and recipe.hidden(recipe.view) else recipe.max_participations(rounds)
        )
        assert way.count >= least, f"{recipe.name}: {rounds} rounds, {way.count} charged"


# -------------------------------------------------------------------- views and amplification


def check_views(recipe: Recipe) -> None:
    """A server has seen what it then adds noise to; a view that shows more costs more."""
    from fedveil.accounting.accountant import epsilon

    found = {view: recipe.spent(DIM, CLIENTS, 3, view) for view in VIEWS}
    for view in VIEWS[1:]:
        if recipe.noise.at == "server":
            release = recipe.release(DIM, CLIENTS, view)
            kind = isinstance(release, events.NonPrivate)
            assert kind, f"{recipe.name}: {view} are seen before the server's noise"
        event = recipe.event(DIM, CLIENTS, view)
        sampled = isinstance(event, events.PoissonSampled | events.SampledWithoutReplacement)
        assert not sampled, f"{recipe.name}: who takes part is seen in view {view}, yet amplified"
    costs = [epsilon(found[view], 1e-5) for view in VIEWS]
    assert costs[0] <= costs[1] * (1 + 1e-3) <= costs[2] * (1 + 2e-3), (
        f"{recipe.name}: ε of {VIEWS} is {costs}, but each view sees more than the one before"
    )


def check_amplification(recipe: Recipe) -> None:
    """Sampling amplifies only where the noise does not tell how many came."""
    if recipe.cohort.fixed:
        return
    few, many = (noise_of_round(recipe, came) for came in (1, CLIENTS))
    if few is None or many is None:
        return
    tells = abs(float(many.std() / few.std()) - 1) > 0.1
    event = recipe.event(DIM, CLIENTS, "models")
    sampled = event != recipe.release(DIM, CLIENTS, "models")
    assert not (tells and (sampled or recipe.hidden("models"))), (
        f"{recipe.name}: noise grows with the number of arrivals, so who took part is not hidden, "
        "but it is accounted as amplified by sampling"
    )


def check_attendance(recipe: Recipe) -> None:
    """A unit takes part no more often than the accounting of seen coins says.

    Each of the units is held to it, and all of them together: a run has one sample of each, and a
    cohort of a fixed size makes their mean vary less than that of independent ones.
    """
    rounds, runs = 6, 125
    law = recipe.participation_mixture(DIM, CLIENTS, rounds)
    if law is None:
        return
    rng, often = np.random.default_rng(0), np.zeros((runs, CLIENTS), dtype=int)
    for run in range(runs):
        kept = recipe.cohort.initial_state(Begin(torch.zeros(DIM), CLIENTS, rounds, rng))
        for _ in range(rounds):
            drawn = recipe.cohort.draw(CLIENTS, rng, kept)
            kept = recipe.cohort.step(kept, drawn)
            often[run, drawn] += 1
    for times in range(1, rounds + 1):
        allowed = float(binom.sf(times - 1, rounds, law.rate)) if times <= law.most else 0.0
        reached = (often >= times).sum(axis=0)
        for found, samples in ((reached.max(), runs), (reached.sum(), often.size)):
            assert found <= binom.isf(RARE, samples, allowed), (
                f"{recipe.name}: a unit takes part {times} times or more in {found / samples:.3f} "
                f"of the runs of {rounds} rounds, but {allowed:.3f} is accounted"
            )


def check_cap(recipe: Recipe) -> None:
    """Over a whole run none takes part more often than the cap allows."""
    if recipe.cohort.cap is None:
        return
    answers, state = normal_answers(CLIENTS, DIM), None
    often = np.zeros(CLIENTS, dtype=int)
    for _ in range(8 * recipe.cohort.cap):
        seen = play(recipe, answers, state=state)
        often[seen.members] += 1
        state = seen.state
    most = recipe.max_participations(8 * recipe.cohort.cap, "models")
    assert often.max() <= most, (
        f"{recipe.name}: a unit took part {often.max()} times, {most} accounted"
    )


def check_wire(recipe: Recipe) -> None:
    """The largest sum there can be, messages and noise, arrives unharmed."""
    message = recipe.message(DIM)
    if message.grid is None:
        return
    largest = int(recipe.cohort.expected(CLIENTS)) if recipe.cohort.fixed else CLIENTS
    for sign in (1.0, -1.0):
        answers = [sign * torch.eye(DIM)[0] * 1e6] * CLIENTS
        members = np.arange(largest)
        clean = play(recipe, answers, members=members).total / message.grid
        most = play(recipe, answers, noise="most", members=members).total / message.grid
        added = largest * recipe.noise.max_magnitude(message)
        off = float((most - clean - added).abs().max())
        assert off <= 1e-6 * (added + float(clean.abs().max())) + 1e-3, (
            f"{recipe.name}: the sum of {largest} messages with all their noise is wrong by "
            f"{off:.4g} steps: its {recipe.wire(DIM, CLIENTS)} is too narrow"
        )


# --------------------------------------------------------------------------- the count of a clip


def check_count(recipe: Recipe) -> None:
    """The count moves by no more, and has no less noise, than the joint event says."""
    joint, alone = recipe.release(DIM, CLIENTS, "models"), _release(recipe, "models")
    assert isinstance(joint, events.GaussianRelease), f"{recipe.name}: {joint}"
    assert isinstance(alone, events.GaussianRelease), f"{recipe.name}: {alone}"
    moved, noise = count_move(recipe), count_noise(recipe)
    assert noise > 0, f"{recipe.name}: the count has no noise"
    true = (alone.ratio**-2 + (moved / noise) ** 2) ** -0.5
    assert joint.ratio <= true * 1.02, (
        f"{recipe.name}: sum and count with noise of {noise:.3g}, moved by {moved:g}, make a "
        f"ratio of {true:.4g}, but {joint.ratio:.4g} is accounted"
    )


def count_move(recipe: Recipe) -> float:
    """How far one client can move the count before its noise."""
    answers = normal_answers(CLIENTS, DIM)
    members = _members(recipe, answers)
    client = int(members[-1])
    rows = [answers[client], *adversarial(DIM)]
    counts = [_count(recipe, swapped(answers, client, row), members) for row in rows]
    others = {
        "replace-one": counts,
        "zero-out": counts[1:2],  # the first adversarial answer is blank
        "add-remove": [_count(recipe, answers, members[:-1])],
    }
    return max(abs(a - b) for a in counts for b in others[recipe.adjacency("models")])


def _count(recipe: Recipe, answers: Sequence[Tensor], members: np.ndarray) -> float:
    count = play(recipe, answers, members=members).count
    assert count is not None, f"{recipe.name} counted nothing"
    return count


def count_noise(recipe: Recipe) -> float:
    """The deviation of the count's noise, from where thresholds go.

    Noise moves log C as counts do: what half a cohort more of short updates does is the unit.
    """
    expected = recipe.cohort.expected(CLIENTS)
    bound = recipe.bound.with_own_noise(recipe.bound.own_noise(expected) or 0.0)
    arrived, draws = 1000, 3000
    enough = 300  # for a mean beside which the noise is small
    rng = np.random.default_rng(0)
    state = bound.initial_state(Begin(torch.zeros(1), CLIENTS, draws, rng))

    def moves(short: int, draws: int) -> np.ndarray:
        after = [bound.step(state, short, arrived, float(arrived), rng) for _ in range(draws)]
        return np.log([bound.at(one).norms(1).l2 / bound.norms(1).l2 for one in after])

    low, high = moves(300, draws), moves(700, enough)
    unit = abs(float(high.mean() - low.mean())) / 400
    return float(np.std(low)) / unit if unit else 0.0


def check_noise_follows_threshold(recipe: Recipe) -> None:
    """A round's noise is measured in the threshold of that very round."""
    answers = [torch.zeros(WIDE)] * CLIENTS
    start = play(recipe, answers).state
    for share in (0.0, 1.0):
        bound = driven(recipe.bound, share, 70)
        state = replace(start, parts={**start.parts, "bound": bound})
        factor = recipe.bound.at(bound).norms(WIDE).l2 / recipe.bound.norms(WIDE).l2
        found = float(play(recipe, answers, state=state, noise="real").total.std())
        wanted = accounted_deviation(recipe, "models") * factor
        assert abs(found / wanted - 1) < 0.1, (
            f"{recipe.name}: at {factor:.3g} times its first threshold noise is {found:.4g}, "
            f"not {wanted:.4g}"
        )


def _members(recipe: Recipe, answers: Sequence[Tensor]) -> np.ndarray:
    """Who comes first of all in a round that anybody comes to."""
    return play(recipe, answers).members
