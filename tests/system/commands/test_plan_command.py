"""`fedveil plan`: what it says, on one screen; and one sentence for what cannot be planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedveil.planning.facts import SizeOptions, facts
from fedveil.training.settings import Settings
from tests.conftest import Run

SMALL = ("--clients", 200, "--rate", 0.2, "--rounds", 20, "--epsilon", 4, "--dim", 50)


def test_a_plan_is_one_screen_with_a_verdict(run: Run) -> None:
    outcome = run("plan", *SMALL)
    assert outcome.code == 0
    labels = ("Plan", "Verdict", "Privacy", "Noise", "Updates", "Messages", "Compute")
    for word in (*labels, "view models", "add/remove", "z = ", "assumed", "200 bytes up"):
        assert word in outcome.out
    lines = [line for line in outcome.out.splitlines() if line]
    assert sum(-(-len(line) // 69) for line in lines) <= 24


def test_json_holds_the_plan(run: Run) -> None:
    outcome = run("plan", *SMALL, "--sweep", "rounds=10,40", "--json")
    plain = json.loads(outcome.out)
    assert plain["dimension"] == 50
    assert plain["participants"] == 40
    assert plain["signal_to_noise"] == pytest.approx(plain["signal"] / plain["noise"])
    assert plain["signal_to_noise_of_run"] == pytest.approx(plain["signal_to_noise"] * 20**0.5)
    assert plain["verdict"] in ("will work", "hard", "hopeless")
    assert 3.97 <= plain["epsilon"] <= 4
    assert [len(row) for row in plain["sweep"]["signal_to_noise"]] == [1, 1]


def test_the_noise_multiplier_is_that_of_the_privacy_command(run: Run) -> None:
    flags = ("--epsilon", 4, "--delta", 1e-5, "--rate", 0.2, "--rounds", 20)
    said = run("privacy", *flags, "--json")
    multiplier = json.loads(said.out)["noise_multiplier"]
    plan = run("plan", *flags, "--clients", 200, "--dim", 50, "--json")
    assert json.loads(plan.out)["noise_multiplier"] == pytest.approx(multiplier)


def test_hopeless_says_how_many_clients_it_would_take(run: Run) -> None:
    flags = ("--clients", 20, "--rate", 0.5, "--epsilon", 0.5, "--dim", 10_000)
    outcome = run("plan", *flags)
    assert "hopeless" in outcome.out
    assert "It would take" in outcome.out
    assert "Below 0.5, runs are hopeless" in outcome.out


def test_settings_and_flags(run: Run, tmp_path: Path) -> None:
    """A file as `fedveil train` takes it; --rate wins over its number of clients a round."""
    file = tmp_path / "plan.toml"
    file.write_text(
        'algorithm = "dp_fedavg"\nrounds = 10\nmodel = "softmax"\n'
        '[data]\ndataset = "synthetic"\nclients = 60\nfeatures = 12\n'
        "[parameters]\nclients = 30\nclip = 2.0\nnoise_multiplier = 3.0\n"
    )
    plain = json.loads(run("plan", file, "--json").out)
    assert (plain["participants"], plain["adjacency"]) == (30, "replace-one")
    assert (plain["dimension"], plain["bound"]) == (130, 2.0)
    plain = json.loads(run("plan", file, "--rate", 0.1, "--json").out)
    assert (plain["participants"], plain["adjacency"]) == (6, "add-remove")


def test_a_table_is_planned_with_the_flags_of_train(run: Run, tmp_path: Path) -> None:
    rows = [f"u{i % 401},{i % 7},{i % 2}" for i in range(2000)]
    (tmp_path / "visits.csv").write_text("user,days,again\n" + "\n".join(rows))
    table = ("--path", "visits.csv", "--client", "user", "--label", "again")
    flags = (*table, "--epsilon", 8, "--rounds", 3, "--set", "rate=0.5")
    planned = json.loads(run("plan", *flags, "--json").out)
    assert run("train", *flags, "--out", "a").code == 0
    trained = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert planned["population"] == trained["privacy"]["population"]
    assert planned["noise_multiplier"] == pytest.approx(trained["noise"]["multiplier"])
    assert "statistics" in trained["privacy"]["origin"]


def test_a_pilot_on_private_data_says_that_it_leaks(run: Run) -> None:
    noise = ("--noise-multiplier", 1, "--rounds", 3)
    flags = ("--dataset", "digits", "--clients", 20, "--rate", 0.5, *noise)
    own = run("plan", *flags, "--pilot", "own", "--theory")
    assert own.code == 0
    assert "No ε covers" in own.out
    for word in ("Theorems 2 and 4", "favours", "Constants", "* estimated"):
        assert word in own.out
    made_up = run("plan", *flags, "--pilot", "synthetic")
    assert "of synthetic data" in made_up.out
    assert "No ε covers" not in made_up.out


DIGITS = ("--dataset", "digits", "--clients", 20, "--rate", 0.5, "--rounds", 2)


def test_the_data_to_be_trained_on_are_not_public_by_another_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('[data]\ndataset = "digits"\nclients = 30\n')
    flags = (*DIGITS, "--noise-multiplier", 1, "--pilot-clients", 10)
    assert "No ε covers" in run("plan", *flags, "--pilot", "other.toml").out
    plain = json.loads(run("plan", *flags, "--pilot", "digits", "--json").out)
    assert plain["pilot_is_private"]
    assert "No ε covers" in plain["leak"]
    fewer = '[data]\ndataset = "synthetic"\nclients = 30\nfeatures = 64\n'
    (tmp_path / "other.toml").write_text(fewer)
    public = run("plan", "--shape", 64, *flags[2:], "--pilot", "other.toml", "--json")
    assert json.loads(public.out)["leak"] is None


def test_a_pilot_does_not_look_at_data_with_a_budget(
    run: Run, refused: Callable[..., str], tmp_path: Path
) -> None:
    small = ("--algorithm", "dp_fedavg", *DIGITS[:4], "--rounds", 1, "--noise-multiplier", 9)
    assert run("train", *small, "--out", "a").code == 0
    assert run("budget", "set", "a", "--epsilon", 9).code == 0
    for pilot in ("own", "digits"):
        said = refused("plan", *DIGITS, "--noise-multiplier", 1, "--pilot", pilot)
        assert "A budget is set for these data" in said
        assert "a pilot would not be charged to it" in said
    assert run("plan", *DIGITS, "--noise-multiplier", 1).code == 0


def test_sweeps_are_drawn(run: Run) -> None:
    outcome = run("plan", *SMALL, "--sweep", "cohort=20,40,400")
    assert "█" in outcome.out
    assert " 400 " not in outcome.out  # of 200
    grid = run("plan", *SMALL, "--sweep", "cohort=20,400", "--sweep", "epsilon=1,4")
    assert "–" in grid.out
    assert "cohort down, ε across" in grid.out


EVERY = {
    "dp_fedavg_adaptive": ("--rate", 1.0),
    "dp_norm_fedavg_discrete": ("--cohort", 20),
    "dp_norm_fedavg_secagg": ("--cohort", 20),
    "dp_norm_fedavg_qtdl": ("--cohort", 20, "--set", "levels=4"),
    "dp_norm_fedavg_binomial": ("--cohort", 20, "--set", "levels=4"),
    "fed_alpha_normec": ("--rate", 0.5, "--constant", "L=1"),
    "dp_sgd": ("--examples", 10, "--theory"),
    "dp_lsgd": ("--examples", 10, "--constant", "L=1"),
}


@pytest.mark.parametrize("algorithm", EVERY)
def test_every_private_algorithm_can_be_planned(algorithm: str, run: Run) -> None:
    flags = ("--clients", 100, "--rounds", 5, "--epsilon", 5, "--dim", 20, "--json")
    outcome = run("plan", "--algorithm", algorithm, *EVERY[algorithm], *flags)
    assert outcome.code == 0
    plain = json.loads(outcome.out)
    assert plain["signal_to_noise"] > 0
    assert plain["population"] == (1000 if algorithm in ("dp_sgd", "dp_lsgd") else 100)


def test_without_noise_there_is_nothing_to_drown_in(run: Run) -> None:
    outcome = run("plan", "--algorithm", "fedavg", "--norm", 1, "--dim", 50)
    assert outcome.code == 0
    assert "not private" in outcome.out


REFUSED = {
    ("--epsilon", "nan"): "epsilon is nan",
    ("--epsilon", "0"): "epsilon is 0.0",
    ("--epsilon", "-1"): "epsilon is -1.0",
    ("--delta", "2"): "delta is 2.0",
    ("--rounds", "0"): "rounds is 0",
    ("--clients", "0"): "clients is 0",
    ("--clients", "-3"): "clients is -3",
    ("--dim", "0"): "dim is 0",
    ("--rate", "0"): "rate is 0.0",
    ("--rate", "nan"): "rate is nan",
    ("--cohort", "500"): "only 100",
    ("--cohort", "5", "--rate", "0.5"): "Pass one of them",
    ("--algorithm", "dp_fedavgg"): "Did you mean 'dp_fedavg'",
    ("--model", "softmaxx"): "Did you mean 'softmax'",
    ("--model", "softmax", "--dim", "5"): "Give one of them",
    ("--dim", "5", "--pilot", "synthetic"): "needs a model",
    ("--shape", "0x2"): "1x28x28",
    ("--classes", "0"): "classes is 0",
    ("--examples", "0"): "examples is 0",
    ("--cosine", "0"): "cosine is 0.0",
    ("--norm", "nan"): "norm is nan",
    ("--dataset", "nowhere"): "no data set 'nowhere'",
    ("--pilot", "own"): "the settings name none",
    ("--sweep", "speed"): "no quantity to sweep named 'speed'",
    ("--sweep", "rounds", "--sweep", "rounds"): "given twice",
    ("--constant", "L"): "name=value",
    ("--constant", "L=0"): "above 0",
    ("--constant", "Q=1"): "no constant 'Q'",
    ("--algorithm", "dp_sgd", "--cohort", "5"): "pass --rate",
    ("--algorithm", "alpha_normec", "--rate", "0.5"): "every client takes part",
    ("--algorithm", "dp_fedavg", "--set", "clip=probe"): "Give a plan a number",
    ("--view", "sum"): "no guarantee in view 'sum'",
}


@pytest.mark.parametrize("flags", REFUSED, ids=lambda flags: " ".join(flags))
def test_what_cannot_be_planned_is_one_sentence(
    flags: tuple[str, ...], refused: Callable[..., str]
) -> None:
    given = flags if "--epsilon" in flags else (*flags, "--epsilon", "5")
    assert REFUSED[flags] in refused("plan", *given)


def test_noise_is_asked_for(refused: Callable[..., str]) -> None:
    assert "Pass --epsilon" in refused("plan", "--dim", "5")


def test_models_without_data_have_their_own_shapes() -> None:
    dims = {
        name: facts(Settings(model=name), SizeOptions(), "client").dim
        for name in ("softmax", "cnn", "linear", "lstm")
    }
    assert (dims["softmax"], dims["cnn"], dims["linear"]) == (7850, 26_010, 784)
    assert dims["lstm"] > 100_000
    wide = facts(Settings(model="softmax"), SizeOptions(shape="3x4", classes=2), "client")
    assert wide.dim == 26
