"""What is told before the first round, and what a resumed run must not draw again."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.engines.isolation import SCALES, uniform
from fedveil.engines.task import Task, alike_everywhere
from fedveil.errors import UserError
from fedveil.runs.directory import saving
from fedveil.training.prepare import prepare
from fedveil.training.settings import DataSettings, Settings, from_settings
from fedveil.training.sources import load_for
from fedveil.training.start import finish, resume, start
from tests.unit.data.test_learning import visits


def small(broken: bool = False) -> Federated:
    inputs = torch.zeros(8, 2)
    if broken:
        inputs[3, 1] = float("nan")
    labels = torch.tensor([0, 1] * 4)
    test = Examples(torch.zeros(2, 2), torch.tensor([0, 1]))
    return Federated("small", inputs, labels, torch.arange(0, 9, 2), test, 2)


def test_doubtful_settings_are_told_before_the_first_round() -> None:
    recipe = algorithms.dp_fedavg(clip=1.0, rate=0.5, noise_multiplier=3.0)
    told = " ".join(prepare(recipe, small(True), rounds=2, epsilon=9.0, delta=0.3).data.notes)
    assert "delta is 0.3, at least 1/4" in told
    assert "Both epsilon and the amount of noise are given" in told
    assert "1 of 8 examples have inputs that are NaN or infinite" in told
    assert prepare(recipe, small(), rounds=2).data.notes == ()


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EACCES, "You may not write there"),
        (errno.ENOTDIR, "A directory cannot be there"),
        (errno.EIO, "Check the disk"),
    ],
)
def test_a_failed_write_says_what_helps(number: int, says: str) -> None:
    with pytest.raises(UserError, match=says), saving(Path("runs/a")):
        raise OSError(number, "it failed")


def test_a_resumed_run_does_not_draw_its_statistics_again(tmp_path: Path) -> None:
    """Secret noise is different in every draw, so a second draw would be a second release."""
    visits().write_csv(tmp_path / "visits.csv")
    data = DataSettings(path=tmp_path / "visits.csv", client="who", label="ill")
    settings = Settings(
        algorithm="dp_fedavg", parameters={"clip": 1.0, "rate": 0.2}, data=data, rounds=2,
        epsilon=8.0, noise="secure",
    )  # fmt: skip
    training = from_settings(settings)
    assert training.recipe.statistics is not None
    start(training, tmp_path / "run").close()
    again, anew = load_for(settings, tmp_path / "run"), load_for(settings)
    assert again.encoder == training.data.encoder
    assert again.fingerprint() == training.spec.fingerprint
    assert again.origin == training.data.origin
    assert anew.encoder != training.data.encoder
    assert anew.source == again.source  # and both are charged to one account


def bad_loss(outputs: Tensor) -> Tensor:
    return outputs.sum()


def likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of a normal whose mean and deviation the model returns."""
    mean, spread = outputs[:, 0], outputs[:, 1].exp()
    return ((targets - mean) / spread).square() / 2 + outputs[:, 1]


def shaped(*tail: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, math.prod(tail)), nn.Unflatten(1, tail))


def labelled(labels: Tensor, classes: int, loss: str) -> Federated:
    inputs = torch.randn(len(labels), 2)
    offsets = torch.tensor([0, 4, len(labels)])
    return Federated("small", inputs, labels, offsets, Examples(inputs, labels), classes, loss)


WHOLE = torch.arange(8) % 3
ALL = {
    "class": labelled(WHOLE, 3, "cross_entropy"),
    "sequence": labelled(WHOLE[:, None].repeat(1, 4), 3, "cross_entropy"),
    "label": labelled((WHOLE > 0).float(), 1, "binary"),
    "labels": labelled((WHOLE > 0).float()[:, None].repeat(1, 2), 2, "binary"),
    "number": labelled(WHOLE.float(), 1, "mse"),
}


@pytest.mark.parametrize(
    ("target", "module", "says"),
    [
        ("class", shaped(20), "returns 20 outputs for 3 classes"),
        ("class", shaped(1), "returns 1 output for 3 classes"),
        ("class", shaped(1, 3), r"have shape \[2, 1, 3\], not \[2, 3\]"),
        ("sequence", shaped(4, 5), "returns 5 outputs for 3 classes"),
        ("sequence", shaped(3), r"have shape \[2, 3\], not \[2, 4, 3\]"),
        ("label", shaped(2), r"have shape \[2, 2\], not \[2\]"),
        ("labels", shaped(3), r"have shape \[2, 3\], not \[2, 2\]"),
        ("number", shaped(3), r"have shape \[2, 3\], not \[2\]"),
    ],
)
def test_outputs_of_another_number_are_refused_before_round_1(
    target: str, module: nn.Module, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        prepare(algorithms.fedavg(), ALL[target], module, rounds=1)


@pytest.mark.parametrize(
    ("target", "module", "loss"),
    [
        ("class", shaped(3), "focal"),
        ("sequence", shaped(4, 3), None),
        ("label", shaped(1), None),
        ("labels", shaped(2), None),
        ("number", shaped(1), "huber"),
        ("number", shaped(2), likelihood),
    ],
)
def test_one_output_per_class_or_target_fits(target: str, module: nn.Module, loss: Any) -> None:
    """A user's own loss of numbers may read more outputs than numbers."""
    training = prepare(algorithms.fedavg(), ALL[target], module, rounds=1, loss=loss)
    assert finish(training).records[-1].loss is not None


def test_a_faulty_loss_is_named_and_not_the_model() -> None:
    with pytest.raises(UserError, match=r"The loss .*:bad_loss raised TypeError .*in this order"):
        prepare(algorithms.fedavg(), ALL["class"], rounds=1, loss=bad_loss)  # type: ignore[arg-type]


class Clamped(nn.Module):
    """Two modules of it have the same text, parameters and outputs for small inputs."""

    def __init__(self, limit: float = 3.0) -> None:
        super().__init__()
        self.limit, self.shapes = limit, set[int]()
        self.layer = nn.Linear(2, 2)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.add(x.shape[-1])  # a cache that depends on shapes only
        return self.layer(x.clamp(-self.limit, self.limit))


def key_of(model: Any, noise: Any = "seeded", multiplier: float | None = 3.0) -> str:
    recipe = algorithms.dp_fedavg(clip=1.0, noise_multiplier=multiplier)
    if multiplier is None:
        recipe = algorithms.fedavg()
    return prepare(recipe, small(), model, rounds=2, noise=noise, delta=1e-5).spec.identity


def test_models_that_differ_in_an_attribute_do_not_share_noise() -> None:
    """Their text, their parameters and their answers to inputs of ones are equal."""
    assert key_of(Clamped()) == key_of(Clamped())
    assert key_of(Clamped(3.0)) != key_of(Clamped(5.0))


def test_the_key_of_a_named_model_stays_what_it_was() -> None:
    """So that runs of earlier versions are resumed."""
    assert key_of("softmax") == "9d990a86c4b751d08facd02c809b0870"


def test_a_run_is_not_resumed_with_another_attribute(tmp_path: Path) -> None:
    def training(limit: float) -> Any:
        recipe = algorithms.dp_fedavg(clip=1.0, noise_multiplier=3.0)
        return prepare(recipe, small(), Clamped(limit), rounds=2)

    begun = start(training(3.0), tmp_path / "run")
    begun.close()
    with pytest.raises(UserError, match="another recipe, model or data"):
        resume(training(5.0), tmp_path / "run")
    resume(training(3.0), tmp_path / "run").close()


def counting() -> Iterator[float]:
    yield 1.0


SOURCE = counting()


class Unreadable(Clamped):
    def helper(self) -> float:
        return next(SOURCE)


def test_a_model_that_cannot_be_read_does_not_get_seeded_noise() -> None:
    with pytest.raises(UserError, match=r"Unreadable uses 'helper\.SOURCE' \(generator\)"):
        key_of(Unreadable())
    assert key_of(Unreadable(), "secure") == key_of(Unreadable(), "secure")
    assert key_of(Unreadable(), multiplier=None)


class Straight(Clamped):
    """The outputs of `Clamped`, and other gradients."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x)
        return found + (found - found.detach())


def test_probes_see_gradients_and_large_inputs() -> None:
    """Also of modules whose code says nothing, such as those of a compiler."""

    def answers(module: nn.Module) -> list[bytes]:
        task = Task(module, "cross_entropy")
        x, few = torch.linspace(-1, 1, task.dim), [uniform(small(), 4, scale) for scale in SCALES]
        return [alike_everywhere(lambda one, f=f: one.answers(x, f), task) for f in few]

    plain = answers(Clamped())
    assert plain == answers(Clamped())
    assert all(a != b for a, b in zip(plain, answers(Straight()), strict=True))
    near, far = answers(Clamped(5.0))
    assert near == plain[0]
    assert far != plain[1]


def test_probes_have_numbers_that_every_processor_draws() -> None:
    """Uniform ones on the grid of float32, and not normal ones, which use logarithms."""
    found = uniform(small(), 4, 1.0).inputs[:]
    assert bool((found * 2**24 == (found * 2**24).round()).all())
    assert 0.5 < float(found.abs().max()) < 1
