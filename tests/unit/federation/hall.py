"""A federation in memory: real agreement, homes, ledgers and participants, without a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.federation.agreement import Agreement
from fedveil.federation.founding import Trust, enrol, found
from fedveil.federation.home import PUBLIC, Home, read_seat
from fedveil.federation.participant import Participant
from fedveil.recipe import Recipe
from fedveil.runs.opened import Interface

CLIENTS, ROUNDS, DELTA = 5, 3, 1e-3
Handler = Callable[[bytes], bytes]
SECAGG = algorithms.dp_norm_fedavg_secagg(clients=CLIENTS, sigma=20.0, support=200, levels=50)
MESSAGES = algorithms.dp_norm_fedavg_discrete(clients=CLIENTS, sigma=40.0, support=400, levels=50)
MODELS = algorithms.dp_fedavg(clip=1.0, rate=0.8, noise_multiplier=3.0, steps=2, batch=4)
ADAPTIVE = algorithms.dp_fedavg_adaptive(rate=0.8, noise_multiplier=3.0)
MEMORY = algorithms.fed_alpha_normec(rate=0.8, noise_multiplier=3.0)
CORRELATED = algorithms.dp_fedavg(
    clip=1.0, clients=2, noise="banded", separation=2, bands=3, noise_multiplier=3.0, steps=2
)
CONTROLS = algorithms.dp_scaffold(1.0, 2, rate=0.8, noise_multiplier=3.0)
PLAIN = algorithms.fedavg(steps=2)


def examples() -> Federated:
    """Clients with 6 to 10 examples of 3 numbers in 2 classes."""
    numbers = torch.Generator().manual_seed(1)
    sizes = torch.arange(6, 6 + CLIENTS)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    inputs = torch.randn(int(sizes.sum()), 3, generator=numbers)
    labels = (inputs[:, 0] > 0).long()
    return Federated("people", inputs, labels, offsets, Examples(inputs, labels), 2)


def of_client(data: Federated, client: int) -> Federated:
    """The data of one client, as its own process has them."""
    mine = data.client(client)
    offsets = torch.tensor([0, len(mine)])
    none = Examples(mine.inputs[:0], mine.labels[:0])
    return replace(data, inputs=mine.inputs, labels=mine.labels, offsets=offsets, test=none)


@dataclass
class Hall:
    """A transport in memory, whose clients answer, fail or lie as a test wants."""

    handlers: dict[int, Handler]
    sent: list[tuple[int, bytes]] = field(default_factory=list)

    def connected(self) -> frozenset[int]:
        return frozenset(self.handlers)

    def exchange(
        self, requests: Mapping[int, bytes], seconds: float
    ) -> Iterator[tuple[int, bytes]]:
        for client, request in requests.items():
            self.sent.append((client, request))
            if client in self.handlers:
                try:
                    reply = self.handlers[client](request)
                except ConnectionError:  # a client that went away
                    continue
                yield client, reply


@dataclass
class Federation:
    """A founded federation with all its clients."""

    directory: Path
    agreement: Agreement
    homes: list[Home]
    data: Federated = field(default_factory=examples)

    def participant(self, client: int) -> Participant:
        return Participant(self.homes[client], of_client(self.data, client))

    def participants(self) -> list[Participant]:
        return [self.participant(client) for client in range(len(self.homes))]


def founded(
    root: Path,
    recipe: Recipe,
    trust: Trust | None = None,
    epsilon: float = 200.0,
    rounds: int = ROUNDS,
) -> Federation:
    """A federation whose clients have accepted its agreement."""
    data = examples()
    directory = root / "federation"
    found(
        directory, "people", recipe, Interface.of(data), CLIENTS, "softmax", rounds, delta=DELTA,
        trust=trust, deadline=5.0, settings={"ledger": str(root / "ledger.sqlite")},
    )  # fmt: skip
    homes = [Home.create(root / f"c{i}", f"c{i}", {}, f"node {i}") for i in range(CLIENTS)]
    agreement = enrol(directory, [read_seat(home.path / PUBLIC) for home in homes])
    for home in homes:
        home.accept(home.offer(directory).hash, epsilon)
    return Federation(directory, agreement, homes, data)
