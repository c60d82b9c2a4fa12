"""A small federation in memory: members, a server, and what an adversary between them sees."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from fedveil.federation.secagg.aggregator import Aggregator, Stage
from fedveil.federation.secagg.member import SecureMember
from fedveil.federation.secagg.messages import SharesRequest, refusal
from fedveil.federation.secagg.primitives import Identity
from fedveil.federation.secagg.refusals import Refusal
from fedveil.federation.secagg.terms import RoundContext, SecAggTerms, least_threshold

AGREEMENT, OPENING, MODEL, OTHER = b"a" * 32, b"o" * 16, b"m" * 32, b"x" * 32
NOBODY: Mapping[Stage, Collection[int]] = {}


@cache
def identity(client: int) -> Identity:
    return Identity(random.Random(client).randbytes(32))


class World:
    """n clients with distinct indexes, one of them possibly corrupt, and their levels."""

    def __init__(
        self, clients: int = 5, terms: SecAggTerms | None = None, seed: int = 0, dim: int = 7
    ) -> None:
        self.draw = random.Random(seed)
        self.cohort = tuple(3 * client + 2 for client in range(clients))
        self.roster = {client: identity(client).public for client in (*self.cohort, 1000)}
        corrupt = 1 if clients > 3 else 0
        threshold = least_threshold(clients, corrupt)
        self.terms = terms or SecAggTerms(threshold, corrupt, clients - 1, 12, dim)
        self.members = {client: self.member(client) for client in self.cohort}
        limit = 2 ** (self.terms.bits - 1)
        drawn = np.random.default_rng(seed).integers(-limit, limit, (clients, self.terms.dim))
        self.levels = dict(zip(self.cohort, drawn, strict=True))
        self.replies: dict[Stage, dict[int, bytes]] = {}

    def member(self, client: int) -> SecureMember:
        return SecureMember(
            client,
            identity(client),
            self.roster,
            AGREEMENT,
            OPENING,
            self.terms,
            entropy=self.draw.randbytes,
        )

    def context(self, round: int = 0, **changes: object) -> RoundContext:
        usual = RoundContext(AGREEMENT, OPENING, round, MODEL, self.cohort, self.terms)
        return replace(usual, **changes)

    def server(self, round: int = 0, known: Mapping[int, bytes] | None = None) -> Aggregator:
        return Aggregator(self.context(round), self.roster, known or {})

    def answer(self, client: int, request: bytes, model: bytes = MODEL) -> bytes:
        return self.members[client].answer(request, model, lambda _: self.levels[client])

    def replied(self, client: int, request: bytes) -> bytes:
        """The reply, or the refusal as it goes to the server."""
        try:
            return self.answer(client, request)
        except Refusal as refused:
            return refusal(refused.word)

    def stage(self, server: Aggregator, lost: Collection[int] = (), close: bool = True) -> None:
        """One stage: everybody answers but those who are lost."""
        seen = self.replies.setdefault(server.stage, {})
        for client, request in server.requests().items():
            if client not in lost:
                seen[client] = self.replied(client, request)
                server.take(client, seen[client])
        if close:
            server.close()

    def until(
        self, stage: Stage, server: Aggregator, lost: Mapping[Stage, Collection[int]] = NOBODY
    ) -> Aggregator:
        """The server at the beginning of a stage."""
        while server.stage != stage:
            self.stage(server, lost.get(server.stage, ()))
        return server

    def at(self, stage: Stage, lost: Mapping[Stage, Collection[int]] = NOBODY) -> Aggregator:
        """A server at the beginning of a stage of round 0."""
        return self.until(stage, self.server(), lost)

    def sum(self, clients: Collection[int]) -> np.ndarray:
        """The plain modular sum."""
        total = sum(self.levels[client].astype(object) for client in clients)
        return np.array(total % 2**self.terms.bits, dtype=np.int64)

    def shares_request(self) -> SharesRequest:
        """The request of stage `shares`, to be changed."""
        server = self.at("shares")
        return SharesRequest.read(server.requests()[self.cohort[0]])


def refused(world: World, client: int, request: bytes, model: bytes = MODEL) -> str:
    """The word of a refusal; it is an error if there is none."""
    try:
        world.answer(client, request, model)
    except Refusal as problem:
        return problem.word
    raise AssertionError("the request was answered")
