from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedveil import algorithms
from fedveil.data.catalog import load
from fedveil.data.federated import Dataset, Examples, Federated
from fedveil.errors import UserError
from fedveil.parts.memory import ClientMemory
from fedveil.privacy.calibrate import sensible_delta
from fedveil.recipe import Recipe
from fedveil.runs.directory import RunDirectory
from fedveil.training.checkpoint import checkpoint
from fedveil.training.prepare import prepare
from fedveil.training.records import Record
from fedveil.training.result import Result
from fedveil.training.run import Training
from fedveil.training.start import conclude, finish, resume, start, train


def weights(result: Result) -> bytes:
    return b"".join(leaf.detach().numpy().tobytes() for leaf in result.model.parameters())


# Noise and budget


@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_a_budget_is_kept_and_used_up(
    blobs: Federated, private_recipe: Recipe, epsilon: float
) -> None:
    result = train(private_recipe, blobs, rounds=5, epsilon=epsilon, delta=1e-3)
    assert result.recipe.noise.calibrated
    assert result.guarantee.delta == 1e-3
    assert epsilon / 1.015 <= result.guarantee.epsilon <= epsilon


def test_a_budget_is_kept_under_sampling(blobs: Federated) -> None:
    recipe = algorithms.dp_fedavg(rate=0.25, steps=1)
    result = train(recipe, blobs, rounds=4, epsilon=2.0, delta=1e-3)
    assert 2.0 / 1.015 <= result.guarantee.epsilon <= 2.0
    assert result.guarantee.adjacency == "add-remove"


def test_more_rounds_need_more_noise(blobs: Federated, private_recipe: Recipe) -> None:
    few, many = (prepare(private_recipe, blobs, rounds=k, epsilon=2.0) for k in (2, 50))
    assert few.recipe.noise.deviation(few.recipe.message(18)) < many.recipe.noise.deviation(
        many.recipe.message(18)
    )


def test_noise_that_is_given_is_kept_and_its_epsilon_reported(
    blobs: Federated, private_recipe: Recipe
) -> None:
    recipe = private_recipe.with_noise(3.0, 18, 12, 1.0, 1e-5)
    result = train(recipe, blobs, rounds=5)
    assert result.recipe == recipe
    assert 0 < result.guarantee.epsilon < math.inf
    assert train(recipe, blobs, rounds=10).guarantee.epsilon > result.guarantee.epsilon


def test_noise_that_is_not_settled_needs_a_budget(blobs: Federated, private_recipe: Recipe) -> None:
    with pytest.raises(UserError, match="has no privacy budget"):
        train(private_recipe, blobs, rounds=2)


def test_settled_noise_that_keeps_the_budget_stays(
    blobs: Federated, private_recipe: Recipe
) -> None:
    recipe = private_recipe.with_noise(50.0, 18, 12, 1.0, 1e-5)
    assert train(recipe, blobs, rounds=2, epsilon=5.0).recipe == recipe


def test_settled_noise_that_breaks_the_budget_is_refused(
    blobs: Federated, private_recipe: Recipe
) -> None:
    with pytest.raises(UserError, match=r"more than the budget of 0\.01"):
        train(private_recipe.with_noise(1.0, 18, 12, 1.0, 1e-5), blobs, rounds=2, epsilon=0.01)


def test_a_recipe_without_noise_has_no_budget(blobs: Federated, plain_recipe: Recipe) -> None:
    with pytest.raises(UserError, match="adds no noise"):
        train(plain_recipe, blobs, epsilon=1.0)


def test_delta_is_sensible_where_none_is_given(blobs: Federated, private_recipe: Recipe) -> None:
    result = train(private_recipe, blobs, rounds=1, epsilon=1.0)
    assert result.guarantee.delta == sensible_delta(blobs.clients) <= 0.1 / blobs.clients


# Results


def test_it_learns(blobs: Federated, plain_recipe: Recipe) -> None:
    result = train(plain_recipe, blobs, rounds=15)
    assert result.accuracy > 0.85
    assert result.records[0].loss is not None
    assert result.loss < result.records[0].loss


def test_the_result_is_evaluated_as_its_model_is(blobs: Federated, plain_recipe: Recipe) -> None:
    result = train(plain_recipe, blobs, rounds=3)
    outputs = result.model(blobs.test.inputs).detach()
    accuracy = float((outputs.argmax(dim=1) == blobs.test.labels).double().mean())
    assert result.accuracy == pytest.approx(accuracy)
    assert result.loss == pytest.approx(
        float(nn.functional.cross_entropy(outputs, blobs.test.labels)), abs=1e-5
    )


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(
    blobs: Federated, private_recipe: Recipe
) -> None:
    recipe = private_recipe.with_noise(1.0, 18, 12, 1.0, 1e-5)
    one, again, other = (train(recipe, blobs, "mlp-4", rounds=3, seed=seed) for seed in (1, 1, 2))
    assert weights(one) == weights(again) != weights(other)
    assert [r.signal for r in one.records] == [r.signal for r in again.records]


def test_torchs_global_generator_is_left_alone(blobs: Federated, plain_recipe: Recipe) -> None:
    before = torch.random.get_rng_state()
    train(plain_recipe, blobs, "mlp-4", rounds=1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_module_of_the_callers_stays_as_it_was(blobs: Federated, plain_recipe: Recipe) -> None:
    module = nn.Linear(5, 3)
    before = [leaf.clone() for leaf in module.parameters()]
    one, again = (train(plain_recipe, blobs, module, rounds=2) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert weights(one) == weights(again)
    assert not torch.equal(one.model.weight, module.weight)


@pytest.mark.parametrize(
    "recipe",
    [
        algorithms.fedavg(steps=2),
        algorithms.fedavg(learning_rate=1e38, steps=5),  # diverges
        algorithms.clipped_fedavg(steps=2),
        algorithms.fed_alpha_normec(noise_multiplier=1.0),
        algorithms.dp_norm_fedavg_binomial(clients=4, trials=10, steps=1),
    ],
    ids=lambda recipe: recipe.name,
)
def test_a_summary_is_json_without_nan(recipe: Recipe, blobs: Federated) -> None:
    result = train(recipe, blobs, rounds=2)
    again = json.loads(json.dumps(result.summary(), allow_nan=False))
    assert again == result.summary()
    assert again["privacy"]["views"]["models"]["sentence"] == result.guarantee.sentence()


def test_a_run_that_diverges_says_what_was_rejected(blobs: Federated) -> None:
    result = train(algorithms.fedavg(learning_rate=1e38, steps=5), blobs, rounds=2)
    assert result.summary()["rejected"] > 0


@pytest.mark.parametrize(
    ("rounds", "every", "evaluated"),
    [
        (7, 3, [3, 6, 7]),
        (4, 1, [1, 2, 3, 4]),
        (3, 100, [3]),
        (4, None, [1, 2, 3, 4]),
        (30, None, list(range(2, 31, 2))),
        (41, None, [*range(3, 41, 3), 41]),
    ],
)
def test_rounds_are_evaluated_as_often_as_asked(
    blobs: Federated, plain_recipe: Recipe, rounds: int, every: int | None, evaluated: list[int]
) -> None:
    result = train(plain_recipe, blobs, rounds=rounds, evaluate_every=every)
    assert len(result.records) == rounds
    assert [r.round for r in result.records if r.loss is not None] == evaluated
    assert all((r.loss is None) == (r.accuracy is None) for r in result.records)


def test_epsilon_grows_to_what_is_reported(blobs: Federated, private_recipe: Recipe) -> None:
    result = train(private_recipe, blobs, rounds=4, epsilon=3.0)
    spent = [record.epsilon for record in result.records]
    assert spent == sorted(spent)
    assert spent[-1] == result.guarantee.epsilon


def test_a_watcher_sees_every_round(blobs: Federated, plain_recipe: Recipe) -> None:
    seen: list[tuple[int, int]] = []
    train(
        plain_recipe,
        blobs,
        rounds=3,
        watch=lambda training, record: seen.append((training.state.round, record.round)),
    )
    assert seen == [(1, 1), (2, 2), (3, 3)]


def test_examples_are_the_population_of_dp_sgd(blobs: Federated) -> None:
    result = train(algorithms.dp_sgd(rate=0.5, noise_multiplier=1.0), blobs, rounds=2)
    assert result.guarantee.population == len(blobs.labels)
    assert result.guarantee.unit == "example"


def test_one_client_can_train(blobs: Federated, private_recipe: Recipe) -> None:
    alone = replace(
        blobs, inputs=blobs.inputs[:4], labels=blobs.labels[:4], offsets=torch.tensor([0, 4])
    )
    result = train(private_recipe, alone, rounds=2, epsilon=4.0)
    assert result.guarantee.population == 1
    assert result.guarantee.epsilon <= 4.0


# What is refused


def test_an_empty_client_is_refused(blobs: Federated) -> None:
    with pytest.raises(UserError, match="Client 1 of 'blobs' has no examples"):
        replace(blobs, offsets=torch.tensor([0, 4, 4, len(blobs.labels)]))


def test_labels_out_of_range_are_refused() -> None:
    some = Examples(torch.zeros(3, 2), torch.tensor([0, 1, 7]))
    with pytest.raises(UserError, match="labels from 0 to 7, but 3 classes"):
        Dataset("odd", some, some, 3)


def test_a_lazy_layer_is_refused(blobs: Federated, plain_recipe: Recipe) -> None:
    with pytest.raises(UserError, match="lazy layer"):
        train(plain_recipe, blobs, nn.LazyLinear(3), rounds=1)


def test_what_is_no_recipe_is_refused(blobs: Federated) -> None:
    with pytest.raises(UserError, match=r"recipe is 'fedavg'\. Give a Recipe"):
        train("fedavg", blobs)  # type: ignore[arg-type]


def test_data_that_are_not_split_are_refused(plain_recipe: Recipe) -> None:
    with pytest.raises(UserError, match="which is not split over clients"):
        train(plain_recipe, load("digits"))  # type: ignore[arg-type]


@pytest.mark.parametrize("rounds", [0, -1, 2.5, math.nan])
def test_no_rounds_are_refused(blobs: Federated, plain_recipe: Recipe, rounds: Any) -> None:
    with pytest.raises(UserError, match=f"rounds is {rounds}"):
        train(plain_recipe, blobs, rounds=rounds)


@pytest.mark.parametrize("every", [0, -2])
def test_evaluating_every_zero_rounds_is_refused(
    blobs: Federated, plain_recipe: Recipe, every: int
) -> None:
    with pytest.raises(UserError, match="evaluate_every"):
        train(plain_recipe, blobs, rounds=2, evaluate_every=every)


@pytest.mark.parametrize(
    "module",
    [nn.Linear(7, 3), nn.Linear(5, 2), nn.Sequential(nn.Linear(5, 3), nn.Unflatten(1, (3, 1, 1)))],
)
def test_a_module_that_does_not_fit_is_refused(
    blobs: Federated, plain_recipe: Recipe, module: nn.Module
) -> None:
    with pytest.raises(
        UserError, match="does not fit 'blobs', which has inputs of shape"
    ) as refusal:
        train(plain_recipe, blobs, module, rounds=1)
    assert "\n" not in str(refusal.value)


# Saving


def test_nothing_is_written_unless_asked(
    blobs: Federated, private_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = train(private_recipe, blobs, rounds=2, epsilon=1.0)
    assert result.path is None
    assert list(tmp_path.iterdir()) == []


def test_a_saved_run_holds_model_metrics_and_summary(
    blobs: Federated, plain_recipe: Recipe, tmp_path: Path
) -> None:
    result = train(plain_recipe, blobs, rounds=3, save=tmp_path / "a")
    assert result.path == tmp_path / "a"
    saved = load_file(tmp_path / "a" / "model.safetensors")
    assert saved.keys() == result.model.state_dict().keys()
    assert all(torch.equal(saved[name], leaf) for name, leaf in result.model.state_dict().items())
    rows = pl.read_parquet(tmp_path / "a" / "metrics.parquet").to_dicts()
    assert [Record(**row) for row in rows] == list(result.records)
    assert json.loads((tmp_path / "a" / "summary.json").read_bytes()) == result.summary()


class Knotted(nn.Module):
    """With a buffer, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(5))
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(inputs - self.shift)))


def test_a_saved_model_loads_into_its_module(
    blobs: Federated, plain_recipe: Recipe, tmp_path: Path
) -> None:
    result = train(plain_recipe, blobs, Knotted(), rounds=2, save=tmp_path / "a")
    fresh = Knotted()
    fresh.load_state_dict(load_file(tmp_path / "a" / "model.safetensors"), strict=True)
    assert torch.equal(fresh(blobs.test.inputs), result.model(blobs.test.inputs))


def test_a_saved_run_is_not_overwritten(
    blobs: Federated, plain_recipe: Recipe, tmp_path: Path
) -> None:
    train(plain_recipe, blobs, rounds=1, save=str(tmp_path / "a"))
    with pytest.raises(UserError, match="is not empty"):
        train(plain_recipe, blobs, rounds=1, save=tmp_path / "a")


def test_a_file_of_client_memory_does_not_outlive_its_run(
    blobs: Federated, private_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def mapped(clients: int, dim: int) -> ClientMemory:
        return ClientMemory(clients, dim, ram_share=0.0)

    monkeypatch.setattr("fedveil.loop.ClientMemory", mapped)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    train(private_recipe, blobs, rounds=2, epsilon=1.0)
    assert list(tmp_path.iterdir()) == []


# Ctrl-C


def test_ctrl_c_ends_a_run_after_its_round(
    blobs: Federated, plain_recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(training: Training, record: Record) -> None:
        if record.round == 2:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    result = train(plain_recipe, blobs, rounds=50, watch=press)
    assert len(result.records) == result.guarantee.course.run == 2
    assert result.summary()["rounds_planned"] == result.guarantee.rounds == 50
    assert "Stopping after this round" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_stops_at_once(blobs: Federated, plain_recipe: Recipe) -> None:
    def press(training: Training, record: Record) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    # A process that a shell starts in the background is born deaf to Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(plain_recipe, blobs, rounds=50, watch=press)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_in_another_thread_leaves_signals_alone(
    blobs: Federated, plain_recipe: Recipe
) -> None:
    results: list[Result] = []
    thread = threading.Thread(
        target=lambda: results.append(train(plain_recipe, blobs, rounds=2)),
    )
    thread.start()
    thread.join()
    assert len(results[0].records) == 2


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_goes_on_as_if_it_had_not_stopped(
    blobs: Federated, private_recipe: Recipe, tmp_path: Path, stop: int
) -> None:
    recipe = private_recipe.with_noise(1.0, 18, 12, 1.0, 1e-5)
    first = start(prepare(recipe, blobs, rounds=5), tmp_path / "a")
    for _ in range(stop):
        first.step()
    checkpoint(first)
    first.close()
    second = resume(prepare(recipe, blobs, rounds=5), tmp_path / "a")
    assert second.state.memory is not None
    assert np.abs(second.state.memory[np.arange(blobs.clients)].numpy()).max() > 0
    result = finish(second)
    whole = train(recipe, blobs, rounds=5)
    assert weights(result) == weights(whole)
    assert [r.signal for r in result.records] == [r.signal for r in whole.records]


# What must not carry data past the noise


def test_other_recipes_data_and_rounds_never_share_noise(
    blobs: Federated, private_recipe: Recipe
) -> None:
    """Two releases with the same noise at two scales would give the clean sum away."""
    keys = set()
    shifted = replace(blobs, inputs=blobs.inputs + 1e-3)
    for data, epsilon, rounds, seed in [
        (blobs, 1.0, 2, 0),
        (blobs, 2.0, 2, 0),
        (blobs, 1.0, 3, 0),
        (blobs, 1.0, 2, 1),
        (shifted, 1.0, 2, 0),
    ]:
        keys.add(prepare(private_recipe, data, rounds=rounds, epsilon=epsilon, seed=seed).key)
    assert len(keys) == 5


class RunningMean(nn.Module):
    """Remembers the mean of all inputs it ever saw, in training and out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.linear = nn.LazyLinear(3)

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean += inputs.mean()
        return self.linear(inputs.flatten(1))


def test_a_module_that_remembers_its_inputs_is_refused(
    blobs: Federated, plain_recipe: Recipe
) -> None:
    module = RunningMean()
    module(blobs.inputs[:2])
    with pytest.raises(UserError, match="changes 'mean'"):
        train(plain_recipe, blobs, module, rounds=1)


def test_data_by_example_need_a_recipe_for_examples(blobs: Federated, plain_recipe: Recipe) -> None:
    with pytest.raises(UserError, match="protects clients"):
        train(plain_recipe, blobs.by_example(), rounds=1)


# What a run must not share, and must not forget


class Bent(nn.Module):
    """Two modules of this class look alike, whatever they do."""

    def __init__(self, bend: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.bend = bend
        nn.init.constant_(self.linear.weight, 0.1)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.bend(x))


def test_modules_that_look_alike_but_compute_other_things_share_no_noise(blobs: Federated) -> None:
    recipe = algorithms.dp_fedavg(noise_multiplier=1.0)
    keys = {
        prepare(recipe, blobs, Bent(bend), rounds=1).key
        for bend in (torch.relu, torch.zeros_like, torch.tanh)
    }
    assert len(keys) == 3


def test_a_module_on_processors_that_round_differently_is_one_run(
    blobs: Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seed means the same run on both. Torch rounds differently there, not the user's code."""
    recipe = algorithms.dp_fedavg(noise_multiplier=1.0)
    one = prepare(recipe, blobs, Bent(torch.abs), rounds=1)
    module, real = nn.Linear(5, 3), nn.Linear.forward
    before = module(blobs.inputs)
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, x: 3 * real(layer, x) / 3)
    assert not torch.equal(module(blobs.inputs), before)
    two = prepare(recipe, blobs, Bent(torch.abs), rounds=1)
    assert one.key == two.key


def test_modules_of_other_code_share_no_noise_even_if_they_differ_in_rounding_only(
    blobs: Federated,
) -> None:
    recipe = algorithms.dp_fedavg(noise_multiplier=1.0)
    bends = (torch.abs, lambda x: (3 * x).abs() / 3)
    one, two = (prepare(recipe, blobs, Bent(bend), rounds=1) for bend in bends)
    assert not torch.equal(*(bend(blobs.inputs) for bend in bends))
    assert one.key != two.key


def test_modules_for_float32_only_are_told_apart_by_all_their_bits(blobs: Federated) -> None:
    recipe = algorithms.dp_fedavg(noise_multiplier=1.0)
    single = [lambda x, by=by: (by * x).to(torch.float32) for by in (1.0, 1.0, 1.0 + 2e-7)]
    one, same, other = (prepare(recipe, blobs, Bent(bend), rounds=1).key for bend in single)
    assert one == same
    assert one != other


def test_frozen_parameters_are_part_of_a_run_s_key_but_engines_are_not(blobs: Federated) -> None:
    """Engines compute the same numbers, so the same seed means the same run on all of them."""
    recipe = algorithms.dp_fedavg(noise_multiplier=1.0)
    keys = set()
    for engine in ("dense", "loop", "factored"):
        for value in (0.1, 0.2):
            body = nn.Linear(5, 5).requires_grad_(False)
            nn.init.constant_(body.weight, value)
            nn.init.zeros_(body.bias)
            module = nn.Sequential(body, Bent(torch.relu))
            keys.add(prepare(recipe, blobs, module, rounds=1, engine=engine).key)
    assert len(keys) == 2


def test_a_checkpoint_of_another_recipe_is_refused(blobs: Federated, tmp_path: Path) -> None:
    loud, quiet = (algorithms.dp_fedavg(noise_multiplier=z, rate=0.5) for z in (50.0, 1.0))
    spent = start(prepare(quiet, blobs, rounds=4), tmp_path / "a")
    spent.step()
    checkpoint(spent)
    spent.close()
    resume(prepare(quiet, blobs, rounds=4), tmp_path / "a").close()
    for other in (
        prepare(loud, blobs, rounds=4),
        prepare(quiet, blobs, rounds=5),
        prepare(quiet, blobs, rounds=4, noise="secure"),
        prepare(quiet, blobs, rounds=4, delta=1e-3),
    ):
        with pytest.raises(UserError, match=r"use the installation that .* .fedveil \d"):
            resume(other, tmp_path / "a")


def test_going_on_forgets_what_an_earlier_stop_concluded(blobs: Federated, tmp_path: Path) -> None:
    recipe = algorithms.dp_fedavg(noise_multiplier=1.0, rate=0.5)
    first = start(prepare(recipe, blobs, rounds=3), tmp_path / "a")
    first.step()
    checkpoint(first)
    first.close()
    directory = RunDirectory.open(tmp_path / "a")
    directory.save_summary(conclude(first).summary())
    directory.save_statement("old")
    resume(prepare(recipe, blobs, rounds=3), tmp_path / "a")
    assert not (tmp_path / "a" / "summary.json").exists()
    assert not (tmp_path / "a" / "privacy.txt").exists()
