"""A whole federation on this machine, over loopback: `make federation`.

SuperLink with TLS and node authentication, ten clients as processes with their own data, keys and
ledgers, five private rounds by secure aggregation. One client is killed in the middle. Every step
is printed as the command that does it.
"""

from __future__ import annotations

import io
import os
import shlex
import shutil
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import torch

from fedveil.cli import app
from fedveil.commands.progress import entry
from fedveil.data.catalog import load
from fedveil.data.origin import SIMULATED
from fedveil.data.partition import Iid
from fedveil.data.save import save_clients
from fedveil.errors import for_command_line
from fedveil.federation.agreement import Agreement
from fedveil.federation.flower.local import NAME, LocalFederation
from fedveil.federation.home import PUBLIC
from fedveil.runs.saved import SavedRun

CLIENTS, ROUNDS, EPSILON, DELTA = 10, 5, 8.0, 1e-3
KILLED, AFTER = 7, 2  # this client is killed after this many rounds
DEADLINE = 30.0  # seconds of a stage; a killed client costs one of them
PLACE = Path("runs/federation")
WARD = PLACE / "ward"
SETTINGS = '[data]\\ndataset = "digits"\\n'
MORE = "# and nine more"
WIDTH = 13


def main() -> None:
    """Make the federation, run it, and show what came of it."""
    started = time.perf_counter()
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    torch.set_num_threads(1)
    os.environ["FEDVEIL_LEDGER"] = str((PLACE / "ledger.sqlite").resolve())
    _print(f"export FEDVEIL_LEDGER={os.environ['FEDVEIL_LEDGER']}")
    homes = clients()
    agreement = agreed(homes)
    with LocalFederation(PLACE / "flower", 0) as flower:
        _print(f"export FLWR_HOME={flower.home}")
        _print(flower.processes.command("superlink"), flower.processes.command("superexec"))
        for home in homes:
            flower.admit((home / "node.pub").read_text())
            _start(flower, home)
        _print(f"flwr supernode register {homes[0] / 'node.pub'} {NAME}   {MORE}")
        _print(f"{flower.processes.command(homes[0].name)}   {MORE}")
        flower.wait_online(CLIENTS, 120)
        entry("Ready", f"{CLIENTS} clients in {time.perf_counter() - started:.0f} s", WIDTH)
        begun = time.perf_counter()
        flower.start_run(WARD)
        _print(flower.processes.command("run"))
        _kill_one(flower, homes[KILLED])
        ended = flower.finished(240)
        seconds = time.perf_counter() - begun
    if not ended.completed:
        sys.exit(f"The run ended as '{ended.status}': {ended.details}\n{ended.output[-2000:]}")
    _show(agreement, seconds)


def clients() -> list[Path]:
    """The homes of all clients, each with its own examples in a file."""
    data = load("digits").split(Iid(CLIENTS))
    facts = (data.test, "digits", data.classes, data.loss, data.class_names)
    homes = [PLACE / f"client-{index}" for index in range(CLIENTS)]
    for index, home in enumerate(homes):
        save_clients(home / "data", [data.client(index)], *facts, origin=SIMULATED)
        fedveil("client", "init", "--home", home, "--path", home / "data", first=home == homes[0])
    return homes


def agreed(homes: list[Path]) -> Agreement:
    """The agreement, which every client has accepted."""
    _print(f"printf '{SETTINGS}' > {PLACE / 'digits.toml'}")
    (PLACE / "digits.toml").write_text(SETTINGS.replace("\\n", "\n"))
    parameters = {"clients": CLIENTS, "steps": 5, "learning_rate": 1.0, "server_rate": 1.0}
    fedveil(
        "federate", "new", WARD, "--from", PLACE / "digits.toml", "--clients", CLIENTS,
        "--algorithm", "dp_norm_fedavg_secagg",
        *(part for name, value in parameters.items() for part in ("--set", f"{name}={value}")),
        "--rounds", ROUNDS, "--epsilon", EPSILON, "--delta", DELTA, "--dropouts", 2,
        "--corrupt", 1, "--deadline", DEADLINE, "--trial",
    )  # fmt: skip
    fedveil("federate", "enrol", WARD, *(home / PUBLIC for home in homes))
    agreement = Agreement.read(WARD)
    for home in homes:
        first = home == homes[0]
        fedveil("client", "check", WARD, "--home", home, first=first)
        allowed = ("--epsilon", 2 * EPSILON, "--home", home)
        fedveil("client", "accept", agreement.hash, *allowed, first=first)
    return agreement


def fedveil(*arguments: object, first: bool | None = None) -> None:
    """Print a command and do it, without its output. Of ten clients, only the first is printed."""
    words = [str(argument) for argument in arguments]
    if first is not False:
        _print(shlex.join(["fedveil", *words]) + (f"   {MORE}" if first else ""))
    with for_command_line(), redirect_stdout(io.StringIO()):
        app(words, standalone_mode=False)


def _print(*commands: str) -> None:
    for command in commands:
        print(f"$ {command}", flush=True)


def _start(flower: LocalFederation, home: Path) -> None:
    """One client as a process of its own, connected without shipped code."""
    command: list[str | Path] = [
        *(sys.executable, "-m", "fedveil", "client", "run", "--home", home),
        *("--join", flower.address, "--root-certificates", flower.certificates.ca),
    ]
    flower.processes.start(home.name, command)


def _kill_one(flower: LocalFederation, home: Path) -> None:
    """`kill -9` of a client once some rounds are done."""
    run, deadline = SavedRun(WARD / "run"), time.monotonic() + 120
    while time.monotonic() < deadline and flower.processes.alive("run"):
        if (run.path / "metrics.parquet").exists() and len(SavedRun(run.path).rows) >= AFTER:
            _print(f"kill -9 {flower.processes.pid(home.name)}   # {home.name}")
            flower.processes.kill(home.name)
            return
        time.sleep(0.1)


def _show(agreement: Agreement, seconds: float) -> None:
    """Accuracy, statement, bytes, and seconds per round."""
    run = SavedRun(WARD / "run")
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
