"""A client's seat in one session: its secrets, and the order in which it gives them away."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedveil.errors import UserError
from fedveil.federation.secagg import messages
from fedveil.federation.secagg.derived import (
    box_label,
    check_value,
    mask_key,
    self_mask_key,
    survivors_text,
)
from fedveil.federation.secagg.keys import KeyRecord, RoundKeys, session_of
from fedveil.federation.secagg.messages import BOX, Kind, RevealReply, SharesReply
from fedveil.federation.secagg.primitives import (
    KEY,
    SIGNATURE,
    Identity,
    add_masks,
    derive,
    is_signed,
    seal,
    unseal,
    words,
)
from fedveil.federation.secagg.refusals import Refusal
from fedveil.federation.secagg.shamir import ELEMENT, Entropy, draw_element, split
from fedveil.federation.secagg.terms import RoundContext

Levels = Callable[[RoundContext], np.ndarray]
FOLLOWING = {
    Kind.SHARES: Kind.MASKED,
    Kind.MASKED: Kind.CONSISTENCY,
    Kind.CONSISTENCY: Kind.REVEAL,
    Kind.REVEAL: None,
}


@dataclass(frozen=True, repr=False)
class Secrets:
    """A client's own secrets of a session: gone as soon as its masked message is made."""

    keys: RoundKeys
    seed: bytes  # of the self mask
    opening: dict[int, bytes] = field(default_factory=dict)  # keys of the boxes from others


@dataclass(frozen=True, repr=False)
class SecretShares:
    """One client's shares of another's two secrets. At most one of them is ever revealed."""

    mask: int  # of the private mask key, revealed if the client is lost
    self_mask: int  # of the seed of the self mask, revealed if the client's message is in the sum


class SecureSeat:
    """One client in one session.  A stage is answered once; a repeated request, by the same reply.

    Bonawitz et al. 2017, Figure 4, the user's side, with the changes that docs/secagg.md lists.
    `context` and `records` have been checked (`Member`). Secrets are dropped as soon as no later
    stage needs them.
    """

    def __init__(
        self,
        client: int,
        context: RoundContext,
        roster: Mapping[int, bytes],
        records: Mapping[int, KeyRecord],
        keys: RoundKeys,
        entropy: Entropy,
    ) -> None:
        self.context = context
        self._client, self._roster, self._records = client, roster, dict(records)
        self._session = session_of(context, roster, records)
        self._secrets: Secrets | None = Secrets(keys, entropy(KEY))
        self._held: dict[int, SecretShares] = {}
        self._survivors: tuple[int, ...] = ()
        self._next: Kind | None = Kind.SHARES
        self._answers: dict[Kind, tuple[bytes, bytes]] = {}
        self._entropy = entropy

    def once(self, kind: Kind, request: bytes, reply: Callable[[], bytes]) -> bytes:
        """The reply to the only request of this kind that is answered."""
        if self.answered(kind, request):
            return self._answers[kind][1]
        if kind in self._answers:
            raise Refusal("repeated", "This stage was answered before. The request was refused.")
        if kind != self._next:
            raise Refusal("stage", "A request is out of order. It was refused.")
        self._answers[kind] = _digest(request), reply()
        self._next = FOLLOWING[kind]
        return self._answers[kind][1]

    def answered(self, kind: Kind, request: bytes) -> bool:
        """Whether exactly this request was answered before."""
        return kind in self._answers and self._answers[kind][0] == _digest(request)

    def shares(self) -> bytes:
        """Stage 1: a box for every other client, with its shares of both secrets."""
        own = self._own
        masks, selves = self._split(own.keys.mask.seed), self._split(own.seed)
        self._held[self._client] = SecretShares(masks[self._client], selves[self._client])
        boxes = []
        for other in self._others:
            secret = own.keys.box.agree(self._records[other].box)
            text = b"".join(map(messages.write_element, (masks[other], selves[other])))
            label = box_label(self._client, other)
            boxes.append(seal(derive(secret, self._session, label), text, self._session + label))
            own.opening[other] = derive(secret, self._session, box_label(other, self._client))
        check = check_value(own.seed, self._session, self._client)
        return SharesReply(self._session, check, tuple(boxes)).write()

    def masked(self, request: bytes, levels: Levels) -> bytes:
        """Stage 2: the client's message plus its masks, if all boxes open.

        `levels` is called at most once in a round, even if it fails.
        """
        session, boxes = messages.read_table(request, Kind.MASKED, BOX)
        self._check_session(session)
        if not boxes.keys() <= self._own.opening.keys():
            raise Refusal("boxes", "A box is from a client without keys, or from oneself.")
        self._check_size(len(boxes) + 1)
        held = {sender: self._opened(sender, box) for sender, box in boxes.items()}
        self._next = None
        try:
            total = self._residues(levels(self.context))
            self._add_masks(total, tuple(boxes))
        finally:
            self._secrets = None
        self._held |= held
        packed = self.context.terms.wire.send(total[None])
        return messages.written(Kind.MASKED_REPLY, self._session, packed.tobytes())

    def consistency(self, request: bytes, identity: Identity) -> bytes:
        """Stage 3: a signature on the list of survivors, the only one of this round."""
        session, survivors = messages.read_survivors(request)
        self._check_session(session)
        if not {self._client} <= set(survivors) <= self._held.keys():
            raise Refusal("survivors", "The survivors are not among those who sent their shares.")
        self._check_size(len(survivors))
        signature = identity.sign(self._text(self._client, survivors))
        self._survivors = survivors
        return messages.written(Kind.CONSISTENCY_REPLY, self._session, signature)

    def reveal(self, request: bytes, following: Callable[[int], KeyRecord]) -> bytes:
        """Stage 4: one share of every client, after t survivors have signed the same list."""
        session, signatures = messages.read_table(request, Kind.REVEAL, SIGNATURE)
        self._check_session(session)
        self._check_signatures(signatures)
        alive = set(self._survivors)
        shares = tuple(
            held.self_mask if client in alive else held.mask
            for client, held in sorted(self._held.items())
        )
        reply = RevealReply(self._session, shares, following(self.context.round)).write()
        self._held = {}
        return reply

    @property
    def _own(self) -> Secrets:
        if self._secrets is None:
            raise Refusal("stage", "This client has no secrets left. The request was refused.")
        return self._secrets

    @property
    def _others(self) -> list[int]:
        return [client for client in sorted(self._records) if client != self._client]

    def _split(self, secret: bytes) -> dict[int, int]:
        """The share of each client that has keys."""
        clients = sorted(self._records)
        points = [self.context.point(client) for client in clients]
        others = [draw_element(self._entropy) for _ in range(self.context.terms.threshold - 1)]
        return dict(zip(clients, split(int.from_bytes(secret, "big"), points, others), strict=True))

    def _opened(self, sender: int, box: bytes) -> SecretShares:
        label = box_label(sender, self._client)
        text = unseal(self._own.opening[sender], box, self._session + label)
        return SecretShares(messages.element(text[:ELEMENT]), messages.element(text[ELEMENT:]))

    def _residues(self, levels: np.ndarray) -> np.ndarray:
        """The client's own message, as words that wrap."""
        terms = self.context.terms
        if levels.shape != (terms.dim,) or not np.issubdtype(levels.dtype, np.integer):
            raise UserError(
                f"Secure aggregation: a message is {levels.dtype} {levels.shape}; it must be "
                f"{terms.dim} whole numbers."
            )
        return levels.astype(words(terms.bits))

    def _add_masks(self, total: np.ndarray, others: tuple[int, ...]) -> None:
        pair, seed = self._own.keys.mask, self._own.seed
        keys = {
            other: mask_key(pair, self._records[other].mask, self._session, (self._client, other))
            for other in others
        }
        plus = [key for other, key in keys.items() if other > self._client]
        minus = [key for other, key in keys.items() if other < self._client]
        own = self_mask_key(seed, self._session, self._client)
        add_masks(total, [own, *plus], minus)

    def _text(self, signer: int, survivors: tuple[int, ...]) -> bytes:
        return survivors_text(self._session, signer, tuple(sorted(self._held)), survivors)

    def _check_session(self, session: bytes) -> None:
        if session != self._session:
            raise Refusal("session", "A request is for another session. It was refused.")

    def _check_size(self, clients: int) -> None:
        if clients < (needed := self.context.terms.needed):
            raise Refusal("too-few", f"A list has {clients} clients, but {needed} are agreed.")

    def _check_signatures(self, signatures: Mapping[int, bytes]) -> None:
        """At least t survivors have signed the list that this client has signed."""
        if not signatures.keys() <= set(self._survivors):
            raise Refusal("survivors", "A signature is not by a survivor. Nothing was revealed.")
        if len(signatures) < (needed := self.context.terms.threshold):
            raise Refusal("too-few", f"{len(signatures)} have signed, but {needed} must.")
        for signer, signature in signatures.items():
            text = self._text(signer, self._survivors)
            if not is_signed(self._roster[signer], signature, text):
                raise Refusal("signature", f"Client {signer} has not signed this list.")


def _digest(request: bytes) -> bytes:
    return hashlib.sha256(request).digest()
