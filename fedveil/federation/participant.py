"""Participant: a client's side of a federation. Requests in, replies out, as bytes.

It holds the client's data, keys, ledger and installed fedveil, and knows no network. It answers
only what it has accepted: the pinned agreement, signed by its server, for itself, once per round
and opening, within its own budget. The owner reads why it refused; the server gets a fixed word.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedveil.data.federated import Examples, Federated
from fedveil.data.frames import is_table
from fedveil.errors import UserError
from fedveil.federation.agreement import Agreement
from fedveil.federation.home import MEMORY, SETTINGS, Accepted, Home
from fedveil.federation.own_ledger import OwnLedger
from fedveil.federation.own_memory import OwnMemory
from fedveil.federation.reception import write_floats, write_levels
from fedveil.federation.requests import (
    RefusedError,
    Reply,
    Request,
    most_bytes,
    public_state,
    read_model,
)
from fedveil.federation.secagg.member import SecureMember
from fedveil.federation.secagg.refusals import Refusal
from fedveil.federation.secagg.terms import RoundContext
from fedveil.federation.silo import silo_message
from fedveil.loop import ClientMessage, State, begin, client_message
from fedveil.models.side_effects import refusing_randomness
from fedveil.random.streams import SecretKey
from fedveil.training.prepare import choose_engine, make_task

if TYPE_CHECKING:
    from fedveil.training.settings import DataSettings

log = logging.getLogger("fedveil.client")


class Participant:
    """One client of one agreement, for the life of a process."""

    def __init__(self, home: Home, data: Federated | None = None) -> None:
        self._lock = home.lock()  # from here on, nothing else can be accepted
        self._lock.take()
        try:
            self._enter(home, data)
        except BaseException:
            self._lock.release()
            raise

    def _enter(self, home: Home, data: Federated | None) -> None:
        self.accepted: Accepted = home.accepted
        self.agreement = home.offered(self.accepted.hash)
        self.index = home.seat(self.agreement)
        self._identity, self._server = home.identity, bytes.fromhex(self.agreement.server)
        self.data = own_data(home, self.agreement) if data is None else data
        self._task = make_task(self.agreement.model, self.data, self.agreement.seed)
        if self._task.dim != self.agreement.dim:
            raise UserError(
                f"The model '{self.agreement.model}' has {self._task.dim} parameters here, but "
                f"{self.agreement.dim} in the agreement. Install the same version of fedveil."
            )
        recipe = self.agreement.recipe
        self._engine = choose_engine("auto", self._task, self.data, recipe.local, 1.0).engine
        self._ledger = OwnLedger(home, self.agreement, self.accepted)
        self._memory = OwnMemory(home.path / MEMORY, self.agreement)
        self._keys: dict[str, SecretKey] = {}  # one for each opening of the server
        self._members: dict[str, SecureMember] = {}
        self._model: tuple[str, int, bytes] = ("", -1, b"")  # opening, round, and the model's bytes

    def handle(self, content: bytes) -> bytes:
        """The reply to a request, whatever it is."""
        try:
            request = Request.read(content, self._server, self._most)
            self._check(request)
            reply = self._masked(request) if request.kind == "secagg" else self._plain(request)
        except (RefusedError, Refusal) as refusal:
            log.warning("Refused (%s): %s", refusal.word, refusal)
            reply = Reply(refusal.word)
        except Exception:  # its text stays here: Flower would send it to the server
            log.exception("A request could not be answered.")
            reply = Reply("failed")
        return reply.packed()

    def close(self) -> None:
        """Close the ledger, for another process."""
        self._ledger.close()
        self._lock.release()

    def spent(self) -> float:
        """ε of everything that this client has answered, in all federations."""
        return self._ledger.spent()

    @property
    def _most(self) -> int:
        return most_bytes(self.agreement.dim, self.agreement.clients)

    def _check(self, request: Request) -> None:
        """Refuse a request that is not for this client and its agreement."""
        if request.agreement != self.accepted.hash:
            raise RefusedError(
                "agreement",
                f"The server asked under the agreement {request.agreement[:16]}…, but "
                f"{self.accepted.hash[:16]}… is accepted.",
            )
        if request.client != self.index:
            raise RefusedError("client", f"The request is for client {request.client}.")
        if request.round >= self.agreement.rounds:
            raise RefusedError("round", f"Round {request.round + 1} is not in the agreement.")
        if (request.kind == "secagg") != self.agreement.secure_sum:
            raise RefusedError("agreement", f"The agreement is for view {self._view}.")

    @property
    def _view(self) -> str:
        return self.agreement.recipe.view

    def _plain(self, request: Request) -> Reply:
        """The message of a round, in view `models` or `messages`."""
        if len(request.parts) != 1:
            raise RefusedError("malformed", "An invitation has not exactly one model.")
        state = self._state(request, request.parts[0])
        self._ledger.charge(request.opening, request.round, request.since, request.redrawn)
        made = self._message(request, state)
        body = self._written(made.numbers)
        self._ledger.sent(request.opening, request.round, body)
        return Reply("message", body, request.nonce, made.short)

    def _masked(self, request: Request) -> Reply:
        """The next step of secure aggregation; the message is computed where it is masked."""
        asked, *model = request.parts or (b"",)
        if model:  # comes once in a round
            self._model = (request.opening, request.round, model[0])
        *of, held = self._model
        if of != [request.opening, request.round]:
            held = b""

        def levels(context: RoundContext) -> np.ndarray:
            if context.round != request.round:
                raise RefusedError("round", "The request is for two rounds at once.")
            state = self._state(request, held)
            self._ledger.charge(request.opening, context.round)
            numbers = self._message(request, state).numbers.numpy()
            self._ledger.sent(request.opening, context.round, numbers.tobytes())
            return numbers

        digest = hashlib.sha256(held).digest()
        reply = self._member(request.opening).answer(asked, digest, levels)
        return Reply("secagg", reply, request.nonce)

    def _member(self, opening: str) -> SecureMember:
        """This client's side of secure aggregation; a new opening starts it again."""
        if opening not in self._members:
            agreed = self.agreement
            self._members = {
                opening: SecureMember(
                    self.index, self._identity, agreed.roster.identities,
                    bytes.fromhex(self.accepted.hash), bytes.fromhex(opening), agreed.terms,
                )
            }  # fmt: skip
        return self._members[opening]

    def _state(self, request: Request, model: bytes) -> State:
        """A round's state as far as a client knows it: the model, and the public state of parts."""
        agreed, key = self.agreement, self._key(request.opening)
        x, public = read_model(model, agreed.dim)
        state = begin(agreed.recipe, x, agreed.population(), agreed.rounds, key)
        parts = dict(state.parts)
        for slot, wanted in public_state(agreed.recipe, state.parts).items():
            found = public[slot]
            if found.keys() != wanted.keys():
                raise RefusedError("malformed", f"The request has not the state of the {slot}.")
            known = {name: found[name].reshape(v.shape).to(v.dtype) for name, v in wanted.items()}
            parts[slot] = {**state.parts[slot], **known}
        return replace(state, round=request.round, parts=parts, memory=None)

    def _message(self, request: Request, state: State) -> ClientMessage:
        """The message of a round, from this client's data and its own secret noise."""
        remembered = self._memory.settled(request.opening, request.counted)
        with refusing_randomness(self._task.module):
            made = self._computed(state, self._key(request.opening), remembered)
        self._task.refuse_side_effects()
        self._memory.await_count(request.opening, request.round, made.memory)
        return made

    def _computed(self, state: State, key: SecretKey, remembered: Tensor | None) -> ClientMessage:
        recipe, data, engine = self.agreement.recipe, self.data, self._engine
        if recipe.in_silos:
            return ClientMessage(silo_message(recipe, state, data, engine, key), None, None)
        return client_message(recipe, state, data, engine, key, self.index, remembered)

    def _key(self, opening: str) -> SecretKey:
        """The key of this client's noise: another opening may ask for a round again."""
        if opening not in self._keys:
            self._keys = {opening: SecretKey()}
        return self._keys[opening]

    def _written(self, numbers: Tensor) -> bytes:
        if not numbers.is_floating_point():
            return write_levels(numbers.numpy(), self.agreement.wire)
        shapes = {name: tuple(shape) for name, shape in self._task.shapes.items()}
        return write_floats(numbers, shapes)


def own_data(home: Home, agreement: Agreement) -> Federated:
    """All examples of this client, encoded as the agreement says, as one unit."""
    from pydantic import ValidationError

    from fedveil.training.settings import DataSettings
    from fedveil.training.sources import load_data

    try:
        settings: DataSettings = DataSettings.model_validate({**agreement.data, **home.data})
    except ValidationError as problem:
        raise UserError(f"client.toml: {problem.errors()[0]['msg']}. Correct [data].") from problem
    for name in ("client", "label"):
        if settings.path is not None and is_table(settings.path) and not getattr(settings, name):
            raise UserError(
                f"Neither the agreement nor {home.path / SETTINGS} names the {name} column of "
                f"{settings.path}. Add it to [data] there."
            )
    return as_one_client(load_data(settings, own=True), agreement)


def _refuse_read(data: Federated) -> None:
    """Refuse records that were encoded by what other records have: one moves all, without noise."""
    if data.origin.exclusions:
        raise UserError(
            f"{data.origin.excluded} were read from the silo's records without noise, so no record "
            "is protected. Declare public ranges, categories and classes in client.toml."
        )
    if data.origin.statistics is not None:
        raise UserError(
            "The silo's records were encoded by statistics of them, which its ledger does not "
            "charge. Declare public ranges, categories and classes in client.toml."
        )


def as_one_client(data: Federated, agreement: Agreement) -> Federated:
    """The data as a single unit, or as a silo's records, if they have the agreement's shapes."""
    shape, tokens = tuple(data.inputs.shape[1:]), not data.inputs.dtype.is_floating_point
    found = (shape, data.classes, data.loss, tokens)
    wanted = (agreement.inputs, agreement.classes, agreement.loss, agreement.tokens)
    if found != wanted:
        raise UserError(
            f"The data have inputs {list(shape)}, {data.classes} classes and loss '{data.loss}', "
            f"but the agreement has inputs {list(agreement.inputs)}, {agreement.classes} classes "
            f"and loss '{agreement.loss}'. Use data of that form."
        )
    none = Examples(data.inputs[:0], data.labels[:0])
    if agreement.recipe.in_silos:
        _refuse_read(data)
        return replace(data.by_example(), test=none)
    offsets = torch.tensor([0, len(data.labels)])
    return replace(data, offsets=offsets, unit="client", test=none, optimum=None)
