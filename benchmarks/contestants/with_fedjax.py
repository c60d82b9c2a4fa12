"""fedjax: for_each_client (jit) with the clip in client_final, and noise on the mean."""

from __future__ import annotations

from typing import Any

import common
import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Params = list[tuple[Any, Any]]  # weight and bias of each layer
SHAPES: dict[str, list[tuple[int, ...]]] = {  # of torch's weights, in its order
    "softmax": [(10, 784)],
    "mlp": [(300, 784), (300, 300), (10, 300)],
    "mlp-256-128": [(256, 784), (128, 256), (10, 128)],
    "cnn": [(16, 1, 8, 8), (32, 16, 4, 4), (32, 512), (10, 32)],
}


def parameters(flat: np.ndarray, model: str) -> Params:
    """torch's parameter vector in the layout that jax likes: [in, out], and channels last."""
    layers: Params = []
    for shape in SHAPES[model]:
        size = int(np.prod(shape))
        weight, bias, flat = flat[:size], flat[size : size + shape[0]], flat[size + shape[0] :]
        weight = weight.reshape(shape)
        if shape == (32, 512):  # its inputs are 32 channels of 4×4, which come last here
            weight = weight.reshape(32, 32, 4, 4).transpose(0, 2, 3, 1).reshape(shape)
        order = (2, 3, 1, 0) if len(shape) == 4 else (1, 0)
        layers.append((jnp.asarray(weight.transpose(order)), jnp.asarray(bias)))
    return layers


def outputs(layers: Params, x: Any, model: str) -> Any:
    """Logits of images [n, 28, 28, 1]."""
    if model == "cnn":
        for (weight, bias), pad in zip(layers[:2], (3, 0), strict=True):
            x = lax.conv_general_dilated(
                x, weight, (2, 2), [(pad, pad)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + bias)
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")
        layers = layers[2:]
    x = x.reshape(len(x), -1)
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    return x @ layers[-1][0] + layers[-1][1]


def main() -> None:
    """Play and report."""
    one = common.setting()
    data = common.arrays(one)
    params = parameters(data.start, one.model)
    images = data.inputs.reshape(-1, 28, 28, 1)
    optimizer = fedjax.optimizers.sgd(one.learning_rate, one.momentum or None)
    batches = fedjax.ShuffleRepeatBatchHParams(
        batch_size=one.batch or int(data.offsets[1]),
        num_epochs=None,
        num_steps=one.steps,
        skip_shuffle=one.batch is None,
    )

    def loss(layers: Params, x: Any, y: Any) -> Any:
        logs = jax.nn.log_softmax(outputs(layers, x, one.model))
        return -jnp.take_along_axis(logs, y[:, None], axis=1).mean()

    def init(server: Params, _: Any) -> dict[str, Any]:
        return {"params": server, "state": optimizer.init(server)}

    def step(client: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
        slope = jax.grad(loss)(client["params"], batch["x"], batch["y"])
        state, moved = optimizer.apply(slope, client["state"], client["params"])
        return {"params": moved, "state": state}

    def final(server: Params, client: dict[str, Any]) -> Any:
        moved = jax.tree_util.tree_map(jnp.subtract, client["params"], server)
        return fedjax.tree_util.tree_clip_by_global_norm(moved, one.clip)

    walk = fedjax.for_each_client(init, step, final)

    def release(server: Params, total: Params, key: Any) -> Any:
        leaves, shape = jax.tree_util.tree_flatten(total)
        keys = jax.random.split(key, len(leaves))
        noisy = [
            leaf / one.per_round + one.deviation * jax.random.normal(each, leaf.shape)
            for leaf, each in zip(leaves, keys, strict=True)
        ]
        mean = jax.tree_util.tree_unflatten(shape, noisy)
        return jax.tree_util.tree_map(jnp.add, server, mean)

    released = jax.jit(release)

    def client(i: int) -> fedjax.ClientDataset:
        place = slice(int(data.offsets[i]), int(data.offsets[i + 1]))
        return fedjax.ClientDataset({"x": images[place], "y": data.labels[place]})

    def play(k: int) -> None:
        nonlocal params
        cohort = [(i, client(i).shuffle_repeat_batch(batches), ()) for i in data.cohort(k)]
        total = fedjax.tree_util.tree_sum(update for _, update in walk(params, cohort))
        params = released(params, total, jax.random.PRNGKey(k))
        jax.block_until_ready(params)

    def evaluate() -> tuple[float, float]:
        logits = jax.jit(outputs, static_argnums=2)(
            params, data.test_inputs.reshape(-1, 28, 28, 1), one.model
        )
        right = float((logits.argmax(1) == data.test_labels).mean())
        return float(loss(params, data.test_inputs.reshape(-1, 28, 28, 1), data.test_labels)), right

    common.race(one, play, evaluate, "fedjax", "jax", "jaxlib", "numpy")


if __name__ == "__main__":
    main()
