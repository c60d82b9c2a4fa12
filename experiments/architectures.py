"""Which architectures run on which engine: agreement with the loop, and the cost of private steps.

The cost is CPU time over that of plain SGD without privacy: one model, the same examples in one
batch, the same number of steps. Prints the table of docs/models.md.

    python -m experiments.architectures
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedveil as fv
from fedveil.data.federated import Examples, Federated
from fedveil.engines.dense import DenseEngine
from fedveil.engines.dropout import DropoutStreams
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine, Group
from fedveil.models import build, fix, lora
from fedveil.models.gpt import GPT
from fedveil.models.outputs import logits_of
from fedveil.models.start import construct
from fedveil.parts.local import SGD
from fedveil.parts.schedule import Constant

CLIENTS, EACH, STEPS, REPEATS = 16, 4, 2, 3
TOKENS, LENGTH, WIDTH, CLASSES = 97, 32, 64, 10
DEEP = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": WIDTH}
TEXT = {"vocab_size": TOKENS, "bos_token_id": 0, "eos_token_id": 0}
WIDE = {**DEEP, "intermediate_size": 4 * WIDTH}


class Encoder(nn.Module):
    """torch's own encoder, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        """int64 [n, length] → [n, length, tokens]."""
        logits: Tensor = self.head(self.layers(self.tokens(x)))
        return logits


class Recurrent(nn.Module):
    """torch's own GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        """int64 [n, length] → [n, length, tokens]."""
        logits: Tensor = self.head(self.cells(self.tokens(x))[0])
        return logits


def batch_normed() -> nn.Module:
    """A small convolutional network after `fix`."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(512, CLASSES),
    )  # fmt: skip
    return fix(net)


def from_config(model: str, config: object) -> Callable[[], nn.Module]:
    """A Hugging Face model."""
    return lambda: getattr(hf, model)(config)


def named(name: str) -> Callable[[], nn.Module]:
    """A model of the catalog, for images."""
    return lambda: build(name, images(), torch.Generator().manual_seed(0))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "MLP 3072-64-10": (named("mlp-64"), "images"),
    "convolutions, batch norm after `fix`": (batch_normed, "images"),
    "ResNet-20 (group norm)": (named("resnet20"), "images"),
    "nn.GRU": (Recurrent, "text"),
    "nn.TransformerEncoder, dropout": (Encoder, "text"),
    "fedveil's GPT": (lambda: GPT(TOKENS, 2, WIDTH), "text"),
    "fedveil's GPT, LoRA of rank 4": (lambda: lora(GPT(TOKENS, 2, WIDTH), 4), "text"),
    "GPT-2": (
        from_config(
            "GPT2LMHeadModel",
            hf.GPT2Config(**TEXT, n_layer=2, n_head=4, n_embd=WIDTH, n_positions=LENGTH),
        ),
        "text",
    ),
    "Llama": (from_config("LlamaForCausalLM", hf.LlamaConfig(**WIDE, **TEXT)), "text"),
    "BERT": (from_config("BertForMaskedLM", hf.BertConfig(**WIDE, **TEXT)), "text"),
    "DistilBERT": (
        from_config(
            "DistilBertForMaskedLM",
            hf.DistilBertConfig(**TEXT, n_layers=2, n_heads=4, dim=WIDTH, hidden_dim=4 * WIDTH),
        ),
        "text",
    ),
    "ViT": (
        from_config(
            "ViTForImageClassification",
            hf.ViTConfig(**WIDE, image_size=32, patch_size=8, num_labels=CLASSES),
        ),
        "images",
    ),
}


def images() -> Federated:
    """Random images of 3×32×32."""
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.normal(size=(CLIENTS * EACH, 3, 32, 32)).astype(np.float32))
    return _federated(inputs, torch.from_numpy(rng.integers(0, CLASSES, CLIENTS * EACH)), CLASSES)


def text() -> Federated:
    """Random tokens."""
    rng = np.random.default_rng(0)
    inputs, labels = torch.from_numpy(rng.integers(0, TOKENS, (2, CLIENTS * EACH, LENGTH)))
    return _federated(inputs, labels, TOKENS)


def _federated(inputs: Tensor, labels: Tensor, classes: int) -> Federated:
    offsets = torch.arange(CLIENTS + 1) * EACH
    return Federated("random", inputs, labels, offsets, Examples(inputs, labels), classes)


@dataclass(frozen=True)
class Measured:
    """An engine on a model."""

    rows: Tensor  # the clients' updates
    seconds: float

    def beside(self, loop: Measured, plain: float) -> str:
        """A cell of the table: time over that of plain SGD, and distance from the loop."""
        gap = float((self.rows - loop.rows).abs().max())
        return f"{self.seconds / plain:.1f} ({gap:.0e})".replace("e-0", "e-")


def least(work: Callable[[], object]) -> float:
    """CPU seconds of the fastest of several repeats, after one that is not counted."""
    work()
    found = []
    for _ in range(REPEATS):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


def plain_sgd(module: nn.Module, data: Federated) -> float:
    """All examples as one batch of one model."""
    inputs, labels = data.inputs[:], data.labels[:].flatten()
    trained = [leaf for leaf in module.parameters() if leaf.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1)

    def work() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            cross_entropy(logits_of(module(inputs), module).flatten(0, -2), labels).backward()
            optimizer.step()

    return least(work)


def measure(engine: Engine, task: Task, data: Federated) -> Measured:
    """The clients' updates, and the time for their norms and their sum; dropout is on."""
    plan = SGD(Constant(0.1), steps=STEPS).plan(data.sizes, 0, np.random.default_rng(0))
    clients = np.arange(CLIENTS)
    group, x = Group(data, clients, plan, DropoutStreams(0, 0, clients)), task.flatten()
    scale = torch.ones(CLIENTS, dtype=torch.float64)

    def work() -> None:
        found = engine.updates(x, group)
        found.norms()
        found.weighted_sum(scale)

    return Measured(engine.updates(x, group).rows().clone(), least(work))


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {hf.__version__}, fedveil {fv.__version__}")
    print("| architecture | trained parameters | factored | dense | loop |")
    print("|---|---:|---:|---:|---:|")
    for name, (make, kind) in MODELS.items():
        data = images() if kind == "images" else text()
        plain = plain_sgd(construct(make, seed=0), data)
        task = Task(construct(make, seed=0), "cross_entropy")
        loop = measure(LoopEngine(task), task, data)
        engines = (FactoredEngine(task, CLIENTS), DenseEngine(task, CLIENTS))
        cells = [measure(engine, task, data).beside(loop, plain) for engine in engines]
        alone = f"{loop.seconds / plain:.1f}"
        print(f"| {name} | {task.dim:,} | {' | '.join(cells)} | {alone} |", flush=True)


if __name__ == "__main__":
    main()
