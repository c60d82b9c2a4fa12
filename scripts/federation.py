"""A whole federation on this machine, over loopback: `make federation`.

SuperLink with TLS and node authentication, ten clients as processes with their own data, keys and
ledgers, five private rounds by secure aggregation. One client is killed in the middle. Every step
is also a command, which is printed before it is done.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import torch

from fedveil.commands.progress import entry
from fedveil.data.catalog import load
from fedveil.data.federated import Federated
from fedveil.data.origin import SIMULATED
from fedveil.data.partition import Iid
from fedveil.data.save import save_clients
from fedveil.federation.agreement import Agreement
from fedveil.federation.flower.keys import write_node_key
from fedveil.federation.flower.local import LocalFederation
from fedveil.federation.flower.writing import write_app
from fedveil.federation.founding import Trust, enrol, found
from fedveil.federation.home import PUBLIC, Home, read_seat
from fedveil.recipe import Recipe
from fedveil.runs.opened import Interface
from fedveil.runs.saved import SavedRun

CLIENTS, ROUNDS, EPSILON, DELTA = 10, 5, 8.0, 1e-3
KILLED, AFTER = 7, 2  # this client is killed after this many rounds
DEADLINE = 30.0  # seconds of a stage; a killed client costs one of them
PLACE = Path("runs/federation")
WIDTH = 13


def main() -> None:
    """Make the federation, run it, and show what came of it."""
    started = time.perf_counter()
    shutil.rmtree(PLACE, ignore_errors=True)
    torch.set_num_threads(1)
    data = load("digits").split(Iid(CLIENTS))
    homes = [_client(data, index) for index in range(CLIENTS)]
    agreement = _agreed(data, homes)
    with LocalFederation(PLACE / "flower", 0) as flower:
        for home in homes:
            flower.admit((home.path / "node.pub").read_text())
            _start(flower, home)
        flower.wait_online(CLIENTS, 120)
        entry("Ready", f"{CLIENTS} clients in {time.perf_counter() - started:.0f} s", WIDTH)
        begun = time.perf_counter()
        print(f"$ flwr run {PLACE / 'ward'} {flower.address} --stream")
        flower.start_run(PLACE / "ward")
        _kill_one(flower, homes[KILLED])
        ended = flower.finished(240)
        seconds = time.perf_counter() - begun
    if not ended.completed:
        sys.exit(f"The run ended as '{ended.status}': {ended.details}\n{ended.output[-2000:]}")
    _show(agreement, seconds)


def _client(data: Federated, index: int) -> Home:
    """One client's home, with its own examples in a file."""
    path = PLACE / f"client-{index}"
    path.mkdir(parents=True)
    facts = (data.test, "digits", data.classes, data.loss, data.class_names)
    save_clients(path / "data", [data.client(index)], *facts, origin=SIMULATED)
    if index == 0:
        print(f"$ fedveil client init --home {path} --path {path / 'data'}   (and nine more)")
    node = write_node_key(path / "node")
    return Home.create(path, path.name, {"path": str((path / "data").resolve())}, node)


def _agreed(data: Federated, homes: list[Home]) -> Agreement:
    """The agreement, on whose hash every client has agreed."""
    where, parameters = PLACE / "ward", "clients=10 --set server_rate=1.0 --set steps=5"
    print(
        f"$ fedveil federate new {where} --clients {CLIENTS} --algorithm dp_norm_fedavg_secagg "
        f"--set {parameters} --rounds {ROUNDS} --epsilon {EPSILON:g} --dropouts 2 "
        "--corrupt 1 --trial"
    )
    found(
        where, "ward", _recipe(), Interface.of(data), CLIENTS, "softmax", ROUNDS, EPSILON, DELTA,
        trust=Trust(2, 1), deadline=DEADLINE, class_names=data.class_names, simulated=True,
        settings={
            "test": {"dataset": "digits", "clients": 1},
            "ledger": str((PLACE / "ledger.sqlite").resolve()),
        },
    )  # fmt: skip
    write_app(where, "ward")
    print(f"$ fedveil federate enrol {where} {PLACE}/client-*/{PUBLIC}")
    agreement = enrol(where, [read_seat(home.path / PUBLIC) for home in homes])
    print(f"$ fedveil client accept {agreement.hash[:16]}… --epsilon {2 * EPSILON:g}")
    for home in homes:
        home.accept(home.offer(where).hash, 2 * EPSILON)
    return agreement


def _recipe() -> Recipe:
    from fedveil.algorithms import dp_norm_fedavg_secagg

    return dp_norm_fedavg_secagg(clients=CLIENTS, steps=5, learning_rate=1.0, server_rate=1.0)


def _start(flower: LocalFederation, home: Home) -> None:
    """One client as a process of its own, connected without shipped code."""
    command = [
        *(sys.executable, "-m", "fedveil", "client", "run", "--home", home.path),
        *("--join", flower.address, "--root-certificates", flower.certificates.ca),
    ]
    flower.processes.start(home.path.name, command)


def _kill_one(flower: LocalFederation, home: Home) -> None:
    """`kill -9` of a client once some rounds are done."""
    run, deadline = SavedRun(PLACE / "ward" / "run"), time.monotonic() + 120
    while time.monotonic() < deadline and flower.processes.alive("run"):
        if (run.path / "metrics.parquet").exists() and len(SavedRun(run.path).rows) >= AFTER:
            print(f"$ kill -9 {flower.processes.pid(home.path.name)}   ({home.path.name})")
            flower.processes.kill(home.path.name)
            return
        time.sleep(0.1)


def _show(agreement: Agreement, seconds: float) -> None:
    """Accuracy, statement, bytes, and seconds per round."""
    run = SavedRun(PLACE / "ward" / "run")
    rows, summary = run.rows, run.summary
    print()
    print((run.path / "privacy.txt").read_text())
    entry("Accuracy", f"{summary['accuracy']:.1%} on digits, {agreement.clients} clients", WIDTH)
    entry("Arrived", ", ".join(str(row["participants"]) for row in rows) + " clients", WIDTH)
    each = summary["bytes_sent"] / max(1, sum(row["participants"] for row in rows))
    entry("Bytes", f"{each:,.0f} per client and round, from the client", WIDTH)
    took = ", ".join(f"{row['seconds']:.1f}" for row in rows)
    entry("Seconds", f"{took} per round; {seconds:.0f} in all", WIDTH)
    entry("Run", f"{run.path}", WIDTH)


if __name__ == "__main__":
    main()
