"""Private selection: a random number of drawn runs, of which the best alone is kept.

    charge the ledger → draw K and K members → play them out of sight → keep the best alone

The argument is in docs/privacy.md, "Choosing the best of several runs".
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.comparing.members import Comparison, Member, plain_settings
from fedveil.comparing.outcome import write
from fedveil.comparing.pool import Pool, Task
from fedveil.comparing.table import Quiet
from fedveil.errors import UserError
from fedveil.privacy.events import NonPrivate, RenyiRelease
from fedveil.privacy.selection import Law, described, drawn, law_of, selection
from fedveil.privacy.together import Charged
from fedveil.runs.directory import MODE, RunDirectory, saving
from fedveil.runs.listing import HIDDEN, Listed, listed, remove_run

if TYPE_CHECKING:
    from fedveil.privacy.ledger import Facts
    from fedveil.privacy.norms import Adjacency
    from fedveil.privacy.session import Session
    from fedveil.training import Training

DRAWS = "draws.json"
KEPT = ("recipe.toml", "model.safetensors", "encoder.json")  # as they are
SHOWN = "who sees the messages of every run sees more than the best one"
NOTHING = {"sentence": f"No privacy guarantee: {SHOWN}.", "reason": SHOWN}
ASSUMED = (
    "runs are compared by a score that is computed from the released model and from test examples "
    "of nobody who is protected; how many runs were drawn, how long it took and what the others "
    "came to stays with whoever ran it."
)
OTHERWISE = {  # than in the statement of a run that was not chosen
    "Diagnostics": "the round means in metrics.parquet; they are private data, which no ε covers.",
    "Accounted": "by Rényi divergences, as dp-accounting has them for one run; the best of several "
    "after Papernot and Steinke 2022, Theorems 2 and 6.",
    "Chosen by": ASSUMED,
}


@dataclass(frozen=True)
class Priced:
    """What selecting among members costs."""

    release: RenyiRelease
    epsilon: float
    delta: float
    single: float  # the largest ε of a member alone
    law: Law
    unit: str
    adjacencies: tuple[Adjacency, ...]  # that hold for every member
    simulated: bool = False  # the clients were made up

    def plain(self) -> dict[str, Any]:
        """For comparison.json: the law, not its outcome."""
        costs = {"epsilon": self.epsilon, "delta": self.delta, "single": self.single}
        holds = {"unit": self.unit, "adjacency": self.adjacencies[0], "view": "models"}
        return {**described(self.law), **costs, **holds, "assumed": ASSUMED}

    def sentence(self) -> str:
        """For a reader who was not there."""
        from fedveil.privacy.statement import rounded_up

        made_up = "Simulation: the clients are made up, so nobody real is protected. "
        return (made_up if self.simulated else "") + (
            f"The best of a random number of runs ({described(self.law)['law']}, "
            f"{self.law.mean:.3g} expected), of which nothing else is released, costs ε = "
            f"{rounded_up(self.epsilon)} at δ = {rounded_up(self.delta)} for one {self.unit} "
            f"({self.adjacencies[0]}), seeing its released models only; one run alone would cost "
            f"ε = {rounded_up(self.single)}."
        )


def priced(trainings: Sequence[Training], law: Law) -> Priced:
    """The cost for members that are ready to run."""
    from fedveil.privacy import accounting
    from fedveil.privacy.together import plan

    _refuse_own_scores(trainings[0])
    for training in trainings:
        recipe = training.recipe
        if not recipe.private or recipe.view != "models":
            raise UserError(
                f"{recipe.name} cannot be selected privately: it must be private towards view "
                "'models', for who sees more of the runs sees more than the best of them."
            )
    members = [
        Charged(
            plan(t.recipe, t.task.dim, t.data.clients, "models", t.data.origin), t.rounds, t.rounds
        )
        for t in trainings
    ]
    release, delta = selection(members, law), trainings[0].delta
    alone = max(accounting.epsilon(m.plan.spent(m.rounds), delta) for m in members)
    found = accounting.epsilon(release, delta)
    if math.isinf(found):
        raise UserError(_hopeless(members))
    unit, origin = trainings[0].recipe.unit, trainings[0].data.origin
    return Priced(release, found, delta, alone, law, unit, _common(members), origin.simulated)


def _hopeless(members: Sequence[Charged]) -> str:
    """Why there is no ε: what a member releases without noise, or too little of it."""
    found = (way.event for member in members for way in member.plan.ways)
    why = next((event.reason for event in found if isinstance(event, NonPrivate)), "")
    because = f", since {why}." if why else "; use more noise."
    return f"Selecting among these members has no finite epsilon{because}"


def _common(members: Sequence[Charged]) -> tuple[Adjacency, ...]:
    """The neighbours for which every member holds, and so the best of them."""
    each = [member.plan.adjacencies for member in members]
    return tuple(one for one in each[0] if all(one in others for others in each))


def _refuse_own_scores(training: Training) -> None:
    """A score by clients' own examples is no function of the released model alone."""
    if training.data.tested_on_clients and training.recipe.unit == "client":
        raise UserError(
            f"The test examples of '{training.data.name}' were held out of the clients' own, or "
            "nothing says that they were not: runs would be compared by data of those who are "
            "protected, and no epsilon would hold; select on data that were saved "
            "(save_federated) with public test examples."
        )


def select(
    comparison: Comparison, directory: Path, jobs: int, ledger: Path | None
) -> tuple[Member | None, Listed | None, Priced]:
    """Play what is drawn, keep the best run in the directory, and say what it cost."""
    from fedveil.settings import load_data, prepare

    assert comparison.selection is not None
    law = law_of(**comparison.selection)
    seed = comparison.seeds[0]
    data = load_data(comparison.members[0].settings.data)
    trainings = [prepare(member.at(seed), data) for member in comparison.members]
    price = priced(trainings, law)
    hidden = directory / HIDDEN
    draws = _draws(comparison, law, hidden, trainings[0])
    session = _charged(trainings[0], price, draws["stream"], ledger, len(trainings))
    try:
        tasks = [_task(comparison, hidden, n, *pick) for n, pick in enumerate(draws["picks"])]
        left = [task for task in tasks if not _finished(task)]
        with Quiet() as sign:
            pool = Pool(jobs, hidden / "ledger.sqlite", sign)
            pool.play(left)
        if pool.stopped:
            raise KeyboardInterrupt
        if pool.problems:
            raise UserError(
                f"A drawn run could not be played: {next(iter(pool.problems.values()))}"
            )
        chosen, run = _kept(comparison, directory, tasks, draws["picks"], price)
        if run is not None:
            RunDirectory.open(run.path).save_trace(session.trace())
        session.commit(0, "no run" if run is None else _digest(run))
        session.end("models", 1, price.epsilon)
    finally:
        session.close()
    return chosen, run, price


def forget(directory: Path) -> None:
    """Delete what was drawn and played, once the result is written down."""
    if (directory / HIDDEN).is_dir():
        with saving(directory):
            shutil.rmtree(directory / HIDDEN)


def _draws(comparison: Comparison, law: Law, hidden: Path, first: Training) -> dict[str, Any]:
    """K members with seeds of their own, drawn once and remembered until the end."""
    from fedveil.streams import SecretKey, run_key, stream

    file = hidden / DRAWS
    if file.is_file():
        known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return known
    secret = isinstance(first.key, SecretKey)
    facts = [(m.label, plain_settings(m.settings)) for m in comparison.members]
    name = run_key("selection", comparison.seeds, comparison.selection, facts, first.identity)
    rng = stream(SecretKey() if secret else name, 0, "selection")
    picks = [
        [int(rng.integers(len(comparison.members))), int(rng.integers(2**31))]
        for _ in range(drawn(law, rng))
    ]
    called = f"selection {secrets.token_hex(16) if secret else name}"
    with saving(hidden):
        hidden.mkdir(mode=MODE, exist_ok=True)
    write(file, json.dumps({"stream": called, "picks": picks}))
    return {"stream": called, "picks": picks}


def _charged(
    first: Training, price: Priced, stream: str, ledger: Path | None, members: int
) -> Session:
    """The whole selection reserved as one release, before any run is played."""
    from fedveil.charging import refuse_other_split
    from fedveil.privacy.ledger import Account, ledger_path, open_ledger
    from fedveil.privacy.session import Session

    books = open_ledger(ledger_path(ledger))
    try:
        account = Account(first.fingerprint, first.recipe.unit)
        refuse_other_split(books, account, first.data)
        facts = _facts(first, account, price, stream, members)
        session = Session(books, facts, stream[-32:], contents=first.data.contents)
    except BaseException:
        books.close()
        raise
    try:
        session.reserve(0)
    except BaseException:
        session.close()
        raise
    return session


def _facts(first: Training, account: Any, price: Priced, stream: str, members: int) -> Facts:
    from fedveil.privacy.ledger import Facts
    from fedveil.privacy.together import Plan, Way

    holds = price.adjacencies
    shown = NonPrivate(SHOWN)
    return Facts(
        account=account,
        data=first.data.name,
        population=first.data.clients,
        recipe=f"the best of {members} members",
        stream=stream,
        rounds=1,
        delta=price.delta,
        plans={
            "models": Plan((Way(price.release, None),), holds),
            "sum": Plan((Way(shown, None),), holds),
            "messages": Plan((Way(shown, None),), holds),
        },
    )


def _task(comparison: Comparison, hidden: Path, number: int, pick: int, seed: int) -> Task:
    member = comparison.members[pick]
    settings = plain_settings(member.at(seed))
    return Task(f"draw-{number}", hidden / f"draw-{number}", settings, member.settings.rounds)


def _finished(task: Task) -> bool:
    return task.path.is_dir() and listed(task.path).state == "finished"


def _kept(
    comparison: Comparison,
    directory: Path,
    tasks: Sequence[Task],
    picks: Sequence[Sequence[int]],
    price: Priced,
) -> tuple[Member | None, Listed | None]:
    """The best run, copied to its member's name."""
    found = [listed(task.path) for task in tasks]
    if any(run.state != "finished" for run in found):
        raise UserError(f"{directory} has drawn runs that are not whole; select anew elsewhere.")
    if not found:
        return None, None
    best = max(range(len(found)), key=lambda n: _rank(found[n]))
    chosen, seed = comparison.members[picks[best][0]], picks[best][1]
    path = directory / chosen.directory(seed)
    if (path / "recipe.toml").is_file():  # left by a stop while it was copied
        remove_run(path)
    _release(found[best].path, path, price)
    return chosen, listed(path)


def _rank(run: Listed) -> tuple[float, float, str]:
    """By what is released alone: accuracy, then loss, then the model's bytes, so ties end."""
    accuracy = -1.0 if run.accuracy is None else run.accuracy
    loss = -math.inf if run.loss is None else -run.loss
    return accuracy, loss, _digest(run)


def _digest(run: Listed) -> str:
    return hashlib.sha256((run.path / "model.safetensors").read_bytes()).hexdigest()


def _release(hidden: Path, path: Path, price: Priced) -> None:
    """Copy the run, with the guarantee of the selection in place of its own.

    Norms and counts in its metrics are as private as any run's; of single clients nothing is kept.
    """
    released = RunDirectory.create(path)
    with saving(path):
        for name in KEPT:
            if (hidden / name).is_file():
                shutil.copyfile(hidden / name, path / name)
    own = RunDirectory.open(hidden)
    released.save_metrics([_repriced(row, price) for row in own.load_metrics()])
    summary = _restated(own.load_summary(), price)
    told = summary["privacy"]["statement"].items()
    released.save_statement("".join(f"{label:<12}{text}\n" for label, text in told))
    released.save_summary(summary)


def _repriced(row: dict[str, Any], price: Priced) -> dict[str, Any]:
    """A round's record: also its first model was released because the run was the best."""
    spent = row.get("epsilon")
    return {**row, "epsilon": None if spent is None else price.epsilon}


def _restated(summary: dict[str, Any], price: Priced) -> dict[str, Any]:
    privacy = summary["privacy"]
    views: dict[str, Mapping[str, Any]] = {
        view: {**guarantee, **dict.fromkeys(("epsilon", "drawn", "capped")), **NOTHING}
        for view, guarantee in privacy["views"].items()
    }
    told = {"epsilon": price.epsilon, "sentence": price.sentence(), "reason": ""}
    views["models"] = {**views["models"], **told, "adjacency": price.adjacencies[0]}
    statement = {**privacy["statement"], "Privacy": price.sentence(), **OTHERWISE}
    for view in views:
        statement.pop(view, None)
    changed = {**privacy, "views": views, "statement": statement}
    return {**summary, "privacy": changed, "selection": price.plain()}
