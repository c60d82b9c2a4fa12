"""The main job on real data, shortened: private training over 3000 clients learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedveil.training.settings import from_settings, read_settings
from fedveil.training.start import finish
from tests.unit.data.paths import needs_fashion

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fashion-mnist.toml"


@needs_fashion
def test_the_demo_learns_within_its_budget() -> None:
    """Ten rounds at the noise of two hundred reach 70%; guessing gives 10%."""
    training = from_settings(read_settings(EXAMPLE, {"evaluate_every": 10}))
    assert training.data.clients == 3000
    assert training.task.dim == 7850
    training.spec = replace(training.spec, rounds=10)
    result = finish(training)
    assert result.accuracy > 0.7
    assert 0 < result.guarantee.epsilon < 5.0
    assert result.guarantee.rounds == 10
