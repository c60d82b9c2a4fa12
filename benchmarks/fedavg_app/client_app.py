"""A ClientApp that returns as many numbers as it gets."""

from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Random arrays: Flower would not upload equal ones again."""
    shapes = [each.shape for each in message.content["arrays"].to_numpy_ndarrays()]
    draw = np.random.default_rng()
    arrays = ArrayRecord([draw.random(shape, dtype=np.float32) for shape in shapes])
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
