"""A client that has joined: it answers over Flower's Fleet API, whatever comes and goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeResponse,
    PullMessagesResponse,
    PushMessagesResponse,
)
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedveil.errors import UserError
from fedveil.federation.flower import join as joining
from fedveil.federation.flower.app.envelope import opened, sealed
from fedveil.federation.flower.join import join
from fedveil.federation.flower.keys import write_node_key
from fedveil.federation.flower.objects import RECORDS
from fedveil.federation.transport import Handler

CALLS = {
    "ActivateNode": ActivateNodeResponse(node_id=7),
    "SendNodeHeartbeat": None,
    "DeactivateNode": None,
    "ConfirmMessageReceived": None,
}


@dataclass
class FakeFleet:
    """A SuperLink's Fleet API with some messages for one node."""

    stop: threading.Event
    messages: list[Message] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    replies: list[Message] = field(default_factory=list)
    called: list[str] = field(default_factory=list)
    problems: dict[str, list[Exception]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        def called(request: Any) -> Any:
            self.called.append(name)
            if self.problems.get(name):
                raise self.problems[name].pop()
            own = {"PullMessages": self.pull, "PullObject": self.get, "PushMessages": self.push}
            own["PushObject"] = self.put
            return own[name](request) if name in own else CALLS[name]

        return called

    def pull(self, _: Any) -> PullMessagesResponse:
        if not self.messages:
            self.stop.set()
            return PullMessagesResponse()
        message = self.messages.pop(0)
        self.objects |= {k: v.deflate() for k, v in get_all_nested_objects(message).items()}
        return PullMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
        )

    def get(self, request: Any) -> PullObjectResponse:
        content = self.objects[request.object_id]
        return PullObjectResponse(
            object_found=True, object_available=bool(content), object_content=content
        )

    def push(self, request: Any) -> PushMessagesResponse:
        self.tree = request.message_object_trees[0]
        self.wanted = [each.object_id for each in iterate_object_tree(self.tree)]
        self.uploaded: dict[str, bytes] = {}
        return PushMessagesResponse(objects_to_push=self.wanted, session_id="s")

    def put(self, request: Any) -> None:
        self.uploaded[request.object_id] = request.object_content
        if self.uploaded.keys() == set(self.wanted):
            reply = inflate_object_from_contents(self.tree.object_id, self.uploaded)
            assert isinstance(reply, Message)
            self.replies.append(reply)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    made = FakeFleet(threading.Event())

    @contextmanager
    def connected(*_: object) -> Iterator[FakeFleet]:
        yield made

    monkeypatch.setattr(joining, "_fleet", connected)
    for name in ("POLL", "SLOWEST", "RETRY"):
        monkeypatch.setattr(joining, name, 0.01)
    return made


def joined(fleet: FakeFleet, tmp_path: Path, handler: Handler = bytes, **options: int) -> None:
    key = tmp_path / "node"
    write_node_key(key)
    join("127.0.0.1:1", handler, key, stop=fleet.stop, **options)


def question(content: RecordDict, seconds: float = 60.0) -> Message:
    message = Message(content, 7, "query", ttl=seconds)
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def status_error(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://localhost")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(code))


def test_requests_are_answered_and_the_node_leaves(fleet: FakeFleet, tmp_path: Path) -> None:
    fleet.messages = [question(sealed(b"one")), question(sealed(b"two"))]
    joined(fleet, tmp_path, bytes.upper)
    assert [opened(reply.content) for reply in fleet.replies] == [b"ONE", b"TWO"]
    assert fleet.called[0] == "ActivateNode"
    assert fleet.called[-1] == "DeactivateNode"


def test_what_many_requests_have_in_common_arrives_as_one_request(
    fleet: FakeFleet, tmp_path: Path
) -> None:
    fleet.messages = [question(sealed(b"own,", ConfigRecord({"body": b"common"})))]
    joined(fleet, tmp_path)
    assert opened(fleet.replies[0].content) == b"own,common"


def test_the_handlers_exception_stays_here(
    fleet: FakeFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(_: bytes) -> bytes:
        raise ValueError("a secret of the client")

    fleet.messages = [question(sealed(b"x"))]
    joined(fleet, tmp_path, handler)
    assert fleet.replies[0].error.reason == "failed"
    assert "a secret of the client" in caplog.text


def test_messages_of_another_form_and_large_ones_are_refused_with_a_word(
    fleet: FakeFleet, tmp_path: Path
) -> None:
    fleet.messages = [question(RecordDict()), question(sealed(bytes(11)))]
    joined(fleet, tmp_path, limit=10)
    assert [reply.error.reason for reply in fleet.replies] == ["malformed", "too-large"]


def test_a_message_of_many_records_is_not_fetched(fleet: FakeFleet, tmp_path: Path) -> None:
    records = {str(i): ConfigRecord({"i": i}) for i in range(RECORDS + 1)}
    fleet.messages = [question(RecordDict(records))]
    joined(fleet, tmp_path)
    assert "PullObject" not in fleet.called
    assert fleet.replies[0].error.reason == "malformed"


def test_an_object_that_is_still_uploaded_is_waited_for(
    fleet: FakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, late = fleet.get, ["once", "twice"]

    def slow(request: Any) -> PullObjectResponse:
        if late:
            late.pop()
            return PullObjectResponse(object_found=True, object_available=False)
        return get(request)

    monkeypatch.setattr(fleet, "get", slow)
    fleet.messages = [question(sealed(b"x"))]
    joined(fleet, tmp_path)
    assert opened(fleet.replies[0].content) == b"x"


@pytest.mark.parametrize(
    "call",
    [
        "ActivateNode", "PullMessages", "PullObject", "ConfirmMessageReceived", "PushMessages",
        "PushObject",
    ],
)  # fmt: skip
def test_a_lost_connection_is_retried_and_the_request_answered_once(
    fleet: FakeFleet, tmp_path: Path, call: str
) -> None:
    answered: list[bytes] = []

    def handler(request: bytes) -> bytes:
        answered.append(request)
        return request

    fleet.messages = [question(sealed(b"x"))]
    fleet.problems = {call: [httpx.ConnectError("down"), httpx.ReadTimeout("slow")]}
    joined(fleet, tmp_path, handler)
    assert answered == [b"x"]
    assert len(fleet.replies) == 1


def test_a_reply_that_has_expired_is_not_sent_any_more(fleet: FakeFleet, tmp_path: Path) -> None:
    fleet.messages = [question(sealed(b"x"), seconds=0.2)]
    fleet.problems = {"PushMessages": [httpx.ConnectError("down") for _ in range(1000)]}
    joined(fleet, tmp_path)
    assert fleet.replies == []


def test_a_wrong_signature_ends_it(fleet: FakeFleet, tmp_path: Path) -> None:
    fleet.problems = {"PullMessages": [status_error(401)]}
    with pytest.raises(UserError, match="refuses this node's key"):
        joined(fleet, tmp_path)
    assert fleet.called[-1] == "DeactivateNode"


def test_a_refused_key_is_retried_while_an_earlier_process_may_seem_online(
    fleet: FakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.problems = {"ActivateNode": [status_error(412)]}
    joined(fleet, tmp_path)
    assert fleet.called[:2] == ["ActivateNode", "ActivateNode"]
    monkeypatch.setattr(joining, "TAKEN", 0.05)
    fleet.stop.clear()
    fleet.problems = {"ActivateNode": [status_error(412) for _ in range(1000)]}
    (tmp_path / "again").mkdir()
    with pytest.raises(UserError, match="refuses this node's key"):
        joined(fleet, tmp_path / "again")


def test_a_refusal_of_the_heartbeat_ends_it_too(
    fleet: FakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "HEARTBEAT", 0.01)
    fleet.problems = {"SendNodeHeartbeat": [status_error(401)]}
    monkeypatch.setattr(fleet, "pull", lambda _: time.sleep(0.01) or PullMessagesResponse())
    with pytest.raises(UserError, match="refuses this node's key"):
        joined(fleet, tmp_path)


def test_another_version_of_flower_is_refused_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining.metadata, "version", lambda _: "1.42.0")
    with pytest.raises(UserError, match=r"Flower 1\.42\.0.*or run a SuperNode and an agent"):
        join("127.0.0.1:1", bytes, Path("key"))
