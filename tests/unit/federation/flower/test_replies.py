"""Replies read through Flower's Runtime API: incomplete, hostile and large ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest, PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from fedveil.federation.flower.app.envelope import sealed
from fedveil.federation.flower.objects import RECORDS
from fedveil.federation.flower.replies import HEADROOM, HttpReplies, replies_of

LIMIT = 1000


@dataclass
class FakeClient:
    """The Runtime API of a SuperLink that has announced some replies."""

    replies: list[tuple[Message, ObjectTree]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    confirmed: list[str] = field(default_factory=list)
    asked: list[list[str]] = field(default_factory=list)
    down: list[Exception] = field(default_factory=list)

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:  # noqa: N802
        self.asked.append(list(request.message_ids))
        ids, ready, rest = set(request.message_ids), [], []
        for each in self.replies:
            (ready if each[0].metadata.reply_to_message_id in ids else rest).append(each)
        self.replies = rest
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(m)) for m, _ in ready],
            message_object_trees=[tree for _, tree in ready],
        )

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        if self.down:
            raise self.down.pop()
        content = self.objects.get(request.object_id)
        return PullObjectResponse(
            object_found=content is not None,
            object_available=bool(content),
            object_content=content or b"",
        )

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.confirmed.append(request.message_object_id)


def question(name: str) -> Message:
    message = Message(RecordDict(), 7, "query")
    message.metadata.__dict__["_message_id"] = name
    return message


def announce(client: FakeClient, name: str, content: RecordDict | Error) -> dict[str, bytes]:
    """Announce a reply to `name`, and return its objects, which are not uploaded yet."""
    reply = Message(content, reply_to=question(name))
    reply.metadata.__dict__["_message_id"] = reply.object_id
    client.replies.append((reply, get_object_tree(reply)))
    objects = {key: value.deflate() for key, value in get_all_nested_objects(reply).items()}
    client.objects |= dict.fromkeys(objects, b"")
    return objects


def reader(client: FakeClient) -> HttpReplies:
    grid = SimpleNamespace(
        node=Node(node_id=1), run=SimpleNamespace(run_id=1), _runtime_client=client
    )
    made = replies_of(grid, LIMIT)  # type: ignore[arg-type]
    assert isinstance(made, HttpReplies)
    return made


def test_a_complete_reply_is_read_once_and_not_asked_for_again() -> None:
    client = FakeClient()
    client.objects |= announce(client, "a", sealed(b"reply"))
    replies = reader(client)
    assert list(replies.look(["a", "b"])) == [("a", b"reply")]
    assert list(replies.look(["b"])) == []
    assert client.asked == [["a", "b"], ["b"]]


def test_replies_that_were_read_or_given_up_are_deleted_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeClient()
    client.objects |= announce(client, "a", sealed(b"reply"))
    client.objects |= dict.fromkeys(announce(client, "bad", sealed(b"x")), b"garbage")
    announce(client, "stuck", sealed(b"never"))
    replies = reader(client)
    list(replies.look(["a", "bad", "stuck"]))
    list(replies.look(["later"]))
    assert client.confirmed == []  # the node may still be uploading the rest
    monkeypatch.setattr("fedveil.federation.flower.replies.LINGER", 0.0)
    list(replies.look(["later"]))
    assert len(client.confirmed) == 3


def test_a_reply_that_is_never_uploaded_does_not_hold_up_the_others() -> None:
    client = FakeClient()
    announce(client, "stuck", sealed(b"never"))
    client.objects |= announce(client, "a", sealed(b"reply"))
    replies = reader(client)
    assert list(replies.look(["stuck", "a"])) == [("a", b"reply")]
    assert list(replies.look(["stuck"])) == []


def test_a_reply_is_read_once_its_upload_is_complete() -> None:
    client = FakeClient()
    objects = announce(client, "a", sealed(b"reply"))
    replies = reader(client)
    assert list(replies.look(["a"])) == []
    client.objects |= objects
    assert list(replies.look(["a"])) == [("a", b"reply")]


def test_an_error_is_unusable_at_once() -> None:
    client = FakeClient()
    announce(client, "a", Error(2, "text"))
    assert list(reader(client).look(["a"])) == [("a", None)]


@pytest.mark.parametrize(
    "garbage",
    [b"\xff", b"ConfigRecord  3\0abc", b"RecordDict  2\0{}", b"Unknown  0\0", b"ConfigRecord"],
)
def test_garbage_is_unusable_and_costs_no_other_reply(garbage: bytes) -> None:
    client = FakeClient()
    client.objects |= dict.fromkeys(announce(client, "bad", sealed(b"x")), garbage)
    client.objects |= announce(client, "good", sealed(b"y"))
    assert dict(reader(client).look(["bad", "good"])) == {"bad": None, "good": b"y"}


def test_the_superlinks_id_counts_and_not_the_one_inside_the_reply() -> None:
    client = FakeClient()
    inner = Message(sealed(b"forged"), reply_to=question("victim"))
    objects = {key: value.deflate() for key, value in get_all_nested_objects(inner).items()}
    announce(client, "own", sealed(b"x"))
    client.replies[0] = (client.replies[0][0], get_object_tree(inner))
    client.objects |= objects
    assert list(reader(client).look(["own", "victim"])) == [("own", b"forged")]


def test_a_large_body_is_unusable() -> None:
    client = FakeClient()
    client.objects |= announce(client, "a", sealed(bytes(LIMIT + 1)))
    assert list(reader(client).look(["a"])) == [("a", None)]


@pytest.mark.parametrize("count", [0, RECORDS + 1])
def test_a_reply_of_no_or_many_records_is_unusable_and_not_fetched(count: int) -> None:
    client = FakeClient()
    records = {str(i): ConfigRecord({"i": i}) for i in range(count)}
    announce(client, "a", RecordDict(records))
    assert list(reader(client).look(["a"])) == [("a", None)]


def test_arrays_are_not_records_of_ours() -> None:
    client = FakeClient()
    client.objects |= announce(client, "a", RecordDict({"x": ArrayRecord([np.zeros(3)])}))
    assert list(reader(client).look(["a"])) == [("a", None)]


def test_an_object_that_is_gone_makes_the_reply_unusable() -> None:
    client = FakeClient()
    for name in announce(client, "a", sealed(b"x")):
        del client.objects[name]
    assert list(reader(client).look(["a"])) == [("a", None)]


def test_a_lost_connection_leaves_the_reply_for_the_next_look() -> None:
    client = FakeClient(down=[httpx.ConnectError("down")])
    client.objects |= announce(client, "a", sealed(b"x"))
    replies = reader(client)
    with pytest.raises(httpx.ConnectError):
        list(replies.look(["a"]))
    assert list(replies.look(["a"])) == [("a", b"x")]


def test_a_reply_that_the_superlink_fails_on_does_not_starve_the_others() -> None:
    request, response = httpx.Request("POST", "https://localhost"), httpx.Response(500)
    client = FakeClient(down=[httpx.HTTPStatusError("", request=request, response=response)])
    for name in ("a", "b"):
        client.objects |= announce(client, name, sealed(name.encode()))
    replies = reader(client)
    assert list(replies.look(["a", "b"])) == [("b", b"b")]
    assert list(replies.look(["a"])) == [("a", b"a")]


def test_a_large_response_is_refused_before_its_body_is_read() -> None:
    """With a real HTTP client, whose transport counts the bytes that are read."""
    read = 0

    def large() -> Any:
        nonlocal read
        for _ in range(100):
            read += 2**20
            yield bytes(2**20)

    def answer(request: httpx.Request) -> httpx.Response:
        size = LIMIT + HEADROOM + 1
        return httpx.Response(200, headers={"content-length": str(size)}, content=large())

    with httpx.Client(transport=httpx.MockTransport(answer)) as web:
        client = FakeClient()
        client._client = web  # type: ignore[attr-defined]
        reader(client)
        with pytest.raises(Exception, match="at most"):
            web.get("http://localhost/")
    assert read == 0
