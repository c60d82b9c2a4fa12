"""A ServerApp with Flower's FedAvg strategy, which notes the seconds of each round."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Timed(FedAvg):
    """FedAvg that remembers when each round was sent."""

    seconds: list[float]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As FedAvg."""
        self.sent = time.monotonic()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]):
        """As FedAvg."""
        self.seconds.append(time.monotonic() - self.sent)
        return super().aggregate_train(server_round, replies)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds and write their seconds."""
    directory = Path(str(context.run_config["directory"]))
    plan = json.loads((directory / "plan.json").read_text())
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=plan["nodes"])
    strategy.min_available_nodes, strategy.seconds = plan["nodes"], []
    arrays = ArrayRecord([np.zeros(plan["bytes"] // 4, dtype=np.float32)])
    strategy.start(grid, arrays, num_rounds=plan["rounds"], timeout=120)
    result = {"seconds": strategy.seconds, "replies": plan["rounds"] * plan["nodes"]}
    (directory / "result.json").write_text(json.dumps(result))
