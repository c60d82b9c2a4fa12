"""Models with several inputs and with outputs of other kinds, on all engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedveil import algorithms
from fedveil.data.federated import IGNORED, Examples, Federated
from fedveil.data.fields import Inputs
from fedveil.engines.choose import choose
from fedveil.engines.dense import DenseEngine
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine, Group
from fedveil.errors import UserError
from fedveil.models.start import construct
from fedveil.parts.local import SGD
from fedveil.parts.schedule import Constant
from fedveil.training.prepare import prepare

TOKENS, LENGTH, SIZE = 12, 5, 8


class Masked(nn.Module):
    """An encoder of padded sequences, whose arguments are given by name."""

    def __init__(self, form: Callable[[Tensor], object] = lambda logits: logits) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, SIZE)
        self.encoder = nn.TransformerEncoderLayer(SIZE, 2, 16, 0.2, batch_first=True)
        self.shift = nn.Linear(2, SIZE)
        self.head = nn.Linear(SIZE, TOKENS)
        self.form = form

    def forward(self, mask: Tensor, ids: Tensor, extra: Tensor) -> object:
        h = self.tokens(ids) + self.shift(extra)[:, None]
        return self.form(self.head(self.encoder(h, src_key_padding_mask=mask == 0)))


class Mixes(Masked):
    """Compares the second input of an example with that of the others."""

    def forward(self, mask: Tensor, ids: Tensor, extra: Tensor) -> object:
        return super().forward(mask, ids, extra - extra.mean(0))


def inputs(outlier: float = 0.0) -> dict[str, Tensor]:
    rng = np.random.default_rng(3)
    lengths = torch.from_numpy(rng.integers(1, LENGTH + 1, 10))
    extra = torch.from_numpy(rng.normal(size=(10, 2)).astype(np.float32))
    if outlier:
        extra[3:5] = outlier
    return {
        "ids": torch.from_numpy(rng.integers(0, TOKENS, (10, LENGTH))),
        "mask": (torch.arange(LENGTH) < lengths[:, None]).long(),
        "extra": extra,
    }


def population(given: Inputs | None = None) -> Federated:
    given = inputs() if given is None else given
    parts = inputs()
    labels = torch.where(parts["mask"] > 0, parts["ids"].roll(1, 1), IGNORED)
    labels[0] = IGNORED  # an example without any label
    examples = Examples.of(given, labels)
    return Federated(
        "padded", examples.inputs, labels, torch.tensor([0, 1, 3, 5, 10]), examples, TOKENS,
        layout=examples.layout,
    )  # fmt: skip


def engines(task: Task) -> list[Engine]:
    return [LoopEngine(task), DenseEngine(task, 4), FactoredEngine(task, 4)]


def rows(engine: Engine, task: Task, data: Federated) -> Tensor:
    plan = SGD(Constant(0.1), steps=2, batch=2).plan(data.sizes, 0, np.random.default_rng(0))
    return engine.updates(task.flatten(), Group(data, np.arange(4), plan)).rows().clone()


def task_of(make: Callable[[], nn.Module], data: Federated) -> Task:
    return Task(construct(make, seed=0), "cross_entropy", data.layout)


FORMS: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda logits: logits,
    "tuple": lambda logits: (None, logits, logits.sum()),
    "dictionary": lambda logits: {"hidden": logits * 2, "logits": logits},
}


@pytest.mark.parametrize("form", FORMS)
def test_engines_agree_on_several_inputs_and_forms_of_outputs(form: str) -> None:
    data = population()
    task = task_of(lambda: Masked(FORMS[form]), data)
    expected, *others = (rows(engine, task, data) for engine in engines(task))
    for found in others:
        assert torch.allclose(found, expected, atol=1e-5, rtol=0)
    assert float(expected[0].norm()) == 0, "the first client has no labels"
    assert choose("factored", task, data).engine.name == "factored"


def test_inputs_in_order_are_the_arguments_of_the_module() -> None:
    by_name = population()
    parts = inputs()
    in_order = population((parts["mask"], parts["ids"], parts["extra"]))
    found = [rows(LoopEngine(t), t, d) for d in (by_name, in_order) for t in [task_of(Masked, d)]]
    assert torch.equal(*found)


def test_one_client_does_not_move_another_through_any_input() -> None:
    """To the bit, also for a module that mixes its batch."""
    for make in (Masked, Mixes):
        data, changed = population(), population(inputs(outlier=1e4))
        task = task_of(make, data)
        for engine in engines(task):
            present, beside = (rows(engine, task, one) for one in (data, changed))
            assert torch.equal(present[[0, 1, 3]], beside[[0, 1, 3]]), engine.name
            assert make is Mixes or not torch.equal(present[2], beside[2])


def test_a_model_that_mixes_a_second_input_is_computed_client_by_client() -> None:
    data = population()
    assert choose("auto", task_of(Mixes, data), data).engine.name == "loop"
    with pytest.raises(UserError, match="examples of a batch independently"):
        choose("dense", task_of(Mixes, data), data)


def test_training_and_evaluation_skip_what_is_ignored() -> None:
    data = population()
    training = prepare(algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0), data, Masked(), 1)
    training.step()
    task = training.task
    whole = task.evaluate(task.flatten(), data.test)
    other = torch.where(data.labels == IGNORED, IGNORED, data.labels)
    assert whole == task.evaluate(task.flatten(), Examples(data.inputs, other, data.layout))


def test_an_output_without_logits_is_refused() -> None:
    data = population()
    with pytest.raises(UserError, match="a dict without logits"):
        prepare(algorithms.fedavg(), data, Masked(lambda logits: {"scores": logits}), 1)


class Branches(nn.Module):
    """Cannot be mapped, because of one line."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        return self.head(x)


def test_a_refusal_names_the_line_that_stands_in_the_way() -> None:
    x, labels = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
    data = Federated("two", x, labels, torch.tensor([0, 2, 4]), Examples(x, labels), 3)
    with pytest.raises(UserError, match=r"at forward \(test_inputs\.py, line \d+: if x\.sum\(\)"):
        choose("dense", Task(Branches(), "cross_entropy"), data)


def stock_models(hf: Any) -> dict[str, Callable[[], nn.Module]]:
    """Two encoders and two decoders, built from configs."""
    one = {"vocab_size": TOKENS, "bos_token_id": 0, "eos_token_id": 0}
    deep = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": SIZE}
    bert = hf.BertConfig(
        **deep, **one, intermediate_size=16, max_position_embeddings=LENGTH, num_labels=TOKENS
    )
    distilbert = hf.DistilBertConfig(
        **one, n_layers=1, n_heads=2, dim=SIZE, hidden_dim=16, max_position_embeddings=LENGTH,
        num_labels=TOKENS,
    )  # fmt: skip
    gpt2 = hf.GPT2Config(**one, n_layer=1, n_head=2, n_embd=SIZE, n_positions=LENGTH)
    llama = hf.LlamaConfig(**deep, **one, num_key_value_heads=1, intermediate_size=16)
    return {
        "BERT": lambda: hf.BertForTokenClassification(bert),
        "DistilBERT": lambda: hf.DistilBertForTokenClassification(distilbert),
        "GPT-2": lambda: hf.GPT2LMHeadModel(gpt2),
        "Llama": lambda: hf.LlamaForCausalLM(llama),
    }


@pytest.mark.parametrize("name", ["BERT", "DistilBERT", "GPT-2", "Llama"])
def test_hugging_face_models_take_their_own_padding_masks_on_every_engine(name: str) -> None:
    """[n, length], as a tokenizer gives them, and ModelOutput as the library gives it.

    The library leaves the mask out of batches without padding. Under vmap it always builds it.
    """
    hf: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    parts = inputs()
    parts["mask"][1:3] = 1  # a client without padding
    data = population({"input_ids": parts["ids"], "attention_mask": parts["mask"]})
    task = task_of(stock_models(hf)[name], data)
    expected, *others = (rows(engine, task, data) for engine in engines(task))
    for found in others:
        assert torch.allclose(found, expected, atol=1e-5, rtol=0)
    assert choose("auto", task, data).engine.name == "factored"


def test_a_mask_as_used_by_attention_gives_the_same() -> None:
    hf: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    parts = inputs()
    whole = parts["mask"].bool()[:, None, None, :].expand(-1, 1, LENGTH, -1).contiguous()
    found = []
    for mask in (parts["mask"], whole):
        data = population({"input_ids": parts["ids"], "attention_mask": mask})
        task = task_of(stock_models(hf)["BERT"], data)
        found.append(rows(FactoredEngine(task, 4), task, data))
    assert torch.allclose(*found, atol=1e-5, rtol=0)


class Shortcut(Masked):
    """A user's own branch on a mask, which nobody but the user can decide."""

    def forward(self, mask: Tensor, ids: Tensor, extra: Tensor) -> object:
        if mask.all():
            return self.head(self.tokens(ids))
        return super().forward(mask, ids, extra)


def test_a_branch_of_the_user_s_model_on_a_mask_is_not_decided_for_it() -> None:
    data = population()
    task = task_of(Shortcut, data)
    for name in ("factored", "dense"):
        with pytest.raises(UserError, match=r"test_inputs\.py, line \d+: if mask\.all\(\):"):
            choose(name, task, data)
