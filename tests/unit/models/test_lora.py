"""LoRA: adapters are trained, everything else stays and costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.engines.dense import DenseEngine
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Group
from fedveil.errors import UserError
from fedveil.models import lora, merge
from fedveil.models.gpt import GPT
from fedveil.models.start import construct
from fedveil.parts.local import SGD
from fedveil.parts.schedule import Constant

TOKENS, LENGTH = 10, 5


def text() -> Federated:
    rng = np.random.default_rng(0)
    inputs, labels = torch.from_numpy(rng.integers(0, TOKENS, (2, 9, LENGTH)))
    offsets = torch.tensor([0, 2, 3, 7, 9])
    return Federated("text", inputs, labels, offsets, Examples(inputs, labels), TOKENS)


def base() -> nn.Module:
    return construct(lambda: GPT(TOKENS, 2, 16, 2), seed=0)


def own(**options: Any) -> nn.Module:
    return lora(base(), rank=2, targets=["attention", "contract"], **options)


def peft_model() -> nn.Module:
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["attention", "contract"], lora_dropout=0.1)
    model: nn.Module = peft.get_peft_model(base(), config)
    for name, leaf in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(leaf, std=0.1, generator=torch.Generator().manual_seed(0))
    return model


def adapted_gpt2() -> nn.Module:
    hf: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    config = hf.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=TOKENS, n_positions=LENGTH,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return lora(construct(lambda: hf.GPT2LMHeadModel(config), seed=0), 2, ["c_attn", "c_proj"])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": own,
    "FFA": lambda: own(freeze_a=True),
    "with the last norm": lambda: own(also=["norm"]),
    "peft": peft_model,
    "GPT-2 with Conv1D": adapted_gpt2,
}


@pytest.mark.parametrize("name", MODELS)
def test_engines_agree_on_adapters(name: str) -> None:
    task, data = Task(MODELS[name](), "cross_entropy"), text()
    # A stable rate: where local steps diverge, they amplify the last bits that engines differ in.
    plan = SGD(Constant(0.05), steps=3, batch=2).plan(data.sizes, 0, np.random.default_rng(0))
    group = Group(data, np.arange(4), plan)
    expected = LoopEngine(task).updates(task.flatten(), group).rows()
    assert expected.shape[1] == task.dim
    assert float(expected.abs().max()) > 1e-3
    for engine in (FactoredEngine(task, 4), DenseEngine(task, 4)):
        found = engine.updates(task.flatten(), group).rows()
        assert torch.allclose(found, expected, atol=1e-5, rtol=0), engine.name


def test_the_first_outputs_are_those_of_the_model() -> None:
    tokens = text().inputs
    assert torch.allclose(own()(tokens), base()(tokens), atol=1e-6)


def test_the_given_model_stays_as_it_is() -> None:
    model = base()
    lora(model, 2)
    assert all(leaf.requires_grad for leaf in model.parameters())
    assert type(model.blocks[0].attention) is nn.Linear


def test_only_adapters_are_trained_noised_and_sent() -> None:
    recipe = algorithms.dp_fedavg(rate=1.0, steps=2, noise_multiplier=1.0)
    model = own()
    result = fv.train(recipe, text(), model, rounds=2)
    trained = [name for name, leaf in model.named_parameters() if leaf.requires_grad]
    numbers = sum(leaf.numel() for leaf in model.parameters() if leaf.requires_grad)
    assert numbers == 2 * 2 * ((16 + 48) + (64 + 16))
    before, after = (dict(one.named_parameters()) for one in (model, result.model))
    for name in before:
        assert torch.equal(before[name], after[name]) == (name not in trained), name
    assert result.summary()["bytes_sent"] == 2 * 4 * 4 * numbers


def test_only_b_is_trained_with_a_frozen() -> None:
    trained = [n for n, leaf in own(freeze_a=True).named_parameters() if leaf.requires_grad]
    assert trained
    assert all(name.endswith(".up") for name in trained)


def test_the_statement_says_which_parameters_were_trained() -> None:
    recipe = algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0)
    statement = fv.train(recipe, text(), own(), rounds=1).statement
    entries = dict(statement.entries())
    assert entries["Trained"].startswith("576 of 7,328 parameters, in 8 of 35 tensors: ")
    assert "blocks.*.attention.down, blocks.*.attention.up" in entries["Trained"]
    assert "frozen parameters were trained on" in entries["Not covered"]
    assert statement.plain()["trained"] == entries["Trained"]
    whole = dict(fv.train(recipe, text(), base(), rounds=1).statement.entries())
    assert "Trained" not in whole


def test_frozen_parameters_are_shared_by_the_threads() -> None:
    task = Task(own(), "cross_entropy")
    with ThreadPoolExecutor(1) as pool:
        twin, _ = pool.submit(task.here).result()
    mine = dict(task.module.named_parameters())
    for name, leaf in twin.named_parameters():
        assert (leaf is mine[name]) == (not leaf.requires_grad)


def test_a_module_that_writes_to_a_frozen_parameter_is_refused() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = own()
            self.inner.norm.weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.inner.norm.weight.data += 1e-3
            return self.inner(x)

    with pytest.raises(UserError, match=r"changes 'inner\.norm\.weight' when it is called"):
        fv.train(algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0), text(), Writes(), rounds=1)


def test_merging_gives_the_same_outputs_without_adapters() -> None:
    for model in (own(), adapted_gpt2()) if _has("transformers") else (own(),):
        for name, leaf in model.named_parameters():
            if name.endswith(".up"):
                nn.init.normal_(leaf, generator=torch.Generator().manual_seed(0))
        model.eval()
        tokens, plain = text().inputs, merge(model)
        found, wanted = (getattr(m(tokens), "logits", m(tokens)) for m in (plain, model))
        assert torch.allclose(found, wanted, atol=1e-4)
        assert not any(name.endswith(".up") for name, _ in plain.named_parameters())


def _has(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def test_wrong_targets_are_refused_with_the_names_there_are() -> None:
    with pytest.raises(UserError, match=r"no linear layer 'query'.*attention, contract, expand"):
        lora(base(), 2, ["query"])
    with pytest.raises(UserError, match="no linear layer that can be adapted"):
        lora(nn.Sequential(nn.ReLU()), 2)
    with pytest.raises(UserError, match="rank is 0"):
        lora(base(), 0)


def test_layers_that_attention_reads_itself_get_no_adapter() -> None:
    adapted = lora(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    adapted(torch.zeros(1, 3, 8))
    assert isinstance(adapted.self_attn.out_proj, nn.Linear)
