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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedveil.federation.flower.app.frames import LIMIT
from fedveil.federation.flower.certificates import write_certificates
from fedveil.federation.flower.local import Finished, LocalFederation, Node
from fedveil.federation.flower.processes import wait_for
from fedveil.federation.flower.replies import HEADROOM
from fedveil.federation.flower.writing import write_app
from tests.system.federation.echo import LOG, PLAN, RESULTS
from tests.system.federation.forking import local_federation
from tests.system.forked import start

ROOT = Path(__file__).parents[3]
ECHO = [sys.executable, "-m", "tests.system.federation.echo"]
CLIENTS = 3
RUN = 150.0  # seconds, at most


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("OMP_NUM_THREADS", "1")
        with local_federation(tmp_path_factory.mktemp("federation"), CLIENTS) as made:
            start_agent(made)
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


def start_agent(federation: LocalFederation) -> None:
    federation.processes.start("agent-0", [*ECHO, "agent", federation.nodes[0].socket])


def joining(federation: LocalFederation, key: Path, certificate: Path) -> list[str | Path]:
    return [*ECHO, "join", federation.address, key, certificate]


def start_joined(federation: LocalFederation, node: Node) -> None:
    command = joining(federation, node.key, federation.certificates.ca)
    federation.processes.start(f"joined-{node.index}", command)


def app(federation: LocalFederation, name: str, *exchanges: Exchange, status: int = 0) -> Path:
    """An app whose server makes these exchanges, and returns a status."""
    directory = federation.directory / name
    write_app(directory, name, serve="tests.system.federation.echo:serve")
    steps = [
        {
            "requests": {client: body.hex() for client, body in exchange.requests.items()},
            "seconds": exchange.seconds,
            "after": exchange.after and str(exchange.after),
        }
        for exchange in exchanges
    ]
    plan = {"clients": CLIENTS, "status": status, "exchanges": steps}
    (directory / PLAN).write_text(json.dumps(plan))
    roster = {"client": [{"node": node.public} for node in federation.nodes]}
    (directory / "roster.toml").write_text(tomli_w.dumps(roster))
    return directory


@dataclass(frozen=True)
class Exchange:
    """What each client is asked, how long its reply is waited for, and after which file exists."""

    requests: dict[int, bytes]
    seconds: float = 30
    after: Path | None = None


def until(file: Path) -> bytes:
    """A request that is answered once a file exists."""
    return b"wait %s" % str(file).encode()


def results(directory: Path) -> list[dict[str, Any]]:
    """What the server has noted so far, without a line that it is still writing."""
    path = directory / RESULTS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def replies(directory: Path) -> list[dict[int, bytes]]:
    got = [line["replies"] for line in results(directory) if "replies" in line]
    return [{int(c): bytes.fromhex(body) for c, body in each.items()} for each in got]


def seconds(directory: Path) -> list[float]:
    """How long each exchange took."""
    return [line["seconds"] for line in results(directory) if "seconds" in line]


def wait_until_sent(directory: Path, exchanges: int = 1) -> int:
    """Wait until the server has sent so many exchanges' requests, and return its process ID."""
    sent: list[dict[str, Any]] = []

    def ready() -> bool:
        sent[:] = [line for line in results(directory) if "sent" in line]
        return len(sent) >= exchanges

    wait_for("The server's requests", ready, RUN)
    return int(sent[-1]["pid"])


MODEL = os.urandom(300_000)
FIRST = {client: b"%d:" % client + MODEL for client in range(CLIENTS)}
SECOND = {client: os.urandom(client + 1) for client in range(CLIENTS)}


@pytest.fixture(scope="module")
def eventful(federation: LocalFederation) -> Path:
    """A completed run in which bytes arrive, then an agent is killed, and then a joined client."""
    gate, never = federation.directory / "agent-is-dead", federation.directory / "never"
    directory = app(
        federation,
        "eventful",
        Exchange(FIRST),
        Exchange(SECOND),
        Exchange({1: b"large %d" % (LIMIT + HEADROOM), 2: b"b"}, 50),
        Exchange({0: b"a", 1: b"b"}, after=gate),
        Exchange({1: b"a", 2: until(never)}, 8),
        Exchange({1: b"c"}),
    )
    federation.start_run(directory)
    wait_for("The first exchanges", lambda: len(replies(directory)) == 3, RUN)
    federation.processes.kill("agent-0")
    federation.processes.end("agent-0")
    gate.touch()
    wait_until_sent(directory, 5)
    federation.processes.kill("joined-2")
    federation.processes.end("joined-2")
    finished = federation.finished(RUN)
    assert finished.completed, finished.details + finished.output
    start_agent(federation)
    return directory


def test_bytes_arrive_by_agent_and_by_joined_clients_but_none_above_the_limit(
    eventful: Path,
) -> None:
    assert replies(eventful)[:3] == [FIRST, SECOND, {2: b"b"}]
    assert seconds(eventful)[2] < 45  # nobody waits for the one that is refused
    assert "A reply could not be read (LargeReplyError)" in (eventful / LOG).read_text()


def test_a_killed_agent_costs_its_own_client_and_no_deadline(eventful: Path) -> None:
    assert replies(eventful)[3] == {1: b"b"}
    assert seconds(eventful)[3] < 25  # the ClientApp said so, before the deadline


def test_a_killed_client_yields_nothing_and_the_exchange_ends_at_its_deadline(
    federation: LocalFederation, eventful: Path
) -> None:
    assert replies(eventful)[4:] == [{1: b"a"}, {1: b"c"}]
    assert 8 <= seconds(eventful)[4] < 25  # a busy machine is late, and Flower waits much longer
    node = federation.nodes[2]
    since = federation.connected_since(node)
    start_joined(federation, node)
    wait_for("Its return", lambda: federation.connected_since(node) > since, RUN)


def test_a_key_that_is_not_registered_is_refused(
    federation: LocalFederation, eventful: Path, tmp_path: Path
) -> None:
    before = federation.online()
    stranger = federation.unregistered(99)
    federation.start_supernode(stranger)  # it tries for a while, beside the other one
    command = joining(federation, stranger.key, federation.certificates.ca)
    joined = start(command[1:], tmp_path, os.environ, "stranger")
    assert joined.wait(RUN) != 0
    assert "The SuperLink refuses this node's key" in joined.err.read_text()
    wait_for("Its refusal", lambda: not federation.processes.alive("supernode-99"), RUN)
    federation.processes.end("supernode-99")
    assert federation.online() == before


def test_a_server_with_another_certificate_is_not_joined(
    federation: LocalFederation, tmp_path: Path
) -> None:
    other = write_certificates(tmp_path).ca
    command = joining(federation, federation.nodes[1].key, other)
    child = start(command[1:], tmp_path, os.environ, "misled")
    try:
        wait_for("Its complaint", lambda: "\n" in child.err.read_text(), RUN)
        assert "Could not connect (ConnectError)" in child.err.read_text().splitlines()[0]
    finally:
        child.kill()
        child.wait(10)


@pytest.fixture(scope="module")
def restarted(federation: LocalFederation) -> tuple[Path, list[dict[int, bytes]]]:
    """A run whose SuperLink was killed in the first of three exchanges, and what was asked.

    Its last one waits for a file.
    """
    gate, later = federation.directory / "restarted", federation.directory / "later"
    asked = [dict.fromkeys((1, 2), until(gate)), dict.fromkeys((1, 2), b"after")]
    last = {1: until(later), 2: b"x"}
    directory = app(federation, "restart", *(Exchange(each, 45) for each in asked), Exchange(last))
    federation.start_run(directory)
    wait_until_sent(directory)
    time.sleep(2)  # the clients have their requests
    federation.kill_superlink()
    time.sleep(1)
    federation.start_superlink()
    gate.touch()
    wait_for("The exchanges", lambda: len(replies(directory)) >= 2, RUN)
    federation.processes.end("run")  # the CLI's log stream did not survive the restart
    return directory, asked


def test_a_superlink_that_is_killed_and_restarted_on_its_database_costs_no_reply(
    restarted: tuple[Path, list[dict[int, bytes]]],
) -> None:
    directory, asked = restarted
    assert replies(directory)[:2] == asked


@pytest.fixture(scope="module")
def after_a_killed_server(
    federation: LocalFederation, restarted: tuple[Path, list[dict[int, bytes]]]
) -> tuple[Path, Finished]:
    """A run whose server stops early, after one whose server died in an exchange."""
    os.kill(wait_until_sent(restarted[0], 3), signal.SIGKILL)
    (federation.directory / "later").touch()
    directory = app(federation, "again", Exchange({1: b"y", 2: b"z"}), status=3)
    return directory, federation.run(directory, RUN)


def test_a_killed_server_app_does_not_keep_the_next_run_from_working(
    after_a_killed_server: tuple[Path, Finished],
) -> None:
    directory, finished = after_a_killed_server
    assert replies(directory) == [{1: b"y", 2: b"z"}], finished.details + finished.output


def test_a_run_that_stopped_early_has_failed(after_a_killed_server: tuple[Path, Finished]) -> None:
    _, finished = after_a_killed_server
    assert (finished.status, finished.completed) == ("failed", False)
    assert "stopped early with status 3" in finished.details
