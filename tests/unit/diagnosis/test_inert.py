"""A learning rate that does nothing is noted, and steps are then stretched by the server."""

from __future__ import annotations

from pathlib import Path

from fedveil import algorithms
from fedveil.data.federated import Federated
from fedveil.diagnosis.change import stretched_steps
from fedveil.diagnosis.diagnose import diagnose
from fedveil.training.start import train

RULE = "learning rate without effect"


def notes(data: Federated, path: Path, clip: float) -> list[str]:
    recipe = algorithms.dp_sgd(clip=clip, rate=0.3, noise_multiplier=1.0)
    train(recipe, data, rounds=3, save=path)
    return [finding.rule for finding in diagnose(path).findings if not finding.wrong]


def test_where_every_example_is_clipped_the_learning_rate_has_no_effect(
    blobs: Federated, tmp_path: Path
) -> None:
    assert RULE in notes(blobs, tmp_path / "small", clip=1e-6)
    assert RULE not in notes(blobs, tmp_path / "large", clip=100.0)


def test_longer_steps_of_examples_are_the_servers() -> None:
    assert stretched_steps(algorithms.dp_sgd(), 4) == "--set server_rate=4"
    assert stretched_steps(algorithms.fedavg(learning_rate=0.1), 2) == "--set learning_rate=0.2"
