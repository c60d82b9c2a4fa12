"""What is told before the first round, and what a resumed run must not draw again."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.errors import UserError
from fedveil.runs.directory import saving
from fedveil.training.prepare import prepare
from fedveil.training.settings import DataSettings, Settings, from_settings
from fedveil.training.sources import load_for
from fedveil.training.start import finish, start
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
