"""Hugging Face's architectures, built from a config without any download, on all engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.engines.choose import choose
from fedveil.engines.dense import DenseEngine
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Group
from fedveil.errors import UserError
from fedveil.models.check import fix
from fedveil.models.start import construct
from fedveil.parts.local import SGD
from fedveil.parts.schedule import Constant
from fedveil.training.prepare import prepare

hf: Any = pytest.importorskip("transformers", reason="transformers is not installed")
TOKENS, LENGTH = 30, 7
BERT = {
    "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24,
    "vocab_size": TOKENS, "max_position_embeddings": LENGTH,
}  # fmt: skip


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_layer=1, n_head=2, n_embd=16, vocab_size=TOKENS, n_positions=LENGTH,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama() -> nn.Module:
    """Rotary positions, RMS norm, gates, grouped queries."""
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, hidden_size=16,
            intermediate_size=24, vocab_size=TOKENS, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def distilbert() -> nn.Module:
    return hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(
            n_layers=1, n_heads=2, dim=16, hidden_dim=24, vocab_size=TOKENS,
            max_position_embeddings=LENGTH, num_labels=3,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    facts = {key: BERT[key] for key in list(BERT)[:4]}
    return hf.ViTForImageClassification(
        hf.ViTConfig(**facts, image_size=8, patch_size=4, num_labels=3)
    )


def text(per_token: bool) -> Federated:
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.integers(0, TOKENS, (9, LENGTH)))
    labels = rng.integers(0, TOKENS, (9, LENGTH)) if per_token else rng.integers(0, 3, 9)
    return federated(inputs, torch.from_numpy(labels), TOKENS if per_token else 3)


def images() -> Federated:
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.normal(size=(9, 3, 8, 8)).astype(np.float32))
    return federated(inputs, torch.from_numpy(rng.integers(0, 3, 9)), 3)


def federated(inputs: torch.Tensor, labels: torch.Tensor, classes: int) -> Federated:
    offsets = torch.tensor([0, 2, 3, 7, 9])
    return Federated("made up", inputs, labels, offsets, Examples(inputs, labels), classes)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Federated]]] = {
    "GPT-2": (gpt2, lambda: text(per_token=True)),
    "Llama": (llama, lambda: text(per_token=True)),
    "BERT": (
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=3)),
        lambda: text(per_token=False),
    ),
    "BERT, masked tokens": (
        lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)),
        lambda: text(per_token=True),
    ),
    "DistilBERT": (distilbert, lambda: text(per_token=False)),
    "ViT": (vit, images),
}


@pytest.mark.parametrize("name", MODELS)
def test_stock_models_run_unchanged_on_every_engine(name: str) -> None:
    make, data_of = MODELS[name]
    task, data = Task(construct(make, seed=0), "cross_entropy"), data_of()
    plan = SGD(Constant(0.1), steps=2, batch=2, momentum=0.5).plan(
        data.sizes, 0, np.random.default_rng(0)
    )
    group = Group(data, np.arange(4), plan)
    expected = LoopEngine(task).updates(task.flatten(), group).rows()
    for engine in (FactoredEngine(task, 4), DenseEngine(task, 4)):
        found = engine.updates(task.flatten(), group).rows()
        assert torch.allclose(found, expected, atol=1e-5, rtol=0), engine.name
    assert choose("factored", task, data).engine.name == "factored"


@pytest.mark.parametrize("make", [gpt2, llama])
def test_stock_models_pass_the_checks_for_state_and_train(make: Callable[[], nn.Module]) -> None:
    recipe = algorithms.dp_fedavg(rate=1.0, steps=2, noise_multiplier=1.0)
    training = prepare(recipe, text(per_token=True), construct(make, seed=0), 2, engine="factored")
    training.step()
    assert training.state.round == 1


def test_a_stock_resnet_trains_after_fix() -> None:
    """Batch norm is refused with the name of the call that replaces it."""
    config = hf.ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
        layer_type="basic", num_labels=3,
    )  # fmt: skip
    model = construct(lambda: hf.ResNetForImageClassification(config), seed=0)
    recipe = algorithms.dp_fedavg(rate=1.0, steps=1, noise_multiplier=1.0)
    with pytest.raises(UserError, match=r"fedveil\.models\.fix\(model\)"):
        prepare(recipe, images(), model, 1)
    training = prepare(recipe, images(), fix(model), 1, engine="factored")
    training.step()
    assert training.state.round == 1
