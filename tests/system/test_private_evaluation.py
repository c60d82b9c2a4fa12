"""`--private-evaluation` as people use it, in all commands that read a run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedveil import algorithms
from fedveil.accounting import accountant
from fedveil.comparing.selecting import selection_cost
from fedveil.data.catalog import load
from fedveil.data.partition import Iid
from fedveil.errors import UserError
from fedveil.privacy.selection import law_of
from fedveil.training.prepare import prepare
from tests.conftest import Run
from tests.unit.training.test_private_evaluation import DP, population

ROOT = Path(__file__).resolve().parents[2]
VISITS = [
    "--path", ROOT / "examples" / "visits.csv", "--client", "user_id", "--label", "returned",
    "--data", "classes=no,yes", "--stats-epsilon", "0", "--algorithm", "dp_fedavg",
    "--rounds", "4", "--epsilon", "8", "--set", "rate=1",  # quickly accounted
]  # fmt: skip


def test_every_command_shows_noisy_results_as_such(run: Run, tmp_path: Path) -> None:
    here = tmp_path / "run"
    trained = run("train", *VISITS, "--private-evaluation", "4", "--out", here)
    assert trained.code == 0, trained.err
    assert "noisy accuracy" in trained.out
    assert "noisy test accuracy" in trained.out
    assert "all planned evaluations together have ε = 4" in trained.out.replace("\n", " ")
    told = run("privacy", here).out
    assert "the noisy evaluations" in told
    assert "accuracy curves" not in told
    assert "noisy loss" in run("diagnose", here).out
    assert run("report", here, "--out", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert "Noisy results of about" in page
    assert "Test accuracy, noisy" in page
    table = run("runs", here).out
    assert re.search(r"\d%‡", table)
    assert "‡ Noisy: of a private evaluation" in table
    assert json.loads(run("runs", here, "--json").out)[0]["noisy"]
    again = run("train", here / "recipe.toml", "--out", tmp_path / "again")
    assert again.code == 0, again.err
    one, two = (
        json.loads((path / "summary.json").read_text()) for path in (here, tmp_path / "again")
    )
    assert one["evaluation"] == two["evaluation"]  # one release, drawn twice from its seed
    verified = run("budget", "verify")
    assert "every recorded ε was confirmed" in verified.out


def test_a_plan_has_the_noise_of_the_run(run: Run) -> None:
    common = ["--algorithm", "dp_fedavg", "--epsilon", "8", "--rounds", "10", "--delta", "1e-5"]
    sizes = ["--clients", "200", "--dataset", "digits"]
    planned = run("plan", *common, *sizes, "--private-evaluation", "2", "--json")
    assert planned.code == 0, planned.err
    training = prepare(
        algorithms.dp_fedavg(), load("digits").split(Iid(200)), rounds=10, epsilon=8.0, delta=1e-5,
        private_evaluation=2.0,
    )  # fmt: skip
    found = training.recipe.noise.noise_multiplier
    assert json.loads(planned.out)["noise_multiplier"] == found
    alone = replace(training.recipe, evaluation=None)
    assert accountant.epsilon(alone.spent(training.task.dim, 200, 10), 1e-5) < 7.9


def test_a_federation_refuses_private_evaluation(run: Run, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("rounds = 2\nepsilon = 8.0\nprivate_evaluation = 1.0\n")
    found = run("federate", "new", tmp_path / "it", "--clients", "10", "--from", settings)
    assert found.code != 0
    assert "do not send evaluations yet" in found.err + found.out


def test_a_selection_by_noisy_scores_needs_no_public_test_examples() -> None:
    """The cost contains the evaluations, and without them such data are refused."""
    data = replace(population(), tested_on_clients=True)
    exact, noisy = (
        prepare(DP, data, rounds=4, epsilon=8.0, private_evaluation=each) for each in (None, 1.0)
    )
    law = law_of("geometric", 4.0)
    with pytest.raises(UserError, match="Give private_evaluation"):
        selection_cost([exact], law)
    with pytest.raises(UserError, match="Give private_evaluation"):
        selection_cost([noisy, exact], law)
    cost = selection_cost([noisy], law)
    assert cost.single == pytest.approx(8.0, rel=0.01)
    assert "noisy scores, which ε covers" in cost.assumed
    spared = replace(noisy.spec.recipe, evaluation=None)
    cheaper = prepare(spared, population(), rounds=4)
    assert selection_cost([cheaper], law).epsilon < cost.epsilon
