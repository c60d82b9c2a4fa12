"""Random fault schedules: lost and spoiled messages, clients and servers that crash, in memory.

Whatever happens: every release was reserved before, every answer was charged before it left and
none twice, no finished round is lost, and each released sum is exactly that of the counted clients.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.federation import participant as clients
from fedveil.federation import rounds as server
from fedveil.federation.founding import Trust
from fedveil.federation.requests import Reply
from fedveil.federation.serve import opened
from fedveil.ledger.ledger import open_ledger
from fedveil.training.run import Training
from tests.unit.federation.hall import (
    CLIENTS,
    CORRELATED,
    MESSAGES,
    MODELS,
    ROUNDS,
    SECAGG,
    Federation,
    founded,
)

SCHEDULES = int(os.environ.get("FEDVEIL_SCHEDULES", "16"))  # of each recipe
RECIPES = {
    "messages": (MESSAGES, None),
    "sum": (SECAGG, Trust(2, 0)),
    "models": (MODELS, None),
    "correlated": (CORRELATED, None),
}
FAULTS = ("request lost", "reply lost", "garbage", "client restarts", "late copy", "server dies")
LIMIT = 60  # openings of the server in one schedule


pytestmark = pytest.mark.usefixtures("one_engine")


class ServerDiesError(Exception):
    """The server's process ends here."""


@dataclass
class Storm:
    """A transport that fails as a seed says, and notes what left each client."""

    made: Federation
    rng: random.Random
    rate: float
    people: dict[int, clients.Participant] = field(default_factory=dict)
    left: list[tuple[int, bytes]] = field(default_factory=list)  # replies that left a client
    held: list[tuple[int, bytes]] = field(default_factory=list)  # replies to be delivered again

    def connected(self) -> frozenset[int]:
        return frozenset(range(CLIENTS))

    def exchange(
        self, requests: Mapping[int, bytes], seconds: float
    ) -> Iterator[tuple[int, bytes]]:
        for client, request in requests.items():
            fault = self.rng.choice(FAULTS) if self.rng.random() < self.rate else ""
            if fault == "server dies":
                raise ServerDiesError
            if fault == "client restarts":
                self.restart(client)
            if fault == "request lost":
                continue
            reply = self.person(client).handle(request)
            self.left.append((client, reply))
            if fault == "reply lost":
                continue
            if fault == "garbage":
                reply = self.rng.randbytes(self.rng.randrange(200))
            if fault == "late copy":
                self.held.append((client, reply))
            yield client, reply
            if self.held and self.rng.random() < 0.3:
                yield self.held.pop()

    def person(self, client: int) -> clients.Participant:
        if client not in self.people:
            self.people[client] = self.made.participant(client)
        return self.people[client]

    def restart(self, client: int) -> None:
        if (one := self.people.pop(client, None)) is not None:
            one.close()


@dataclass
class Witness:
    """What was computed, counted and released, seen from inside."""

    messages: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)  # newest by round
    computed: list[tuple[int, int]] = field(default_factory=list)
    sums: dict[int, np.ndarray] = field(default_factory=dict)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compute, conclude = clients.client_message, server._with_counted

        def computing(recipe: Any, state: Any, data: Any, engine: Any, key: Any, client: int, *v):
            made = compute(recipe, state, data, engine, key, client, *v)
            self.messages[client, state.round] = made.numbers.numpy()
            self.computed.append((client, state.round))
            return made

        def counting(before: Any, after: Any, counted: tuple[int, ...]) -> Any:
            if counted:
                sums = [self.messages[client, before.round] for client in counted]
                self.sums[before.round] = np.sum(sums, axis=0)
            return conclude(before, after, counted)

        monkeypatch.setattr(clients, "client_message", computing)
        monkeypatch.setattr(server, "_with_counted", counting)


def _served(storm: Storm, witness: Witness) -> tuple[Training, int]:
    """Serve until the run is finished, with a new process whenever the server dies."""
    openings, done = 0, 0
    while openings < LIMIT:
        openings += 1
        training = opened(storm.made.directory, storm)
        assert training.state.round >= done  # no finished round is lost
        try:
            while not training.finished:
                _step(training, witness)
                done = training.state.round
            training.close()
            return training, openings
        except ServerDiesError:
            training.close()
        storm.rate /= 1.2  # so that every schedule ends
    pytest.fail("the run did not end")


def _step(training: Training, witness: Witness) -> None:
    """One round, with its checkpoint, and its released sum against the witness."""
    from fedveil.training.checkpoint import write_round

    released: list[Any] = []
    recipe, round = training.recipe, training.state.round
    before = training.state.x.clone()
    record = training.step()
    released.append(record)
    assert training.session is not None
    assert training.session.rounds >= round + 1  # reserved before it was released
    if not record.aborted and round in witness.sums and recipe.noise.at == "client":
        grid = recipe.message(len(before)).grid
        mean = witness.sums[round] * grid / recipe.cohort.expected(CLIENTS)
        expected = before.double().numpy() - recipe.server.rate(round) * mean
        np.testing.assert_allclose(training.state.x.numpy(), expected, rtol=0, atol=2e-5)
    write_round(training, record)


def _charged(made: Federation, client: int) -> int:
    ledger = open_ledger(made.homes[client].path / "ledger.sqlite")
    try:
        return sum(len(stream.rounds) for stream in ledger.streams.values())
    finally:
        ledger.close()


@pytest.fixture(scope="module", params=RECIPES)
def template(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A founded federation, to be copied for each schedule."""
    return founded(tmp_path_factory.mktemp(request.param), *RECIPES[request.param])


@pytest.mark.parametrize("block", range(4))
def test_nothing_is_lost_undercounted_or_double_counted(
    template: Federation, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A masked sum has many messages: half of its schedules have 5 to 12 faults of each kind."""
    masked = template.agreement.recipe.name == SECAGG.name
    count = SCHEDULES // 2 if masked else SCHEDULES
    for seed in range(block * count // 4, (block + 1) * count // 4):
        with monkeypatch.context() as patched:
            _play(_copy(template, tmp_path / str(seed)), seed, patched)


def _play(made: Federation, seed: int, patched: pytest.MonkeyPatch) -> None:
    rng, recipe = random.Random(seed), made.agreement.recipe
    storm, witness = Storm(made, rng, rng.choice((0.05, 0.15, 0.3))), Witness()
    witness.watch(patched)
    training, openings = _served(storm, witness)
    assert training.state.round == ROUNDS
    assert training.charge().drawn >= ROUNDS
    for client in range(CLIENTS):
        storm.restart(client)
        answers = len([1 for who, _ in witness.computed if who == client])
        charged, whole = _charged(made, client), recipe.noise.at == "server"
        assert charged >= answers if whole else charged == answers, f"seed {seed}, client {client}"
    words = {Reply.read(reply, 2**20).word for _, reply in storm.left}
    assert words <= {
        "message",
        "secagg",
        "answered",
        "stage",
        "session",
        "round",
        "keys",
        "repeated",
    }
    assert openings <= LIMIT


def _copy(template: Federation, root: Path) -> Federation:
    """The same federation in another place, with ledgers of its own."""
    import shutil
    import tomllib

    import tomli_w

    source = template.directory.parent
    shutil.copytree(source, root)
    settings = root / "federation" / "server.toml"
    plain = tomllib.loads(settings.read_text()) | {"ledger": str(root / "ledger.sqlite")}
    settings.write_text(tomli_w.dumps(plain))
    homes = [type(home)(root / home.path.name) for home in template.homes]
    return Federation(root / "federation", template.agreement, homes, template.data)
