"""A small GPT on Shakespeare under user-level privacy: all parameters or LoRA, with a base or not.

A client is one speech of the private half of the text (its first 64 characters). The base was
trained on the public half without privacy. Prints one JSON object for each run:

    python -m experiments.private_gpt shakespeare.txt
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedveil as fv
from fedveil.data.federated import IGNORED, Examples, Federated
from fedveil.data.sources.shakespeare import CLASSES, encode
from fedveil.models.gpt import GPT
from fedveil.models.start import construct
from fedveil.parts import NoNoise

LENGTH, LAYERS, WIDTH, RANK = 64, 2, 32, 4
CLIP, RATE, EPSILON, DELTA = 0.5, 0.1, 8.0, 1e-5
FAST, CAREFUL = 0.03, 0.01  # server learning rates, chosen by results: no ε covers the choice


def speeches(path: Path) -> list[str]:
    """Every speech without its speaker, in the order of the file."""
    blocks = re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))
    found = (block.strip().partition("\n")[2] for block in blocks)
    return [speech for speech in found if len(speech) > 1]


def windows(texts: list[str]) -> Examples:
    """The first characters of each text and their successors; padding has no label."""
    inputs = torch.zeros(len(texts), LENGTH, dtype=torch.long)
    labels = torch.full((len(texts), LENGTH), IGNORED)
    for row, text in enumerate(texts):
        ids = torch.from_numpy(encode(text[: LENGTH + 1]))
        inputs[row, : len(ids) - 1], labels[row, : len(ids) - 1] = ids[:-1], ids[1:]
    return Examples(inputs, labels)


def clients(texts: list[str]) -> Federated:
    """One client for each speech; every tenth speech is held out for testing."""
    held = np.arange(len(texts)) % 10 == 9
    train = windows([text for text, out in zip(texts, held, strict=True) if not out])
    test = windows([text for text, out in zip(texts, held, strict=True) if out])
    offsets = torch.arange(len(train) + 1)
    return Federated("speeches", train.inputs, train.labels, offsets, test, CLASSES)


def fresh() -> GPT:
    """A model that has seen nothing."""
    model = construct(lambda: GPT(CLASSES, LAYERS, WIDTH), seed=0)
    assert isinstance(model, GPT)
    with torch.no_grad():
        model.start_weights()
    return model


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean over all characters with a label."""
    return cross_entropy(model(inputs).flatten(0, 1), labels.flatten())


def pretrained(texts: list[str], steps: int) -> GPT:
    """A model trained by Adam on all windows of public speeches."""
    cut = [text[at:] for text in texts for at in range(0, len(text) - 1, LENGTH)]
    data = windows(cut)
    model, draws = fresh(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        some = torch.randint(len(data), (64,), generator=draws)
        optimizer.zero_grad()
        loss_of(model, data.inputs[some], data.labels[some]).backward()
        optimizer.step()
    return model


@torch.no_grad()
def perplexity(model: nn.Module, examples: Examples) -> float:
    """Of the next character."""
    return math.exp(float(loss_of(model, examples.inputs[:], examples.labels[:])))


def run(data: Federated, model: nn.Module, rate: float, private: bool, rounds: int) -> dict:
    """Perplexity on the test speeches, four times in a run, and ε."""
    recipe = fv.algorithms.dp_fedadam(
        CLIP, rate=RATE, learning_rate=1.0, steps=1, server_rate=rate, bias_correction=True
    )
    budget = {"epsilon": EPSILON, "delta": DELTA} if private else {}
    if not private:
        recipe = replace(recipe, noise=NoNoise())
    started = time.process_time()
    result = fv.train(
        recipe, data, copy.deepcopy(model), rounds, engine="factored",
        evaluate_every=max(1, rounds // 4), **budget,
    )  # fmt: skip
    return {
        "trained": sum(leaf.numel() for leaf in model.parameters() if leaf.requires_grad),
        "before": round(perplexity(model, data.test), 2),
        "perplexity": [round(math.exp(one.loss), 2) for one in result.records if one.loss],
        "privacy": str(result.statement),
        "seconds": round(time.process_time() - started),
    }


def main() -> None:
    """Train all of them."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("text", type=Path)
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--steps", type=int, default=600, help="of the base on public text")
    asked = options.parse_args()
    torch.set_num_threads(1)
    texts = speeches(asked.text)
    data, base = (
        clients(texts[len(texts) // 2 :]),
        pretrained(texts[: len(texts) // 2], asked.steps),
    )
    print(json.dumps({"clients": data.clients, "test": len(data.test)}), flush=True)
    scratch = fresh()
    for name, model, rate, private in (
        ("random start, all, without noise", scratch, FAST, False),
        ("random start, all", scratch, FAST, True),
        ("random start, LoRA", fv.models.lora(scratch, RANK), FAST, True),
        ("base, all, without noise", base, CAREFUL, False),
        ("base, all", base, CAREFUL, True),
        ("base, LoRA, without noise", fv.models.lora(base, RANK), CAREFUL, False),
        ("base, LoRA", fv.models.lora(base, RANK), CAREFUL, True),
    ):
        found = run(data, model, rate, private, asked.rounds)
        print(json.dumps({"run": name, **found}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
