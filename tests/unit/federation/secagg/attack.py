"""A random active server with one corrupt client, and an exact account of what it learns.

It shows clients different models, cohorts and key lists, mixes boxes of two sessions, asks for
signatures on several lists, lets the corrupt client sign them all, and asks again after every
refusal. What it learns follows from the shares it gets: a message y_u = x_u + masks is a linear
equation, whose unknowns are the masks that those shares do not give.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fedveil.federation.secagg import messages, terms
from fedveil.federation.secagg.derived import survivors_text
from fedveil.federation.secagg.keys import KeyRecord, RoundKeys
from fedveil.federation.secagg.member import SecureMember
from fedveil.federation.secagg.messages import Kind, RevealReply, SharesReply, SharesRequest
from fedveil.federation.secagg.refusals import Refusal
from fedveil.federation.secagg.seat import SecureSeat
from fedveil.federation.secagg.terms import RoundContext, SecAggTerms, place
from tests.unit.federation.secagg.world import AGREEMENT, OPENING, identity

HONEST, CORRUPT = tuple(range(12)), 12
DIM = 2
Clients = tuple[int, ...]


@dataclass
class Session:
    """One context that the server shows to some clients, and the boxes that were sent in it."""

    context: RoundContext
    records: dict[int, KeyRecord]
    boxes: dict[tuple[int, int], bytes]  # (sender, receiver)
    hash: bytes = b""

    @property
    def model(self) -> bytes:
        return self.context.model


class Attack:
    """One round of a hostile server; `sums` are the sets of honest clients whose sum it learns."""

    clients = 5  # of a cohort
    enough: tuple[int, ...] = (4, 5)

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        threshold = terms.least_threshold(self.clients, 1)
        self.terms = SecAggTerms(threshold, 1, self.draw.choice(self.enough), 8, DIM)
        roster = {client: identity(client).public for client in (*HONEST, CORRUPT)}
        self.members = {
            client: SecureMember(
                client,
                identity(client),
                roster,
                AGREEMENT,
                OPENING,
                self.terms,
                self.draw.randbytes,
            )
            for client in HONEST
        }
        self.roster, self.where = roster, place(AGREEMENT, OPENING, 0)
        self.records = {client: self.ask_keys(client) for client in HONEST}
        self.mine = RoundKeys.draw(self.where, 0, CORRUPT, identity(CORRUPT), self.draw.randbytes)
        self.records[CORRUPT] = self.mine.record
        self.sessions = [self.session(*shown) for shown in self.contexts()]
        self.entered: dict[int, Session] = {}
        self.sent: dict[tuple[int, bytes], Clients] = {}  # whose masks a message has, by session
        self.holders: dict[tuple[int, str], set[int]] = defaultdict(set)  # of shares of a secret
        self.signatures: dict[tuple[bytes, Clients, Clients], dict[int, bytes]] = defaultdict(dict)

    def play(self) -> Attack:
        for client in HONEST:
            self.enter(client)
        for client in self.entered:
            self.get_message(client)
        for plan in self.plans():
            for client, session in self.sent:
                self.get_signature(client, session, plan[client])
            for client, session in self.sent:
                self.get_shares(client, session)
        return self

    def contexts(self) -> list[tuple[bytes, Clients]]:
        """Models and cohorts: one or two, of the same clients or of others."""
        some = self.draw.sample(HONEST, self.clients + 1)
        cohorts = [self.draw.sample(some, self.clients - 1) for _ in range(2)]
        models = [b"m" * 32, self.draw.choice((b"m" * 32, b"x" * 32))]
        both = list(zip(models, map(tuple, cohorts), strict=True))
        return both if self.draw.random() < 0.6 else both[:1]

    def order(self, client: int) -> list[Session]:
        """The sessions that a client is shown, one after the other."""
        shown = [session for session in self.sessions if client in session.context.cohort]
        return self.draw.sample(shown, len(shown))

    def plans(self) -> list[dict[int, list[Clients]]]:
        """Lists of survivors for each client: several at once, or one after the other for all."""
        lists = self.lists()
        if self.draw.random() < 0.5:
            return [{client: self.draw.sample(lists, len(lists)) for client in HONEST}]
        self.draw.shuffle(lists)
        return [{client: [survivors] for client in HONEST} for survivors in lists]

    def ask_keys(self, client: int) -> KeyRecord:
        request = messages.keys_request(AGREEMENT, OPENING, 0)
        return messages.read_record(self.members[client].answer(request, b"", _levels))

    def session(self, model: bytes, others: Clients) -> Session:
        cohort = tuple(sorted((*others, CORRUPT)))
        context = RoundContext(AGREEMENT, OPENING, 0, model, cohort, self.terms)
        records = {client: self.records[client] for client in cohort}
        made = Session(context, records, {})
        seat = SecureSeat(CORRUPT, context, self.roster, records, self.mine, self.draw.randbytes)
        self.keep_boxes(made, CORRUPT, seat.shares())
        return made

    def keep_boxes(self, session: Session, sender: int, reply: bytes) -> None:
        receivers = [client for client in sorted(session.records) if client != sender]
        shares = SharesReply.read(reply, len(receivers))
        session.hash = shares.session
        for receiver, box in zip(receivers, shares.boxes, strict=True):
            session.boxes[sender, receiver] = box

    def enter(self, client: int) -> None:
        """Show a client the sessions in random order; it should enter one at most."""
        for session in self.order(client):
            request = SharesRequest(session.context, session.records).write()
            reply = self.answer(client, request, session.model)
            if reply is not None:
                self.keep_boxes(session, client, reply)
                self.entered[client] = session
                for secret in ("mask", "self"):
                    self.holders[client, secret].add(CORRUPT)

    def get_message(self, client: int) -> None:
        """Try sets of boxes, greedy ones first: with boxes of other sessions, or without some."""
        session = self.entered[client]
        for boxes in self.choices(session, client):
            request = messages.written(Kind.MASKED, session.hash, messages.write_table(boxes))
            if self.answer(client, request, session.model) is not None:
                self.sent[client, session.hash] = tuple(sorted((*boxes, client)))
                return

    def choices(self, session: Session, client: int) -> Iterator[dict[int, bytes]]:
        own = {s: box for (s, r), box in session.boxes.items() if r == client}
        junk = {c: bytes(messages.BOX) for c in session.context.cohort if c not in (client, *own)}
        foreign = {
            s: box
            for other in self.sessions
            for (s, r), box in other.boxes.items()
            if r == client and s in junk
        }
        yield {**own, **junk, **foreign}
        if self.draw.random() < 0.3 and len(own) > 1:
            left = self.draw.choice(sorted(own))
            yield {sender: box for sender, box in own.items() if sender != left}
        yield own

    def lists(self) -> list[Clients]:
        """Some lists of survivors: everybody, and all but one or two."""
        found = []
        for session in self.sessions:
            cohort = session.context.cohort
            for size in (self.clients, self.clients - 1, self.clients - 2):
                found.append(tuple(sorted(self.draw.sample(cohort, size))))
            found.append(tuple(c for c in cohort if c != self.draw.choice(cohort)))
        return found

    def get_signature(self, client: int, session: bytes, lists: list[Clients]) -> None:
        """Ask for signatures on all lists; a client should sign one."""
        sharers = self.sent[client, session]
        for survivors in lists:
            body = messages.write_clients(survivors)
            reply = self.answer(client, messages.written(Kind.CONSISTENCY, session, body))
            if reply is not None:
                signature = messages.read_signature(reply)[1]
                self.signatures[session, sharers, survivors][client] = signature

    def get_shares(self, client: int, session: bytes) -> None:
        for (of, sharers, survivors), signatures in self.signatures.items():
            if of == session and client in signatures:
                text = survivors_text(session, CORRUPT, sharers, survivors)
                forged = {CORRUPT: identity(CORRUPT).sign(text)} if CORRUPT in survivors else {}
                body = messages.write_table({**signatures, **forged})
                reply = self.answer(client, messages.written(Kind.REVEAL, session, body))
                if reply is not None:
                    self.keep_shares(client, reply, sharers, survivors)

    def keep_shares(self, client: int, reply: bytes, sharers: Clients, survivors: Clients) -> None:
        RevealReply.read(reply, len(sharers))
        for owner in sharers:
            self.holders[owner, "self" if owner in survivors else "mask"].add(client)

    def answer(self, client: int, request: bytes, model: bytes | None = None) -> bytes | None:
        shown = self.entered[client].model if model is None else model
        try:
            return self.members[client].answer(request, shown, _levels)
        except Refusal:
            return None

    def knows(self, owner: int, secret: str) -> bool:
        return owner == CORRUPT or len(self.holders[owner, secret]) >= self.terms.threshold

    @property
    def sums(self) -> list[set[int]]:
        """The honest clients of each sum that the known shares lay open.

        Λ·y is free of masks only if Λ is equal on both ends of an unknown mask between clients,
        and zero on an unknown self mask and on a mask whose other end was not sent.
        """
        groups = {client: {client} for client, _ in self.sent}
        hidden = {client for client in groups if not self.knows(client, "self")}
        for (client, session), sharers in self.sent.items():
            for other in sharers:
                if other == client or self.knows(client, "mask") or self.knows(other, "mask"):
                    continue
                if client in self.sent.get((other, session), ()):
                    joined = groups[client] | groups[other]
                    groups.update(dict.fromkeys(joined, joined))
                else:
                    hidden.add(client)
        found = {frozenset(group) for group in groups.values() if not group & hidden}
        return [set(group) for group in found]


def _levels(_: RoundContext) -> np.ndarray:
    return np.zeros(DIM, int)


class UnevenLists(Attack):
    """Every client gets a list of its own; together they declare four of nine clients lost.

    Each list has `enough` = 6 survivors, and no client's two secrets are both restored. But only
    five clients are left in the sum. Signatures prevent it, not the threshold.
    """

    clients = 9
    enough = (6,)

    def contexts(self) -> list[tuple[bytes, Clients]]:
        return [(b"m" * 32, tuple(self.draw.sample(HONEST, self.clients - 1)))]

    def plans(self) -> list[dict[int, list[Clients]]]:
        cohort = self.sessions[0].context.cohort
        victims = self.draw.sample([c for c in cohort if c != CORRUPT], 4)
        lost = dict.fromkeys(victims, 0)
        plan = {}
        for client in sorted(cohort, key=lambda c: c not in victims):
            least = sorted((c for c in victims if c != client), key=lost.__getitem__)[:3]
            lost.update({victim: lost[victim] + 1 for victim in least})
            plan[client] = [tuple(c for c in cohort if c not in least)]
        return [plan]


class LentClient(Attack):
    """A client of two cohorts enters one, where it is lost, and is counted in the other.

    Its keys were sent ahead, so they are the same in both. Once its mask key is restored in one
    session, its masks come off in the other. The box that it never sent there prevents it.
    """

    clients = 7
    enough = (6,)

    def contexts(self) -> list[tuple[bytes, Clients]]:
        first = tuple(range(6))
        return [(b"m" * 32, first), (b"x" * 32, (0, *range(6, 11)))]

    def order(self, client: int) -> list[Session]:
        shown = [session for session in self.sessions if client in session.context.cohort]
        return shown[::-1]

    def plans(self) -> list[dict[int, list[Clients]]]:
        first, second = (session.context.cohort for session in self.sessions)
        without = tuple(client for client in second if client != 0)
        idle = tuple(client for client in first if client != 1)
        return [{client: [idle, without] for client in HONEST}]


def violations(played: Iterable[Attack]) -> Iterator[tuple[int, set[int]]]:
    """Sums with the noise of fewer honest clients than the statement counts on."""
    for number, attack in enumerate(played):
        least = attack.terms.enough - attack.terms.corrupt
        yield from ((number, group) for group in attack.sums if len(group) < least)
