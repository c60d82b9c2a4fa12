from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from fedveil.ledger.ledger import Ledger
from tests.conftest import Outcome, Run

Refused = Callable[..., str]
DIGITS = ("--dataset", "digits", "--clients", 20)
NORMEC = ("--algorithm", "fed_alpha_normec", "--noise-multiplier", 9.0, *DIGITS)


def well(outcome: Outcome) -> str:
    assert outcome.code == 0, outcome
    assert outcome.err == ""
    return outcome.out


def test_nothing_is_recorded_at_first(run: Run, refused: Refused, ledger: Path) -> None:
    assert well(run("budget", "show")) == "The ledger is empty.\n"
    assert well(run("budget", "history")) == "The ledger is empty.\n"
    assert json.loads(well(run("budget", "show", "--json"))) == {"head": None, "accounts": []}
    assert "There is no ledger at" in refused("budget", "verify")
    assert not ledger.exists()


def test_a_run_is_shown_with_what_it_spent(run: Run) -> None:
    out = well(run("train", *NORMEC, "--rounds", 3, "--out", "a"))
    said = re.search(r"would be \((\S+), 1e-5\)-differ", out)
    assert said
    shown = well(run("budget", "show"))
    assert re.search(r"^Data         digits, 20 clients \([0-9a-f]{12}/client\)$", shown, re.M)
    assert f"  models     ε = {said[1]}* at δ = 1e-5 (zero-out)\n" in shown
    assert "*  Informational: a guarantee needs a budget set before the runs.\n" in shown
    assert "Recorded     3 rounds charged, from 1 noise stream\n" in shown
    for target in ("digits", "a", "a/recipe.toml"):
        assert well(run("budget", "show", target)) == shown
    plain = json.loads(well(run("budget", "show", "--json")))
    assert plain["accounts"][0]["views"][0]["budget"] is None
    assert f"{plain['head']['position']}:{plain['head']['hash']}" in shown


def test_no_benchmark_where_a_budget_stands(run: Run, refused: Refused) -> None:
    """Its rounds would be counted nowhere; neither would those of another split or unit."""
    bench = ("bench", "--algorithm", "fed_alpha_normec", "--dataset", "digits", "--rounds", 1)
    well(run("train", *NORMEC, "--rounds", 1, "--out", "a"))
    well(run("budget", "set", "a", "--epsilon", 2))
    for clients in (20, 10):
        said = refused(*bench, "--clients", clients)
        assert "A budget is set for these data ('digits'), and a benchmark's rounds would" in said
    well(run("budget", "set", "a", "--lift"))
    well(run(*bench, "--clients", 10))


def test_a_budget_is_set_kept_raised_and_lifted(run: Run, refused: Refused, tmp_path: Path) -> None:
    well(run("train", *NORMEC, "--rounds", 3, "--out", "a"))
    out = well(run("budget", "set", "a", "--epsilon", 2))
    assert re.search(
        r"Budget of all runs on .*: ε = 2 at δ = 1e-5 in view 'models'. So far, ε = \S+ is spent",
        out,
    )
    shown = well(run("budget", "show", "--delta", 1e-6))
    assert re.search(r"ε = \S+\* at δ = 1e-6 \(zero-out\); the budget is 2 at δ = 1e-5\n", shown)
    outcome = run("train", *NORMEC, "--rounds", 30, "--out", "b")
    assert outcome.code == 2
    assert re.match(
        r"fedveil: Round \d+ of fed_alpha_normec was not run: it would bring", outcome.err
    )
    assert outcome.err.count("\n") == 1
    stopped = json.loads((tmp_path / "b" / "summary.json").read_bytes())
    assert 0 < stopped["rounds"] < 30
    room = f"The budget of this data set allows only {stopped['rounds']} more rounds."
    assert room in outcome.out.splitlines()
    assert "no finite ε" in refused("train", "--algorithm", "fedavg", *DIGITS, "--out", "c")
    assert "would bring" in refused("train", *NORMEC, "--rounds", 5, "--out", "c")
    assert not (tmp_path / "c").exists()
    assert "would bring" in refused("train", "--resume", "b")
    assert json.loads((tmp_path / "b" / "summary.json").read_bytes()) == stopped
    well(run("budget", "set", "b", "--epsilon", 90))
    well(run("train", "--resume", "b"))
    well(run("budget", "set", "b", "--lift"))
    well(run("train", "--algorithm", "fedavg", *DIGITS, "--rounds", 1, "--out", "c"))
    lines = well(run("budget", "history")).splitlines()
    assert [
        re.search(r"budget of .*: (.*)$", line)[1] for line in lines if "budget of" in line
    ] == [
        "ε = 2 at δ = 1e-5",
        "ε = 90 at δ = 1e-5",
        "removed",
    ]
    assert re.search(r"3 rounds charged; it reported ε = \S+$", lines[1])
    assert re.search(r"Entries +\d+, all intact", well(run("budget", "verify")))


def test_a_budget_below_what_is_spent_says_so_and_refuses_new_rounds(
    run: Run, refused: Refused
) -> None:
    for seed in range(2):
        flags = ("--rounds", 3, "--seed", seed, "--out", f"a{seed}")
        well(run("train", *NORMEC, *flags))
    out = well(run("budget", "set", "a0", "--epsilon", 0.01))
    assert "is spent.\nThis budget is already exceeded. Every new round will be refused.\n" in out
    assert not re.search("ε = ∞|ε = 0 ", out)
    shown = well(run("budget", "show"))
    assert re.search(r"ε = [\d.]+\*? of 0\.01 .*, exceeded, so every new round is refused\n", shown)
    said = refused("train", *NORMEC, "--rounds", 3, "--seed", 2, "--out", "b")
    assert "was not run: the budget of 'digits' is already exceeded. The budget is" in said
    again = well(run("train", "a1/recipe.toml", "--out", "c"))
    assert "Note         This run repeats a recorded run with the same noise." in again
    assert "This run repeats" not in well(run("train", "--resume", "a0"))


def test_a_delta_below_that_of_the_runs_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "who,a,y\n" + "".join(f"{i % 60},{i % 7},{'np'[i % 2]}\n" for i in range(240))
    )
    flags = ("--path", "t.csv", "--client", "who", "--label", "y", "--data", "classes=n,p")
    for seed in range(2):
        well(run("train", *flags, "--epsilon", 8, "--rounds", 2, "--data", f"seed={seed}"))
    shown = well(run("budget", "show", "--delta", 1e-8))
    assert re.search(r"ε = ∞ at δ = 1e-8.*: δ is too small for these runs \(at δ = 1e-\d, ε", shown)


def test_a_seed_of_a_table_s_run_shares_its_budget(run: Run, table: Path) -> None:
    flags = ("--path", table, "--client", "who", "--label", "y", "--noise-multiplier", 9.0)
    flags = ("--algorithm", "fed_alpha_normec", *flags)
    well(run("train", *flags, "--rounds", 2, "--out", "a"))
    well(run("train", "a/recipe.toml", "--seed", 1, "--out", "b"))
    assert "Recorded     4 rounds charged, from 2 noise streams" in well(run("budget", "show"))


def test_a_budget_can_be_set_before_the_first_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(
        'algorithm = "dp_sgd"\nrounds = 2\n[parameters]\nnoise_multiplier = 2.0\nrate = 0.1\n'
        '[data]\ndataset = "digits"\nclients = 20\n'
    )
    out = well(run("budget", "set", "plan.toml", "--epsilon", 3, "--delta", 1e-6))
    assert "/example): ε = 3 at δ = 1e-6 in view 'models'. So far, ε = 0 is" in out
    shown = well(run("budget", "show"))
    assert "Data         digits, examples" in shown
    assert "ε = 0 of 3 at δ = 1e-6" in shown
    well(run("train", "plan.toml", "--out", "a"))
    assert re.search(
        r"models     ε = \S+ of 3 at δ = 1e-6 \(zero-out\), \d+% used", run("budget", "show").out
    )


BAD = {
    "no such run": (("set", "nowhere.toml", "--epsilon", 1), "Could not read nowhere.toml"),
    "an unknown view": (("set", "a", "--epsilon", 1, "--view", "all"), "There is no view 'all'"),
    "neither": (("set", "a"), "Pass either --epsilon to set a budget, or --lift"),
    "both": (
        ("set", "a", "--epsilon", 1, "--lift"),
        "Pass either --epsilon to set a budget, or --lift",
    ),
    "a negative budget": (("set", "a", "--epsilon", -1), "epsilon is -1"),
    "a delta of one": (("set", "a", "--epsilon", 1, "--delta", 1), "delta is 1"),
    "unknown data": (("show", "digit"), "Did you mean 'digits'"),
    "a head that is none": (("verify", "--head", "seven"), "does not contain the head seven"),
    "a head far away": (("verify", "--head", f"{10**30}:a"), "does not contain the head 1000"),
    "no delta": (("show", "--delta", 0), "delta is 0"),
    "a directory": (("show", "--ledger", "."), "it is a directory"),
    "a head of another": (("verify", "--head", "3:" + "f" * 64), "does not contain the head 3:f"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(name: str, run: Run, refused: Refused, ledger: Path) -> None:
    well(run("train", *NORMEC, "--rounds", 1, "--out", "a"))
    before = Ledger(ledger).head
    arguments, words = BAD[name]
    assert words in refused("budget", *arguments)
    assert Ledger(ledger).head == before


def test_a_head_noted_earlier_is_found_again(run: Run) -> None:
    well(run("train", *NORMEC, "--rounds", 1, "--out", "a"))
    head = re.search(r"^Head +(\d+:[0-9a-f]{64})$", well(run("budget", "show")), re.M)
    assert head
    well(run("train", *NORMEC, "--rounds", 2, "--out", "b"))
    well(run("budget", "verify", "--head", head[1]))


def test_an_altered_ledger_is_refused_everywhere(run: Run, refused: Refused, ledger: Path) -> None:
    well(run("train", *NORMEC, "--rounds", 2, "--out", "a"))
    database = sqlite3.connect(ledger)
    database.execute("DROP TRIGGER kept")
    database.execute("UPDATE entries SET body = replace(body, '9.0', '90.0') WHERE kind = 'run'")
    database.commit()
    database.close()
    for command in (
        ("budget", "show"),
        ("budget", "history"),
        ("budget", "verify"),
        ("budget", "set", "a", "--epsilon", 1),
        ("train", *NORMEC, "--rounds", 1, "--out", "b"),
        ("train", "--resume", "a"),
    ):
        assert "cannot be trusted: entry 2 was altered" in refused(*command)


def test_a_wrong_epsilon_ends_verify_with_one(run: Run, ledger: Path) -> None:
    well(run("train", *NORMEC, "--rounds", 2, "--out", "a"))
    books = Ledger(ledger)
    (end,) = [entry for entry in books.chain.entries() if entry.kind == "end"]
    with books.writing():
        books.chain.add("end", end.body | {"epsilon": end.body["epsilon"] / 2})
    books.close()
    outcome = run("budget", "verify")
    assert outcome.code == 1
    assert "fed_alpha_normec stated ε =" in outcome.out


def test_a_lost_head_is_written_anew_when_asked(run: Run, refused: Refused, ledger: Path) -> None:
    well(run("train", *NORMEC, "--rounds", 1, "--out", "a"))
    ledger.with_name(ledger.name + ".head").unlink()
    assert "verify --trust-without-head" in refused("budget", "show")
    well(run("budget", "verify", "--trust-without-head"))
    assert "the database was trusted without its .head" in well(run("budget", "history"))
    assert re.search("Trusted +once the database", well(run("budget", "verify")))
    ledger.with_name(ledger.name + ".head").unlink()
    well(run("budget", "verify", "--anchor-anew"))  # the earlier name of the option
    assert re.search("Trusted +2 times the database", well(run("budget", "verify")))


def test_ledgers_are_named_by_flag(run: Run, ledger: Path, tmp_path: Path) -> None:
    well(run("train", *NORMEC, "--rounds", 1, "--out", "a", "--ledger", "own.sqlite"))
    assert not ledger.exists()
    assert "digits, 20 clients" in well(run("budget", "show", "--ledger", "own.sqlite"))
    well(run("budget", "set", "a", "--epsilon", 50, "--ledger", "own.sqlite"))
    assert "does not exist. Restore the ledger, or name it" in run("train", "--resume", "a").err
    well(run("train", "--resume", "a", "--ledger", "own.sqlite"))
