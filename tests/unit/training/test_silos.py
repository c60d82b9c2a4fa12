"""Silos: DP-SGD inside each of them, their own ε, and what the others see."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binom, norm

from fedveil import algorithms
from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.rounding import rounded_up
from fedveil.algorithms.calling import call
from fedveil.audit.run import place_canaries
from fedveil.commands.plan_output import lines
from fedveil.comparing.members import Member, refuse_unequal
from fedveil.data.catalog import load
from fedveil.data.federated import Examples, Federated
from fedveil.data.origin import Origin
from fedveil.data.partition import Iid
from fedveil.engines.choose import choose
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine
from fedveil.errors import UserError
from fedveil.federation.silo import refuse_local_silos
from fedveil.ledger.ledger import open_ledger
from fedveil.loop import State, begin, run_round
from fedveil.parts import Everyone, Gaussian, Poisson, RecordSGD, SiloGaussian
from fedveil.planning.facts import SizeOptions
from fedveil.planning.plan import PlanOptions, make
from fedveil.privacy.calibrate import Budget, calibrate
from fedveil.privacy.composition import Charged, epsilon, plan
from fedveil.privacy.guarantee import guarantee
from fedveil.random.samplers import normals
from fedveil.random.streams import derived, stream
from fedveil.recipe import Recipe
from fedveil.training.checkpoint import write_round
from fedveil.training.prepare import prepare
from fedveil.training.run import Training
from fedveil.training.settings import Settings
from fedveil.training.start import finish, resume, start

DIM = 7


def silos(count: int = 3, size: int = 40, seed: int = 0) -> Federated:
    """Small silos of classes that differ in size."""
    rng = np.random.default_rng(seed)
    sizes = [size + 5 * silo for silo in range(count)]
    inputs = torch.from_numpy(rng.normal(size=(sum(sizes), 6))).float()
    labels = (inputs[:, 0] > 0).long()
    offsets = torch.tensor([0, *itertools.accumulate(sizes)])
    test = Examples(inputs[:20], labels[:20])
    return Federated("silos", inputs, labels, offsets, test, classes=2)


@functools.cache
def engine(name: str = "factored") -> Engine:
    """An engine of softmax regression on such silos."""
    torch.manual_seed(0)
    return choose(name, Task(torch.nn.Linear(6, 2), "cross_entropy"), silos()).engine


def trained(recipe: Recipe, data: Federated, rounds: int = 1, name: str = "factored") -> State:
    """The state after some rounds from zero."""
    state = begin(recipe, torch.zeros(14), data, rounds, 0)
    for _ in range(rounds):
        state, _ = run_round(recipe, state, data, engine(name), 0)
    return state


def messages(recipe: Recipe, data: Federated, name: str = "factored") -> torch.Tensor:
    """The silos' own models after a round of MR-MTL from zero: what they sent."""
    memory = trained(recipe, data, name=name).memory
    assert memory is not None
    return memory[np.arange(data.clients)]


def test_a_single_silo_trains_as_dp_sgd_does() -> None:
    """Rounds of three steps are the rounds of the inner recipe."""
    data = silos(1)
    recipe = algorithms.silo_dp_fedavg(steps=3, rate=0.5, noise_multiplier=1.0)
    alone, inside, x = data.by_example(), recipe.inside(0), torch.zeros(14)
    for round in range(2):
        key = derived(0, f"silo 0 in round {round}")
        expected = begin(inside, x, alone, 3, key)
        for _ in range(3):
            expected, _ = run_round(inside, expected, alone, engine(), key)
        x = expected.x
    assert torch.allclose(trained(recipe, data, 2).x, x, rtol=1e-6, atol=1e-6)


def test_a_step_is_written_out_by_hand() -> None:
    """y ← y − η·((Σ clip(∇f_j, C) + z·C·N)/(q·n) + λ·(y − x)), from the silo's own model."""
    data, clip, rate, eta, pull = silos(1, size=10), 0.4, 0.5, 0.2, 0.7
    options = {"steps": 3, "rate": rate, "learning_rate": eta, "noise_multiplier": 1.5}
    recipe = algorithms.mr_mtl(clip, pull, **options)
    model, own = torch.nn.Linear(6, 2), torch.zeros(14)
    for round in range(2):
        key = derived(0, f"silo 0 in round {round}")
        mean = own.clone()  # one silo: x is its own model
        for step in range(3):
            total = torch.zeros(14)
            for j in np.flatnonzero(stream(key, step, "cohort").random(10) < rate):
                torch.nn.utils.vector_to_parameters(own, model.parameters())
                loss = torch.nn.functional.cross_entropy(model(data.inputs[j]), data.labels[j])
                parts = torch.autograd.grad(loss, tuple(model.parameters()))
                gradient = torch.cat([part.flatten() for part in parts])
                total += gradient * min(1.0, clip / float(gradient.norm()))
            noise = torch.from_numpy(normals(14, stream(key, step, "noise"))) * 1.5 * clip
            own = own - eta * ((total + noise) / (rate * 10) + pull * (own - mean)).float()
        found = trained(recipe, data, round + 1)
        assert torch.allclose(found.x, own, atol=1e-5)


def test_the_server_keeps_the_mean_of_personal_models() -> None:
    data = silos(3)
    recipe = algorithms.mr_mtl(steps=2, rate=0.5, noise_multiplier=1.0, pull=0.5)
    state = trained(recipe, data, 3)
    assert state.memory is not None
    own = state.memory[np.arange(3)]
    assert torch.allclose(state.x, own.mean(0), atol=1e-6)
    assert float((own - state.x).norm()) > 0.1
    some = trained(replace(recipe, cohort=Poisson(0.6)), data, 3)  # also where some are absent
    assert some.memory is not None
    assert torch.allclose(some.x, some.memory[np.arange(3)].mean(0), atol=1e-6)


def test_a_stronger_pull_keeps_personal_models_together() -> None:
    def spread(pull: float) -> float:
        recipe = algorithms.mr_mtl(steps=3, rate=0.5, noise_multiplier=0.5, pull=pull)
        state = trained(recipe, silos(3), 2)
        assert state.memory is not None
        return float((state.memory[np.arange(3)] - state.x).norm())

    assert spread(1.5) < spread(0.5) < spread(0.0)


def test_the_server_averages_what_silos_send() -> None:
    data = silos(3)
    common = {"steps": 2, "rate": 0.5, "noise_multiplier": 1.0}
    plain = algorithms.silo_dp_fedavg(**common)
    first = begin(plain, torch.zeros(14), data, 1, 0)
    state, info = run_round(plain, first, data, engine(), 0)
    sent = messages(algorithms.mr_mtl(pull=0.0, **common), data)
    assert torch.allclose(state.x, sent.mean(0), atol=1e-6)
    assert info.participants == 3
    assert info.signal is None
    assert info.noise is None


def test_a_record_moves_nothing_but_its_own_silos_message() -> None:
    """Parallel composition: the other silos' messages of a round are the same to the last bit."""
    data = silos(3)
    recipe = algorithms.mr_mtl(steps=2, rate=0.5, noise_multiplier=1.0)
    inputs = data.inputs[:].clone()
    inputs[50] += 5.0  # a record of the second silo
    before, after = messages(recipe, data), messages(recipe, replace(data, inputs=inputs))
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


def test_a_record_moves_a_step_by_at_most_its_clip() -> None:
    """|S| is drawn by coins of their own, and the denominator is public."""
    data = silos(1, size=10)
    clip, rate, eta = 0.3, 0.5, 0.5
    recipe = algorithms.mr_mtl(clip, pull=0.0, steps=1, rate=rate, noise_multiplier=1.0)
    most = eta * clip / (rate * 10)
    for record in range(10):
        inputs = data.inputs[:].clone()
        inputs[record] = 1e4
        moved = messages(recipe, replace(data, inputs=inputs)) - messages(recipe, data)
        assert float(moved.norm()) <= 2 * most * (1 + 1e-5)  # replaced: two clips
    assert most > 0


def test_every_engine_gives_the_same_messages() -> None:
    data = silos(2)
    recipe = algorithms.mr_mtl(steps=2, rate=0.5, noise_multiplier=1.0)
    found = [messages(recipe, data, name) for name in ("factored", "dense", "loop")]
    assert torch.allclose(found[0], found[1], atol=1e-5)
    assert torch.allclose(found[0], found[2], atol=1e-5)


def test_records_are_clipped_by_the_factored_engine() -> None:
    data = load("digits").split(Iid(3))
    training = prepare(algorithms.silo_dp_fedavg(noise_multiplier=1.0), data, rounds=1)
    assert isinstance(training.engine, FactoredEngine)


# ------------------------------------------------------------------------------------- accounting


@pytest.mark.parametrize(("rate", "multiplier", "steps"), [(0.3, 0.8, 3), (1.0, 2.0, 4)])
def test_the_accounted_delta_covers_every_way_to_sample(
    rate: float, multiplier: float, steps: int
) -> None:
    """Gradients that do not depend on the model: a message is a mixture over all samples.

    Of one record with gradient C, the K steps add C·Bin(K, q) and noise √K·z·C. The hockey-stick
    divergence is integrated numerically, in both directions.
    """
    recipe = algorithms.silo_dp_fedavg(steps=steps, rate=rate, noise_multiplier=multiplier)
    spent = recipe.spent(DIM, 5, 2)  # two rounds
    times, deviation = 2 * steps, math.sqrt(2 * steps) * multiplier
    grid = np.linspace(-8 * deviation - times, 8 * deviation + 2 * times, 40_001)
    counts = np.arange(times + 1)
    there = binom.pmf(counts, times, rate) @ norm.pdf(grid, counts[:, None], deviation)
    absent = norm.pdf(grid, 0.0, deviation)
    for eps in (0.1, 0.5, 1.0, 2.0):
        exact = max(
            float(np.trapezoid(np.maximum(p - math.exp(eps) * q, 0), grid))
            for p, q in ((there, absent), (absent, there))
        )
        assert exact <= accounting.delta(spent, eps)
    if rate == 1.0:  # without sampling, this mixture is the worst case
        assert accounting.delta(spent, eps) <= exact * 1.05 + 1e-6


def test_each_silo_has_the_epsilon_of_its_own_dp_sgd() -> None:
    rates, multipliers = (0.1, 0.3), (1.0, 2.0)
    recipe = algorithms.silo_dp_fedavg(steps=5, rate=rates, noise_multiplier=multipliers)
    said = guarantee(recipe, DIM, 2, 4, 1e-5)
    own = [
        guarantee(
            algorithms.dp_sgd(rate=rate, noise_multiplier=multiplier), DIM, 100, 20, 1e-5
        ).epsilon
        for rate, multiplier in zip(rates, multipliers, strict=True)
    ]
    assert said.silos == pytest.approx(own)
    assert said.epsilon == max(said.silos)
    assert said.unit == "record"


@pytest.mark.parametrize("view", ["models", "sum", "messages"])
def test_all_views_see_the_same(view: str) -> None:
    """Messages have their noise in them, so whoever sees more sees nothing more of a record."""
    recipe = algorithms.silo_dp_fedavg(noise_multiplier=1.0)
    here = guarantee(recipe, DIM, 3, 4, 1e-5, view)  # type: ignore[arg-type]
    assert here.epsilon == guarantee(recipe, DIM, 3, 4, 1e-5, "messages").epsilon
    assert here.adjacency == "add-remove"


def test_silos_are_listed_in_settings_and_in_python() -> None:
    listed = {"rate": [0.1, 0.2], "budgets": [1, 0.5], "noise_multiplier": [1.0, 2.0]}
    recipe = algorithms.silo_dp_fedavg(**listed)
    assert recipe == call("silo_dp_fedavg", listed)
    assert isinstance(recipe.local, RecordSGD)
    assert recipe.local.rates == (0.1, 0.2)
    with pytest.raises(UserError, match="it must be a number or a list"):
        algorithms.silo_dp_fedavg(rate=[0.1, "a"])


def test_silos_are_calibrated_to_their_own_budgets() -> None:
    recipe = algorithms.silo_dp_fedavg(rate=(0.1, 0.2, 0.1), budgets=(1.0, 1.0, 0.5))
    found = calibrate(recipe, Budget(4.0, 1e-5), 5, DIM, 3)
    each = guarantee(found, DIM, 3, 5, 1e-5).silos
    for spent, wanted in zip(each, (4.0, 4.0, 2.0), strict=True):
        assert 0.98 * wanted < spent <= wanted


def test_silos_that_work_alike_are_calibrated_once() -> None:
    found = calibrate(algorithms.silo_dp_fedavg(), Budget(4.0, 1e-5), 5, DIM, 1000)
    assert isinstance(found.noise, SiloGaussian)
    assert found.noise.multipliers is not None
    assert len(found.noise.multipliers) == 1


def test_several_runs_compose_at_the_worst_silo() -> None:
    """Σ_r max_i D_α is at least what any record loses, also if silos change places."""
    first = algorithms.silo_dp_fedavg(rate=(0.1, 0.2), noise_multiplier=1.5)
    second = algorithms.silo_dp_fedavg(rate=(0.2, 0.1), noise_multiplier=1.5)
    alike = algorithms.silo_dp_fedavg(rate=0.2, noise_multiplier=1.5)

    def both(*recipes: Recipe) -> float:
        runs = [Charged(plan(r, DIM, 2, "messages"), 4, 4) for r in recipes]
        return epsilon(runs, 1e-5)

    smaller = algorithms.silo_dp_fedavg(rate=0.1, noise_multiplier=1.5)
    assert both(first, second) == pytest.approx(both(alike, replace(alike, name="again")), rel=0.2)
    assert both(first, second) > both(first, smaller)


def test_an_event_of_silos_without_a_guarantee_has_none() -> None:
    broken = events.InSilos((events.GaussianRelease(1.0), events.NonPrivate("open")), 2)
    assert accounting.epsilon(events.Composed(broken, 3), 1e-5) == math.inf


# -------------------------------------------------------------------------------------------- runs


def test_a_run_is_charged_saved_and_resumed(tmp_path: Path) -> None:
    data = silos(3)
    recipe = algorithms.mr_mtl(steps=2, rate=0.3, noise_multiplier=(1.0, 2.0, 1.0))

    def prepared() -> Training:
        return prepare(
            recipe, data, rounds=4, ledger=tmp_path / "ledger", evaluate_every=2, engine="loop"
        )

    whole = finish(start(prepared(), tmp_path / "whole"))
    assert whole.guarantee.silos[0] == whole.guarantee.silos[2] > whole.guarantee.silos[1]
    assert f"ε of silo 1: {rounded_up(whole.guarantee.epsilon)}, 2:" in whole.statement.text()
    with contextlib.closing(open_ledger(tmp_path / "ledger")) as ledger:
        (account,) = ledger.accounts()
        assert account.unit == "record"
    begun = start(prepared(), tmp_path / "half")
    for _ in range(2):
        record = begun.step()
    write_round(begun, record)
    begun.close()
    rest = finish(resume(prepared(), tmp_path / "half"))
    for mine, theirs in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_every_silo_is_scored_by_its_own_model(tmp_path: Path) -> None:
    data = silos(3)
    recipe = algorithms.mr_mtl(steps=2, rate=0.5, noise_multiplier=0.5)
    training = prepare(recipe, data, rounds=1, engine="loop", ledger=tmp_path / "ledger")
    found = finish(start(training, tmp_path / "run"))
    assert found.model_of is not None
    scores = []
    for silo in range(3):
        own = data.client(silo)
        answers = found.model_of(silo)(own.inputs[:]).argmax(-1)
        scores.append(round(float((answers == own.labels[:]).double().mean()), 4))
    saved = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert saved["client_accuracy"] == {"examples": [40, 45, 50], "accuracy": scores}
    assert saved["of"] == "training examples of clients, by their own models"


@pytest.mark.parametrize("personal", [True, False])
def test_every_silo_is_scored_on_the_records_that_it_held_out(
    personal: bool, tmp_path: Path
) -> None:
    """By its own model, or by the common one; a silo without such records has no score."""
    data, options = silos(3), {"steps": 2, "rate": 0.5, "noise_multiplier": 0.5}
    test = replace(data.test, owners=np.array(["a", "c"] * 10))
    data = replace(data, names=np.array(["a", "b", "c"]), test=test)
    recipe = (algorithms.mr_mtl if personal else algorithms.silo_dp_fedavg)(**options)
    training = prepare(recipe, data, rounds=1, engine="loop", ledger=tmp_path / "ledger")
    found = finish(start(training, tmp_path / "run"))
    scores: list[float | None] = [None] * 3
    for silo, first in ((0, 0), (2, 1)):
        model = found.model_of(silo) if found.model_of is not None else found.model
        answers = model(test.inputs[:][first::2]).argmax(-1)
        scores[silo] = round(float((answers == test.labels[:][first::2]).double().mean()), 4)
    saved = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert (found.model_of is not None) == personal
    assert saved["held_out"] == {"examples": [10, 0, 10], "accuracy": scores}


def test_secure_noise_is_integer_inside_the_silos() -> None:
    training = prepare(
        algorithms.silo_dp_fedavg(steps=2),
        silos(2),
        rounds=1,
        epsilon=4.0,
        noise="secure",
        engine="loop",
    )
    inside = training.recipe.inside(1)
    assert inside.noise.needs_grid
    assert inside.message(DIM).grid is not None
    found = finish(training)
    assert "Rounded Gaussian" in found.statement.text()


def test_the_statement_names_silos_and_their_records() -> None:
    training = prepare(
        algorithms.silo_dp_fedavg(steps=2), silos(3), rounds=2, epsilon=4.0, engine="loop"
    )
    text = training.statement().text()
    for said in (
        "per record against anyone who sees every silo's message",
        "the number of silos (3) and of the records in each",
        "It holds in every silo",
        "added by the silos to their own steps",
        "Neither the server nor any other silo is trusted",
    ):
        assert said in text
    assert "the server is trusted" not in text
    assert training.delta == 1e-5


def test_delta_is_judged_by_the_records() -> None:
    data = silos(3)  # 135 records
    recipe = algorithms.silo_dp_fedavg(noise_multiplier=1.0)
    training = prepare(recipe, data, rounds=1, delta=0.01, engine="loop")
    assert any("1/135" in note for note in training.data.notes)


def test_what_does_not_fit_is_refused() -> None:
    made = algorithms.silo_dp_fedavg(noise_multiplier=1.0)
    for change, sentence in (
        ({"noise": Gaussian(1.0)}, "Use SiloGaussian"),
        ({"unit": "client"}, "unit='record'"),
        ({"cohort": Everyone(honest=2)}, "with honest or cap"),
        ({"cohort": Poisson(0.5, cap=3)}, "with honest or cap"),
    ):
        with pytest.raises(UserError, match=sentence):
            replace(made, **change)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="Use RecordSGD"):
        replace(algorithms.dp_fedavg(), noise=SiloGaussian((1.0,)))
    with pytest.raises(UserError, match="list 2 and 3"):
        algorithms.silo_dp_fedavg(rate=(0.1, 0.2), noise_multiplier=(1.0, 1.0, 2.0))
    with pytest.raises(UserError, match="for 2 silos, but there are 3"):
        prepare(algorithms.silo_dp_fedavg(rate=(0.1, 0.2)), silos(3), rounds=1, epsilon=4.0)


def test_copies_of_a_record_in_several_silos_are_refused() -> None:
    """A record in two silos would be in two releases, and parallel composition would not hold."""
    data = replace(silos(3), origin=Origin(simulated=True, repeats=True))
    with pytest.raises(UserError, match="copies of one example"):
        prepare(algorithms.silo_dp_fedavg(noise_multiplier=1.0), data, rounds=1)


def test_what_only_simulations_can_do_is_refused_elsewhere() -> None:
    made = algorithms.silo_dp_fedavg(noise_multiplier=1.0)
    with pytest.raises(UserError, match="simulated only"):
        refuse_local_silos(made)
    with pytest.raises(UserError, match="no canaries for them"):
        place_canaries(made, silos(3), 100, "direction", 0)


def test_a_plan_is_that_of_one_silo() -> None:
    """200 records at a rate of 0.1, 3 · 5 steps: the noise and the ratio of dp_sgd on them."""
    asked = {"data": {"clients": 8}, "epsilon": 4.0, "delta": 1e-5}
    sizes = PlanOptions(SizeOptions(dim=50, examples=200))
    inside = {"algorithm": "mr_mtl", "parameters": {"steps": 5, "rate": 0.1}, "rounds": 3}
    found = make(Settings.model_validate({**asked, **inside}), sizes)
    alone = {"algorithm": "dp_sgd", "parameters": {"rate": 0.1}, "rounds": 15}
    silo = make(Settings.model_validate({**asked, **alone, "data": {"clients": 1}}), sizes)
    assert found.forecast.ratio == pytest.approx(silo.forecast.ratio, rel=0.01)
    assert found.participants == silo.participants == 20
    assert found.silos is not None
    assert (found.silos.count, found.silos.rounds, found.silos.steps) == (8, 3, 5)
    assert found.guarantee.unit == "record"
    text = dict(lines(found))
    assert "the figures below are for one of 8 silos" in text["Silos"]
    assert "20 of 200 records of a silo per step, 5 steps in each of 3 rounds" in text["Plan"]
    assert "pilot" not in text["Updates"]


def test_silos_are_compared_with_dp_sgd_over_all_records() -> None:
    """Both protect a record; against the same adversary, ε means the same."""

    def member(name: str, view: str) -> Member:
        asked = {"algorithm": name, "epsilon": 4.0, "view": view}
        return Member(name, Settings.model_validate(asked), {})

    union = member("dp_sgd", "models")
    refuse_unequal([member("mr_mtl", "models"), union])
    with pytest.raises(UserError, match="the view is messages"):
        refuse_unequal([member("mr_mtl", "messages"), union])
    with pytest.raises(UserError, match="the unit that is protected"):
        refuse_unequal([member("mr_mtl", "models"), member("dp_fedavg", "models")])


def test_a_subclass_of_the_local_work_makes_no_promise() -> None:
    class Louder(RecordSGD):
        """A user's own."""

    own = Louder(algorithms.silo_dp_fedavg().local.learning_rate)  # type: ignore[attr-defined]
    assert not own.by_record
    with pytest.raises(UserError, match="silos sample their records"):
        replace(algorithms.silo_dp_fedavg(noise_multiplier=1.0), local=own)
