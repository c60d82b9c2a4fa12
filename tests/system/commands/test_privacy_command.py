"""`fedveil privacy`: of a run, of a recipe, of a question."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import pytest
import tomli_w

from fedveil.errors import UserError
from fedveil.privacy.ask import Question, answer
from tests.conftest import Run

DIGITS = ("--dataset", "digits", "--clients", 20)


def found(**known: float | int | str) -> str:
    return answer(Question(**known)).found  # type: ignore[arg-type]


def value(text: str) -> float:
    return float(text.partition(" = ")[2])


# Questions


def test_the_issue_s_question_has_the_known_answer(run: Run) -> None:
    """z = 2.69 for (5, 1e-5) over 200 Poisson rounds of rate 0.2."""
    flags = ("--epsilon", 5, "--delta", 1e-5, "--rate", 0.2, "--rounds", 200)
    outcome = run("privacy", *flags)
    assert outcome.code == 0
    assert "noise multiplier = 2.69" in outcome.out
    for word in (
        "Adjacency: add/remove",
        "per client",
        "Poisson",
        "dp-accounting",
        "Not covered",
        "Rounds: 200",
    ):
        assert word in outcome.out
    assert "\nOther views  sum and messages: no guarantee, since " in outcome.out


def test_each_unknown_is_found_from_the_others() -> None:
    noise = value(found(epsilon=3.0, delta=1e-5, rate=0.1, rounds=100))
    known = {"epsilon": 3.0, "delta": 1e-5, "noise_multiplier": noise}
    rounds = value(found(**known, rate=0.1))
    assert 100 <= rounds <= 103
    rate = value(found(**known, rounds=100))
    assert 0.1 * 0.995 <= rate <= 0.1 * 1.01
    epsilon = value(found(delta=1e-5, noise_multiplier=noise, rate=0.1, rounds=100))
    assert 2.97 <= epsilon <= 3.0


def test_fixed_cohorts_cost_more_than_poisson_ones() -> None:
    known = {"epsilon": 3.0, "delta": 1e-5, "rounds": 100, "clients": 1000}
    assert value(found(**known, cohort=100)) > 1.9 * value(found(**known, rate=0.1))


def test_a_view_of_the_sum_needs_noise_of_the_clients() -> None:
    stated = answer(
        Question(epsilon=5.0, delta=1e-5, rounds=20, cohort=60, clients=300, view="sum")
    ).statement
    assert stated.main.view == "sum"
    assert 4.95 <= stated.main.epsilon <= 5.0
    assert stated.towards("models").epsilon < 5 < stated.towards("messages").epsilon


def test_a_cap_is_worth_something_where_the_server_that_keeps_it_is_trusted() -> None:
    known = {"epsilon": 5.0, "delta": 1e-5, "rounds": 50, "cohort": 250, "clients": 300}
    capped, free = found(**known, cap=5), found(**known)
    assert value(capped) < 0.5 * value(free)
    seen = [found(**known, cap=cap, view="sum") for cap in (5, None)]
    assert value(seen[0]) == value(seen[1])


def test_json_is_json(run: Run) -> None:
    flags = ("--noise-multiplier", 2, "--rounds", 10, "--rate", 0.1, "--clients", 500, "--json")
    plain = json.loads(run("privacy", *flags).out)
    assert plain["views"]["models"]["epsilon"] > 0
    assert plain["views"]["messages"]["epsilon"] is None
    assert plain["views"]["messages"]["reason"]
    assert plain["delta"] == 1e-5
    assert plain["accountant"].startswith("By dp-accounting ")


BAD = {
    "nothing": ((), "Give all but one"),
    "all": (
        ("--epsilon", 1, "--noise-multiplier", 1, "--rounds", 1, "--rate", 0.1),
        "all given. Omit the one to compute",
    ),
    "two unknown": (("--epsilon", 1), "Give --rounds"),
    "rate and cohort": (
        ("--epsilon", 1, "--rounds", 5, "--rate", 0.1, "--cohort", 3),
        "Give one of them",
    ),
    "a cohort of nobody": (("--epsilon", 1, "--rounds", 5, "--cohort", 3), "Give --clients"),
    "a sum of nobody": (
        ("--epsilon", 1, "--rounds", 5, "--rate", 0.1, "--view", "sum"),
        "Give --clients",
    ),
    "an unknown view": (
        ("--epsilon", 1, "--rounds", 5, "--rate", 0.1, "--view", "model"),
        "Did you mean 'models'",
    ),
    "a cap of everyone": (
        ("--epsilon", 1, "--rounds", 5, "--cap", 3),
        "needs a sampled cohort. Give --rate or --cohort",
    ),
    "epsilon 0": (("--epsilon", 0, "--rounds", 5, "--rate", 0.1), "above 0"),
    "delta 1": (("--epsilon", 1, "--delta", 1, "--rounds", 5, "--rate", 0.1), "below 1"),
    "rate 2": (("--epsilon", 1, "--rounds", 5, "--rate", 2), "at most 1"),
    "too little for one round": (
        ("--epsilon", 0.01, "--noise-multiplier", 0.5, "--rate", 0.5),
        "a single round already spends more",
    ),
    "no such file": (("nowhere.toml",), "Could not read nowhere.toml"),
    "a target and a question": (("nowhere.toml", "--epsilon", 1), "Leave out the options"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_question_is_one_sentence(name: str, run: Run) -> None:
    flags, words = BAD[name]
    outcome = run("privacy", *flags)
    assert outcome.code == 2
    assert words in outcome.err
    assert outcome.err.count("\n") == 1
    assert outcome.out == ""


def test_a_recipe_from_python_asks_the_same() -> None:
    with pytest.raises(UserError, match="Give one of them"):
        answer(Question(rate=0.1, cohort=3))


# Runs and recipes


def test_a_run_says_again_what_it_said(run: Run, tmp_path: Path) -> None:
    flags = ("--algorithm", "dp_norm_fedavg_secagg", "--set", "clients=10", "--epsilon", 8)
    said = run("train", *flags, *DIGITS, "--rounds", 2, "--out", "a").out
    again = run("privacy", "a")
    assert again.code == 0
    assert again.out in said
    assert "(secure aggregation" not in again.out
    assert "bits per coordinate" in again.out
    plain = json.loads(run("privacy", "a", "--json").out)
    assert plain == json.loads((tmp_path / "a" / "summary.json").read_text("utf-8"))["privacy"]


def test_a_run_whose_noise_was_edited_says_what_is_true(run: Run, tmp_path: Path) -> None:
    flags = ("--algorithm", "dp_fedavg", "--noise-multiplier", 2.0, "--set", "rate=0.5")
    run("train", *flags, *DIGITS, "--rounds", 2, "--out", "a")
    before = json.loads(run("privacy", "a", "--json").out)["views"]["models"]["epsilon"]
    file = tmp_path / "a" / "recipe.toml"
    file.write_text(
        file.read_text("utf-8").replace("multiplier = 2.0", "multiplier = 1.0"), "utf-8"
    )
    after = json.loads(run("privacy", "a", "--json").out)["views"]["models"]["epsilon"]
    assert after > 1.5 * before


def test_a_recipe_says_what_it_will_cost(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        'algorithm = "dp_fedavg"\nrounds = 30\nepsilon = 2.0\ndelta = 1e-4\n'
        '[parameters]\nrate = 0.5\n[data]\ndataset = "digits"\nclients = 40\n',
        encoding="utf-8",
    )
    plain = json.loads(run("privacy", "a.toml", "--json").out)
    assert plain["rounds"] == 30
    assert plain["population"] == 40
    assert 1.98 <= plain["views"]["models"]["epsilon"] <= 2.0
    assert not (tmp_path / "runs").exists()


def test_an_unfinished_run_states_its_planned_rounds(run: Run, tmp_path: Path) -> None:
    run("train", "--algorithm", "dp_fedavg", *DIGITS, "--epsilon", 5, "--rounds", 2, "--out", "a")
    ended = json.loads(run("privacy", "a", "--json").out)
    (tmp_path / "a" / "summary.json").unlink()
    planned = json.loads(run("privacy", "a", "--json").out)
    assert planned["views"]["models"]["epsilon"] == ended["views"]["models"]["epsilon"]
    assert "all planned rounds" in planned["statement"]["Not ended"]
    assert "Not ended" not in ended["statement"]


def test_a_budget_can_be_kept_against_each_view(run: Run) -> None:
    flags = ("train", "--algorithm", "dp_fedavg", "--set", "clients=10", "--epsilon", 6)
    at_clients = ("--set", "noise_at=client", *DIGITS, "--rounds", 1)
    for view in ("models", "sum", "messages"):
        run(*flags, *at_clients, "--view", view, "--out", view)
        plain = json.loads(run("privacy", view, "--json").out)
        assert 5.94 <= plain["views"][view]["epsilon"] <= 6.0
    refused = run(*flags, *DIGITS, "--rounds", 1, "--view", "sum", "--out", "x")
    assert refused.code == 2
    assert "no guarantee in view 'sum'" in refused.err


def test_a_budget_of_one_round_is_composed_in_the_statement(run: Run) -> None:
    flags = (
        "train",
        "--algorithm",
        "dp_norm_fedavg_qtdl",
        "--set",
        "clients=10",
        "--set",
        "levels=4",
    )
    run(
        *flags, *DIGITS, "--rounds", 3, "--epsilon", 4, "--delta", 1e-5, "--per-round", "--out", "a"
    )
    plain = json.loads(run("privacy", "a", "--json").out)
    assert plain["views"]["models"]["epsilon"] > 4.1
    run(*flags, *DIGITS, "--rounds", 3, "--epsilon", 4, "--delta", 1e-5, "--out", "b")
    whole = json.loads(run("privacy", "b", "--json").out)
    assert whole["views"]["models"]["epsilon"] <= 4


def test_the_published_qtdl_prints_its_true_delta_and_meets_no_budget(run: Run) -> None:
    flags = ("train", "--algorithm", "dp_norm_fedavg_qtdl", "--set", "clients=10")
    published = (*flags, "--set", "calibration=das2021", *DIGITS, "--rounds", 1)
    out = run(*published, "--out", "a").out
    assert "not private as claimed" in out
    assert "not 2^-650" in out
    refused = run(*published, "--epsilon", 100, "--out", "b")
    assert refused.code == 2
    assert "not private as claimed" in refused.err


def test_secure_noise_says_so_and_is_never_the_same_twice(run: Run, tmp_path: Path) -> None:
    flags = ("train", "--algorithm", "dp_fedavg", "--epsilon", 5, *DIGITS, "--rounds", 1)
    for name in "ab":
        out = run(*flags, "--noise", "secure", "--out", name).out
        assert "operating system" in out
        assert "seed" not in out.partition("Privacy")[2].partition("Saved")[0]
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert models[0] != models[1]
    assert json.loads(run("privacy", "a", "--json").out)["randomness"] == "secure"


def test_a_probed_threshold_is_said_to_leak(run: Run) -> None:
    flags = ("train", "--algorithm", "dp_fedavg", "--set", "clip=probe", "--epsilon", 5)
    out = run(*flags, *DIGITS, "--rounds", 1, "--out", "a").out
    assert "measured on these data without noise. No ε covers it." in out
    assert "Leak" in run("privacy", "a").out
    epsilon = json.loads(run("privacy", "a", "--json").out)["views"]["models"]["epsilon"]
    assert math.isfinite(epsilon)


def test_a_run_s_checkpoint_counts_where_it_has_more_rounds(run: Run, tmp_path: Path) -> None:
    flags = ("--algorithm", "dp_fedavg", "--noise-multiplier", 1.0, *DIGITS)
    run("train", *flags, "--rounds", 3, "--out", "a")
    file = tmp_path / "a" / "summary.json"
    summary = json.loads(file.read_text("utf-8"))
    summary["privacy"]["rounds"] = 1
    file.write_text(json.dumps(summary), "utf-8")
    assert json.loads(run("privacy", "a", "--json").out)["rounds"] == 3


def test_a_view_is_asked_of_a_written_recipe_too(run: Run, tmp_path: Path) -> None:
    flags = ("--algorithm", "dp_fedavg", "--set", "clients=10", "--set", "noise_at=client")
    run("train", *flags, *DIGITS, "--rounds", 1, "--epsilon", 6, "--out", "a")
    plain = tomllib.loads((tmp_path / "a" / "recipe.toml").read_text("utf-8"))
    for name in ("algorithm", "parameters"):
        del plain[name]
    (tmp_path / "b.toml").write_text(tomli_w.dumps(plain), "utf-8")
    refused = run("train", "b.toml", "--view", "messages", "--epsilon", 6, "--out", "b")
    assert refused.code == 2
    assert "more than the budget of 6" in refused.err
