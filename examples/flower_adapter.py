"""Flower's central differential privacy with fixed and adaptive clipping, for `fedveil conform`.

Needs flwr 1.41:  fedveil conform examples/flower_adapter.py
"""

from __future__ import annotations

import logging

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger("flwr").setLevel(logging.ERROR)
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # required to create messages


class Fixed:
    """Server-side fixed clipping."""

    name = "Flower 1.41, server-side fixed clipping over FedAvg"
    clip, noise_multiplier, cohort = 1.0, 1.0, 20

    def __init__(self) -> None:
        self.strategy = flower.DifferentialPrivacyServerSideFixedClipping(
            flower.FedAvg(), self.noise_multiplier, self.clip, self.cohort
        )

    def __call__(self, updates: list[np.ndarray], counts: list[int], seed: int) -> np.ndarray:
        """Run one round from a model of zeros, so that the next model is the mean update."""
        np.random.seed(seed)  # noqa: NPY002 - Flower draws from numpy's global generator
        self.strategy.current_arrays = ArrayRecord([np.zeros_like(updates[0])])
        arrays, _ = self.strategy.aggregate_train(1, list(map(_reply, updates, counts)))
        return arrays.to_numpy_ndarrays()[0]


class Adaptive(Fixed):
    """Server-side adaptive clipping."""

    name = "Flower 1.41, server-side adaptive clipping over FedAvg"

    def __init__(self) -> None:
        self.strategy = flower.DifferentialPrivacyServerSideAdaptiveClipping(
            flower.FedAvg(), self.noise_multiplier, self.cohort, self.clip
        )

    @property
    def threshold(self) -> float:
        """The norm to which the next updates are clipped."""
        return self.strategy.clipping_norm


def _reply(update: np.ndarray, count: int) -> Message:
    content = {"arrays": ArrayRecord([update]), "metrics": MetricRecord({"num-examples": count})}
    return Message(RecordDict(content), dst_node_id=1, message_type="train")


AGGREGATORS = [Fixed, Adaptive]
