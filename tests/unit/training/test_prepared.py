"""What is told before the first round, and what a resumed run must not draw again."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.errors import UserError
from fedveil.runs.directory import saving
from fedveil.training.prepare import prepare
from fedveil.training.settings import DataSettings, Settings, from_settings
from fedveil.training.sources import load_for
from fedveil.training.start import start
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
