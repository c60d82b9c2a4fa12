"""Replies: read what nodes reply through a Grid, without letting one reply delay another.

Flower's `Grid.pull_messages` reads all replies to the end before it returns any. A node that
announces a reply and never uploads it holds it up for minutes, and a malformed reply loses the
others. So with Flower's own Grid, the announcement and each record are fetched separately, and
whatever is missing is looked for again at the next look. Every other Grid is read one ID at a time.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fedveil.federation.flower.objects import bytes_in, record_ids

if TYPE_CHECKING:
    from flwr.serverapp import Grid

HEADROOM = 2**16  # bytes of a reply around its body
LINGER = 3.0  # seconds for a node to complete the upload of a reply whose records are here

log = logging.getLogger(__name__)


class Replies(Protocol):
    """Looks for replies to messages."""

    def look(self, ids: Collection[str]) -> Iterator[tuple[str, bytes | None]]:
        """Yield (ID, bytes) for replies that are complete, (ID, None) for those that are unusable.

        A message without a reply yields nothing. The ID is that of the message, as the SuperLink
        knows it, whatever the reply says.
        """
        ...


def replies_of(grid: Grid, limit: int) -> Replies:
    """The way to read replies of at most `limit` bytes from this Grid."""
    client = getattr(grid, "_runtime_client", None)
    return PlainReplies(grid, limit) if client is None else HttpReplies(grid, client, limit)


class LargeReplyError(Exception):
    """A reply above the size limit, refused before it was read."""


@dataclass
class PlainReplies:
    """Replies through the public methods of a Grid, one message ID at a time."""

    grid: Grid
    limit: int

    def look(self, ids: Collection[str]) -> Iterator[tuple[str, bytes | None]]:
        """See `Replies.look`."""
        for name in ids:
            try:
                messages = list(self.grid.pull_messages([name]))
            except Exception as problem:
                if is_connection(problem):
                    raise
                _note(problem)
                yield name, None
                continue
            if messages:
                yield name, self._body(messages, name)

    def _body(self, messages: list[Any], name: str) -> bytes | None:
        if len(messages) != 1 or messages[0].metadata.reply_to_message_id != name:
            return None
        return body_of(messages[0], self.limit)


@dataclass
class _Announced:
    """A reply that the SuperLink has announced, and those of its records that are already here."""

    reply: str
    missing: list[str]
    contents: list[bytes] = field(default_factory=list)


class HttpReplies:
    """Replies through the Runtime API that Flower's own Grid uses."""

    def __init__(self, grid: Any, client: Any, limit: int) -> None:
        self._grid, self._client, self._limit = grid, client, limit
        self._announced: dict[str, _Announced] = {}
        self._done: deque[tuple[float, str]] = deque()  # when, and the reply's own ID
        _refuse_large_responses(client, limit + HEADROOM)

    def look(self, ids: Collection[str]) -> Iterator[tuple[str, bytes | None]]:
        """See `Replies.look`."""
        import httpx

        self._tidy(set(ids))
        for name in self._newly_announced([name for name in ids if name not in self._announced]):
            yield name, None
        for name, reply in list(self._announced.items()):
            try:
                if not self._complete(reply):
                    continue
                body = bytes_in(reply.contents)
            except httpx.HTTPStatusError as problem:  # of this reply; it must not starve the others
                _note(problem)
                continue
            except Exception as problem:
                if is_connection(problem):
                    raise
                _note(problem)
                body = None
            self._done.append((time.monotonic(), self._announced.pop(name).reply))
            yield name, body if body is not None and len(body) <= self._limit else None

    def _newly_announced(self, ids: list[str]) -> list[str]:
        """Ask for announcements, and return the IDs of those that are errors or not ours."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        if not ids:
            return []
        pulled = self._client.PullMessages(PullAppMessagesRequest(message_ids=ids))
        failed, asked = [], set(ids)
        for message, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
            name, records = message.metadata.reply_to_message_id, record_ids(tree)
            if name not in asked:
                continue
            if message.HasField("error") or not records:
                failed.append(name)
            else:
                self._announced[name] = _Announced(tree.object_id, records)
        return failed

    def _complete(self, reply: _Announced) -> bool:
        """Fetch what is missing. False if the node has not uploaded all of it yet."""
        from flwr.proto.message_pb2 import PullObjectRequest

        while reply.missing:
            request = PullObjectRequest(
                node=self._grid.node, run_id=self._grid.run.run_id, object_id=reply.missing[0]
            )
            response = self._client.PullObject(request)
            if not response.object_found:
                raise LookupError("an object of a reply is gone")
            if not response.object_available:
                return False
            reply.contents.append(response.object_content)
            del reply.missing[0]
        return True

    def _tidy(self, ids: set[str]) -> None:
        """Let the SuperLink delete replies that were read a while ago, or given up."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        now, node, run = time.monotonic(), self._grid.node, self._grid.run.run_id
        for name in self._announced.keys() - ids:
            self._done.append((now, self._announced.pop(name).reply))
        while self._done and self._done[0][0] <= now - LINGER:
            _, reply = self._done.popleft()
            self._client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=reply)
            )


def body_of(message: object, limit: int) -> bytes | None:
    """The bytes of a reply, or None if it is an error, too large, or not one of ours."""
    from flwr.app import Message

    from fedveil.federation.flower.app.envelope import opened

    if not isinstance(message, Message) or not message.has_content():
        return None
    body = opened(message.content)
    return body if body is not None and len(body) <= limit else None


def is_connection(problem: Exception) -> bool:
    """Whether the SuperLink could not be reached, which says nothing about a reply."""
    import httpx

    return isinstance(problem, httpx.HTTPError | OSError)


def _note(problem: Exception) -> None:
    log.warning("A reply could not be read (%s).", type(problem).__name__)


def _refuse_large_responses(client: Any, limit: int) -> None:
    """Refuse a response by the length it announces, before its body is read into memory."""
    web = getattr(client, "_client", None)
    if web is None:
        return

    def check(response: Any) -> None:
        length = response.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > limit:
            raise LargeReplyError(f"A reply has {length} bytes; at most {limit} are read.")

    hooks = web.event_hooks
    web.event_hooks = {**hooks, "response": [*hooks["response"], check]}
