"""Run and comparison directories as `fedveil train` and `fedveil compare` write them, by hand."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars
import tomli_w

from fedveil import __version__, algorithms
from fedveil.privacy.statement import statement
from fedveil.recipe import Recipe
from fedveil.serialization.codec import to_plain
from fedveil.serialization.versions import versions

DIM = 7850
EPSILON, DELTA = 5.0, 1e-5
CLASSES = ["T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker"]


@functools.cache
def stated(recipe: Recipe, population: int, rounds: int) -> dict[str, Any]:
    """The statement of a real recipe, computed once."""
    return statement(recipe, DIM, population, rounds, DELTA).plain()


def a_recipe(name: str = "dp_fedavg", **parameters: Any) -> Recipe:
    given = {
        "noise_multiplier": 2.0,
        **({"clip": 1.0} if name == "dp_fedavg" else {}),
        **parameters,
    }
    recipe: Recipe = algorithms.ALGORITHMS[name](**given)
    return recipe


def write_run(
    path: Path,
    recipe: Recipe | None = None,
    parameters: dict[str, Any] | None = None,
    rounds: int = 40,
    seed: int = 0,
    cohort: int = 20,
    quality: float = 0.85,
    population: int = 300,
    classes: list[str] | None = None,
    plane: bool = False,
    diagnostics: bool = True,
    **changes: Any,
) -> Path:
    """A finished run; `changes` are to its settings."""
    recipe = recipe or a_recipe()
    rng = np.random.default_rng([seed, rounds, int(1000 * quality)])
    path.mkdir(parents=True)
    settings = {
        "fedveil": __version__, "algorithm": recipe.name, "parameters": parameters or {},
        "data": {"dataset": "fashion-mnist", "partition": "shards", "clients": population},
        "model": "softmax", "rounds": rounds, "epsilon": EPSILON, "delta": DELTA,
        "noise": "seeded", "seed": seed, "recipe": to_plain(recipe), **changes,
    }  # fmt: skip
    settings = {name: value for name, value in settings.items() if value is not None}
    (path / "recipe.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    told = stated(recipe, population, rounds)
    spent = told["views"][told["view"]]["epsilon"]
    rows = records(rounds, cohort, quality, rng, plane, diagnostics, spent)
    polars.DataFrame(rows, infer_schema_length=None).write_parquet(path / "metrics.parquet")
    summary = {
        "algorithm": recipe.name, "data": "fashion-mnist", "fingerprint": "5f" * 32,
        "accuracy": rows[-1]["accuracy"], "loss": rows[-1]["loss"], "rounds": rounds,
        "rounds_planned": rounds, "privacy": told,
        "bytes_sent": sum(row["sent"] for row in rows), "aborted_rounds": 0, "rejected": 0,
        "seconds": 12.0, "seed": seed, "engine": "factored", "engine_reason": "",
        "noise": to_plain(recipe.noise), "versions": versions(),
    }  # fmt: skip
    save(path / "summary.json", summary)
    if diagnostics:
        clients(rounds, cohort, population, rng).write_parquet(path / "clients.parquet")
        save(path / "evaluation.json", evaluation(classes or CLASSES, population, quality, rng))
    return path


def records(
    rounds: int,
    cohort: int,
    quality: float,
    rng: Any,
    plane: bool,
    diagnosed: bool,
    spent: float | None,
) -> list[dict[str, Any]]:
    rows = []
    for k in range(1, rounds + 1):
        done = 1 - np.exp(-4 * k / rounds)
        looked = k % max(1, rounds // 20) == 0 or k == rounds
        norm = float(3 * np.exp(-2 * k / rounds) * rng.lognormal(0, 0.1))
        row: dict[str, Any] = {
            "round": k, "participants": cohort, "rejected": 0, "norm": norm,
            "clipped_fraction": float(np.clip(norm / 3, 0, 1)), "signal": norm / 4,
            "noise": 1.1 if spent else 0.0, "seconds": 0.03, "sent": cohort * DIM * 4,
            "threshold": None, "aborted": False,
            "loss": float(2.3 - 1.7 * quality * done + rng.normal(0, 0.02)) if looked else None,
            "accuracy": float(0.1 + (quality - 0.1) * done + rng.normal(0, 0.006))
            if looked else None,
            "epsilon": float(spent * np.sqrt(k / rounds)) if looked and spent else None,
        }  # fmt: skip
        if diagnosed:
            row |= {
                "norm_median": norm, "norm_deviation": norm / 3, "cosine": float(0.6 * (1 - done)),
                "bias_own": norm / 10, "bias_shared": norm / 15,
                "incremental_norm": max(norm - 1, 0), "second_moment": max(norm - 1, 0) * 1.2,
                "memory_error": None, "heterogeneity": None, "distance": None,
                "position_0": float(4 - 3.5 * done + rng.normal(0, 0.2)) if plane else None,
                "position_1": float(done**2 + rng.normal(0, 0.2)) if plane else None,
            }  # fmt: skip
        rows.append(row)
    return rows


def clients(rounds: int, cohort: int, population: int, rng: Any) -> polars.DataFrame:
    at = np.repeat(np.arange(1, rounds + 1), cohort)
    norm = 3 * np.exp(-2 * at / rounds) * rng.lognormal(0, 0.5, len(at))
    cosine = np.clip(0.6 * np.exp(-4 * at / rounds) + rng.normal(0, 0.2, len(at)), -1, 1)
    frame = polars.DataFrame({
        "round": at, "client": rng.integers(0, population, len(at)), "norm": norm,
        "scale": np.minimum(1, 1 / norm), "cosine": cosine,
        "memory_error": [None] * len(at),
    }, schema_overrides={"memory_error": polars.Float64})  # fmt: skip
    none = polars.when(polars.col("round") == 1).then(None).otherwise(polars.col("cosine"))
    return frame.with_columns(none.alias("cosine"))


def evaluation(classes: list[str], population: int, quality: float, rng: Any) -> dict[str, Any]:
    count = len(classes)
    wrong = rng.dirichlet(np.full(count, 0.4), count) * (1 - quality) + np.eye(count) * quality
    return {
        "classes": classes,
        "confusion": [rng.multinomial(1000, row / row.sum()).tolist() for row in wrong],
        "client_accuracy": {
            "examples": rng.integers(5, 120, population).tolist(),
            "accuracy": rng.beta(8 * quality, 8 * (1 - quality), population).round(4).tolist(),
        },
        "of": "training examples of clients",
    }


def write_comparison(
    path: Path, members: list[tuple[str, Recipe, dict[str, Any]]], seeds: int = 3, **more: Any
) -> Path:
    """Members as (label, recipe, varied parameters), with accuracies that fall in this order."""
    path.mkdir(parents=True)
    told = []
    for place, (label, recipe, parameters) in enumerate(members):
        runs = [f"member-{place}-s{seed}" for seed in range(seeds)]
        quality = 0.85 - 0.4 * place / max(1, len(members))
        for seed, run in enumerate(runs):
            write_run(path / run, recipe, parameters, seed=seed, **{"quality": quality, **more})
        told.append(
            {"label": label, "algorithm": recipe.name, "parameters": parameters, "runs": runs,
             "accuracy": [], "loss": [], "mean": quality, "standard_error": None,
             "epsilon": EPSILON, "best": place == 0, "significant": None}
        )  # fmt: skip
    (path / "comparison.toml").write_text("seeds = 3\n", encoding="utf-8")
    save(
        path / "comparison.json",
        {"members": told, "varied": sorted(members[0][2]), "rounds": more.get("rounds", 40),
         "budget": [EPSILON, DELTA], "view": "models", "selection": None},
    )  # fmt: skip
    return path


def save(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
