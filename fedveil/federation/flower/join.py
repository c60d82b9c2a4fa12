"""join: take part over Flower's own connection, without running code that the server ships.

A SuperNode downloads the submitter's app and runs it for every message. A joined client speaks the
same Fleet API with the same node key and answers the same messages itself, with the fedveil that
its owner installed. It uses parts of Flower that are not public, so it insists on the version that
it was written for (tests/contracts/test_flower.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import UserError
from fedveil.federation.flower.app.frames import LIMIT
from fedveil.federation.flower.keys import read_node_key
from fedveil.federation.flower.objects import bytes_in, other_ids, record_ids
from fedveil.federation.flower.stopping import on_signals
from fedveil.federation.transport import Handler

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.supernode.fleet_http_client import FleetHttpClient

VERSION = "1.41."
HEARTBEAT = 10.0  # seconds that are promised to the SuperLink, which waits for twice that
POLL, SLOWEST = 0.2, 2.0  # seconds between two looks for requests: just after one, and at most
GROWTH = 1.25  # of the pause from look to look
SHARE = 5.0  # a look that took t seconds is followed by a pause of at least SHARE · t
RETRY = 2.0  # seconds before the next try if the SuperLink cannot be reached
TAKEN = 2 * HEARTBEAT + 3.0  # seconds until a node that was killed may connect again
CODE = 100  # of an error reply

log = logging.getLogger(__name__)


def join(
    superlink: str,
    handler: Handler,
    key: Path,
    root_certificate: Path | None = None,
    *,
    stop: threading.Event | None = None,
    limit: int = LIMIT,
) -> None:
    """Answer the requests that the SuperLink at host:port has for this node, until `stop`.

    In the main thread, SIGTERM and SIGINT stop it too, after the current request.
    The key must be registered (`flwr supernode register`). The connection always uses TLS, with the
    given root certificate or the system's. A lost connection is retried without end. An exception
    of the handler becomes one fixed word, and its text stays in this process's log.
    """
    check_version()
    halt = stop or threading.Event()
    with _fleet(superlink, key, root_certificate) as client, on_signals(halt.set):
        member = _Member(client, handler, halt, limit)
        member.activate(_public_pem(key))
        beating = threading.Thread(target=member.beat, name="heartbeat", daemon=True)
        beating.start()
        try:
            member.answer_all()
        finally:
            halt.set()
            beating.join(HEARTBEAT)
            member.deactivate()


def check_version() -> None:
    """Raise unless the installed Flower is the one that this module was written for."""
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise UserError(
            "Flower is not installed. Run: pip install 'fedveil[federation]'."
        ) from None
    if not version.startswith(VERSION):
        raise UserError(
            f"Flower {version} is installed, but joining without a SuperNode needs {VERSION}x. "
            "Install that version, or run a SuperNode and an agent."
        )


class _Member:
    """One node's side of the Fleet API."""

    def __init__(
        self, client: FleetHttpClient, handler: Handler, halt: threading.Event, limit: int
    ) -> None:
        self._client, self._handler, self._halt, self._limit = client, handler, halt, limit
        self._node: Any = None
        self._pause = POLL
        self._refusal: UserError | None = None

    def activate(self, public: bytes) -> None:
        """Connect as the node with this public key. Waits for a SuperLink that is not there yet.

        The SuperLink also refuses a registered key while an earlier process of its node seems to be
        online, which lasts up to two heartbeats after that process was killed.
        """
        from flwr.proto.fleet_pb2 import ActivateNodeRequest
        from flwr.proto.node_pb2 import Node

        request = ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT)
        until = time.monotonic() + TAKEN
        while not self._halt.is_set():
            with self._forgiving("connect", refused=time.monotonic() > until):
                self._node = Node(node_id=self._client.ActivateNode(request).node_id)
                return

    def beat(self) -> None:
        """Tell the SuperLink that this node is online, well within the promised interval."""
        from flwr.proto.heartbeat_pb2 import (
            SendNodeHeartbeatRequest,
        )

        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT)
        while not self._halt.wait(HEARTBEAT * 0.6):
            try:
                with self._forgiving("send a heartbeat"):
                    self._client.SendNodeHeartbeat(request)
            except UserError as problem:
                self._refusal = problem

    def answer_all(self) -> None:
        """Answer requests one at a time, in the order in which the SuperLink gives them.

        Looks become rarer after a request, and where the SuperLink is slow to answer them.
        """
        while not self._halt.is_set():
            began = time.monotonic()
            with self._forgiving("look for requests"):
                if self._answer_one():
                    self._pause = POLL
                    continue
            busy = SHARE * (time.monotonic() - began)
            self._halt.wait(min(max(self._pause, busy), SLOWEST))
            self._pause = min(self._pause * GROWTH, SLOWEST)
        if self._refusal is not None:
            raise self._refusal

    def deactivate(self) -> None:
        """Tell the SuperLink that this node leaves, if it can be reached."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        if self._node is not None:
            with self._forgiving("disconnect", pause=False):
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))

    def _answer_one(self) -> bool:
        """Answer the next request. False if there is none."""
        from flwr.common.serde import message_from_proto
        from flwr.proto.fleet_pb2 import PullMessagesRequest

        pulled = self._client.PullMessages(PullMessagesRequest(node=self._node))
        if not pulled.messages_list:
            return False
        message = message_from_proto(pulled.messages_list[0])
        request = self._received(message, pulled.message_object_trees[0])
        self._push(self._reply(message, request))
        return True

    def _received(self, message: Message, tree: Any) -> bytes | None:
        """The bytes of a request, or None if it is not one of ours.

        Confirming makes the SuperLink delete the message, so all of it must have been uploaded.
        """
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        run, records = message.metadata.run_id, record_ids(tree)
        contents = [self._object(message, name) for name in records]
        for name in other_ids(tree) if records else []:
            self._object(message, name)
        confirmed = ConfirmMessageReceivedRequest(
            node=self._node, run_id=run, message_object_id=tree.object_id
        )
        self._called(message, self._client.ConfirmMessageReceived, confirmed)
        return bytes_in(contents)

    def _object(self, message: Message, name: str) -> bytes:
        """The content of an object, waiting while the server is still uploading it."""
        from flwr.proto.message_pb2 import PullObjectRequest

        run = message.metadata.run_id
        request = PullObjectRequest(node=self._node, run_id=run, object_id=name)
        while True:
            response = self._called(message, self._client.PullObject, request)
            if not response.object_found:
                raise LookupError("an object of the request is gone")
            if response.object_available:
                return bytes(response.object_content)
            self._halt.wait(POLL)

    def _reply(self, message: Message, request: bytes | None) -> Message:
        from flwr.app import Error, Message

        from fedveil.federation.flower.app.envelope import sealed

        if request is None:
            return Message(Error(CODE, "malformed"), reply_to=message)
        if len(request) > self._limit:
            return Message(Error(CODE, "too-large"), reply_to=message)
        try:
            return Message(sealed(self._handler(request)), reply_to=message)
        except Exception:
            log.exception("A request could not be answered.")
            return Message(Error(CODE, "failed"), reply_to=message)

    def _push(self, reply: Message) -> None:
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            no_object_id_recompute,
        )

        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            objects, tree = get_all_nested_objects(reply), get_object_tree(reply)
        request = PushMessagesRequest(
            node=self._node,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[tree],
        )
        taken = self._called(reply, self._client.PushMessages, request)
        for name in taken.objects_to_push:
            self._upload(reply, taken.session_id, name, objects[name].deflate())

    def _upload(self, reply: Message, session: str, name: str, content: bytes) -> None:
        from flwr.proto.message_pb2 import PushObjectRequest

        request = PushObjectRequest(
            node=self._node,
            run_id=reply.metadata.run_id,
            object_id=name,
            object_content=content,
            session_id=session,
        )
        self._called(reply, self._client.PushObject, request)

    def _called(self, message: Message, call: Callable[[Any], Any], request: object) -> Any:
        """call(request), again while the SuperLink cannot be reached and the message is valid.

        All calls of one message can be repeated: the SuperLink takes a reply and an object once.
        """
        import httpx

        expires = message.metadata.created_at + message.metadata.ttl
        while not self._halt.is_set() and time.time() < expires:
            try:
                return call(request)
            except httpx.TransportError as problem:
                self._note("exchange a message", problem, pause=True)
        raise LookupError("the message has expired")

    @contextmanager
    def _forgiving(self, what: str, refused: bool = False, pause: bool = True) -> Iterator[None]:
        """Log a failure that may pass, and wait a little. A wrong signature does not pass."""
        import httpx

        try:
            yield
        except httpx.HTTPStatusError as problem:
            if refused or problem.response.status_code == httpx.codes.UNAUTHORIZED:
                self._halt.set()
                raise UserError(
                    "The SuperLink refuses this node's key. Register its public key with `flwr "
                    "supernode register`, stop any other process with the same key, and check this "
                    "computer's clock."
                ) from None
            self._note(what, problem, pause)
        except (httpx.HTTPError, LookupError, ValueError) as problem:
            self._note(what, problem, pause)

    def _note(self, what: str, problem: Exception, pause: bool) -> None:
        log.warning("Could not %s (%s).", what, type(problem).__name__)
        if pause:
            self._halt.wait(RETRY)


@contextmanager
def _fleet(superlink: str, key: Path, root_certificate: Path | None) -> Iterator[FleetHttpClient]:
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    private = read_node_key(key)
    with FleetHttpClient.from_server_address(
        superlink,
        False,
        None if root_certificate is None else str(root_certificate),
        [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(private, private.public_key()),
        ],
    ) as client:
        yield client


def _public_pem(key: Path) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return (
        read_node_key(key)
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
