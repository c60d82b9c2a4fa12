"""Private selection: train a random number of random members and keep only the best run.

    charge the ledger → draw K and K members → train them in a hidden directory → keep the best

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

from fedveil.accounting.events import NonPrivate, RenyiRelease
from fedveil.comparing.members import Comparison, Member, plain_settings
from fedveil.comparing.outcome import Measure, measure_of, write
from fedveil.comparing.pool import NoDisplay, Pool, RunTask
from fedveil.data.columns import digest as digest_of
from fedveil.errors import UserError
from fedveil.privacy.composition import Charged
from fedveil.privacy.selection import Law, described, drawn, law_of, selection
from fedveil.privacy.statement import OTHERS
from fedveil.runs.directory import MODE, RunDirectory, saving
from fedveil.runs.listing import HIDDEN, Listed, listed, remove_run
from fedveil.runs.saved import ENCODER, MODEL, RECIPE, SavedRun

if TYPE_CHECKING:
    from fedveil.accounting.norms import Adjacency
    from fedveil.ledger.ledger import Facts
    from fedveil.ledger.session import Session
    from fedveil.training.run import Training

DRAWS = "draws.json"
KEPT = (RECIPE, MODEL, ENCODER)  # copied unchanged
SHOWN = "an adversary who sees the messages of every run sees more than the best run"
NOTHING = {"sentence": f"No privacy guarantee: {SHOWN}.", "reason": SHOWN}
SECRET = (
    "The operator of the selection keeps secret how many runs were drawn, how long it took and "
    "what the other runs achieved."
)
ASSUMED = (
    "runs are compared by a score computed from the released model and from test examples that "
    f"belong to nobody who is protected. {SECRET}"
)
ASSUMED_NOISY = f"runs are compared by their noisy scores, which ε covers. {SECRET}"
RESTATED = {  # lines that differ from the statement of a single run
    "Diagnostics": "the round means in metrics.parquet. These are private data: no ε covers them.",
    "Accounting": "by Rényi divergences, from dp-accounting for one run. The best of several: "
    "Papernot and Steinke 2022, Theorems 2 and 6.",
}


@dataclass(frozen=True)
class SelectionCost:
    """The privacy cost of selecting among members."""

    release: RenyiRelease
    epsilon: float
    delta: float
    single: float  # the largest ε of a member alone
    law: Law
    unit: str
    adjacencies: tuple[Adjacency, ...]  # that hold for every member
    simulated: bool = False  # whether the clients are simulated
    noisy: bool = False  # whether all scores are of private evaluations

    @property
    def assumed(self) -> str:
        """What the guarantee relies on."""
        return ASSUMED_NOISY if self.noisy else ASSUMED

    def plain(self) -> dict[str, Any]:
        """For comparison.json: the distribution of K, not its value."""
        costs = {"epsilon": self.epsilon, "delta": self.delta, "single": self.single}
        holds = {"unit": self.unit, "adjacency": self.adjacencies[0], "view": "models"}
        return {**described(self.law), **costs, **holds, "assumed": self.assumed}

    def sentence(self) -> str:
        """The guarantee as text."""
        from fedveil.accounting.rounding import rounded_up, short

        made_up = "Simulation: clients are simulated, so no real person is protected. "
        return (made_up if self.simulated else "") + (
            f"Releasing only the best of a random number of runs ({described(self.law)['law']}, "
            f"{short(self.law.mean, 3)} expected) is ({rounded_up(self.epsilon)}, "
            f"{rounded_up(self.delta)})-differentially private per {self.unit} against anyone who "
            f"sees only its released models. Adjacency: {self.adjacencies[0]}. One run alone would "
            f"cost ε = {rounded_up(self.single)}."
        )


def selection_cost(trainings: Sequence[Training], law: Law) -> SelectionCost:
    """The cost of selecting among prepared members."""
    from fedveil.accounting import accountant as accounting
    from fedveil.privacy.composition import common, plan

    for training in trainings:
        _refuse_own_scores(training)
        recipe = training.recipe
        if not recipe.private or recipe.view != "models":
            raise UserError(
                f"{recipe.name} cannot be selected privately. Use a private algorithm in view "
                f"'models': {SHOWN}."
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
        raise UserError(_no_epsilon(members))
    unit, origin = trainings[0].recipe.unit, trainings[0].data.origin
    noisy = all(training.spec.evaluation is not None for training in trainings)
    return SelectionCost(
        release, found, delta, alone, law, unit, common(members), origin.simulated, noisy
    )


def _no_epsilon(members: Sequence[Charged]) -> str:
    """Why there is no finite ε: a member without noise, or with too little."""
    found = (way.event for member in members for way in member.plan.ways)
    why = next((event.reason for event in found if isinstance(event, NonPrivate)), "")
    because = f", since {why}." if why else ". Use more noise."
    return f"Selecting among these members has no finite ε{because}"


def _refuse_own_scores(training: Training) -> None:
    """Refuse scores on clients' own examples, which depend on more than the released model.

    Noisy scores are released with the model, and its ε covers them.
    """
    if training.spec.evaluation is not None:
        return
    if training.data.tested_on_clients and training.recipe.unit == "client":
        raise UserError(
            f"The test examples of '{training.data.name}' may belong to its clients. Runs would be "
            "compared on data of protected people, and no epsilon would hold. Give "
            "private_evaluation, or use data that were saved (save_federated) with public test "
            "examples."
        )


def select(
    comparison: Comparison, directory: Path, jobs: int, ledger: Path | None
) -> tuple[Member | None, Listed | None, SelectionCost]:
    """Train what is drawn, keep the best run in the directory, and return its cost."""
    from fedveil.training.settings import from_settings
    from fedveil.training.sources import load_for

    assert comparison.selection is not None
    law = law_of(**comparison.selection)
    seed = comparison.seeds[0]
    data = load_for(comparison.members[0].settings)
    trainings = [from_settings(member.at(seed), data) for member in comparison.members]
    price = selection_cost(trainings, law)
    hidden = directory / HIDDEN
    draws = _draws(comparison, law, hidden, trainings)
    session = _charged(trainings[0], price, draws["stream"], ledger, len(trainings))
    try:
        tasks = [_task(comparison, hidden, n, *pick) for n, pick in enumerate(draws["picks"])]
        left = [task for task in tasks if not _finished(task)]
        pool = Pool(jobs, hidden / "ledger.sqlite", NoDisplay())
        pool.run(left)
        if pool.stopped:
            raise KeyboardInterrupt
        if pool.problems:
            raise UserError(f"A drawn run failed: {next(iter(pool.problems.values()))}")
        number, digest = _best(directory, tasks)
        session.commit(0, digest, once=True)  # K, members and noise are those of this stream
        chosen, run = _kept(comparison, directory, tasks, draws["picks"], number, price)
        if run is not None:
            RunDirectory.open(run.path).save_trace(session.trace())
        session.end("models", 1, price.epsilon)
    finally:
        session.close()
    return chosen, run, price


def forget(directory: Path) -> None:
    """Delete the drawn runs, once the result is saved."""
    if (directory / HIDDEN).is_dir():
        with saving(directory):
            shutil.rmtree(directory / HIDDEN)


def _draws(
    comparison: Comparison, law: Law, hidden: Path, trainings: Sequence[Training]
) -> dict[str, Any]:
    """K members with their own seeds, drawn once and kept until the end.

    Their stream is keyed by everything that decides which run is best: all members and the test
    examples. So a selection by other examples is another release, with other runs.
    """
    from fedveil.random.streams import SecretKey, run_key, stream

    file = hidden / DRAWS
    if file.is_file():
        known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return known
    secret, test = trainings[0].spec.secret, trainings[0].data.test
    facts = [(m.label, plain_settings(m.settings)) for m in comparison.members]
    members = [training.spec.identity for training in trainings]
    tested = digest_of(test.inputs), digest_of(test.labels)
    name = run_key("selection", comparison.seeds, comparison.selection, facts, members, tested)
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
    first: Training, price: SelectionCost, stream: str, ledger: Path | None, members: int
) -> Session:
    """Reserve the whole selection as one release, before any run starts."""
    from fedveil.ledger.entering import entered
    from fedveil.ledger.ledger import ledger_path
    from fedveil.ledger.session import Session

    account = first.spec.account
    with entered(ledger_path(ledger), account, first.data) as books:
        facts = _facts(first, account, price, stream, members)
        session = Session(books, facts, stream[-32:], contents=first.data.contents)
    try:
        session.reserve(0)
    except BaseException:
        session.close()
        raise
    return session


def _facts(first: Training, account: Any, price: SelectionCost, stream: str, members: int) -> Facts:
    from fedveil.ledger.ledger import Facts
    from fedveil.privacy.composition import ReleasePlan, Way

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
            "models": ReleasePlan((Way(price.release, None),), holds),
            "sum": ReleasePlan((Way(shown, None),), holds),
            "messages": ReleasePlan((Way(shown, None),), holds),
        },
    )


def _task(comparison: Comparison, hidden: Path, number: int, pick: int, seed: int) -> RunTask:
    member = comparison.members[pick]
    settings = plain_settings(member.at(seed))
    return RunTask(f"draw-{number}", hidden / f"draw-{number}", settings, member.settings.rounds)


def _finished(task: RunTask) -> bool:
    return task.path.is_dir() and listed(task.path).state == "finished"


def _best(directory: Path, tasks: Sequence[RunTask]) -> tuple[int | None, str]:
    """The number of the best run, if any was drawn, and the digest of what is released."""
    found = [listed(task.path) for task in tasks]
    if any(run.state != "finished" for run in found):
        raise UserError(
            f"{directory} has drawn runs that are incomplete. Select again in a new directory."
        )
    if not found:
        return None, "no run"
    measure = measure_of(found)
    best = max(range(len(found)), key=lambda n: _rank(found[n], measure))
    return best, _digest(found[best])


def _kept(
    comparison: Comparison,
    directory: Path,
    tasks: Sequence[RunTask],
    picks: Sequence[Sequence[int]],
    best: int | None,
    price: SelectionCost,
) -> tuple[Member | None, Listed | None]:
    """The best run, copied to its member's directory."""
    if best is None:
        return None, None
    chosen, seed = comparison.members[picks[best][0]], picks[best][1]
    path = directory / chosen.directory(seed)
    if SavedRun(path).has(RECIPE):  # left by an interrupted copy
        remove_run(path)
    _release(tasks[best].path, path, price)
    return chosen, listed(path)


def _rank(run: Listed, measure: Measure) -> tuple[float, float, str]:
    """A score from the released model and test examples only: the metric, then the loss.

    Ties are broken by the model's hash.
    """
    score = run.score(measure.name)
    loss = -math.inf if run.loss is None else -run.loss
    return -math.inf if score is None else measure.sign * score, loss, _digest(run)


def _digest(run: Listed) -> str:
    return hashlib.sha256((run.path / MODEL).read_bytes()).hexdigest()


def _release(hidden: Path, path: Path, price: SelectionCost) -> None:
    """Copy the run, with the guarantee of the selection in place of its own.

    Its metrics are private data, as for any run. Records of single clients are not copied.
    """
    released = RunDirectory.create(path)
    with saving(path):
        for name in KEPT:
            if (hidden / name).is_file():
                shutil.copyfile(hidden / name, path / name)
    own = SavedRun.open(hidden)
    released.save_metrics([_repriced(row, price) for row in own.rows])
    summary = _restated(own.summary, price)
    lines = summary["privacy"]["statement"].items()
    released.save_statement("".join(f"{label:<12}{text}\n" for label, text in lines))
    released.save_summary(summary)


def _repriced(row: dict[str, Any], price: SelectionCost) -> dict[str, Any]:
    """A round's record with the ε of the selection, which covers every released round."""
    spent = row.get("epsilon")
    return {**row, "epsilon": None if spent is None else price.epsilon}


def _restated(summary: dict[str, Any], price: SelectionCost) -> dict[str, Any]:
    privacy = summary["privacy"]
    views: dict[str, Mapping[str, Any]] = {
        view: {**guarantee, **dict.fromkeys(("epsilon", "drawn", "capped")), **NOTHING}
        for view, guarantee in privacy["views"].items()
    }
    stated = {"epsilon": price.epsilon, "sentence": price.sentence(), "reason": ""}
    views["models"] = {**views["models"], **stated, "adjacency": price.adjacencies[0]}
    statement = {**privacy["statement"], "Privacy": price.sentence(), **RESTATED}
    statement["Chosen by"] = price.assumed
    for label in (*views, OTHERS):
        statement.pop(label, None)
    changed = {**privacy, "views": views, "statement": statement}
    return {**summary, "privacy": changed, "selection": price.plain()}
