"""GridTransport: a Transport over Flower's Grid, from roster clients to authenticated nodes.

Flower authenticates a node by its key, and the SuperLink lists the keys of connected nodes. A
client is the node with the key in the roster, whatever its node ID. A reply belongs to the client
whose message it answers. Message IDs are hashes over a nonce, so only the addressed node, which the
SuperLink has authenticated, can know the ID that a reply must name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedveil.errors import UserError
from fedveil.federation.flower.app.frames import LIMIT
from fedveil.federation.flower.keys import node_key
from fedveil.federation.flower.replies import is_connection, replies_of

if TYPE_CHECKING:
    from flwr.app import ConfigRecord, Message
    from flwr.serverapp import Grid

POLL = 0.2  # seconds between two looks for replies, at least
SHARE = 5.0  # a look that took t seconds is followed by a pause of at least SHARE · t
SLOWEST = 2.0  # seconds between two looks, at most
WORTH = 2**16  # bytes that requests must have in common to travel once
PATIENCE = 30.0  # seconds that `connected` waits for the SuperLink
QUERY = "query"

log = logging.getLogger(__name__)


class GridTransport:
    """Exchanges bytes with the nodes whose public keys the roster names."""

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[int, bytes | str],
        *,
        limit: int = LIMIT,
        poll: float = POLL,
    ) -> None:
        self._grid, self._poll = grid, poll
        self._clients = {node_key(key): client for client, key in nodes.items()}
        if len(self._clients) != len(nodes):
            raise UserError("Two clients of the roster have the same node key. Give each its own.")
        self._replied = replies_of(grid, limit)

    def connected(self) -> frozenset[int]:
        """The clients whose nodes are online, by the SuperLink's last heartbeat from them."""
        with self._reaching(PATIENCE, "The nodes could not be listed"):
            return frozenset(self._online())
        return frozenset()

    def exchange(
        self, requests: Mapping[int, bytes], seconds: float
    ) -> Iterator[tuple[int, bytes]]:
        """Send the requests now, and yield (client, reply) until all have replied or time is up.

        A message and its reply expire on the SuperLink when the exchange ends.
        """
        deadline = time.monotonic() + seconds
        return self._replies(self._sent(requests, seconds), deadline)

    def _online(self) -> dict[int, int]:
        """Client → node ID."""
        found = ((self._client(node.public_key), node.node_id) for node in self._grid.get_nodes())
        return {client: node for client, node in found if client is not None}

    def _client(self, key: bytes) -> int | None:
        try:
            return self._clients.get(node_key(key))
        except UserError:  # a node without authentication
            return None

    def _sent(self, requests: Mapping[int, bytes], seconds: float) -> dict[str, int]:
        """Message ID → client, for all requests that the SuperLink has taken."""
        taken: dict[str, int] = {}
        with self._reaching(seconds, "Not all requests could be sent"):
            nodes = self._online()
            reached = {client: body for client, body in requests.items() if client in nodes}
            for client, message in zip(reached, _messages(reached, nodes, seconds), strict=True):
                if name := self._pushed(message):
                    taken[name] = client
        return taken

    def _pushed(self, message: Message) -> str | None:
        """The ID of a message, or None if the SuperLink did not take it.

        Messages are sent one at a time: a node that deletes its own message during the upload stops
        Flower's upload, and must not stop that of the others.
        """
        from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

        try:
            return next(iter(self._grid.push_messages([message])), None)
        except ObjectPushError as problem:
            log.warning("A request could not be sent (%s).", type(problem).__name__)
            return None

    def _replies(self, waiting: dict[str, int], deadline: float) -> Iterator[tuple[int, bytes]]:
        while waiting and time.monotonic() < deadline:
            began = time.monotonic()
            for name, body in self._looked(list(waiting), deadline):
                client = waiting.pop(name, None)
                if client is not None and body is not None:
                    yield client, body
            if waiting:
                _pause(began, deadline, self._poll)

    def _looked(self, ids: list[str], deadline: float) -> Iterator[tuple[str, bytes | None]]:
        """What one look finds before the deadline. A lost connection ends the look."""
        looking = self._replied.look(ids)
        while (left := deadline - time.monotonic()) > 0:
            found = None
            with self._reaching(left, "Replies could not be read"):
                found = next(looking, None)
            if found is None:
                return
            yield found

    @contextmanager
    def _reaching(self, seconds: float, failure: str) -> Iterator[None]:
        """Give up on an unreachable SuperLink after `seconds`, with a warning and no exception.

        Flower itself retries without end. Other failures, such as a run that was stopped, raise.
        """
        retries = getattr(self._grid, "_retry_invoker", None)
        before = retries and retries.max_time
        try:
            if retries is not None:
                retries.max_time = max(seconds, 0.0)
            yield
        except Exception as problem:
            if not is_connection(problem):
                raise
            log.warning("%s (%s).", failure, type(problem).__name__)
        finally:
            if retries is not None:
                retries.max_time = before


def _messages(
    requests: Mapping[int, bytes], nodes: Mapping[int, int], seconds: float
) -> list[Message]:
    """One message for each request. What they have in common at the end is one record of all."""
    from flwr.app import Message

    from fedveil.federation.flower.app.envelope import common_record, sealed

    size = common_suffix(list(requests.values()))
    shared: ConfigRecord | None = None
    if len(requests) > 1 and size >= WORTH:
        shared = common_record(next(iter(requests.values()))[-size:])
    cut = size if shared is not None else 0
    return [
        Message(sealed(body[: len(body) - cut], shared), nodes[client], QUERY, ttl=seconds)
        for client, body in requests.items()
    ]


def common_suffix(bodies: list[bytes]) -> int:
    """The length of the longest common suffix.

    >>> common_suffix([b"one model", b"two model"])
    6
    """
    low, high = 0, min(map(len, bodies), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        tail = bodies[0][-middle:]
        if all(body.endswith(tail) for body in bodies):
            low = middle
        else:
            high = middle - 1
    return low


def _pause(began: float, deadline: float, poll: float) -> None:
    now = time.monotonic()
    pause = min(max(poll, SHARE * (now - began)), SLOWEST)
    time.sleep(max(0.0, min(pause, deadline - now)))
