"""Member: the client's side of secure aggregation.  Bytes in, bytes out."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from fedveil.errors import UserError
from fedveil.federation.secagg import messages
from fedveil.federation.secagg.keys import KeyRecord, RoundKeys, context_place, have_duplicates
from fedveil.federation.secagg.messages import Kind, SharesRequest, kind_of
from fedveil.federation.secagg.primitives import Identity
from fedveil.federation.secagg.refusals import Refusal
from fedveil.federation.secagg.seat import Levels, SecureSeat
from fedveil.federation.secagg.shamir import Entropy
from fedveil.federation.secagg.terms import (
    RoundContext,
    SecAggTerms,
    check_place,
    check_roster,
    place,
)


class SecureMember:
    """One client during one opening of a server.  It believes nothing that the server says.

    Agreement, opening, terms and roster are what the client's owner has accepted. `answer` compares
    every request with them. Rounds only go forward: a round that was left is not entered again.
    A member exists once: a copy of it could be asked twice.
    """

    def __init__(
        self,
        client: int,
        identity: Identity,
        roster: Mapping[int, bytes],
        agreement: bytes,
        opening: bytes,
        terms: SecAggTerms,
        entropy: Entropy = secrets.token_bytes,
    ) -> None:
        check_place(agreement, opening, 0)
        check_roster(roster)
        if roster.get(client) != identity.public:
            raise UserError(
                f"The roster has another identity for client {client}. Use the key that was "
                "registered, or register this one."
            )
        self._client, self._identity, self._roster = client, identity, dict(roster)
        self._agreement, self._opening, self._terms = agreement, opening, terms
        self._entropy = entropy
        self._ahead: RoundKeys | None = None  # of a round that this client has not entered
        self._newest = -1  # the last round that this client has drawn keys for
        self._seat: SecureSeat | None = None

    def answer(self, request: bytes, model: bytes, levels: Levels) -> bytes:
        """The reply to a request, or `Refusal`.  A refused request changes nothing.

        `model` is the hash of the model that this client has received for the round, computed by
        itself. `levels(context)` computes the client's message on that model. It is called in the
        masked stage only, at most once in a round, and must itself refuse a round that the client's
        ledger has charged before. Its exceptions are passed on, and end the round for this client.
        """
        kind = kind_of(request)
        if kind is Kind.KEYS:
            return self._keys(request)
        if kind is Kind.SHARES:
            return self._shares(request, model)
        return self._seated(kind, request, model, levels)

    def _keys(self, request: bytes) -> bytes:
        """Stage 0: the keys of a round that this client has not entered."""
        agreement, opening, round = messages.read_keys_request(request)
        self._check_place(agreement, opening)
        record = self._keys_of(round).record
        if self._seat is not None and self._seat.context.round < round:
            self._seat = None  # with every secret of the round that was left
        return messages.written(Kind.KEYS_REPLY, record.plain())

    def _shares(self, request: bytes, model: bytes) -> bytes:
        """Stage 1: enter the round, unless anything is not as agreed."""
        if self._seat is not None and self._seat.answered(Kind.SHARES, request):
            return self._seat.once(Kind.SHARES, request, self._seat.shares)
        asked = SharesRequest.read(request)
        self._check_context(asked.context, model)
        keys = self._unused_keys(asked.context.round)
        self._check_records(asked.context, asked.records, keys.record)
        seat = SecureSeat(
            self._client, asked.context, self._roster, asked.records, keys, self._entropy
        )
        reply = seat.once(Kind.SHARES, request, seat.shares)
        self._seat, self._ahead = seat, None
        return reply

    def _seated(self, kind: Kind, request: bytes, model: bytes, levels: Levels) -> bytes:
        """Stages 2 to 4, in the seat that this client has taken."""
        if (seat := self._seat) is None:
            raise Refusal(
                "stage", "This client has not entered the round. The request was refused."
            )
        if kind is Kind.MASKED:
            self._check_model(seat.context, model)
            return seat.once(kind, request, lambda: seat.masked(request, levels))
        if kind is Kind.CONSISTENCY:
            return seat.once(kind, request, lambda: seat.consistency(request, self._identity))
        if kind is Kind.REVEAL:
            return seat.once(kind, request, lambda: seat.reveal(request, self._following))
        raise Refusal("stage", "A reply came as a request. It was refused.")

    def _keys_of(self, round: int) -> RoundKeys:
        """The keys of a round: the same as long as they are not used, and never of an old round."""
        if self._ahead is not None and self._ahead.round == round:
            return self._ahead
        if round <= self._newest:
            raise Refusal("round", f"Round {round} is over for this client. It was refused.")
        where = place(self._agreement, self._opening, round)
        self._ahead = RoundKeys.draw(where, round, self._client, self._identity, self._entropy)
        self._newest = round
        return self._ahead

    def _unused_keys(self, round: int) -> RoundKeys:
        if self._ahead is None or self._ahead.round != round:
            raise Refusal("keys", f"This client has no keys for round {round}. Ask for new ones.")
        return self._ahead

    def _following(self, round: int) -> KeyRecord:
        """The keys of the round after this one."""
        return self._keys_of(round + 1).record

    def _check_place(self, agreement: bytes, opening: bytes) -> None:
        if agreement != self._agreement:
            raise Refusal("agreement", "The request is for another agreement. It was refused.")
        if opening != self._opening:
            raise Refusal("opening", "The request is for another opening. It was refused.")

    def _check_context(self, context: RoundContext, model: bytes) -> None:
        """The context is the one that this client's owner has agreed to, and names its model."""
        self._check_place(context.agreement, context.opening)
        self._check_model(context, model)
        if context.terms != self._terms:
            raise Refusal("terms", f"The server asks for {context.terms}, not {self._terms}.")
        if not {self._client} <= set(context.cohort) <= self._roster.keys():
            raise Refusal("cohort", "The cohort lacks this client or has one without identity.")

    def _check_model(self, context: RoundContext, model: bytes) -> None:
        if model != context.model:
            raise Refusal("model", "The round is for another model than this client received.")

    def _check_records(
        self, context: RoundContext, records: Mapping[int, KeyRecord], own: KeyRecord
    ) -> None:
        """The records are of this cohort and round, all different, and include one's own."""
        if not records.keys() <= set(context.cohort) or records.get(self._client) != own:
            raise Refusal("keys", "The keys are not those of the cohort and of this client.")
        if len(records) < (needed := context.terms.needed):
            raise Refusal("too-few", f"{len(records)} clients have keys, but {needed} are agreed.")
        if have_duplicates(records):
            raise Refusal("keys", "Two clients have the same public key. The round was refused.")
        where = context_place(context)
        for client, record in records.items():
            if not record.signed(where, client, self._roster[client]):
                raise Refusal("signature", f"Client {client} has not signed its keys.")
