"""fedveil by one of its engines, as `fedveil train` plays rounds."""

from __future__ import annotations

from dataclasses import replace

import common
import torch
from common import Arrays, Setting

from fedveil.data.federated import Examples, Federated
from fedveil.errors import UserError
from fedveil.parts.bound import Clip
from fedveil.parts.cohort import FixedSize
from fedveil.parts.local import SGD
from fedveil.parts.noise import Gaussian
from fedveil.parts.report import Difference
from fedveil.parts.schedule import Constant
from fedveil.recipe import Recipe
from fedveil.training.prepare import prepare
from fedveil.training.run import Training

ROUNDS = 1000  # more than are ever played, so that no round evaluates


def recipe(one: Setting) -> Recipe:
    """DP-FedAvg, or DP-SGD and DP-LSGD where examples are the clients."""
    return Recipe(
        "bench",
        SGD(Constant(one.learning_rate), one.steps, batch=one.batch, momentum=one.momentum),
        FixedSize(one.per_round),
        Difference(),
        bound=Clip(one.clip),
        noise=Gaussian(one.noise),
        unit="example" if one.unit == "example" else "client",
    )


def training(one: Setting, data: Arrays, engine: str) -> Training:
    """A run at round 0."""
    federated = Federated(
        name=one.data,
        inputs=torch.from_numpy(data.inputs),
        labels=torch.from_numpy(data.labels),
        offsets=torch.from_numpy(data.offsets),
        test=Examples(torch.from_numpy(data.test_inputs), torch.from_numpy(data.test_labels)),
        classes=10,
        unit=one.unit,
    )
    run = prepare(
        recipe(one),
        federated,
        one.model,
        ROUNDS,
        engine=engine,
        evaluate_every=ROUNDS,
        diagnostics=False,
    )
    # A run's own key depends on its engine; here all engines draw the same participants.
    run.spec = replace(run.spec, key="bench")
    return run


def main() -> None:
    """Play and report."""
    one = common.setting()
    data = common.arrays(one)
    try:
        run = training(one, data, one.variant)
    except UserError as problem:
        common.decline(str(problem))
    common.race(
        one,
        lambda _: run.step(),
        lambda: run.task.evaluate(run.state.model, run.data.test),
        "fedveil",
        "torch",
    )


if __name__ == "__main__":
    main()
