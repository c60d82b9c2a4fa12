"""The transport over a Grid: who is asked, who has answered, and when it ends."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from fedveil.errors import UserError
from fedveil.federation.flower.app.envelope import BODY, COMMON, NONCE, OWN
from fedveil.federation.flower.grid import GridTransport, common_suffix
from fedveil.federation.flower.keys import node_key
from tests.unit.federation.flower.fakes import (
    Answer,
    FakeGrid,
    FakeNode,
    body,
    echo,
    error,
    odd_reply,
    pem_key,
    reply,
)

KEYS = [pem_key() for _ in range(4)]
SOON = 0.15  # seconds


def silent(_: Message) -> None:
    return None


def federation(*answers: Answer) -> tuple[FakeGrid, GridTransport]:
    """Client i has key i and node ID 100 − i, so that the two orders differ."""
    grid = FakeGrid([FakeNode(100 - i, KEYS[i], answer) for i, answer in enumerate(answers)])
    nodes = {i: KEYS[i] for i in range(len(answers))}
    return grid, GridTransport(grid, nodes, poll=0.01)  # type: ignore[arg-type]


def test_each_client_gets_its_own_request_and_its_reply_comes_back_under_its_index() -> None:
    _, transport = federation(echo, echo, echo)
    requests = {i: f"request of {i}".encode() for i in range(3)}
    assert dict(transport.exchange(requests, 5)) == requests


def test_requests_are_sent_before_the_first_reply_is_asked_for() -> None:
    grid, transport = federation(echo)
    transport.exchange({0: b"x"}, 5)
    assert len(grid.pushed) == 1


def test_only_nodes_of_the_roster_are_clients() -> None:
    grid, transport = federation(echo, echo)
    grid.nodes += [FakeNode(7, pem_key()), FakeNode(8, b"")]
    grid.nodes[1].online = False
    assert transport.connected() == {0}
    assert dict(transport.exchange({0: b"a", 1: b"b"}, SOON)) == {0: b"a"}


def test_a_client_keeps_its_index_when_its_node_id_changes() -> None:
    grid, transport = federation(echo, echo)
    grid.nodes[0].node_id, grid.nodes[1].node_id = 99, 100
    assert dict(transport.exchange({0: b"a", 1: b"b"}, 5)) == {0: b"a", 1: b"b"}


def test_keys_are_compared_in_any_form() -> None:
    from cryptography.hazmat.primitives import serialization

    public = serialization.load_pem_public_key(KEYS[0])
    line = public.public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    ).decode()
    assert node_key(line) == node_key(f"{line} comment\n") == node_key(KEYS[0]) != node_key(KEYS[1])


def test_one_key_for_two_clients_is_refused() -> None:
    with pytest.raises(UserError, match="same node key"):
        GridTransport(FakeGrid([]), {0: KEYS[0], 1: KEYS[0]})  # type: ignore[arg-type]


def test_a_silent_client_ends_the_exchange_at_its_deadline() -> None:
    _, transport = federation(silent, echo)
    began = time.monotonic()
    assert dict(transport.exchange({0: b"a", 1: b"b"}, SOON)) == {1: b"b"}
    assert SOON <= time.monotonic() - began < SOON + 20  # a busy machine is late


def test_an_exchange_ends_as_soon_as_everyone_has_replied_or_failed() -> None:
    _, transport = federation(echo, error)
    began = time.monotonic()
    assert dict(transport.exchange({0: b"a", 1: b"b"}, 60)) == {0: b"a"}
    assert time.monotonic() - began < 5


def test_the_text_of_an_error_is_neither_returned_nor_logged(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    _, transport = federation(error)
    assert list(transport.exchange({0: b"a"}, 5)) == []
    assert "secret" not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "records",
    [
        {},
        {OWN: ConfigRecord({NONCE: b"x"})},
        {OWN: ConfigRecord({BODY: "text", NONCE: b"x"})},
        {OWN: ConfigRecord({BODY: [b"x"], NONCE: b"x"})},
        {OWN: ConfigRecord({BODY: b"x", NONCE: b"x"}), "more": ConfigRecord({})},
        {str(i): ConfigRecord({BODY: b"x", NONCE: b"x"}) for i in range(2)},
        {COMMON: ConfigRecord({BODY: b"x"})},
        {OWN: MetricRecord({BODY: 1})},
    ],
)
def test_a_reply_of_another_form_yields_nothing(records: dict[str, Any]) -> None:
    _, transport = federation(lambda message: odd_reply(message, records), echo)
    assert dict(transport.exchange({0: b"a", 1: b"b"}, 5)) == {1: b"b"}


def test_a_reply_above_the_limit_yields_nothing() -> None:
    grid = FakeGrid([FakeNode(1, KEYS[0], lambda message: reply(message, bytes(11)))])
    transport = GridTransport(grid, {0: KEYS[0]}, limit=10, poll=0.01)  # type: ignore[arg-type]
    assert list(transport.exchange({0: b"a"}, 5)) == []


def test_a_reply_to_another_clients_message_yields_nothing() -> None:
    seen: list[Message] = []

    def remember(message: Message) -> None:
        seen.append(message)

    def forge(message: Message) -> Message:
        return reply(seen[0], b"as if from client 0")

    _, transport = federation(remember, forge)
    assert list(transport.exchange({0: b"a", 1: b"b"}, SOON)) == []


def test_messages_expire_with_the_exchange_and_have_ids_that_nobody_can_guess() -> None:
    grid, transport = federation(echo, echo)
    for _ in range(2):
        list(transport.exchange({0: b"same", 1: b"same"}, 7))
    assert {message.metadata.ttl for message in grid.pushed} == {7}
    assert len({message.content.object_id for message in grid.pushed}) == 4


def test_what_requests_have_in_common_is_one_object_for_all() -> None:
    grid, transport = federation(echo, echo, echo)
    model = bytes(range(256)) * 300
    requests = {i: bytes([i]) * (i + 1) + model for i in range(3)}
    assert dict(transport.exchange(requests, 5)) == requests
    assert len({message.content[COMMON].object_id for message in grid.pushed}) == 1
    assert [body(message) for message in grid.pushed] == list(requests.values())


@pytest.mark.parametrize(
    ("bodies", "size"),
    [([], 0), ([b""], 0), ([b"ab"], 2), ([b"ab", b"b"], 1), ([b"ab", b"ab"], 2), ([b"a", b"b"], 0)],
)
def test_common_suffix(bodies: list[bytes], size: int) -> None:
    assert common_suffix(bodies) == size


def test_an_unreadable_reply_costs_only_its_own_client() -> None:
    grid, transport = federation(echo, echo)
    grid.fail = [ValueError("garbage")]
    assert len(list(transport.exchange({0: b"a", 1: b"b"}, 5))) == 1


@pytest.mark.parametrize("lost", [httpx.ConnectError("down"), ConnectionResetError()])
def test_a_lost_connection_costs_no_reply(lost: Exception) -> None:
    grid, transport = federation(echo, echo)
    grid.fail = [lost, lost]
    assert dict(transport.exchange({0: b"a", 1: b"b"}, 5)) == {0: b"a", 1: b"b"}


def test_a_superlink_that_is_down_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, transport = federation(echo)

    def down() -> None:
        raise httpx.ConnectError("down")

    monkeypatch.setattr(grid, "get_nodes", down)
    assert transport.connected() == frozenset()
    assert list(transport.exchange({0: b"a"}, SOON)) == []


def test_a_stopped_run_raises_instead_of_looking_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supercore.run import RunNotRunningException

    grid, transport = federation(echo)

    def stopped(_: object) -> None:
        raise RunNotRunningException

    monkeypatch.setattr(grid, "push_messages", stopped)
    with pytest.raises(RunNotRunningException):
        transport.exchange({0: b"a"}, SOON)


def test_a_message_that_the_superlink_does_not_take_yields_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid, transport = federation(echo, echo, echo)
    push = grid.push_messages

    def odd(messages: list[Message]) -> list[str]:
        match body(messages[0]):
            case b"refused":
                return [""]
            case b"deleted":
                raise ObjectPushError("object", 1, "session")
        return push(messages)

    monkeypatch.setattr(grid, "push_messages", odd)
    requests = {0: b"refused", 1: b"deleted", 2: b"c"}
    assert dict(transport.exchange(requests, 5)) == {2: b"c"}
