"""local: a whole Flower federation on loopback, for demos and tests.

SuperLink with TLS, node authentication and a database; a SuperExec that runs the ServerApp and
survives a restart of the SuperLink; nodes with keys of their own. Everything is in one directory,
and everything that was started ends with the `with` block.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fedveil.errors import UserError
from fedveil.federation.flower.certificates import Certificates, write_certificates
from fedveil.federation.flower.keys import node_key, write_node_key
from fedveil.federation.flower.processes import (
    ChildProcesses,
    accepts,
    environment,
    free_port,
    wait_for,
)

if TYPE_CHECKING:
    from types import TracebackType

    from flwr.supercore.control import ControlHttpClient

NAME = "loopback"  # of the connection in Flower's configuration
START = 60.0  # seconds for the SuperLink to listen, and for nodes to connect
POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
COMPLETED = "completed"


@dataclass(frozen=True)
class Node:
    """A registered node: its private key file, its public key and its agent's socket."""

    index: int
    key: Path
    public: str
    socket: Path


@dataclass(frozen=True)
class Finished:
    """How a run ended: Flower's own status, and what `flwr run --stream` printed."""

    status: str
    details: str
    output: str

    @property
    def completed(self) -> bool:
        """Whether the ServerApp returned without an exception."""
        return self.status == COMPLETED


class LocalFederation:
    """SuperLink, SuperExec and N registered nodes on loopback, inside a `with` block.

    Without a database, a message costs the SuperLink less than half the CPU time, but it cannot be
    restarted.
    """

    def __init__(self, directory: Path, nodes: int, *, database: bool = True) -> None:
        self.directory, self._count, self._database = directory.resolve(), nodes, database
        self.address = f"127.0.0.1:{free_port()}"
        self.home = self.directory / "flwr"
        self.processes = ChildProcesses(self.directory / "logs", environment(self.home))
        self.nodes: list[Node] = []

    def __enter__(self) -> LocalFederation:
        self.home.mkdir(parents=True, exist_ok=True)
        try:
            self._configure()
            self.start_superlink()
            self._start_superexec()
            self.nodes = [self.register(index) for index in range(self._count)]
        except BaseException:
            self.processes.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.processes.end()

    @cached_property
    def certificates(self) -> Certificates:
        """The CA and the SuperLink's certificate."""
        return write_certificates(self.directory)

    def start_superlink(self) -> None:
        """Start the SuperLink on its database, also after it was killed, and wait for it."""
        tls = self.certificates
        host, _, port = self.address.partition(":")
        command = [
            *_flower("flower-superlink"),
            *("--host", host, "--port", port, "--isolation", "process"),
            *("--ssl-ca-certfile", tls.ca, "--ssl-certfile", tls.certificate),
            *("--ssl-keyfile", tls.key, "--enable-supernode-auth"),
            *("--superexec-auth-secret-file", self._secret),
        ]
        if self._database:
            command += ["--database", self.directory / "superlink.sqlite"]
        self.processes.start("superlink", command)
        self._wait_for_port("superlink", int(port))

    def kill_superlink(self) -> None:
        """`kill -9` of the SuperLink. `start_superlink` starts it again on its database."""
        self.processes.kill("superlink")
        self.processes.end("superlink")

    def register(self, index: int) -> Node:
        """Make a node's key and register it, as `flwr supernode register` does."""
        node = self.unregistered(index)
        self.admit(node.public)
        return node

    def admit(self, public: str) -> None:
        """Register the public key of a node."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        with self._control() as control:
            control.RegisterNode(RegisterNodeRequest(public_key=_pem(public)))

    def unregistered(self, index: int) -> Node:
        """A node with a key that the SuperLink does not know."""
        key = self.directory / f"node-{index}"
        return Node(index, key, write_node_key(key), self.directory / f"agent-{index}.sock")

    def start_supernode(self, node: Node, superlink: str | None = None) -> None:
        """Start a SuperNode whose ClientApps reach the agent at the node's socket."""
        port = str(free_port())
        command = [
            *_flower("flower-supernode"),
            *(
                "--superlink",
                superlink or self.address,
                "--root-certificates",
                self.certificates.ca,
            ),
            *("--auth-supernode-private-key", node.key, "--port", port),
            *("--node-config", f'agent-socket="{node.socket}"'),
        ]
        self.processes.start(f"supernode-{node.index}", command)

    def wait_online(self, count: int, seconds: float = START) -> None:
        """Wait until `count` nodes are connected."""
        wait_for(f"The connection of {count} nodes", lambda: self.online() >= count, seconds)

    def online(self) -> int:
        """How many nodes are connected, or were killed less than two heartbeats ago."""
        return sum(node.status == "online" for node in self._listed())

    def connected_since(self, node: Node) -> str:
        """When a node last connected, as the SuperLink's time stamp. Empty if it never has."""
        key = node_key(node.public)
        (info,) = (each for each in self._listed() if node_key(each.public_key) == key)
        return str(info.last_activated_at)

    def start_run(self, app: Path) -> None:
        """Start `flwr run APP --stream` without waiting for its end."""
        self.processes.start("run", [*_flower("flwr"), "run", app, NAME, "--stream"])

    def run(self, app: Path, seconds: float) -> Finished:
        """`flwr run APP --stream`, and how the run ended. Raise if it takes too long."""
        self.start_run(app)
        return self.finished(seconds)

    def finished(self, seconds: float) -> Finished:
        """Wait for the end of the run that `start_run` started."""
        wait_for("The run", lambda: not self.processes.alive("run"), seconds)
        self.processes.end("run")
        output = self.processes.log("run").read_text(errors="replace")
        status = self.last_run()
        return Finished(status.sub_status or status.status, status.details, output)

    def last_run(self) -> Any:
        """The status of the newest run, as the SuperLink reports it."""
        from flwr.proto.control_pb2 import ListRunsRequest

        with self._control() as control:
            runs = control.ListRuns(ListRunsRequest(limit=1)).run_dict.values()
        if not runs:
            raise UserError("No run was started. Read the log of `flwr run`.")
        return next(iter(runs)).status

    def _listed(self) -> list[Any]:
        from flwr.proto.control_pb2 import ListNodesRequest

        with self._control() as control:
            return list(control.ListNodes(ListNodesRequest()).nodes_info)

    @cached_property
    def _secret(self) -> Path:
        """The secret that SuperLink and SuperExec share, so that nobody else takes their tasks."""
        path = self.directory / "superexec.secret"
        path.touch(mode=0o600)
        path.write_bytes(secrets.token_bytes(32))
        return path

    def _start_superexec(self) -> None:
        command = [
            *_flower("flower-superexec"),
            *("--runtime-api-address", self.address),
            *("--root-certificates", self.certificates.ca),
            *("--superexec-auth-secret-file", self._secret),
        ]
        self.processes.start("superexec", command, {POLL: "0.3"})

    def _configure(self) -> None:
        """Flower's configuration file, in a home of its own."""
        connection = {"address": self.address, "root-certificates": str(self.certificates.ca)}
        config = {"superlink": {"default": NAME, NAME: connection}}
        (self.home / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")

    def _wait_for_port(self, name: str, port: int) -> None:
        def ready() -> bool:
            self.processes.fail_unless_alive(name)
            return accepts(port)

        wait_for(f"The start of '{name}'", ready, START)

    def _control(self) -> ControlHttpClient:
        from flwr.supercore.control import ControlHttpClient

        return ControlHttpClient.from_server_address(
            self.address, False, self.certificates.ca.read_bytes(), []
        )


def _flower(command: str) -> Sequence[str | Path]:
    """A command of the Flower that is installed with this Python."""
    path = Path(sys.executable).with_name(command)
    if not path.exists():
        raise UserError("Flower is not installed. Run: pip install 'fedveil[federation]'.")
    return [path]


def _pem(public: str) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return serialization.load_der_public_key(node_key(public)).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
