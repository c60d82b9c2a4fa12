"""Flower: FedAvg in its DP wrapper (server-side fixed clipping), simulated by two Ray actors."""

from __future__ import annotations

import os
import sys
import time

import common
import flower_client
import numpy as np
import torch
import torch_side
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.simulation import run_simulation


def main() -> None:
    """Play and report."""
    one = common.setting()
    os.environ["BENCH_SETTING"] = next(word for word in sys.argv if word.endswith(".json"))
    data = common.arrays(one)
    net = torch_side.model(one.model)
    torch_side.load(net, torch.from_numpy(data.start))
    np.random.seed(1)  # noqa: NPY002 (Flower's noise comes from numpy's global generator)
    rounds, ends, peak = one.warm + one.rounds, list[float](), 0
    server = ServerApp()

    @server.main()
    def play(grid: Grid, context: Context) -> None:
        plain = FedAvg(
            fraction_train=(one.per_round + 0.5) / one.clients,
            fraction_evaluate=0.0,
            min_available_nodes=one.clients,
        )
        strategy = DifferentialPrivacyServerSideFixedClipping(
            plain, one.noise, one.clip, one.per_round
        )
        start = ArrayRecord(net.state_dict())
        strategy.start(grid, start, num_rounds=rounds, timeout=600, evaluate_fn=look)

    def look(played: int, arrays: ArrayRecord) -> MetricRecord:
        nonlocal peak
        ends.append(time.perf_counter())
        if played == rounds:
            peak = sum(common.peak_bytes(str(each)) for each in common.family(os.getpid()))
            net.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord()

    run_simulation(
        server,
        flower_client.app,
        one.clients,
        backend_config={
            "init_args": {"num_cpus": 2, "_node_ip_address": "127.0.0.1"},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    if len(ends) <= rounds:
        raise SystemExit(f"the simulation ended after {len(ends)} of {rounds + 1} evaluations")
    loss, accuracy = torch_side.evaluate(net, data)
    seconds = np.diff(ends)[one.warm :].tolist()
    common.report(seconds, loss, accuracy, peak, "flwr", "ray", "torch")


if __name__ == "__main__":
    main()
