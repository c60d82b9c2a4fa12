"""Transformers made of torch's own layers, on all engines."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.engines.choose import choose
from fedveil.engines.dense import DenseEngine
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.rewriting import Rewriting
from fedveil.engines.task import Task
from fedveil.engines.updates import Group
from fedveil.models.gpt import GPT
from fedveil.models.start import construct
from fedveil.parts.local import SGD, Local
from fedveil.parts.schedule import Constant
from fedveil.training.prepare import prepare

TOKENS, LENGTH, SIZE = 20, 6, 16


class Reader(nn.Module):
    """Tokens and positions, a body over [n, length, size], and logits for every position."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, SIZE, padding_idx=0)
        self.positions = nn.Parameter(0.1 * torch.randn(1, LENGTH, SIZE))
        self.first = nn.Parameter(torch.randn(SIZE))
        self.body = body
        self.head = nn.Linear(SIZE, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions
        h = torch.cat([self.first.expand(len(x), 1, -1), h], 1)
        return self.head(self.body(h)[:, 1:])


class Encoder(nn.Module):
    def __init__(self, time_first: bool = False, **options: object) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(SIZE, 2, 24, 0.1, batch_first=not time_first, **options)
        self.time_first = time_first
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(SIZE), False)

    def forward(self, h: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(h.shape[1])
        if not self.time_first:
            return self.layers(h, mask, is_causal=True)
        return self.layers(h.transpose(0, 1), mask).transpose(0, 1)


class Decoder(nn.Module):
    """Cross-attention, and padding that depends on the example."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(SIZE, 2, 24, 0.1, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, 1)

    def forward(self, h: Tensor) -> Tensor:
        padding = h.flip(1)[..., 0] > 1.0
        return self.layers(h, h.flip(1), memory_key_padding_mask=padding)


class Attention(nn.Module):
    """torch's attention with its rarer options."""

    def __init__(self, weights: bool, **options: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, 2, batch_first=True, **options)
        self.weights = weights

    def forward(self, h: Tensor) -> Tensor:
        key = h[..., : self.attention.kdim]
        found, weights = self.attention(h, key, key, need_weights=self.weights)
        return found if weights is None else found + weights.mean(-1, keepdim=True)


class Gated(nn.Module):
    """RMS norms of both kinds, a gate, a product with a parameter, one head for all queries."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(SIZE)
        self.scale = nn.Parameter(torch.ones(SIZE))
        self.weight = nn.Parameter(0.3 * torch.randn(SIZE, 2 * SIZE))
        self.shift = nn.Parameter(torch.zeros(2 * SIZE))
        self.key = nn.Linear(SIZE, SIZE // 2, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        gate, value = (self.norm(h) @ self.weight + self.shift).chunk(2, -1)
        x = F.silu(gate) * value
        x = self.scale * (x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt())
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        k = self.key(x)[:, None]
        return h + F.scaled_dot_product_attention(
            q, k, k, is_causal=True, enable_gqa=True
        ).transpose(1, 2).flatten(2)


class Convolved(nn.Module):
    """Convolutions and instance norms over time."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(SIZE, SIZE, 3, padding="same")
        self.norm = nn.InstanceNorm1d(SIZE, affine=True)
        self.far = nn.Conv1d(SIZE, SIZE, 3, padding=2, dilation=2, groups=4)

    def forward(self, h: Tensor) -> Tensor:
        return self.far(self.norm(self.near(h.transpose(1, 2)))).transpose(1, 2)


BODIES: dict[str, Callable[[], nn.Module]] = {
    "encoder": Encoder,
    "encoder, norm first": lambda: Encoder(norm_first=True, activation="gelu"),
    "encoder, time first": lambda: Encoder(time_first=True, bias=False),
    "decoder": Decoder,
    "attention": lambda: Attention(weights=True, bias=False),
    "attention to smaller keys": lambda: Attention(weights=False, kdim=5, vdim=5),
    "attention with more keys": lambda: Attention(True, add_bias_kv=True, add_zero_attn=True),
    "gated": Gated,
    "convolved": Convolved,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda body=body: Reader(body()) for name, body in BODIES.items()},
    "gpt": lambda: GPT(TOKENS, 2, SIZE, 2),
}
PLANS: dict[str, Local] = {
    "momentum": SGD(Constant(0.1), epochs=1, batch=2, momentum=0.9),
    "full batches with decay": SGD(Constant(0.1), steps=2, weight_decay=0.01),
}


def population() -> Federated:
    rng = np.random.default_rng(1)
    inputs, labels = torch.from_numpy(rng.integers(0, TOKENS, (2, 6, LENGTH)))
    offsets = torch.tensor([0, 1, 4, 6])
    return Federated("text", inputs, labels, offsets, Examples(inputs, labels), TOKENS)


def task_of(name: str) -> Task:
    return Task(construct(MODELS[name], seed=2), "cross_entropy")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_engines_agree_on_transformers(name: str, plan: str) -> None:
    task, data = task_of(name), population()
    local = PLANS[plan].plan(data.sizes, 0, np.random.default_rng(0))
    group = Group(data, np.arange(3), local)
    expected = LoopEngine(task).updates(task.flatten(), group).rows()
    for engine in (FactoredEngine(task, 3), DenseEngine(task, 3)):
        updates = engine.updates(task.flatten(), group)
        assert torch.allclose(updates.rows(), expected, atol=1e-5, rtol=0), engine.name
        scale = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
        wanted = scale.float() @ expected
        assert torch.allclose(updates.weighted_sum(scale), wanted, atol=1e-5)
        assert torch.allclose(updates.norms(), expected.double().norm(dim=1), rtol=1e-4)
        assert torch.allclose(updates.dots(wanted), (expected @ wanted).double(), atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_are_served_by_the_factored_engine(name: str) -> None:
    assert choose("factored", task_of(name), population()).engine.name == "factored"


@pytest.mark.parametrize("name", ["encoder", "decoder", "attention with more keys", "gated"])
def test_equations_equal_torchs_own_attention(name: str) -> None:
    module, inputs = construct(MODELS[name], seed=2).eval(), population().inputs
    wanted = module(inputs)
    with Rewriting():
        found = module(inputs)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_attention_without_anything_to_attend_to_is_zero_as_in_torch() -> None:
    q = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    wanted = F.scaled_dot_product_attention(q, q, q, mask)
    added = torch.zeros(3, 3).masked_fill(~mask, -math.inf)
    with Rewriting():
        for each in (mask, added):
            given = q.clone().requires_grad_()
            found = F.scaled_dot_product_attention(given, given, given, each)
            assert torch.allclose(found, wanted, atol=1e-6)
            (slope,) = torch.autograd.grad(found.sum(), given)
            assert bool(slope.isfinite().all())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_positions_that_see_padding_only_do_not_reject_a_client(dropout: float) -> None:
    """Left padding under a causal mask: the first positions have nothing to attend to."""

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(21, 8, padding_idx=20)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
            self.out = nn.Linear(8, 21)

        def forward(self, x: Tensor) -> Tensor:
            ahead = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
            return self.out(self.layer(self.table(x), ahead, x == 20))

    inputs = torch.arange(24).reshape(4, 6) % 20
    inputs[:, 0] = 20
    labels = torch.where(inputs == 20, -100, inputs)
    data = Federated("padded", inputs, labels, 2 * torch.arange(3), Examples(inputs, labels), 21)
    recipe = algorithms.dp_fedavg(rate=1.0, steps=2, noise_multiplier=1.0)
    for engine in ("loop", "dense", "factored"):
        assert prepare(recipe, data, Causal(), 1, engine=engine).step().rejected == 0, engine


def test_evaluation_keeps_the_length_of_padded_sequences() -> None:
    """torch's fused encoder cuts a batch to its longest sequence, so labels would not fit."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reader = Reader(nn.Identity())
            layer = nn.TransformerEncoderLayer(SIZE, 2, 24, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.reader.tokens(x)
            return self.reader.head(self.encoder(h, src_key_padding_mask=x == 0))

    data = population()
    inputs = data.inputs.clone().clamp_min(1)
    inputs[:, 4:] = 0
    task = Task(construct(Padded, seed=0), "cross_entropy")
    loss, _ = task.evaluate(task.flatten(), Examples(inputs, data.labels))
    assert loss > 0


class Bags(nn.Module):
    """Bags of tokens, of every kind."""

    def __init__(self) -> None:
        super().__init__()
        kinds = ("mean", "sum", "max")
        self.bags = nn.ModuleList([nn.EmbeddingBag(TOKENS, SIZE, mode=kind) for kind in kinds])
        self.head = nn.Linear(SIZE, LENGTH * TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        mean, total, top = self.bags
        h = mean(x) + total(x, per_sample_weights=0.1 * x) + top(x)
        return self.head(h).unflatten(1, (LENGTH, TOKENS))


def test_engines_agree_on_embedding_bags() -> None:
    """From their equation: torch's own has no rule for vmap."""
    task, data = Task(construct(Bags, seed=0), "cross_entropy"), population()
    local = SGD(Constant(0.1), steps=2).plan(data.sizes, 0, np.random.default_rng(0))
    group = Group(data, np.arange(3), local)
    expected = LoopEngine(task).updates(task.flatten(), group).rows()
    for engine in (FactoredEngine(task, 3), DenseEngine(task, 3)):
        found = engine.updates(task.flatten(), group).rows()
        assert torch.allclose(found, expected, atol=1e-5, rtol=0), engine.name
    assert choose("factored", task, data).engine.name == "factored"
