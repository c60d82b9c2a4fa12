"""A Grid in memory, whose nodes answer, fail, stay silent or lie."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity

from fedveil.federation.flower.app.envelope import opened, sealed

Answer = Callable[[Message], Message | None]


def pem_key() -> bytes:
    """A fresh node key, as Flower stores it."""
    return public_key_to_bytes(ec.generate_private_key(ec.SECP256R1()).public_key())


def echo(message: Message) -> Message:
    """The honest node: the same bytes."""
    return reply(message, body(message))


def body(message: Message) -> bytes:
    """The bytes of a request."""
    found = opened(message.content)
    assert found is not None
    return found


def reply(message: Message, content: bytes) -> Message:
    """A reply with these bytes."""
    return Message(sealed(content), reply_to=message)


def odd_reply(message: Message, records: dict[str, Any]) -> Message:
    """A reply with other records than ours."""
    return Message(RecordDict(records), reply_to=message)


def error(message: Message) -> Message:
    """What Flower sends if a ClientApp raises: the text of the exception."""
    return Message(Error(2, "<class 'KeyError'>:<'a secret of the client'>"), reply_to=message)


@dataclass
class FakeNode:
    """A node with a key and a way to answer."""

    node_id: int
    key: bytes
    answer: Answer = echo
    online: bool = True


@dataclass
class FakeGrid:
    """The public methods of a Grid that the transport uses."""

    nodes: list[FakeNode]
    pushed: list[Message] = field(default_factory=list)
    ready: dict[str, Message] = field(default_factory=dict)
    fail: list[Exception] = field(default_factory=list)  # raised by the next pulls

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=n.node_id, public_key=n.key) for n in self.nodes if n.online]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        if self.fail:
            raise self.fail.pop()
        return [self.ready.pop(name) for name in message_ids if name in self.ready]

    def _push(self, message: Message) -> str:
        name = secrets.token_hex(32)
        message.metadata.__dict__["_message_id"] = name
        self.pushed.append(message)
        (node,) = (n for n in self.nodes if n.node_id == message.metadata.dst_node_id)
        if (answer := node.answer(message)) is not None:
            self.ready[name] = answer
        return name


@contextmanager
def identity() -> Iterator[None]:
    """Flower's identity of a ServerApp's process, which messages need."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_task_id", "_run_id", "_node_id"):
            patch.setattr(TaskIdentity, name, 1)
        yield
