"""Kill (−9) a training at random moments and at every named step of a round, resume, compare.

    python -m scripts.kill_test --kills 200

After every trial: no round before the last checkpoint is lost, no release is missing from the
ledger, no noise was used in two different releases, and a seeded run has the files of an
undisturbed run. Each training is a real process (forked, so that libraries load once).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import dp_accounting.pld
import dp_accounting.rdp  # libraries load before the forks
import numpy as np
import polars
import safetensors.torch
import tomli_w
import torch

from fedveil import cli
from fedveil.accounting import accountant as accounting
from fedveil.commands import progress
from fedveil.data.federated import Examples, Federated
from fedveil.ledger import charging
from fedveil.ledger.anchor import Anchor
from fedveil.ledger.chain import Chain
from fedveil.ledger.ledger import Account, Ledger, open_ledger
from fedveil.ledger.session import Session
from fedveil.ledger.verify import verify
from fedveil.parts.memory import ClientMemory
from fedveil.privacy.calibrate import Budget
from fedveil.runs.directory import RunDirectory
from fedveil.training import run as training
from fedveil.training import scoring, settings, sources
from fedveil.training import start as starting

LOADED = (dp_accounting.pld, dp_accounting.rdp, polars, progress, safetensors.torch, tomli_w)
ROUNDS, EVERY = 10, 3
ONCE = ("settings saved", "end noted", "model saved", "summary saved", "resumed")
COMMON = {"rate": 0.5, "noise_multiplier": 2.0}
CASES: dict[str, dict[str, Any]] = {  # the last one's noise cannot be drawn again
    "gaussian": {"algorithm": "dp_fedavg", "parameters": COMMON},
    "memory": {"algorithm": "fed_alpha_normec", "parameters": COMMON},
    "adaptive": {
        "algorithm": "dp_fedavg_adaptive",
        "parameters": COMMON | {"cap": 6, "start": 0.1},
    },
    "whole numbers": {
        "algorithm": "dp_norm_fedavg_secagg",
        "parameters": {"rate": 0.5, "levels": 64, "sigma": 30.0, "support": 400, "honest": 2},
    },
    "secure": {"algorithm": "dp_fedavg", "parameters": COMMON, "noise": "secure"},
}
BUDGET = 200.0  # far above what is spent: it exercises the locks and checks
STEPS: dict[str, tuple[Any, str, str]] = {  # name: object, method, before or after it
    "before reserve": (Session, "reserve", "before"),
    "reserve added, not on disk": (Chain, "add", "after"),
    "entry on disk, head not": (Anchor, "write", "before"),
    "head written": (Anchor, "write", "after"),
    "head on disk": (Anchor, "sync", "after"),
    "reserved": (Session, "reserve", "after"),
    "before the clients": (training, "run_round", "before"),
    "noise drawn": (training, "run_round", "after"),
    "before publishing": (charging, "check", "after"),
    "published, not committed": (Session, "commit", "before"),
    "committed": (Session, "commit", "after"),
    "ledger position saved": (RunDirectory, "save_trace", "after"),
    "metrics saved": (RunDirectory, "save_metrics", "after"),
    "client memory saved": (ClientMemory, "save", "after"),
    "before the checkpoint": (RunDirectory, "save_checkpoint", "before"),
    "checkpoint saved": (RunDirectory, "save_checkpoint", "after"),
    "file written, not in place": (Path, "replace", "before"),
    "file in place": (Path, "replace", "after"),
    "end noted": (Session, "end", "after"),
    "model saved": (RunDirectory, "save_model", "after"),
    "summary saved": (RunDirectory, "save_summary", "after"),
    "settings saved": (RunDirectory, "save_settings", "after"),
    "resumed": (starting, "resume", "after"),
}


@dataclass
class Tally:
    """The totals of all trials."""

    kills: Counter[str] = field(default_factory=Counter)
    trials: Counter[str] = field(default_factory=Counter)
    on_a_budget: int = 0
    releases: int = 0
    charged: int = 0
    lost_rounds: int = 0
    uncharged_releases: int = 0
    noise_used_twice: int = 0
    different_models: int = 0
    problems: list[str] = field(default_factory=list)


def blobs() -> Federated:
    """Three classes of points in R⁵ over 12 clients."""
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(4 + np.arange(12) % 4)])

    def examples(count: int) -> Examples:
        labels = rng.integers(3, size=count)
        points = rng.normal(size=(count, 5)) + 3 * np.eye(5)[labels]
        return Examples(torch.from_numpy(points.astype(np.float32)), torch.from_numpy(labels))

    train, test = examples(int(offsets[-1])), examples(60)
    return Federated("blobs", train.inputs, train.labels, torch.from_numpy(offsets), test, 3)


def toml(case: str) -> str:
    """The settings file of a case; `load_data` replaces the data it names."""
    often = {"rounds": ROUNDS, "evaluate_every": ROUNDS, "checkpoint_every": EVERY}
    return tomli_w.dumps(CASES[case] | often | {"data": {"dataset": "digits"}})


def warm(place: Path) -> None:
    """Account for all cases once, and import what a run imports, so that every fork has both."""
    import scipy.stats  # noqa: F401
    import sklearn.calibration  # noqa: F401
    import typer.main

    scoring.GROUPS = 3  # intervals of metrics are not what is tested here
    command = typer.main.get_command(cli.app)
    typer.main.get_command = lambda _: command
    for case in CASES:
        file = place / f"{case}.toml"
        file.write_text(toml(case))
        ready = settings.from_settings(settings.read_settings(file, {}))
        ready.statement()
        for rounds in range(1, ROUNDS + 1):
            spent = ready.recipe.spent(ready.task.dim, ready.data.clients, rounds)
            accounting.epsilon(spent, ready.delta)


def arguments(case: str, run: Path) -> list[str]:
    """The command that starts or resumes a case."""
    if (run / "recipe.toml").is_file():
        return ["train", "--resume", str(run)]
    return ["train", str(run.parents[1] / f"{case}.toml"), "--out", str(run)]


def spied(log: Path, plan: tuple[str, int] | None) -> None:
    """In the child: log what is published and saved, and die at the planned step."""
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(*words: object) -> None:
        os.write(sink, (json.dumps(words) + "\n").encode())

    def published(self: Any, info: Any, seconds: float) -> Any:
        stream = "none" if self.session is None else self.session._key
        note("published", stream, info.round, charging.digest(self.state))
        return record(self, info, seconds)

    def saved(self: Any, state: Any, identity: str = "") -> None:
        save(self, state, identity)
        note("saved", state.round)

    def enrolled(self: Any, *given: Any, **named: Any) -> Any:
        enrolment = enrol(self, *given, **named)
        note("enrolled", self.state.round)
        return enrolment

    record, save = training.Training._record, RunDirectory.save_checkpoint
    enrol = training.Training.enrol
    training.Training._record = published  # type: ignore[method-assign]
    RunDirectory.save_checkpoint = saved  # type: ignore[method-assign]
    training.Training.enrol = enrolled  # type: ignore[method-assign]
    if plan is not None:
        doomed(*plan)


def doomed(step: str, times: int) -> None:
    """Die when a step is reached for the n-th time."""
    owner, name, when = STEPS[step]
    left, real = [times], getattr(owner, name)

    def reached() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(*given: Any, **named: Any) -> Any:
        if when == "before":
            reached()
        result = real(*given, **named)
        if when == "after":
            reached()
        return result

    setattr(owner, name, wrapped)


def child(case: str, run: Path, log: Path, plan: tuple[str, int] | None) -> int:
    """Start a process that trains, and return its id."""
    pid = os.fork()
    if pid:
        return pid
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(os.open(log.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    code = 1
    try:
        spied(log, plan)
        sys.argv = ["fedveil", *arguments(case, run)]
        cli.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    finally:
        os._exit(code)
    raise AssertionError


def killed(pid: int, after: float | None) -> bool:
    """Wait for the process, or kill it after so many seconds; whether it was killed."""
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) == signal.SIGKILL
    if os.WEXITSTATUS(status):
        raise RuntimeError(f"the training exited with {os.WEXITSTATUS(status)}")
    return False


def grant(ledger: Path, data: Federated) -> None:
    """A budget for these data."""
    books, account = open_ledger(ledger), Account(data.fingerprint(), "client")
    books.grant(account, "models", Budget(BUDGET, 1e-5), data.name, data.contents())
    books.close()


def trial(
    case: str,
    base: Path,
    plans: list[tuple[str, int] | float],
    tally: Tally,
    budget: Federated | None = None,
) -> tuple[Path, Path]:
    """One run with these kills in order, and then to its end."""
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    os.environ["FEDVEIL_LEDGER"] = str(base / "ledger.sqlite")
    if budget is not None:
        grant(base / "ledger.sqlite", budget)
    run, log = base / "run", base / "log"
    for plan in plans:
        at_step = plan if isinstance(plan, tuple) else None
        pid = child(case, run, log, at_step)
        if killed(pid, plan if isinstance(plan, float) else None):
            tally.kills[at_step[0] if at_step else "at a random moment"] += 1
    if killed(child(case, run, log, None), None):
        raise RuntimeError("killed by another process")
    tally.trials[case] += 1
    return run, log


def judge(case: str, run: Path, log: Path, whole: dict[str, str], tally: Tally) -> None:
    """Compare a trial with the ledger and with an undisturbed run."""
    ledger = Ledger(run.parent / "ledger.sqlite")
    tally.problems += verify(ledger).problems
    released, checkpoint = set(), 0
    for line in map(json.loads, log.read_text().splitlines()):
        match line:
            case ["published", stream, round, digest]:
                released.add((stream, round, digest))
            case ["saved", round]:
                checkpoint = round
            case ["enrolled", round]:
                tally.lost_rounds += max(checkpoint - round, 0)
    charged = sum(len(stream.rounds) for stream in ledger.streams.values())
    known = {(key, round) for key, stream in ledger.streams.items() for round in stream.rounds}
    tally.releases += len(released)
    tally.charged += charged
    tally.uncharged_releases += sum((stream, round) not in known for stream, round, _ in released)
    tally.noise_used_twice += len(released) - len({(s, r) for s, r, _ in released})
    facts = json.loads((run / "summary.json").read_text())
    if facts["rounds"] != ROUNDS or facts["privacy"]["rounds"] < len(released):
        tally.problems.append(f"{case}: the statement covers {facts['privacy']['rounds']} rounds")
    tally.different_models += case != "secure" and files(run) != whole
    ledger.close()


def files(run: Path) -> dict[str, str]:
    """Digests of the model and the whole state."""
    names = ["model.safetensors", "checkpoint.safetensors", *(p.name for p in run.glob("mem*"))]
    return {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in names}


def paired(rng: random.Random) -> Iterator[list[tuple[str, int]]]:
    """Kills at every step: the second one of a run meets a process that resumed it."""
    yield [("checkpoint saved", 2), ("resumed", 1)]  # there is a checkpoint to resume
    yield [("settings saved", 1), ("end noted", 1)]
    often = [step for step in STEPS if step not in ONCE]
    steps = [*often, "model saved", "summary saved"]
    for first, second in itertools.zip_longest(steps[::2], steps[1::2]):
        plans = [(first, 1 if first in ONCE else rng.choice((1, 2)))]
        yield [*plans, (second, 1)] if second else plans


def campaign(kills: int, seed: int, show: Callable[[str], None]) -> Tally:
    """Kill at every step of every case, then at random moments until the target is reached."""
    data, rng, tally = blobs(), random.Random(seed), Tally()
    sources.load_data = lambda *_: data
    with tempfile.TemporaryDirectory() as place:
        warm(Path(place))
        base = Path(place) / "trial"
        whole, lasting = {}, {}
        for case in CASES:
            started = time.monotonic()
            run, _ = trial(case, base, [], Tally())
            lasting[case], whole[case] = time.monotonic() - started, files(run)

        def go(case: str, *plans: tuple[str, int] | float) -> None:
            budget = data if rng.random() < 0.5 else None
            tally.on_a_budget += budget is not None
            run, log = trial(case, base, list(plans), tally, budget)
            judge(case, run, log, whole[case], tally)

        cases = list(CASES)
        for number, plans in enumerate(paired(rng)):
            of_memory = any("memory" in step for step, _ in plans)
            go("memory" if of_memory else cases[number % len(cases)], *plans)
        show(f"{tally.kills.total()} kills at steps")
        while tally.kills.total() < kills:
            case = rng.choice(cases)
            step = (rng.choice([step for step in STEPS if step not in ONCE]), rng.randint(1, 6))
            moments = [rng.uniform(0.0, lasting[case] / 2) for _ in range(rng.randint(1, 4))]
            go(case, *moments, *([step] if rng.random() < 0.5 else []))
            show(f"{tally.kills.total()} kills")
    return tally


def main() -> None:
    """Run a campaign, print its numbers, and fail if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    show = (lambda _: None) if given.quiet else (lambda text: print(text, file=sys.stderr))
    tally = campaign(given.kills, given.seed, show)
    figures = {name: getattr(tally, name) for name in Tally.__dataclass_fields__}
    print(json.dumps(figures | {"kills_in_all": tally.kills.total()}, indent=2))
    broken = ("lost_rounds", "uncharged_releases", "noise_used_twice", "different_models")
    sys.exit(any(figures[name] for name in (*broken, "problems")))


if __name__ == "__main__":
    main()
