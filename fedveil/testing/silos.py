"""The contract of silos: each step is a release of its own, and a record reaches its silo alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting import events
from fedveil.data.federated import Examples, Federated
from fedveil.engines.processes import ALONE
from fedveil.engines.updates import DenseUpdates, Group
from fedveil.loop import begin, run_round, sum_of_messages
from fedveil.random.streams import Key, SecretKey
from fedveil.recipe import Recipe

RECORDS, DIM, WIDE, ROUNDS = 5, 6, 4000, 2


@dataclass
class Valued:
    """An engine whose units answer with their inputs."""

    name: str = "valued"
    group_size: int = 3
    least_group: int = 1

    def updates(self, x: Tensor, group: Group) -> DenseUpdates:
        """The inputs of units with one example each."""
        return DenseUpdates(group.data.inputs[torch.from_numpy(group.clients)].clone())


class Traced(SecretKey):
    """A key that notes which streams were opened, by itself and by the keys derived from it."""

    def __init__(self, opened: Counter[tuple[str, int, str]] | None = None, name: str = "") -> None:
        super().__init__()
        self.opened = Counter() if opened is None else opened
        self._name = name

    def derived(self, purpose: str) -> Traced:
        """As any key; the streams of the new one are noted, too."""
        child = Traced(self.opened, f"{self._name}/{purpose}")
        child._secret = super().derived(purpose)._secret
        return child

    def subkey(self, round: int, purpose: str) -> bytes:
        """As any key."""
        if not purpose.startswith("key of "):
            self.opened[self._name, round, purpose] += 1
        return super().subkey(round, purpose)


def check_silos(recipe: Recipe, check_step: Callable[[Recipe], None]) -> None:
    """Raise unless rounds of silos release what the recipe's event says.

    `check_step` checks one step inside a silo, as a recipe over records. A round makes as many
    steps as the event counts, each with noise of its own, however they are counted over silos and
    rounds. A record of one silo changes no other silo's message.
    """
    silos = recipe.local.listed or recipe.noise.listed or 3
    release = recipe.release(DIM, silos)
    assert isinstance(release, events.InSilos), f"{recipe.name} accounts {release} for a round"
    for step in dict.fromkeys(recipe.insides(silos)):
        check_step(step)
    _accounted_as_run(recipe, release, silos)
    _every_step_has_noise_of_its_own(recipe, release, silos)
    _noise_reaches_the_messages(recipe, silos)
    _a_record_reaches_its_silo_alone(recipe, silos)


def _people(silos: int, inputs: Tensor) -> Federated:
    labels = torch.zeros(len(inputs), dtype=torch.long)
    offsets = torch.arange(silos + 1) * RECORDS
    return Federated("silos", inputs, labels, offsets, Examples(inputs, labels), 2)


def _answers(silos: int, dim: int, length: float) -> Tensor:
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.normal(size=(silos * RECORDS, dim)) * length).float()


def _message(recipe: Recipe, data: Federated, silo: int, key: Key = 0) -> Tensor:
    """What one silo sends in the first round."""
    state = begin(recipe, torch.zeros(data.inputs.shape[1]), data, ROUNDS, key)
    alone = np.array([silo])
    return sum_of_messages(recipe, state, data, Valued(), alone, key, ALONE).sum


def _accounted_as_run(recipe: Recipe, release: events.InSilos, silos: int) -> None:
    """Each silo's event is that of its own step."""
    listed = recipe.local.listed or recipe.noise.listed or 1
    assert len(release.silos) == listed, f"{recipe.name}: {len(release.silos)} of {listed} events"
    for silo, event in enumerate(release.silos):
        own = recipe.inside(silo).event(DIM, RECORDS, "models")
        assert event == own, f"{recipe.name}: silo {silo} is accounted as {event}, but runs {own}"


def _every_step_has_noise_of_its_own(recipe: Recipe, release: events.InSilos, silos: int) -> None:
    key, data = Traced(), _people(silos, _answers(silos, DIM, 1.0))
    state = begin(recipe, torch.zeros(DIM), data, ROUNDS, key)
    for _ in range(ROUNDS):
        state, _ = run_round(recipe, state, data, Valued(), key)
    for kind in ("noise", "cohort"):
        found = Counter(name for name, _, purpose in key.opened.elements() if purpose == kind)
        steps = sum(times for name, times in found.items() if name)  # by keys of silos
        wanted = ROUNDS * silos * release.times
        assert steps == wanted, (
            f"{recipe.name}: {silos} silos make {steps} steps with {kind} in {ROUNDS} rounds, and "
            f"{wanted} are accounted"
        )
    twice = [one for one, times in key.opened.items() if times > 1 and "rounding" not in one[2]]
    assert not twice, f"{recipe.name}: streams are drawn from twice: {twice}"


def _noise_reaches_the_messages(recipe: Recipe, silos: int) -> None:
    """Records that answer zero: what is left of a message is the noise of its steps."""
    data, local = _people(silos, torch.zeros(silos * RECORDS, WIDE)), recipe.local
    kept = 1 - local.rate(0) * local.pull
    for silo in range(silos):
        step = recipe.inside(silo)
        message, expected = step.message(WIDE), step.cohort.expected(RECORDS)
        once = (step.noise.deviation_of_sum(message, expected, 1.0) or 0.0) / expected
        steps = math.sqrt(sum(kept ** (2 * t) for t in range(local.inner_steps)))
        wanted = local.rate(0) * once * steps
        found = float(_message(recipe, data, silo).std())
        assert found >= 0.95 * wanted, (
            f"{recipe.name}: the noise in a message of silo {silo} has deviation {found:.4g}, but "
            f"its steps add {wanted:.4g}"
        )


def _a_record_reaches_its_silo_alone(recipe: Recipe, silos: int) -> None:
    inputs = _answers(silos, DIM, 10.0)
    for record in range(RECORDS):
        other = inputs.clone()
        other[record] = -other[record]
        here, there = _people(silos, inputs), _people(silos, other)
        for silo in range(1, silos):
            same = torch.equal(_message(recipe, here, silo), _message(recipe, there, silo))
            assert same, f"{recipe.name}: a record of silo 0 changes the message of silo {silo}"
