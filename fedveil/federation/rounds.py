"""Served rounds: the source of a training whose messages come from the clients of a federation.

The server opens a round, sends invitations, passes on what arrives, closes it, and continues with
the loop's own second half. A round closes at its deadline or once everybody invited has answered,
never when enough have (docs/privacy.md, "Messages from outside").
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from fedveil.engines.totals import Total
from fedveil.errors import UserError
from fedveil.federation.agreement import Agreement
from fedveil.federation.reception import Message, Reception, read_levels
from fedveil.federation.requests import (
    ANSWERS,
    NONCE,
    OPENING,
    Kind,
    Reply,
    Request,
    model_bytes,
    most_bytes,
    public_state,
)
from fedveil.federation.secagg.aggregator import Aggregator
from fedveil.federation.secagg.checks import check_sum
from fedveil.federation.secagg.primitives import Identity
from fedveil.federation.secagg.refusals import Aborted
from fedveil.federation.secagg.terms import RoundContext
from fedveil.federation.silo import without_noise
from fedveil.federation.transport import Transport
from fedveil.loop import Info, State, aborted_round, cohort_of, conclude_round
from fedveil.training.run import Training

COUNTED = "counted"  # the last round in which each client's message was counted; −1: none
log = logging.getLogger("fedveil.server")


class Served:
    """A `Source`: one round of a training with the clients of a federation."""

    def __init__(self, agreement: Agreement, transport: Transport, identity: Identity) -> None:
        if identity.public.hex() != agreement.server:
            raise UserError("The server's key is not the one of the agreement. Restore it.")
        self._agreement, self._transport, self._identity = agreement, transport, identity
        self.opening = secrets.token_bytes(OPENING)
        self.refusals: Counter[str] = Counter()  # what clients said instead of a message
        self._keys: dict[int, bytes] = {}  # of the next round's secure aggregation
        self._since: int | None = None  # the first round of this opening
        self._redrawn = 0  # rounds that earlier openings have drawn and lost

    def __call__(self, training: Training) -> tuple[State, Info]:
        """Run a round that the ledger has reserved."""
        if self._since is None:
            self._since = training.state.round
            self._redrawn = 0 if training.session is None else training.session.redrawn
        if self._agreement.secure_sum:
            return self._masked(training)
        if self._agreement.recipe.in_silos:
            return self._silos(training)
        return self._plain(training)

    def _silos(self, training: Training) -> tuple[State, Info]:
        """View `messages` of silos: the server receives each silo's noisy sum."""
        state, agreed = training.state, self._agreement
        model = model_bytes(state.x, public_state(self._agreement.recipe, state.parts))
        nonces = {silo: _nonce() for silo in range(agreed.clients)}
        requests = {
            silo: self._request("invite", state, silo, nonce, (model,))
            for silo, nonce in nonces.items()
        }
        total = Total(torch.zeros(agreed.dim, dtype=torch.int64), noisy=True)
        came = 0
        for silo, reply in self._replies(requests):
            if _bytes(reply.nonce) != nonces[silo]:
                log.warning("Silo %d: the reply is not to this round's request.", silo)
                continue
            try:
                total.sum += torch.from_numpy(read_levels(reply.body, agreed.wire, agreed.dim))
            except UserError as problem:
                log.warning("Silo %d: %s", silo, problem)
                continue
            came += 1
            total.sent += len(reply.body)
        return self._concluded(training, total, came)

    def _concluded(self, training: Training, total: Total, came: int) -> tuple[State, Info]:
        """The second half of a round whose noise the silos have added."""
        nobody = np.zeros(0, dtype=np.int64)
        quiet, agreed = without_noise(training.recipe), self._agreement
        after, info = conclude_round(
            quiet, training.state, total, nobody, came, agreed.units, training.key
        )
        return after, info

    def _plain(self, training: Training) -> tuple[State, Info]:
        """Views `models` and `messages`: the server receives each message."""
        state = training.state
        shapes = {name: tuple(shape) for name, shape in training.task.shapes.items()}
        reception = Reception(training.recipe, state, shapes, self._agreement.clients, training.key)
        model = model_bytes(state.x, public_state(self._agreement.recipe, state.parts))
        nonces = {one.client: one.nonce for one in reception.invitations}
        requests = {
            client: self._request("invite", state, client, nonce, (model,))
            for client, nonce in nonces.items()
        }
        for client, reply in self._replies(requests):
            body, nonce = reply.body, _bytes(reply.nonce)
            message = Message(client, state.round, nonce, 0, body, reply.short)
            if not (verdict := reception.take(message)).taken:
                log.warning("Client %d: %s. %s", client, verdict.reason, verdict.why)
        after, info = reception.close()
        return _with_counted(state, after, reception.in_sum), info

    def _masked(self, training: Training) -> tuple[State, Info]:
        """View `sum`: the server learns the sum of a round's messages."""
        recipe, state, agreed = training.recipe, training.state, self._agreement
        cohort = np.arange(agreed.clients)
        if not recipe.in_silos:
            cohort = cohort_of(recipe, state, agreed.clients, training.key)
        model = model_bytes(state.x, public_state(self._agreement.recipe, state.parts))
        try:
            aggregator = self._aggregated(state, cohort, model)
            came, summed = len(aggregator.survivors), agreed.terms.wire.settle(aggregator.total)
            check_sum(summed, *self._reach(came))
        except Aborted as problem:
            log.warning("Round %d was aborted: %s", state.round + 1, problem)
            return aborted_round(recipe, state, cohort[:0] if recipe.in_silos else cohort, 0)
        self._keys = aggregator.next_keys
        total = Total(torch.from_numpy(summed), aggregator.total, agreed.wire, noisy=True)
        total.sent = self._sent
        if recipe.in_silos:
            return self._concluded(training, total, came)
        after, info = conclude_round(
            recipe, state, total, cohort, came, agreed.clients, training.key
        )
        return _with_counted(state, after, aggregator.survivors), info

    def _reach(self, came: int) -> tuple[int, float]:
        """How many messages the sum may have, and the largest coordinate of each."""
        recipe, agreed = self._agreement.recipe, self._agreement
        message = recipe.message(agreed.dim)
        noise = recipe.noise.max_magnitude(message)
        messages = agreed.records if recipe.in_silos else came
        return messages, message.steps.linf + noise

    def _aggregated(self, state: State, cohort: np.ndarray, model: bytes) -> Aggregator:
        """The stages of secure aggregation, until the sum is known."""
        agreed = self._agreement
        context = RoundContext(
            bytes.fromhex(agreed.hash), self.opening, state.round, hashlib.sha256(model).digest(),
            tuple(int(client) for client in cohort), agreed.terms,
        )  # fmt: skip
        aggregator = Aggregator(context, agreed.roster.identities, self._keys)
        self._sent = 0
        while aggregator.stage != "done":
            beside = (model,) if aggregator.stage == "shares" else ()
            requests = {
                client: self._request("secagg", state, client, _nonce(), (asked, *beside))
                for client, asked in aggregator.requests().items()
            }
            for client, reply in self._replies(requests):
                self._sent += len(reply.body)
                if (verdict := aggregator.take(client, reply.body)) != "taken":
                    log.warning("Client %d, stage %s: %s.", client, aggregator.stage, verdict)
            aggregator.close()
        return aggregator

    def _request(
        self, kind: Kind, state: State, client: int, nonce: bytes, parts: tuple[bytes, ...]
    ) -> bytes:
        counted = state.parts["memory"].get(COUNTED)
        last = -1 if counted is None else int(counted[client])
        hash, opening = self._agreement.hash, self.opening.hex()
        since = self._since or 0
        return Request(
            kind, hash, opening, client, state.round, nonce.hex(), last, since, parts, self._redrawn
        ).signed(self._identity)

    def _replies(self, requests: Mapping[int, bytes]) -> Iterator[tuple[int, Reply]]:
        """The replies that are messages; what else arrives is noted and dropped."""
        most = most_bytes(self._agreement.dim, self._agreement.clients)
        for client, content in self._transport.exchange(requests, self._agreement.deadline):
            try:
                reply = Reply.read(content, most)
            except UserError as problem:
                self.refusals["malformed"] += 1
                log.warning("Client %d: %s", client, problem)
                continue
            if reply.word not in ANSWERS:
                self.refusals[reply.word] += 1
                log.warning("Client %d refused: %s.", client, reply.word)
                continue
            yield client, reply


def _with_counted(before: State, after: State, clients: tuple[int, ...]) -> State:
    """Note whose messages were counted, for clients with a memory."""
    if before.memory is None:
        return after
    memory = after.parts["memory"]
    counted = memory.get(COUNTED)
    counted = torch.full((len(before.memory),), -1) if counted is None else counted.clone()
    counted[torch.tensor(clients, dtype=torch.int64)] = before.round
    return replace(after, parts={**after.parts, "memory": {**memory, COUNTED: counted}})


def _nonce() -> bytes:
    return secrets.token_bytes(NONCE)


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
