"""What an honest-but-curious server learns: the sum. Everything short of it looks uniform.

All clients send the same constant message of 20,000 bytes. A χ² over the 256 values has mean 255
and standard deviation 22.6 if they are uniform, and 5.1 million if a mask is missing. The limit of
400 is 6.4 standard deviations: a correct program exceeds it with probability below 1e-8.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np

from fedveil.federation.secagg import messages
from fedveil.federation.secagg.aggregator import Aggregator
from fedveil.federation.secagg.derived import mask_key
from fedveil.federation.secagg.primitives import add_masks
from fedveil.federation.secagg.terms import SecAggTerms
from fedveil.federation.secagg.unmasking import Unmasking
from tests.unit.federation.secagg.world import World

DIM, LIMIT, LOST = 20_000, 400.0, 8
SENT = 5


class Curious:
    """A server that keeps everything, also the message of a client that came too late."""

    def __init__(self) -> None:
        world = World(5, SecAggTerms(threshold=4, corrupt=1, enough=4, bits=8, dim=DIM))
        world.levels = {client: np.full(DIM, SENT) for client in world.cohort}
        server = world.at("masked")
        late = world.answer(LOST, server.requests()[LOST])
        world.until("done", server, {"masked": [LOST]})
        self.server, self.survivors = server, server.survivors
        self.seen = {c: residues(reply) for c, reply in world.replies["masked"].items()}
        self.seen[LOST] = residues(late)
        self._learned = learned(server)

    def without_self(self, client: int) -> np.ndarray:
        """A survivor's message without its self mask and its masks with the lost client."""
        found = self.seen[client].copy()
        lost = [self.with_lost(client)]
        minus, plus = (lost, []) if client < LOST else ([], lost)
        add_masks(found, plus, [self._learned._self_mask(client), *minus])
        return found

    def without_pairs(self) -> np.ndarray:
        """The lost client's message without its masks with survivors."""
        found = self.seen[LOST].copy()
        keys = {client: self.with_lost(client) for client in self.survivors}
        minus = [key for client, key in keys.items() if client > LOST]
        add_masks(found, [key for client, key in keys.items() if client < LOST], minus)
        return found

    def with_lost(self, client: int) -> bytes:
        pair = self._learned._mask_pair(LOST)
        record = self.server._records[client]
        return mask_key(pair, record.mask, self.server._session, (client, LOST))


def learned(server: Aggregator) -> Unmasking:
    checks = {client: reply.check for client, reply in server._shared.items()}
    return Unmasking(server.context, server._session, server._records, checks, server._shares)


def residues(reply: bytes) -> np.ndarray:
    return np.frombuffer(messages.read_masked(reply)[1], np.uint8).copy()


@cache
def curious() -> Curious:
    return Curious()


def chi_squared(values: np.ndarray) -> float:
    counts = np.bincount(values, minlength=256)
    expected = len(values) / 256
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_statistic_has_power() -> None:
    assert chi_squared(np.full(DIM, SENT, np.uint8)) > 1e6
    drawn = np.random.default_rng(0).integers(0, 256, DIM).astype(np.uint8)
    assert chi_squared(drawn) < LIMIT
    assert chi_squared(np.where(np.arange(DIM) % 5 == 0, SENT, drawn)) > 10 * LIMIT


def test_masked_messages_are_uniform() -> None:
    for values in curious().seen.values():
        assert chi_squared(values) < LIMIT


def test_survivors_stay_hidden_after_their_self_masks_are_known() -> None:
    """The masks between survivors hide each of them, and every sum and difference of some."""
    seen = {client: curious().without_self(client) for client in curious().survivors}
    for size in range(1, len(seen)):
        for some in itertools.combinations(seen.values(), size):
            assert chi_squared(np.sum(some, axis=0, dtype=np.uint8)) < LIMIT
    for one, other in itertools.combinations(seen.values(), 2):
        assert chi_squared(one - other) < LIMIT
    total = np.sum(list(seen.values()), axis=0, dtype=np.uint8)
    assert np.array_equal(total, np.full(DIM, SENT * len(seen), np.uint8))


def test_a_late_message_stays_hidden_after_its_pair_masks_are_known() -> None:
    """The self mask hides it: without it, declaring a slow client lost would reveal its message."""
    assert chi_squared(curious().without_pairs()) < LIMIT


def test_messages_of_two_rounds_do_not_share_masks() -> None:
    """Their difference would be the difference of the levels."""
    world = World(3, SecAggTerms(3, 0, 3, 8, DIM))
    world.levels = {client: np.full(DIM, SENT) for client in world.cohort}
    first = world.at("done")
    before = {client: residues(reply) for client, reply in world.replies["masked"].items()}
    world.until("done", world.server(1, first.next_keys))
    for client, reply in world.replies["masked"].items():
        assert chi_squared(residues(reply) - before[client]) < LIMIT
