"""Measures the speed of the ledger on a disk and its share of a W1 round.

`python -m experiments.ledger DIRECTORY` creates its files there and removes them at the end.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from fedveil import algorithms
from fedveil.data.federated import Federated
from fedveil.data.synthetic import synthetic
from fedveil.ledger import charging
from fedveil.ledger.ledger import VIEWS, Account, Facts, Ledger, open_ledger
from fedveil.ledger.session import Session
from fedveil.privacy.calibrate import Budget
from fedveil.privacy.composition import plan
from fedveil.training.prepare import prepare

RECIPE = algorithms.dp_fedavg(clients=600, noise_multiplier=30.0, clip=0.5, steps=20)
ACCOUNT = Account("ab" * 32, "client")
BUDGET = Budget(200.0, 1e-5)


def median(times: list[float]) -> float:
    """The median in milliseconds."""
    return 1e3 * statistics.median(times)


def timed(work: Callable[[int], object], count: int) -> list[float]:
    """Seconds of each of `count` calls."""
    found = []
    for number in range(count):
        started = time.perf_counter()
        work(number)
        found.append(time.perf_counter() - started)
    return found


def syncs(place: Path, count: int = 300) -> list[float]:
    """Seconds to write and sync a page: what any ledger on this disk must wait for."""
    file = os.open(place / "page", os.O_CREAT | os.O_RDWR)

    def write(number: int) -> None:
        os.pwrite(file, b"x" * 4096, 4096 * number)
        os.fdatasync(file)

    found = timed(write, count)
    os.close(file)
    return found


def session(path: Path, number: int, rounds: int, played: int = 0) -> Session:
    """A run with its own noise stream; rounds it has already run are entered at once."""
    plans = {view: plan(RECIPE, 7850, 3000, view) for view in VIEWS}
    facts = Facts(ACCOUNT, "made up", 3000, "w1", f"seeded {number}", rounds, 1e-5, plans)
    return Session(open_ledger(path), facts, str(number), played)


def throughput(path: Path, number: int, rounds: int = 1000) -> None:
    """Reserves alone, then whole rounds."""
    work = session(path, number, 2 * rounds)
    reserves = timed(work.reserve, rounds)
    commits = timed(lambda round: work.commit(round, f"{round:032x}"), rounds)
    entries = work.ledger.head.position
    work.close()
    opening = timed(lambda _: Ledger(path).close(), 3)
    both = median(reserves) + median(commits)
    print(
        f"{entries:>8,} entries: reserve {median(reserves):.2f} ms ({1e3 / median(reserves):,.0f} "
        f"per second), commit {median(commits):.2f} ms, both {1e3 / both:,.0f} rounds per second; "
        f"99 of 100 reserves within {1e3 * sorted(reserves)[rounds * 99 // 100]:.2f} ms; "
        f"opened and verified in {median(opening):,.0f} ms",
        flush=True,
    )


def share(place: Path, data: Federated, budget: bool, rounds: int = 30) -> None:
    """The ledger's share of rounds as `fedveil train` runs them, without evaluations."""
    path = place / f"share-{budget}.sqlite"
    if budget:
        books = open_ledger(path)
        account = Account(data.fingerprint(), "client")
        books.grant(account, "models", BUDGET, data.name, data.contents())
        books.close()
    training = prepare(
        RECIPE, data, "softmax", 10_000, engine="factored", evaluate_every=10_000, seed=int(budget)
    )
    training.enrol(path, saved=True)
    training.step()
    spent = ledger_times()
    whole = timed(lambda _: training.step(), rounds)
    ledger = [sum(spent[3 * k : 3 * k + 3]) for k in range(rounds)]
    part = 100 * statistics.median(mine / all for mine, all in zip(ledger, whole, strict=True))
    kind = "with a budget" if budget else "without one"
    print(
        f"W1, {kind}: a round takes {median(whole):.1f} ms, the ledger {median(ledger):.2f} ms of "
        f"it ({part:.1f}%)",
        flush=True,
    )
    assert training.session is not None
    training.session.close()


def ledger_times() -> list[float]:
    """A list that grows by three with each round: reserve, check, commit."""
    spent: list[float] = []

    def watched(name: str) -> None:
        real = getattr(charging, name)

        def wrapped(*given: object) -> object:
            started = time.perf_counter()
            result = real(*given)
            spent.append(time.perf_counter() - started)
            return result

        setattr(charging, name, wrapped)

    for name in ("reserve", "check", "commit"):
        watched(name)
    return spent


def main() -> None:
    """Measure one disk."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        place = Path(name)
        print(f"A page is written and synced in {median(syncs(place)):.2f} ms.", flush=True)
        for number in range(3):
            throughput(place / "ledger.sqlite", number)
        session(place / "ledger.sqlite", 3, 100_000, 100_000).close()
        throughput(place / "ledger.sqlite", 4)
        books = open_ledger(place / "budget.sqlite")
        books.grant(ACCOUNT, "models", BUDGET, "made up", "made up")
        books.close()
        print("With a budget:")
        throughput(place / "budget.sqlite", 0)
        made = synthetic(clients=3000)
        data = Federated(
            "w1", made.inputs[:], made.labels[:], made.offsets, made.test, made.classes
        )
        share(place, data, budget=False)
        share(place, data, budget=True)


if __name__ == "__main__":
    main()
