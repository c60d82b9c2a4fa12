"""`audit`: bounds beside proofs in one run, and what it says of itself."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil import algorithms
from fedveil.accounting import events
from fedveil.audit import bounds, evidence
from fedveil.audit.report import ALARM, Audit, LowerBound, ViewFinding, down
from fedveil.audit.run import audit, place_canaries
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.parts.cohort import Everyone
from fedveil.parts.noise import Gaussian
from fedveil.training.prepare import prepare
from fedveil.training.run import Training
from tests.conftest import Run
from tests.statistics.audit.chances import at_most, gaussian_range

DELTA = 1e-5
INSIDE = "fedveil.parts.noise"  # a mistake of our own: from outside no claim would be believed
EVERYONE = replace(algorithms.dp_fedavg(clip=0.3, steps=2, learning_rate=0.5), cohort=Everyone())


def test_the_gaussian_bound_comes_close_to_what_is_proven(digits: Federated) -> None:
    found = audit(EVERYONE, digits, rounds=4, epsilon=4.0, delta=DELTA, canaries=500, seed=3)
    models, mu = found.towards("models"), bounds.gaussian_mu(4.0, DELTA) / 2
    assert 3.97 < models.proven <= 4.0
    low, high = gaussian_range(mu, 500, 4, DELTA)
    assert low < models.audited < high
    assert models.estimate is not None
    low, high = gaussian_range(mu, 500, 4, DELTA, alpha=0.5)
    assert low < models.estimate.epsilon < high
    assert models.bounds[0].method == "gaussian"
    assert "isotropic and Gaussian" in models.bounds[0].assumes
    assert not found.alarm
    assert found.towards("sum").silent.startswith("there is no proven ε, because the server sees")


def test_sampling_is_taken_as_accounted(digits: Federated) -> None:
    recipe = algorithms.dp_fedavg(clip=0.3, rate=0.3, steps=2, noise_multiplier=1.0)
    models = audit(recipe, digits, rounds=8, delta=DELTA, canaries=400).towards("models")
    assert 0.6 * models.proven < models.audited < 1.2 * models.proven


def test_replaced_neighbours_count_twice(digits: Federated) -> None:
    recipe = algorithms.dp_fedavg(clip=0.3, clients=150, steps=2, noise_multiplier=1.5)
    models = audit(recipe, digits, rounds=6, delta=DELTA, canaries=400).towards("models")
    assert 0.5 * models.proven < models.audited < 1.2 * models.proven
    assert models.estimate is not None
    assert models.estimate.epsilon == pytest.approx(models.proven, rel=0.4)


def test_one_run_finds_less_and_assumes_nothing(digits: Federated) -> None:
    found = audit(
        EVERYONE, digits, rounds=4, epsilon=8.0, delta=DELTA, canaries=500, method="one-run"
    )
    models = found.towards("models")
    pair, curve = models.bounds
    assert 0.5 < pair.epsilon < curve.epsilon < models.proven
    assert pair.assumes.startswith("nothing about the mechanism")
    assert models.audited == pair.epsilon
    assert found.cosine is None
    assert models.estimate is not None
    assert models.estimate.method == "projection"
    assert "not bounded" in models.estimate.assumes


def test_each_message_is_audited_where_it_carries_its_noise(digits: Federated) -> None:
    recipe = algorithms.dp_norm_fedavg_discrete(
        rate=1.0, levels=64, sigma=100.0, support=800, steps=2
    )
    found = audit(recipe, digits, rounds=6, delta=DELTA, canaries=300)
    messages, models = found.towards("messages"), found.towards("models")
    assert 1.0 < messages.audited < messages.proven
    assert models.audited < messages.audited  # in the sum there is everybody's noise
    assert not found.alarm


@pytest.mark.parametrize("method", [algorithms.dp_sgd, algorithms.dp_lsgd])
def test_examples_are_audited_with_directions_and_with_wrong_labels(
    method: Callable[..., Any], digits: Federated
) -> None:
    recipe = method(rate=0.5, learning_rate=0.5, noise_multiplier=0.2, clip=0.3)
    found = audit(recipe, digits, rounds=5, delta=DELTA, canaries=300)
    assert found.unit == "example"
    assert found.towards("models").audited > 0.8 * found.towards("models").proven
    wrong = audit(recipe, digits, rounds=5, delta=DELTA, canaries=300, kind="mislabelled")
    assert 0.3 < wrong.towards("models").audited < wrong.towards("models").proven
    assert not found.alarm
    assert not wrong.alarm


def test_client_side_noise_is_audited_in_the_sum(digits: Federated) -> None:
    recipe = algorithms.dp_fedavg(
        clip=0.3, clients=100, steps=2, noise_multiplier=1.0, noise_at="client"
    )
    found = audit(recipe, digits, rounds=4, delta=DELTA, canaries=300)
    assert found.towards("sum").audited > 0.45 * found.towards("sum").proven
    assert "noise as one vector" in found.towards("messages").silent


def test_an_adaptive_clip_is_audited_at_each_round_s_threshold(digits: Federated) -> None:
    recipe = algorithms.dp_fedavg_adaptive(
        start=5.0, rate=0.6, count_noise=10.0, noise_multiplier=1.0, steps=2, clip_rate=1.0
    )
    models = audit(recipe, digits, rounds=6, delta=DELTA, canaries=200).towards("models")
    assert 0.6 * models.proven < models.audited < 1.2 * models.proven


def test_secure_runs_are_audited_as_they_are(digits: Federated) -> None:
    found = audit(
        EVERYONE, digits, rounds=2, epsilon=4.0, delta=DELTA, canaries=300, noise="secure"
    )
    low, high = gaussian_range(bounds.gaussian_mu(4.0, DELTA) / math.sqrt(2), 300, 2, DELTA)
    assert low < found.towards("models").audited < high
    assert not found.alarm


class Halved(Gaussian):
    __module__ = INSIDE

    def draw(self, *arguments: Any) -> Any:
        return super().draw(*arguments) / 2


def test_half_of_the_noise_is_an_alarm(digits: Federated) -> None:
    recipe = replace(EVERYONE, noise=Halved(4.0))
    found = audit(recipe, digits, rounds=4, delta=DELTA, canaries=600)
    models = found.towards("models")
    assert found.alarm
    assert models.audited > models.proven
    assert "CONTRADICTS" in models.sentence(0.95)
    assert "CONTRADICTS" in found.verdict()


# ------------------------------------------------------------------- who took part


def trained(digits: Federated, **settings: Any) -> Training:
    recipe = algorithms.dp_fedavg(noise_multiplier=1.0, **settings)
    return prepare(recipe, digits, rounds=10, delta=DELTA)


def test_attendance_as_accounted_raises_no_alarm(digits: Federated) -> None:
    training, rng = trained(digits, rate=0.3), np.random.default_rng(0)
    taken = [rng.binomial(10, 0.3, size=50) for _ in range(300)]
    wrong = sum(evidence.attendance_p(training, one) <= 0.05 for one in taken)
    assert wrong <= at_most(0.05, 300)


def test_draws_of_a_fixed_size_raise_no_alarm_either(digits: Federated) -> None:
    training, rng = trained(digits, clients=8), np.random.default_rng(0)
    assert digits.clients == 20
    wrong = 0
    for _ in range(300):
        draws = np.argsort(rng.random((10, 20)), axis=1) < 8
        wrong += evidence.attendance_p(training, draws[:, :12].sum(axis=0)) <= 0.05
    assert wrong <= at_most(0.05, 300)


def test_no_canary_there_is_no_evidence(digits: Federated) -> None:
    assert evidence.attendance_p(trained(digits, rate=0.3), np.zeros(0, dtype=int)) == 1.0


def test_too_frequent_and_uneven_attendance_do(digits: Federated) -> None:
    training, rng = trained(digits, rate=0.3), np.random.default_rng(0)
    assert evidence.attendance_p(training, rng.binomial(10, 0.6, size=50)) < ALARM
    always = np.where(np.arange(50) < 15, 10, 0)  # as many in all, but always the same
    assert evidence.attendance_p(training, always) < ALARM


def test_more_often_than_the_cap_is_an_alarm(digits: Federated) -> None:
    training = trained(digits, rate=0.3, cap=2)
    assert evidence.attendance_p(training, np.array([2, 1, 0])) == 1.0
    assert evidence.attendance_p(training, np.array([3, 0, 0])) == 0.0


# ------------------------------------------------------------------- refusals and reports


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"canaries": 3}, "canaries is 3"),
        ({"alpha": 0.7}, "alpha is 0.7"),
        ({"kind": "yellow"}, "no kind of canary 'yellow'"),
        ({"method": "guess"}, "no method 'guess'"),
        ({"kind": "mislabelled"}, "need a recipe that protects examples"),
    ],
)
def test_what_makes_no_sense_is_refused(
    changes: dict[str, Any], sentence: str, digits: Federated
) -> None:
    with pytest.raises(UserError, match=sentence):
        audit(EVERYONE, digits, rounds=1, epsilon=1.0, **{"canaries": 20, **changes})


def test_the_gaussian_bound_is_refused_where_noise_is_not_gaussian(digits: Federated) -> None:
    recipe = algorithms.dp_norm_fedavg_binomial(clients=5, levels=64, trials=40_000)
    with pytest.raises(UserError, match="Use the method one-run"):
        audit(recipe, digits, rounds=1, delta=DELTA, canaries=20, method="gaussian")


def test_a_recipe_without_noise_has_nothing_to_audit(digits: Federated) -> None:
    with pytest.raises(UserError, match="claims no privacy"):
        place_canaries(algorithms.fedavg(), digits, 20, "direction", 0)


def test_numbers_are_roundeddown() -> None:
    assert [down(x) for x in (3.6299, 0.0, 0.012349, 123.9, math.inf)] == [
        "3.62", "0", "0.0123", "123", "∞",
    ]  # fmt: skip


def test_a_bound_above_the_proof_that_is_no_alarm_is_explained() -> None:
    bound = LowerBound(4.1, "gaussian", "nothing")
    above = ViewFinding("models", 4.0, (bound,), p_value=0.01)
    found = Audit("a", "client", "b", 10, 20, 1, 5, DELTA, 0.05, (above,) * 3, 1.0)
    assert not found.alarm
    assert "in 5% of runs with a tight proof" in found.verdict()


def test_a_report_is_plain_values_without_infinities() -> None:
    silent = ViewFinding("sum", math.inf, silent="nothing is proven")
    found = Audit("a", "client", "b", 10, 20, 1, 5, DELTA, 0.05, (silent,) * 3, 1.0)
    plain = json.loads(json.dumps(found.plain(), allow_nan=False))
    assert plain["findings"][0]["proven"] is None
    assert plain["alarm"] is False


SETTINGS = """
algorithm = "dp_fedavg"
rounds = 3
model = "softmax"
epsilon = 6.0
delta = 1e-5
[data]
dataset = "digits"
clients = 20
[parameters]
rate = 1.0
steps = 2
"""


def test_the_command_says_what_was_found_what_is_proven_and_what_is_assumed(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(SETTINGS)
    done = run("audit", "run.toml", "--canaries", 60)
    assert done.code == 0, done
    assert "60 canary clients among 80, 3 rounds" in done.out
    assert "proven" in done.out
    assert "Assumes that noise is isotropic" in done.out
    assert "nothing in this run contradicts" in done.out


def test_the_command_answers_in_json_and_takes_other_rounds(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SETTINGS)
    done = run("audit", "run.toml", "--canaries", 60, "--rounds", 2, "--seed", 3, "--json")
    plain = json.loads(done.out)
    assert plain["rounds"] == 2
    assert plain["findings"][0]["bounds"][0]["epsilon"] > 1.0


def test_the_command_audits_a_run_s_settings(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SETTINGS)
    assert run("train", "run.toml", "--out", "done").code == 0
    done = run("audit", "done", "--canaries", 60)
    assert done.code == 0, done
    assert re.search(r"ε ≤ (5\.9\d|6) proven", done.out)


def test_the_command_refuses_a_confidence_that_is_none(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(SETTINGS)
    assert "confidence is 1.2. Give a number" in refused("audit", "run.toml", "--confidence", 1.2)


def test_the_command_ends_with_1_on_an_alarm(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(SETTINGS)
    monkeypatch.setattr(Gaussian, "deviation", lambda self, message: 0.3 * message.l2)
    monkeypatch.setattr(Gaussian, "event", lambda self, *_: events.GaussianRelease(self.multiplier))
    done = run("audit", "run.toml", "--canaries", 60)
    assert done.code == 1, done
    assert "Do not rely on the proven" in done.out
