"""pfl: FederatedAveraging with central DP in its simulation, in one process or in two.

The first process starts the second one with PFL_WORKER_RANK=1; they meet on the loopback.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from itertools import chain, count
from typing import Any

import common


def meet(processes: int) -> subprocess.Popen[bytes] | None:
    """Give both processes their addresses before pfl is imported; the second one, if there is."""
    if processes == 1 or "PFL_WORKER_RANK" in os.environ:
        return None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["PFL_WORKER_ADDRESSES"] = f"127.0.0.1:{port},127.0.0.1:{port + 1}"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    second = {**os.environ, "PFL_WORKER_RANK": "1"}
    os.environ["PFL_WORKER_RANK"] = "0"
    return subprocess.Popen([sys.executable, *sys.argv], env=second, stdout=subprocess.DEVNULL)


def main() -> None:
    """Play and report."""
    one = common.setting()
    partner = meet(int(one.variant))
    try:
        play(one, common.arrays(one))
    finally:
        if partner is not None and sys.exc_info()[0] is not None:
            partner.kill()
    if partner is not None:
        partner.wait(60)


def play(one: common.Setting, data: common.Arrays) -> None:
    """All rounds in pfl's own loop; a callback looks at the clock between them."""
    import numpy as np
    import torch
    import torch_side
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

    rank = int(os.environ.get("PFL_WORKER_RANK", "0"))
    rng = np.random.default_rng(1 + rank)
    np.random.seed(1)  # noqa: NPY002 (pfl draws from numpy's global generator, alike in all processes)

    class Net(torch.nn.Module):
        """A model with the two methods that pfl calls."""

        def __init__(self) -> None:
            super().__init__()
            self.net = torch_side.model(one.model)

        def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            """The mean loss of a batch."""
            return torch.nn.functional.cross_entropy(self.net(inputs), labels)

        def metrics(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
            """Never asked for: rounds are timed without evaluation."""
            return {"loss": Weighted(float(self.loss(inputs, labels)), 1)}

    class Shuffled(PyTorchTensorDataset):  # type: ignore[misc]
        """Reshuffled passes without a gap, where pfl's own repeat the first order."""

        def iter(self, batch_size: int | None) -> Any:
            """Every batch of the local work."""
            inputs, labels = self.raw_data
            for index in torch.from_numpy(np.array(common.batches(len(labels), one, rng))):
                yield inputs[index], labels[index]

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        """The time between the ends of rounds."""

        def __init__(self) -> None:
            self.ends = [time.perf_counter()]

        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            """Look at the clock."""
            self.ends.append(time.perf_counter())
            return False, Metrics()

    inputs, labels = torch.from_numpy(data.inputs), torch.from_numpy(data.labels)

    def client(user: int) -> PyTorchTensorDataset:
        place = slice(int(data.offsets[user]), int(data.offsets[user + 1]))
        kind = PyTorchTensorDataset if one.batch is None else Shuffled
        return kind((inputs[place], labels[place]), user_id=str(user))

    users = chain.from_iterable(data.cohort(k) for k in count())
    population = FederatedDataset(client, lambda: int(next(users)))
    mechanism = CentrallyAppliedPrivacyMechanism(GaussianMechanism(one.clip, one.noise))
    backend = SimulatedBackend(population, population, postprocessors=[mechanism])
    net = Net()
    torch_side.load(net.net, torch.from_numpy(data.start))
    model = PyTorchModel(
        net,
        lambda parameters, lr: torch.optim.SGD(parameters, lr, one.momentum),
        torch.optim.SGD(net.parameters(), 1.0),
    )
    rounds, clock = one.warm + one.rounds, Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, rounds + 1, one.per_round, None),
        backend,
        model,
        NNTrainHyperParams(
            local_num_epochs=one.steps if one.batch is None else 1,
            local_learning_rate=one.learning_rate,
            local_batch_size=one.batch,
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    if rank == 0:
        peak = sum(common.peak_bytes(str(each)) for each in common.family(os.getpid()))
        loss, accuracy = torch_side.evaluate(net.net, data)
        seconds = np.diff(clock.ends)[one.warm :].tolist()
        common.report(seconds, loss, accuracy, peak, "pfl", "torch")


if __name__ == "__main__":
    main()
