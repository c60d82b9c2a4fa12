"""What fedveil uses of Flower beyond its public API, in the version that it is pinned to.

If one of these fails after an update of flwr, read `federation/flower/join.py`, `replies.py` and
`grid.py` against the new source before the pin in pyproject.toml is moved.
"""

from __future__ import annotations

import importlib
import inspect
from importlib import metadata
from typing import Any

import httpx
import pytest

from fedveil.federation.flower.join import VERSION

USED = [
    "flwr.app.message:remove_content_from_message",
    "flwr.common.serde:message_from_proto",
    "flwr.common.serde:message_to_proto",
    "flwr.supercore.inflatable.inflatable_object:get_all_nested_objects",
    "flwr.supercore.inflatable.inflatable_object:get_object_tree",
    "flwr.supercore.inflatable.inflatable_object:no_object_id_recompute",
    "flwr.supercore.inflatable.inflatable_utils:ObjectPushError",
    "flwr.supercore.interceptors.http.runtime_version:RuntimeVersionHttpInterceptor",
    "flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor",
]
FLEET = (
    "ActivateNode", "DeactivateNode", "SendNodeHeartbeat", "PullMessages", "PushMessages",
    "PullObject", "PushObject", "ConfirmMessageReceived",
)  # fmt: skip
RUNTIME = ("PullMessages", "PullObject", "ConfirmMessageReceived")
FIELDS = {
    "flwr.proto.fleet_pb2:ActivateNodeRequest": {"public_key", "heartbeat_interval"},
    "flwr.proto.fleet_pb2:DeactivateNodeRequest": {"node_id"},
    "flwr.proto.fleet_pb2:PullMessagesRequest": {"node"},
    "flwr.proto.fleet_pb2:PullMessagesResponse": {"messages_list", "message_object_trees"},
    "flwr.proto.fleet_pb2:PushMessagesRequest": {
        "node", "messages_list", "message_object_trees",
    },
    "flwr.proto.fleet_pb2:PushMessagesResponse": {"objects_to_push", "session_id"},
    "flwr.proto.heartbeat_pb2:SendNodeHeartbeatRequest": {"node", "heartbeat_interval"},
    "flwr.proto.message_pb2:ObjectTree": {"object_id", "children"},
    "flwr.proto.message_pb2:PullObjectRequest": {"node", "run_id", "object_id"},
    "flwr.proto.message_pb2:PullObjectResponse": {
        "object_found", "object_available", "object_content",
    },
    "flwr.proto.message_pb2:PushObjectRequest": {
        "node", "run_id", "object_id", "object_content", "session_id",
    },
    "flwr.proto.message_pb2:ConfirmMessageReceivedRequest": {
        "node", "run_id", "message_object_id",
    },
    "flwr.proto.runtime_pb2:PullAppMessagesRequest": {"message_ids"},
    "flwr.proto.runtime_pb2:PullAppMessagesResponse": {"messages_list", "message_object_trees"},
    "flwr.proto.node_pb2:NodeInfo": {"node_id", "public_key"},
}  # fmt: skip


def found(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def test_the_installed_flower_is_the_pinned_one() -> None:
    assert metadata.version("flwr").startswith(VERSION)


@pytest.mark.parametrize("name", USED)
def test_a_function_or_class_is_where_it_was(name: str) -> None:
    assert callable(found(name))


@pytest.mark.parametrize("name", FIELDS)
def test_a_message_has_the_fields_that_are_used(name: str) -> None:
    assert FIELDS[name] <= {field.name for field in found(name).DESCRIPTOR.fields}


def test_the_clients_have_the_calls_that_are_used() -> None:
    fleet = found("flwr.supernode.fleet_http_client:FleetHttpClient")
    runtime = found("flwr.supercore.runtime:RuntimeHttpClient")
    assert all(callable(getattr(fleet, name)) for name in FLEET)
    assert all(callable(getattr(runtime, name)) for name in RUNTIME)
    expected = ["server_address", "insecure", "root_certificates", "interceptors"]
    assert list(inspect.signature(fleet.from_server_address).parameters)[:4] == expected


def test_the_grid_of_a_server_app_lets_itself_be_read_object_by_object() -> None:
    grid = found("flwr.superlink.grid:HttpGrid")("127.0.0.1:1", insecure=True, token="t")
    try:
        assert grid._retry_invoker.max_time is None  # endless, unless bounded
        assert isinstance(grid._runtime_client._client, httpx.Client)
        assert "response" in grid._runtime_client._client.event_hooks
        assert grid.node.node_id
    finally:
        grid.close()


def test_a_content_of_one_config_record_has_three_objects() -> None:
    from fedveil.federation.flower.app.envelope import sealed

    nested = found("flwr.supercore.inflatable.inflatable_object:get_all_nested_objects")
    objects = nested(sealed(bytes(10**6)))
    assert len(objects) == 2  # and the message itself
    size = sum(len(each.deflate()) for each in objects.values())
    assert size < 1.001 * 10**6
