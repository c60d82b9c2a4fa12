"""A private federation of real processes that loses its server, its SuperLink and a client."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedveil.data.save import save_clients
from fedveil.federation.flower.keys import write_node_key
from fedveil.federation.flower.local import LocalFederation
from fedveil.federation.flower.processes import wait_for
from fedveil.federation.flower.writing import write_app
from fedveil.federation.founding import Trust, enrol, found
from fedveil.federation.home import PUBLIC, Home, read_seat
from fedveil.ledger.ledger import open_ledger
from fedveil.runs.opened import Interface
from fedveil.runs.saved import SavedRun
from tests.system.federation.crashing import PLAN
from tests.system.federation.forking import local_federation
from tests.unit.federation.hall import CLIENTS, SECAGG, examples

ROOT = Path(__file__).parents[3]
ROUNDS = 3
DEADLINE = 15.0  # seconds of a stage: one that waits for a killed client takes all of it
LIMIT = 170.0  # seconds of one `flwr run`, at most


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> list[Home]:
    root, data = tmp_path_factory.mktemp("clients"), examples()
    made = []
    for index in range(CLIENTS):
        path = root / f"client-{index}"
        path.mkdir()
        save_clients(path / "data", [data.client(index)], data.test, "people", data.classes)
        node = write_node_key(path / "node")
        made.append(Home.create(path, path.name, {"path": str(path / "data")}, node))
    return made


@pytest.fixture(scope="module")
def directory(homes: list[Home], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation that all clients have accepted."""
    where = tmp_path_factory.mktemp("server") / "people"
    found(
        where, "people", SECAGG, Interface.of(examples()), CLIENTS, "softmax", ROUNDS, delta=1e-3,
        trust=Trust(2, 0), deadline=DEADLINE, settings={"ledger": str(where / "ledger.sqlite")},
    )  # fmt: skip
    enrol(where, [read_seat(home.path / PUBLIC) for home in homes])
    write_app(where, "people", serve="tests.system.federation.crashing:serve")
    for home in homes:
        home.accept(home.offer(where).hash, 200.0)
    return where


@pytest.fixture(scope="module")
def flower(
    homes: list[Home], directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalFederation]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("OMP_NUM_THREADS", "1")
        with local_federation(tmp_path_factory.mktemp("flower"), 0) as made:
            for home in homes:
                made.admit((home.path / "node.pub").read_text())
                start(made, home)
            made.wait_online(CLIENTS, 120)
            yield made


def start(flower: LocalFederation, home: Home) -> None:
    command = [
        *(sys.executable, "-m", "fedveil", "client", "run", "--home", home.path),
        *("--join", flower.address, "--root-certificates", flower.certificates.ca),
    ]
    flower.processes.start(home.path.name, command)


def rounds_of(directory: Path) -> int:
    saved = directory / "run" / "metrics.parquet"
    return len(SavedRun(directory / "run").rows) if saved.exists() else 0


def charged(home: Home) -> list[int]:
    """Rounds that a client has charged, for each opening of the server."""
    ledger = open_ledger(home.path / "ledger.sqlite")
    try:
        return sorted(len(stream.rounds) for stream in ledger.streams.values())
    finally:
        ledger.close()


def test_a_run_outlives_its_server_its_superlink_and_a_client(
    flower: LocalFederation, directory: Path, homes: list[Home]
) -> None:
    # The ServerApp dies in the second round, between reserve and commit: keys are exchange 1,
    # the first round takes 2 to 5, and 7 is where the second round's masked messages arrive.
    (directory / PLAN).write_text(json.dumps({"exchange": 7}))
    flower.start_run(directory)
    wait_for("the server's death", lambda: not (directory / PLAN).exists(), LIMIT)
    flower.processes.end("run")  # nobody waits until Flower notices
    assert rounds_of(directory) == 1  # the second was not published

    # The SuperLink is killed and restarted on its database, and one client is killed for good.
    flower.kill_superlink()
    flower.start_superlink()
    flower.processes.kill(homes[4].path.name)
    ended = flower.run(directory, LIMIT)
    assert ended.completed, ended.output[-2000:]

    summary = SavedRun(directory / "run").summary
    assert summary["rounds"] == ROUNDS
    assert summary["aborted_rounds"] == 0
    assert summary["privacy"]["course"]["redrawn"] == 1  # the lost round is charged as well
    came = [row["participants"] for row in SavedRun(directory / "run").rows]
    assert came == [CLIENTS, *[CLIENTS - 1] * (ROUNDS - 1)]
    # Each living client was charged for round 1, the lost round 2, and rounds 2 and 3 again.
    assert charged(homes[0]) == [2, ROUNDS - 1]
    assert sum(charged(homes[4])) <= 2
