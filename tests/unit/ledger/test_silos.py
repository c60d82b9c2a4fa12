"""Records of silos are charged by silo: their own ε, their own budgets, their own runs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedveil import algorithms
from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.data.federated import Federated
from fedveil.ledger.ledger import VIEWS, Account, Facts, Silos, Stream, open_ledger, spent_on
from fedveil.ledger.session import BudgetError, Session
from fedveil.ledger.verify import verify
from fedveil.privacy.calibrate import Budget
from fedveil.privacy.composition import plan
from fedveil.training.checkpoint import write_round
from fedveil.training.prepare import prepare
from fedveil.training.run import Training
from fedveil.training.start import finish, resume, start
from tests.conftest import Run
from tests.unit.training.test_silos import DIM, silos

DELTA, ROUNDS = 1e-5, 4
HOSPITALS = Account("f" * 64, "record", "hospitals")


def facts(
    ids: Sequence[str],
    multipliers: Sequence[float],
    split: str = "hospital",
    stream: str = "seeded 1",
    told: bool = True,
) -> Facts:
    """A run over these silos, each with its own noise."""
    recipe = algorithms.silo_dp_fedavg(steps=2, rate=0.3, noise_multiplier=tuple(multipliers))
    return Facts(
        HOSPITALS, "hospitals", 100, recipe.name, stream, ROUNDS, DELTA,
        {view: plan(recipe, DIM, len(ids), view) for view in VIEWS},
        silos=Silos(split, tuple(ids)) if told else None,
    )  # fmt: skip


def drawn(of: Facts, rounds: int = ROUNDS) -> Stream:
    return Stream({**of.plain(), "run": "a"}, set(range(rounds)))


def alone(multiplier: float, rounds: int = ROUNDS) -> float:
    """ε of DP-SGD on the records of one silo."""
    step = events.PoissonSampled(0.3, events.GaussianRelease(multiplier))
    return accounting.epsilon(events.Composed(step, 2 * rounds), DELTA)


def spent(*streams: Stream, silo: str = "") -> float:
    return spent_on(streams, "messages", DELTA, silo=silo)


def test_each_silo_is_charged_its_own_epsilon() -> None:
    run = drawn(facts("abc", (1.0, 2.0, 4.0)))
    for silo, multiplier in zip("abc", (1.0, 2.0, 4.0), strict=True):
        assert spent(run, silo=silo) == pytest.approx(alone(multiplier))
    assert spent(run) == pytest.approx(alone(1.0))
    assert spent(run, silo="d") == 0.0


def test_runs_over_disjoint_silos_do_not_add_up() -> None:
    first, second = drawn(facts("ab", (1.0, 2.0))), drawn(facts("cd", (1.5, 3.0)))
    assert spent(first, second) == pytest.approx(alone(1.0))
    assert spent(first, second, silo="c") == pytest.approx(alone(1.5))


def test_a_silo_in_two_runs_is_charged_for_both() -> None:
    """It may be in another place of the list: it is known by its id."""
    first, second = drawn(facts("ab", (1.0, 2.0))), drawn(facts("bc", (3.0, 1.0)))
    assert alone(2.0) < spent(first, second, silo="b") < alone(2.0) + alone(3.0) + 1
    assert spent(first, second, silo="a") == pytest.approx(alone(1.0))
    twice = drawn(facts("a", (1.0,))), drawn(facts("ab", (1.0, 1.0), stream="seeded 2"))
    assert spent(*twice, silo="a") > alone(1.0)


@pytest.mark.parametrize("told", [True, False])
def test_runs_that_tell_other_silos_apart_add_up_at_their_worst(told: bool) -> None:
    """Another split may put a record into any silo, and old entries do not list silos."""
    first = drawn(facts("ab", (1.0, 2.0)))
    second = drawn(facts("cd", (2.0, 1.0), "city", told=told))
    both = drawn(facts("a", (1.0,))), drawn(facts("a", (1.0,), stream="seeded 2"))
    assert spent(first, second) >= spent(*both) > alone(1.0)
    assert spent(first, second, silo="b") == spent(first, second)


def test_no_split_is_charged_less_than_what_any_record_lost() -> None:
    """Every record's own composition, for all ways to place it in a silo of each of two runs."""
    multipliers = (1.0, 1.6)
    for one, other in itertools.product(range(2), repeat=2):
        runs = [
            drawn(facts("a", (multipliers[silo],), stream=f"seeded {place}"))
            for place, silo in enumerate((one, other))
        ]
        apart = drawn(facts("ab", multipliers)), drawn(facts("xy", multipliers, "city", "seeded 2"))
        assert spent(*runs) <= spent(*apart) * (1 + 1e-9)


def test_rounds_of_silos_that_differ_are_not_one_kind_over_several_runs() -> None:
    """Equal plans of another order of silos mix their events, which no closed form covers."""
    first, second = facts("ab", (1.0, 1.6), told=False), facts("ba", (1.0, 1.6), told=False)
    run, again = drawn(first, 2), drawn(replace(second, stream="seeded 2"), 2)
    assert spent(run, again) > alone(1.0, 4) * 1.01


# ------------------------------------------------------------------------------------------ budgets


@pytest.fixture
def limited(ledger: Path) -> Path:
    """A ledger with a budget for one silo."""
    with contextlib.closing(open_ledger(ledger)) as books:
        a = replace(HOSPITALS, silo="a")
        books.grant(a, "messages", Budget(alone(2.0) * 1.001, DELTA), "hospitals", "0")
    return ledger


def reserved(ledger: Path, of: Facts) -> int:
    """The rounds that a run can reserve."""
    session = Session(open_ledger(ledger), of, of.stream)
    with contextlib.closing(session), contextlib.suppress(BudgetError):
        for round in range(ROUNDS):
            session.reserve(round)
    return session.rounds


def test_the_budget_of_a_silo_limits_the_runs_with_it(limited: Path) -> None:
    assert reserved(limited, facts("bc", (1.0, 1.0), stream="seeded 1")) == ROUNDS
    assert reserved(limited, facts("ab", (1.5, 2.0), stream="seeded 2")) < ROUNDS
    with contextlib.closing(open_ledger(limited)) as books:
        assert not verify(books).problems


def test_a_silo_with_more_noise_stays_within_its_smaller_budget(limited: Path) -> None:
    run = facts("ab", (2.0, 1.0))
    assert reserved(limited, run) == ROUNDS
    with contextlib.closing(open_ledger(limited)) as books:
        assert books.spent(HOSPITALS, "messages", DELTA) == pytest.approx(alone(1.0))
        assert not verify(books).problems
    again = facts("ab", (2.0, 1.0), stream="seeded 2")
    session = Session(open_ledger(limited), again, "again")
    with contextlib.closing(session), pytest.raises(BudgetError, match="'hospitals', silo a,"):
        session.reserve(0)


def test_another_split_cannot_avoid_the_budget_of_a_silo(limited: Path) -> None:
    assert reserved(limited, facts("ab", (2.0, 1.0))) == ROUNDS
    assert reserved(limited, facts("xy", (9.0, 9.0), "city", "seeded 2")) == 0


def test_the_budget_of_the_account_holds_for_every_silo(limited: Path) -> None:
    with contextlib.closing(open_ledger(limited)) as books:
        books.grant(HOSPITALS, "messages", Budget(alone(1.0) * 1.001, DELTA), "hospitals", "0")
    assert reserved(limited, facts("bc", (1.0, 1.0), stream="seeded 1")) == ROUNDS
    assert reserved(limited, facts("de", (1.0, 1.0), stream="seeded 2")) == ROUNDS
    assert reserved(limited, facts("cf", (9.0, 1.0), stream="seeded 3")) == 0


# --------------------------------------------------------------------------------------------- runs


def named(*names: str) -> Federated:
    """Silos with names."""
    return replace(silos(len(names)), names=np.array(names))


def prepared(data: Federated, ledger: Path, noise: str = "seeded") -> Training:
    recipe = algorithms.silo_dp_fedavg(steps=2, rate=0.3, noise_multiplier=(1.0, 3.0))
    return prepare(
        recipe, data, rounds=3, ledger=ledger, engine="loop", account="hospitals",
        checkpoint_every=1, evaluate_every=3, diagnostics=False, delta=DELTA,
        noise=noise,  # type: ignore[arg-type]
    )  # fmt: skip


def test_runs_of_named_silos_are_charged_by_name(tmp_path: Path, ledger: Path) -> None:
    other = replace(named("c", "d"), labels=1 - silos(2).labels[:])
    said = finish(start(prepared(named("a", "b"), ledger), tmp_path / "1")).guarantee
    finish(start(prepared(other, ledger), tmp_path / "2"))
    with contextlib.closing(open_ledger(ledger)) as books:
        (account,) = books.accounts()
        for name, epsilon in zip("ab", said.silos, strict=True):
            silo = replace(account, silo=books.silo_id(name))
            assert books.spent(silo, "models", DELTA) == pytest.approx(epsilon)
        assert books.spent(account, "models", DELTA) == pytest.approx(said.epsilon)


def test_a_lost_round_is_charged_to_every_silo_by_its_own_noise(
    tmp_path: Path, ledger: Path
) -> None:
    """Two rounds drawn, one saved; the resumed run draws two more with secret noise: four."""
    data = named("a", "b")
    begun = start(prepared(data, ledger, "secure"), tmp_path / "run")
    record = begun.step()
    write_round(begun, record)
    begun.step()
    begun.close()
    found = finish(resume(prepared(data, ledger, "secure"), tmp_path / "run"))
    with contextlib.closing(open_ledger(ledger)) as books:
        (account,) = books.accounts()
        assert not verify(books).problems
        each = [
            books.spent(replace(account, silo=books.silo_id(name)), "models", DELTA)
            for name in ("a", "b")
        ]
    # The plan has 3 rounds, so the fourth is at the share of δ that is kept for it.
    assert each[0] > found.guarantee.silos[0] * 0.999 > each[1]
    assert found.guarantee.silos[1] * 0.999 < each[1]
    assert found.guarantee.rounds == 4


def test_other_columns_of_names_are_other_silos(ledger: Path) -> None:
    with contextlib.closing(open_ledger(ledger)) as books:
        data = replace(named("a", "b"), keyed_by="hospital")
        mine, theirs = (
            books.silos(one, HOSPITALS) for one in (data, replace(data, keyed_by="city"))
        )
        assert mine is not None
        assert theirs is not None
        assert mine.split != theirs.split
        assert books.silos(silos(2), HOSPITALS) is None  # unnamed silos of a named account
        by_data = Account("0" * 64, "record")
        assert books.silos(data, by_data) == Silos("", ("1", "2"))  # whatever they are called
        table = books.silos(replace(data, source="rows"), by_data)
        assert table is not None
        assert table.ids == mine.ids == (books.silo_id("a"), books.silo_id("b"))


TABLE = "hospital,age,ill\n" + "\n".join(
    f"{name},{30 + (7 * row) % 40},{(row + place) % 2}"
    for place, name in enumerate(("north", "south", "west"))
    for row in range(12)
)
SETTINGS = """
algorithm = "silo_dp_fedavg"
rounds = 2
evaluate_every = 2
diagnostics = false
engine = "loop"
account = "hospitals"
[data]
path = "{path}"
client = "hospital"
label = "ill"
holdout = "rows"
classes = ["0", "1"]
ranges = {{ age = [30, 70] }}
[parameters]
rate = 0.5
noise_multiplier = 2.0
steps = 2
"""


def test_budgets_of_silos_are_set_and_shown(
    tmp_path: Path, run: Run, refused: Callable[..., str], ledger: Path
) -> None:
    table, settings = tmp_path / "data.csv", tmp_path / "a.toml"
    table.write_text(TABLE)
    settings.write_text(SETTINGS.format(path=table))
    assert run("budget", "set", settings, "--silo", "south", "--epsilon", "20").code == 0
    assert run("train", settings, "--out", tmp_path / "run").code == 0
    shown = run("budget", "show").out
    with contextlib.closing(open_ledger(ledger)) as books:
        south, north = books.silo_id("south"), books.silo_id("north")
    assert f"silo {south}: ε = " in shown
    assert "of 20 at δ" in shown
    assert north in shown
    assert "silo south: ε = " in run("budget", "show", settings).out
    assert shown.count("records (hospitals/record)") == 1  # one account
    assert run("budget", "set", f"hospitals/record/{south}", "--lift").code == 0
    assert south not in run("budget", "show").out
    said = refused("budget", "set", settings, "--silo", "east", "--epsilon", "1")
    assert "no silo 'east'" in said
