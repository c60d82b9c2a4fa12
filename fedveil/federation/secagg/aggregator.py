"""Aggregator: the server's side of one round of secure aggregation.  Bytes in, bytes out.

    stage:     keys ─▶ shares ─▶ masked ─▶ consistency ─▶ reveal ─▶ done
    lists:          U1        U2        U3             U4        total

Stage `keys` is skipped if the last round brought everybody's keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Literal

import numpy as np

from fedveil.errors import UserError
from fedveil.federation.secagg import messages
from fedveil.federation.secagg.derived import survivors_text
from fedveil.federation.secagg.keys import KeyRecord, context_place, have_duplicates, session_of
from fedveil.federation.secagg.messages import (
    Kind,
    RevealReply,
    SharesReply,
    SharesRequest,
    kind_of,
)
from fedveil.federation.secagg.primitives import is_signed, words
from fedveil.federation.secagg.refusals import Aborted, Refusal, Word
from fedveil.federation.secagg.terms import RoundContext, check_roster, place
from fedveil.federation.secagg.unmasking import Unmasking
from fedveil.wire import wrap

Stage = Literal["keys", "shares", "masked", "consistency", "reveal", "done", "aborted"]
Taken = Literal["taken", "late", "uninvited", "duplicate", "malformed", "forged", "refused"]
STAGES: tuple[Stage, ...] = ("keys", "shares", "masked", "consistency", "reveal", "done")
REPLIES = (
    Kind.KEYS_REPLY,
    Kind.SHARES_REPLY,
    Kind.MASKED_REPLY,
    Kind.CONSISTENCY_REPLY,
    Kind.REVEAL_REPLY,
)


class Aggregator:
    """Σ levels mod 2^bits over the survivors of a round, and nothing else.

    Bonawitz et al. 2017, Figure 4, the server's side, with the changes that docs/secagg.md lists.
    Send `requests`, pass every reply to `take`, `close` at the deadline, until `stage` is "done".
    Then `total` has the residues, and `next_keys` what the next round starts from.
    """

    def __init__(
        self,
        context: RoundContext,
        roster: Mapping[int, bytes],
        known_keys: Mapping[int, bytes],
    ) -> None:
        check_roster(roster)
        if strangers := set(context.cohort) - roster.keys():
            raise UserError(f"The roster has no identity of client {min(strangers)}. Register it.")
        self.context, self.stage = context, STAGES[0]
        self.refusals: dict[int, Word] = {}
        self.verdicts: Counter[Taken] = Counter()
        self.survivors: tuple[int, ...] = ()
        self.next_keys: dict[int, bytes] = {}
        self._roster, self._session = roster, b""
        self._records: dict[int, KeyRecord] = {}  # U1
        self._shared: dict[int, SharesReply] = {}  # U2
        self._masked: set[int] = set()  # U3
        self._signatures: dict[int, bytes] = {}  # U4
        self._shares: dict[int, tuple[int, ...]] = {}
        self._total = np.zeros(context.terms.dim, words(context.terms.bits))
        for client in sorted(set(context.cohort) & known_keys.keys()):
            with suppress(Refusal):
                self._add_record(client, KeyRecord.parse(known_keys[client]))
        self._asked = frozenset(context.cohort) - self._records.keys()
        if not self._asked:
            self.close()

    @property
    def total(self) -> np.ndarray:
        """The residues of the sum, int64 in 0..2^bits − 1; `wire.settle` restores their signs."""
        if self.stage != "done":
            raise UserError(f"Secure aggregation: there is no sum in stage '{self.stage}'.")
        return wrap(self._total.astype(np.int64), self.context.terms.bits)

    def requests(self) -> dict[int, bytes]:
        """What to send to each client that this stage asks."""
        write = {
            "keys": self._ask_keys,
            "shares": self._ask_shares,
            "masked": self._ask_masked,
            "consistency": self._ask_consistency,
            "reveal": self._ask_reveal,
        }.get(self.stage)
        return write() if write else {}

    def take(self, client: int, reply: bytes) -> Taken:
        """Take the reply of a client that the transport has authenticated, or say why not."""
        verdict = self._verdict(client, reply)
        self.verdicts[verdict] += 1
        return verdict

    def close(self) -> None:
        """End the stage; `Aborted` if too few clients are left for the next one."""
        if self.stage in ("done", "aborted"):
            raise UserError("Secure aggregation: this round is over. Open the next one.")
        answered = self._answered
        if len(answered) < (needed := self._needed):
            stage, self.stage = self.stage, "aborted"
            raise Aborted(
                "too-few", f"{len(answered)} clients answered in stage '{stage}', not {needed}."
            )
        if self.stage == "keys":
            self._session = session_of(self.context, self._roster, self._records)
        if self.stage == "masked":
            self.survivors = answered
        if self.stage == "reveal":
            self._unmask()
        self._asked = frozenset(answered)
        self.stage = STAGES[STAGES.index(self.stage) + 1]

    @property
    def _answered(self) -> tuple[int, ...]:
        """The clients that have answered in this stage: they take part in the next one."""
        return tuple(sorted(self._replies))

    @property
    def _replies(self) -> Collection[int]:
        replies: dict[Stage, Collection[int]] = {
            "keys": self._records,
            "shares": self._shared,
            "masked": self._masked,
            "consistency": self._signatures,
            "reveal": self._shares,
        }
        return replies[self.stage]

    @property
    def _needed(self) -> int:
        """The least number of answers that this stage needs."""
        terms = self.context.terms
        return terms.threshold if self.stage in ("consistency", "reveal") else terms.needed

    def _ask_keys(self) -> dict[int, bytes]:
        asked = self.context
        request = messages.keys_request(asked.agreement, asked.opening, asked.round)
        return dict.fromkeys(sorted(self._asked), request)

    def _ask_shares(self) -> dict[int, bytes]:
        request = SharesRequest(self.context, self._records).write()
        return dict.fromkeys(sorted(self._asked), request)

    def _ask_masked(self) -> dict[int, bytes]:
        """For each client, the boxes that the others have sent for it."""
        places = {client: at for at, client in enumerate(sorted(self._records))}
        requests = {}
        for client in sorted(self._asked):
            at = places[client]
            boxes = {
                sender: reply.boxes[at - (at > places[sender])]  # a sender has none for itself
                for sender, reply in self._shared.items()
                if sender != client
            }
            requests[client] = self._written(Kind.MASKED, messages.write_table(boxes))
        return requests

    def _ask_consistency(self) -> dict[int, bytes]:
        request = self._written(Kind.CONSISTENCY, messages.write_clients(self.survivors))
        return dict.fromkeys(sorted(self._asked), request)

    def _ask_reveal(self) -> dict[int, bytes]:
        """The signatures of t survivors: as many as clients want to see."""
        first = sorted(self._signatures)[: self.context.terms.threshold]
        table = messages.write_table({signer: self._signatures[signer] for signer in first})
        return dict.fromkeys(sorted(self._asked), self._written(Kind.REVEAL, table))

    def _written(self, kind: Kind, body: bytes) -> bytes:
        return messages.written(kind, self._session, body)

    def _verdict(self, client: int, reply: bytes) -> Taken:
        if self.stage in ("done", "aborted"):
            return "late"
        if client not in self._asked:
            return "uninvited"
        if client in self._replies:
            return "duplicate"
        try:
            kind = kind_of(reply)
            if kind is Kind.REFUSAL:
                self.refusals[client] = messages.read_refusal(reply)
                return "refused"
            if kind in REPLIES and REPLIES.index(kind) < STAGES.index(self.stage):
                return "late"
            return self._taken(client, reply)
        except UserError:
            return "malformed"

    def _taken(self, client: int, reply: bytes) -> Taken:
        take = {
            "keys": self._take_record,
            "shares": self._take_shares,
            "masked": self._take_masked,
            "consistency": self._take_signature,
            "reveal": self._take_reveal,
        }[self.stage]
        return take(client, reply)

    def _take_record(self, client: int, reply: bytes) -> Taken:
        return self._add_record(client, messages.read_record(reply))

    def _add_record(self, client: int, record: KeyRecord) -> Taken:
        """Take keys that the client has signed for this round, and nobody else has."""
        if not record.signed(context_place(self.context), client, self._roster[client]):
            return "forged"
        if have_duplicates({**self._records, client: record}):
            return "forged"
        self._records[client] = record
        return "taken"

    def _take_shares(self, client: int, reply: bytes) -> Taken:
        shares = SharesReply.read(reply, len(self._records) - 1)
        self._check_session(shares.session)
        self._shared[client] = shares
        return "taken"

    def _take_masked(self, client: int, reply: bytes) -> Taken:
        session, packed = messages.read_masked(reply)
        self._check_session(session)
        wire, dim = self.context.terms.wire, self.context.terms.dim
        residues = wire.receive(np.frombuffer(packed, np.uint8)[None], dim)[0]
        self._total += residues.astype(self._total.dtype)
        self._masked.add(client)
        return "taken"

    def _take_signature(self, client: int, reply: bytes) -> Taken:
        session, signature = messages.read_signature(reply)
        self._check_session(session)
        text = survivors_text(session, client, tuple(sorted(self._shared)), self.survivors)
        if not is_signed(self._roster[client], signature, text):
            return "forged"
        self._signatures[client] = signature
        return "taken"

    def _take_reveal(self, client: int, reply: bytes) -> Taken:
        """Take shares, and next round's keys if they are signed for that round."""
        revealed = RevealReply.read(reply, len(self._shared))
        self._check_session(revealed.session)
        asked = self.context
        following = place(asked.agreement, asked.opening, asked.round + 1)
        if revealed.record.signed(following, client, self._roster[client]):
            self.next_keys[client] = revealed.record.plain()
        self._shares[client] = revealed.shares
        return "taken"

    def _check_session(self, session: bytes) -> None:
        if session != self._session:
            raise Refusal("session", "A reply is for another session. It was refused.")

    def _unmask(self) -> None:
        checks = {client: reply.check for client, reply in self._shared.items()}
        try:
            unmasking = Unmasking(self.context, self._session, self._records, checks, self._shares)
            unmasking.remove_masks(self._total, self.survivors)
        except Aborted:
            self.stage = "aborted"
            raise
