"""Flower's client: a module of its own, so that Ray's actors import it and keep their data."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import torch_side
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@lru_cache(maxsize=1)
def material() -> tuple[common.Setting, common.Arrays, Any, np.random.Generator]:
    """The workload, its data, a model and a generator, once for each actor."""
    torch.set_num_threads(1)
    one = common.Setting(**json.loads(Path(os.environ["BENCH_SETTING"]).read_text()))
    rng = np.random.default_rng(os.getpid())
    return one, common.arrays(one), torch_side.model(one.model), rng


@app.train()
def train(message: Message, context: Context) -> Message:
    """The local steps of the client whose number the node has."""
    one, data, net, rng = material()
    inputs, labels = data.client(int(context.node_config["partition-id"]))
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    torch_side.walk(net, torch.from_numpy(inputs), torch.from_numpy(labels), one, rng)
    arrays, weight = ArrayRecord(net.state_dict()), MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": weight}), reply_to=message)
