"""Bytes over a real Flower federation on loopback: TLS, node authentication, a database.

One SuperLink serves all tests of this file. Client 0 is a SuperNode with an agent, the others have
joined. What the server sends is in a plan, and what it gets in a file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedveil.federation.flower.local import Finished, LocalFederation, Node
from fedveil.federation.flower.processes import wait_for
from fedveil.federation.flower.writing import write_app
from tests.system.federation.echo import LOG, PLAN, RESULTS

ROOT = Path(__file__).parents[3]
ECHO = [sys.executable, "-m", "tests.system.federation.echo"]
CLIENTS = 3
RUN = 150.0  # seconds, at most


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("OMP_NUM_THREADS", "1")
        with LocalFederation(tmp_path_factory.mktemp("federation"), CLIENTS) as made:
            made.processes.start("agent-0", [*ECHO, "agent", made.nodes[0].socket])
            made.start_supernode(made.nodes[0])
            for node in made.nodes[1:]:
                start_joined(made, node)
            made.wait_online(CLIENTS)
            groups = {made.processes.pid(name) for name in ("superlink", "supernode-0")}
            assert groups <= running_groups()
            yield made
    # Everything ends with the block. A process ends a moment after its SIGKILL was sent.
    wait_for("The end of all processes", lambda: not groups & running_groups(), 30)


def running_groups() -> set[int]:
    """The process groups in which a process runs. What init has not collected yet has ended."""
    lines = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True).stdout
    return {int(line.split()[0]) for line in lines.splitlines() if line.split()[1][0] != "Z"}


@pytest.fixture(autouse=True)
def _no_run_is_left_behind(federation: LocalFederation) -> Iterator[None]:
    """One test that fails does not make the next one fail."""
    yield
    if "run" in federation.processes.names():
        federation.processes.end("run")


def start_joined(federation: LocalFederation, node: Node) -> None:
    command = [*ECHO, "join", federation.address, node.key, federation.certificates.ca]
    federation.processes.start(f"joined-{node.index}", command)


def app(federation: LocalFederation, name: str, *exchanges: dict[int, bytes], **plan: Any) -> Path:
    """An app whose server makes these exchanges, with deadlines of `seconds`."""
    directory = federation.directory / name
    write_app(directory, name, serve="tests.system.federation.echo:serve")
    seconds = plan.pop("seconds", [30] * len(exchanges))
    steps = [
        {"requests": {client: body.hex() for client, body in each.items()}, "seconds": deadline}
        for each, deadline in zip(exchanges, seconds, strict=True)
    ]
    whole = {"clients": CLIENTS, "status": 0, "exchanges": steps} | plan
    (directory / PLAN).write_text(json.dumps(whole))
    roster = {"client": [{"node": node.public} for node in federation.nodes]}
    (directory / "roster.toml").write_text(tomli_w.dumps(roster))
    return directory


def results(directory: Path) -> list[dict[str, Any]]:
    path = directory / RESULTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def replies(directory: Path) -> list[dict[int, bytes]]:
    got = [line["replies"] for line in results(directory) if "replies" in line]
    return [{int(c): bytes.fromhex(body) for c, body in each.items()} for each in got]


def wait_until_sent(directory: Path, exchanges: int = 1) -> int:
    """Wait until the server has sent so many exchanges' requests, and return its process ID."""
    sent: list[dict[str, Any]] = []

    def ready() -> bool:
        sent[:] = [line for line in results(directory) if "sent" in line]
        return len(sent) >= exchanges

    wait_for("The server's requests", ready, RUN)
    return int(sent[-1]["pid"])


def assert_completed(finished: Finished) -> None:
    assert finished.completed, finished.details + finished.output


def test_bytes_arrive_by_agent_and_by_joined_clients_but_none_of_60_mb(
    federation: LocalFederation,
) -> None:
    model = os.urandom(300_000)
    first = {client: b"%d:" % client + model for client in range(CLIENTS)}
    second = {client: os.urandom(client + 1) for client in range(CLIENTS)}
    large = {1: b"large 60000000", 2: b"b"}
    directory = app(federation, "echo", first, second, large, seconds=[30, 30, 50])
    assert_completed(federation.run(directory, RUN))
    assert replies(directory) == [first, second, {2: b"b"}]
    assert results(directory)[-1]["seconds"] < 45  # nobody waits for the one that is refused
    assert "A reply could not be read (LargeReplyError)" in (directory / LOG).read_text()


def test_a_run_that_stopped_early_has_failed(federation: LocalFederation) -> None:
    finished = federation.run(app(federation, "early", status=3), RUN)
    assert (finished.status, finished.completed) == ("failed", False)
    assert "stopped early with status 3" in finished.details


def test_a_key_that_is_not_registered_is_refused(federation: LocalFederation) -> None:
    stranger = federation.unregistered(99)
    federation.start_supernode(stranger)  # it tries for a while, beside the other one
    command = [*ECHO, "join", federation.address, stranger.key, federation.certificates.ca]
    refused = subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=RUN
    )
    assert refused.returncode != 0
    assert "The SuperLink refuses this node's key" in refused.stderr
    wait_for("Its refusal", lambda: not federation.processes.alive("supernode-99"), RUN)
    federation.processes.end("supernode-99")
    assert federation.online() == CLIENTS


def test_a_server_with_another_certificate_is_not_joined(
    federation: LocalFederation, tmp_path: Path
) -> None:
    from fedveil.federation.flower.certificates import write_certificates

    other = write_certificates(tmp_path).ca
    node = federation.nodes[1]
    command = [*ECHO, "join", federation.address, node.key, other]
    process = subprocess.Popen(
        [str(part) for part in command], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        assert "Could not connect (ConnectError)" in process.stderr.readline()
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_a_killed_client_yields_nothing_and_the_exchange_ends_at_its_deadline(
    federation: LocalFederation,
) -> None:
    gate, node = federation.directory / "never", federation.nodes[2]
    requests = {1: b"a", 2: b"wait %s" % str(gate).encode()}
    directory = app(federation, "killed", requests, {1: b"b"}, seconds=[8, 30])
    since = federation.connected_since(node)
    federation.start_run(directory)
    wait_until_sent(directory)
    federation.processes.kill("joined-2")
    federation.processes.end("joined-2")
    start_joined(federation, node)
    assert_completed(federation.finished(RUN))
    assert replies(directory) == [{1: b"a"}, {1: b"b"}]
    seconds = [line["seconds"] for line in results(directory) if "seconds" in line]
    assert 8 <= seconds[0] < 25  # a busy machine is late, and Flower itself waits much longer
    wait_for("Its return", lambda: federation.connected_since(node) > since, RUN)


def test_a_killed_agent_costs_its_own_client_and_no_deadline(federation: LocalFederation) -> None:
    federation.processes.kill("agent-0")
    federation.processes.end("agent-0")
    directory = app(federation, "agentless", {0: b"a", 1: b"b"})
    assert_completed(federation.run(directory, RUN))
    assert replies(directory) == [{1: b"b"}]
    assert results(directory)[-1]["seconds"] < 25  # the ClientApp said so, before the deadline
    federation.processes.start("agent-0", [*ECHO, "agent", federation.nodes[0].socket])


def test_a_superlink_that_is_killed_and_restarted_on_its_database_costs_no_reply(
    federation: LocalFederation,
) -> None:
    gate = federation.directory / "restarted"
    waiting = {client: b"wait %s" % str(gate).encode() for client in (1, 2)}
    after = dict.fromkeys((1, 2), b"after")
    directory = app(federation, "restart", waiting, after, seconds=[45, 45])
    federation.start_run(directory)
    wait_until_sent(directory)
    time.sleep(2)  # the clients have their requests
    federation.kill_superlink()
    time.sleep(1)
    federation.start_superlink()
    gate.touch()
    wait_for("The exchanges", lambda: len(replies(directory)) == 2, RUN)
    assert replies(directory) == [waiting, after]
    federation.processes.end("run")  # the CLI's log stream did not survive the restart


def test_a_killed_server_app_does_not_keep_the_next_run_from_working(
    federation: LocalFederation,
) -> None:
    gate = federation.directory / "later"
    directory = app(federation, "server-killed", {1: b"wait %s" % str(gate).encode(), 2: b"x"})
    federation.start_run(directory)
    os.kill(wait_until_sent(directory), signal.SIGKILL)
    federation.processes.end("run")
    gate.touch()
    again = app(federation, "again", {1: b"y", 2: b"z"})
    assert_completed(federation.run(again, RUN))
    assert replies(again) == [{1: b"y", 2: b"z"}]
