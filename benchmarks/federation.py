"""`python -m benchmarks.federation`: what a message costs over Flower, without any training.

Three ways on the same loopback federation (TLS, node authentication, a database): SuperNodes with
an agent, joined clients, and Flower's own FedAvg on SuperNodes. Nodes return what they get. CPU
seconds are those of all processes of a role; bytes are those on the wire, under TLS, with polling.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from fedveil.federation.flower.agent import listen
from fedveil.federation.flower.join import join
from fedveil.federation.flower.local import LocalFederation, Node
from fedveil.federation.flower.writing import write_app
from fedveil.federation.transport import Transport

WAYS = ("join", "agent", "fedavg")
NODE = [sys.executable, "-m", "benchmarks.federation", "--node"]
TICKS = os.sysconf("SC_CLK_TCK")
IDLE = 10.0  # seconds in which nodes only wait
LIMIT = 600.0  # seconds for a run
ROLES = {"superlink": "SuperLink", "superexec": "server", "run": "command"}


def main() -> None:
    """Measure the chosen ways and print a table."""
    options = _options()
    if options.node:
        return _node(*options.node)
    for line in (_HEADER, "|---" * (_HEADER.count("|") - 1) + "|"):
        print(line)
    for way in options.ways.split(","):
        cost = measured(way, options.nodes, options.rounds, options.bytes, not options.memory)
        print(cost.row(), flush=True)


_HEADER = (
    "| way | nodes | start s | idle CPU s/s | round s | CPU s/message: node | SuperLink | server "
    "| wire bytes/message | overhead |"
)


@dataclass
class Measured:
    """One way's costs. A message is a request with its reply."""

    way: str
    nodes: int
    start: float
    idle: float
    rounds: list[float]
    messages: int
    cpu: Counter[str]
    wire: int
    payload: int

    def row(self) -> str:
        """The line of the table."""
        each = [self.cpu[role] / self.messages for role in ("node", "SuperLink", "server")]
        wire = self.wire / self.messages
        cells = [
            self.way,
            str(self.nodes),
            f"{self.start:.1f}",
            f"{self.idle:.2f}",
            f"{statistics.median(self.rounds):.1f}",
            *(f"{value:.2f}" for value in each),
            f"{wire:,.0f}",
            f"{wire / self.payload - 1:.1%}",
        ]
        return "| " + " | ".join(cells) + " |"


def measured(way: str, nodes: int, rounds: int, size: int, database: bool = True) -> Measured:
    """Start a federation, let it wait, and run some rounds of messages of `size` bytes."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        federation = stack.enter_context(LocalFederation(Path(place), nodes, database=database))
        meter = stack.enter_context(Meter(federation).running())
        wire = stack.enter_context(Wire(federation.address).running())
        for node in federation.nodes:
            _start(federation, node, way, wire.address)
        federation.wait_online(nodes, LIMIT)
        start, before = time.monotonic() - began, meter.read()
        time.sleep(IDLE)
        idle = sum((meter.read() - before).values()) / IDLE
        app = _app(federation, way, {"nodes": nodes, "rounds": rounds, "bytes": size})
        before, sent = meter.read(), wire.bytes
        finished = federation.run(app, LIMIT)
        if not finished.completed:
            raise SystemExit(finished.output)
        cpu, wired = meter.read() - before, wire.bytes - sent
        result = json.loads((app / "result.json").read_text())
    seconds, replies = result["seconds"], result["replies"]
    return Measured(way, nodes, start, idle, seconds, replies, cpu, wired, 2 * size)


def serve(directory: Path, transport: Transport) -> int:
    """The server of our two ways: the same model to all, and all replies equal to the requests."""
    plan = json.loads((directory / "plan.json").read_text())
    while len(transport.connected()) < plan["nodes"]:
        time.sleep(0.2)
    seconds, replies = [], 0
    for _ in range(plan["rounds"]):
        model, began = os.urandom(plan["bytes"] - 4), time.monotonic()
        requests = {client: client.to_bytes(4, "big") + model for client in range(plan["nodes"])}
        for client, body in transport.exchange(requests, 120):
            replies += body == requests[client]
        seconds.append(time.monotonic() - began)
    result = {"seconds": seconds, "replies": replies}
    (directory / "result.json").write_text(json.dumps(result))
    return replies != plan["rounds"] * plan["nodes"]


def _app(federation: LocalFederation, way: str, plan: dict[str, int]) -> Path:
    directory = federation.directory / "app"
    write_app(directory, way, serve="benchmarks.federation:serve")
    if way == "fedavg":
        source = Path(__file__).parent / "fedavg_app"
        for file in ("client_app.py", "server_app.py"):
            shutil.copyfile(source / file, directory / "fedveil_app" / file)
    roster = {"client": [{"node": node.public} for node in federation.nodes]}
    (directory / "roster.toml").write_text(tomli_w.dumps(roster))
    (directory / "plan.json").write_text(json.dumps(plan))
    return directory


def _start(federation: LocalFederation, node: Node, way: str, address: str) -> None:
    if way == "join":
        command = [*NODE, "join", address, node.key, federation.certificates.ca]
        federation.processes.start(f"node-{node.index}", command)
        return
    if way == "agent":
        federation.processes.start(f"agent-{node.index}", [*NODE, "agent", node.socket])
    federation.start_supernode(node, address)


def _node(kind: str, *arguments: str) -> None:
    """A node's process, which returns what it gets."""
    if kind == "agent":
        return listen(Path(arguments[0]), bytes)
    superlink, key, certificate = arguments
    return join(superlink, bytes, Path(key), Path(certificate))


@dataclass
class Meter:
    """CPU seconds of all processes of a federation, by role, also of those that have ended."""

    federation: LocalFederation
    seen: dict[tuple[str, int], float] = field(default_factory=dict)

    @contextlib.contextmanager
    def running(self) -> Iterator[Meter]:
        """Look at all processes ten times a second inside the block."""
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.1):
                self.look()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        yield self
        stop.set()
        thread.join()

    def read(self) -> Counter[str]:
        """CPU seconds by role until now."""
        self.look()
        total: dict[str, float] = defaultdict(float)
        for (role, _), seconds in list(self.seen.items()):
            total[role] += seconds
        return Counter(total)  # type: ignore[arg-type]

    def look(self) -> None:
        """Note the CPU seconds of each process in the groups that the federation started."""
        groups = {self.federation.processes.pid(n): n for n in self.federation.processes.names()}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if (name := groups.get(int(fields[2]))) is not None:
                    used = (int(fields[11]) + int(fields[12])) / TICKS
                    self.seen[ROLES.get(name, "node"), int(stat.parent.name)] = used


class Wire:
    """A TCP relay in front of the SuperLink that counts the bytes of the nodes."""

    def __init__(self, target: str) -> None:
        host, _, port = target.partition(":")
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.bytes = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[Wire]:
        """Relay connections inside the block."""
        threading.Thread(target=self._accept, daemon=True).start()
        yield self
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._relay, args=pair, daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(2**16):
                self.bytes += len(chunk)
                sink.sendall(chunk)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure messages over Flower on loopback.")
    parser.add_argument("--ways", default=",".join(WAYS), help="join, agent, fedavg [default: all]")
    parser.add_argument("--nodes", type=int, default=10, help="Number of nodes. [default: 10]")
    parser.add_argument("--rounds", type=int, default=3, help="Number of rounds. [default: 3]")
    parser.add_argument("--bytes", type=int, default=10**6, help="Bytes each way. [default: 1e6]")
    parser.add_argument("--memory", action="store_true", help="Run the SuperLink without database.")
    parser.add_argument("--node", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
