"""Silos: records are sampled, clipped and noised inside, and sums add up to the union's."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil import algorithms
from fedveil.accounting import accountant
from fedveil.accounting.events import GaussianRelease, PoissonSampled
from fedveil.engines.loop import LoopEngine
from fedveil.engines.processes import ALONE
from fedveil.errors import UserError
from fedveil.federation.described import stated
from fedveil.federation.founding import Trust, enrol, found
from fedveil.federation.home import PUBLIC, Home, read_seat
from fedveil.federation.participant import Participant, as_one_client
from fedveil.federation.serve import opened
from fedveil.federation.silo import in_silos, silo_message, silo_sum, silo_wire, without_noise
from fedveil.loop import begin, cohort_of, sum_of_messages
from fedveil.privacy.secure import secured
from fedveil.runs.opened import Interface
from fedveil.training.prepare import make_task
from fedveil.training.start import finish, train
from tests.unit.federation.hall import CLIENTS, Federation, Hall, examples, of_client

SGD = algorithms.dp_sgd(clip=0.5, rate=0.4, noise_multiplier=2.0, learning_rate=0.5)
KEY, ROUNDS, DELTA = 7, 2, 1e-5


def founded(root: Path, view: str, trust: Trust | None = None) -> Federation:
    data, recipe = examples(), replace(SGD, view=view)
    epsilon = 8.0 if view == "sum" else None
    found(
        root / "federation", "wards", recipe, Interface.of(data), CLIENTS, "softmax", ROUNDS,
        epsilon, DELTA, trust=trust, deadline=5.0, records=len(data.labels),
        settings={"ledger": str(root / "ledger.sqlite")},
    )  # fmt: skip
    homes = [Home.create(root / f"s{i}", f"s{i}", {}, f"node {i}") for i in range(CLIENTS)]
    agreement = enrol(root / "federation", [read_seat(home.path / PUBLIC) for home in homes])
    for home in homes:
        home.accept(home.offer(root / "federation").hash, 100.0)
    return Federation(root / "federation", agreement, homes, data)


def silo(made: Federation, index: int) -> Participant:
    return Participant(
        made.homes[index], as_one_client(of_client(made.data, index), made.agreement)
    )


def test_on_a_grid_the_sums_of_silos_are_that_of_dp_sgd_over_the_union() -> None:
    """Bit for bit, for the records that the silos sampled."""
    data = examples()
    recipe = replace(secured(SGD), unit="record", view="messages")
    task = make_task("softmax", data, 0)
    engine = LoopEngine(task)
    union = data.by_example()
    state = begin(without_noise(recipe), task.flatten(), union, 1, KEY)
    sums, sampled = torch.zeros(task.dim, dtype=torch.int64), []
    for index in range(data.clients):
        mine = of_client(data, index).by_example()
        part, _ = silo_sum(recipe, state, mine, engine, f"silo {index}")
        sums += part
        own = cohort_of(without_noise(recipe), state, mine.clients, f"silo {index}")
        sampled.append(own + int(data.offsets[index]))
    cohort = np.concatenate(sampled)
    plain = replace(without_noise(recipe), unit="example")
    whole = sum_of_messages(plain, state, union, engine, cohort, KEY, ALONE)
    assert len(cohort) > 5
    assert torch.equal(sums, whole.sum)


def test_a_silo_s_noise_is_all_of_it_in_view_messages() -> None:
    """The release of one silo is the secured dp_sgd of its own records."""
    recipe = replace(secured(SGD), unit="record", view="messages")
    release = recipe.release(8, 100, "messages")
    assert isinstance(release, GaussianRelease)
    assert release.ratio == pytest.approx(2.0, rel=1e-9)
    event = recipe.event(8, 100, "messages")
    assert isinstance(event, PoissonSampled)
    assert recipe.adjacency("messages") == "add-remove"
    data = of_client(examples(), 0).by_example()
    engine = LoopEngine(make_task("softmax", data, 0))
    state = begin(recipe, torch.zeros(8), data, 1, KEY)
    clean, _ = silo_sum(recipe, state, data, engine, KEY)
    noisy = [
        (silo_message(recipe, state, data, engine, KEY + i) - silo_sum(
            recipe, state, data, engine, KEY + i)[0]).double()
        for i in range(200)
    ]  # fmt: skip
    grid = recipe.message(8).grid
    assert grid is not None
    found = float(torch.stack(noisy).std()) * grid
    assert clean.dtype == torch.int64
    # 1600 draws: the standard error of a deviation is 1.8 %. A share of 1/5 would be 0.45 of it.
    assert found == pytest.approx(2.0 * 0.5, rel=0.08)


def test_the_noise_of_honest_silos_adds_up_in_view_sum(tmp_path: Path) -> None:
    """ε follows from h shares by the accountant, amplified by the sample inside the silo."""
    made = founded(tmp_path, "sum", Trust(1, 1))
    agreed, recipe = made.agreement, made.agreement.recipe
    assert recipe.cohort.honest == CLIENTS - 2
    told = stated(agreed).towards("sum")
    assert told.epsilon <= 8.0
    assert told.unit == "record"
    release = recipe.release(agreed.dim, agreed.records, "sum")
    alone = recipe.release(agreed.dim, agreed.records, "messages")
    assert accountant.epsilon(release, DELTA) < accountant.epsilon(alone, DELTA)
    sampled = recipe.event(agreed.dim, agreed.records, "sum")
    assert accountant.epsilon(sampled, DELTA) < accountant.epsilon(release, DELTA)


@pytest.mark.parametrize("view", ["messages", "sum"])
def test_a_run_of_silos_is_charged_to_each_by_its_own_rounds(view: str, tmp_path: Path) -> None:
    made = founded(tmp_path, view, Trust(2, 0) if view == "sum" else None)
    silos = [silo(made, index) for index in range(CLIENTS)]
    handlers = {index: one.handle for index, one in enumerate(silos)}
    training = opened(made.directory, Hall(handlers))
    training.step()
    del handlers[2]  # one silo is away in the second round
    training.step()
    spent = [one.spent() for one in silos]
    assert spent[0] == pytest.approx(stated(made.agreement).main.epsilon, rel=1e-6)
    assert 0 < spent[2] < spent[0]
    assert [record.participants for record in training.records] == [CLIENTS, CLIENTS - 1]
    result = finish(training)
    assert result.guarantee.unit == "record"
    assert "The server cannot check a silo's sum" in result.statement.text()
    for one in silos:
        one.close()


def test_a_message_has_room_for_all_records_and_all_noise() -> None:
    recipe = replace(secured(SGD), unit="record", view="messages")
    wire = silo_wire(recipe, 8, 10**6, 5)
    assert wire.bits <= 62
    message = recipe.message(8)
    assert 2 ** (wire.bits - 1) > message.steps.linf * 0.4 * 10**6 * 0.99
    assert math.isfinite(message.steps.linf)


def test_what_silos_cannot_do_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"protects clients. In silos, use .* dp_sgd"):
        in_silos(algorithms.dp_fedavg(), "messages", 1)
    with pytest.raises(UserError, match="Silos do not trust the server"):
        in_silos(SGD, "models", 1)
    with pytest.raises(UserError, match="Run it as a federation"):
        train(replace(SGD, unit="record"), examples().by_example(), "softmax", 1, delta=DELTA)
    with pytest.raises(UserError, match="silos sample their records independently"):
        replace(algorithms.dp_fedavg_adaptive(noise_multiplier=1.0), unit="record")
