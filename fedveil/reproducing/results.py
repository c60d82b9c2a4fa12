"""Results as JSON: every configuration tried, published beside measured, and the verdicts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.reproducing.item import RESULTS, Item
from fedveil.reproducing.judging import Judgement, interval, judged
from fedveil.reproducing.runner import ArmResult, Attempt, Outcome, curves
from fedveil.runs.saved import SavedRun

DIGITS = 6


def plain(outcome: Outcome) -> dict[str, Any]:
    """The results of an item at a scale."""
    from fedveil import __version__

    item, scale = outcome.item, outcome.item.scale(outcome.scale)
    ends = {r.arm.name: list(item.at_ends(r.arm, scale, r.settings)) for r in outcome.arms}
    return {
        "item": item.name,
        "scale": outcome.scale,
        "changes": scale.changes,
        "fedveil": __version__,
        "fingerprint": outcome.fingerprint,
        "cpu_seconds": round(outcome.cpu_seconds, 1),
        "measure": item.measure,
        "better": item.better,
        "arms": [{**_arm(result), "at_ends": ends[result.arm.name]} for result in outcome.arms],
        "tuning": [_attempt(attempt) for attempt in outcome.tuning],
        "claims": [_claim(found) for found in judged(item, scale, outcome.values, ends)],
        "curves": curves(outcome.arms),
    }


def _arm(result: ArmResult) -> dict[str, Any]:
    mean, low, high = interval(list(result.values.values()))
    run = SavedRun.open(result.attempts[0].path)
    privacy = run.summary["privacy"]
    return {
        "name": result.arm.name,
        "algorithm": result.settings.algorithm,
        "parameters": dict(result.settings.parameters),
        "model": result.settings.model,
        "rounds": result.settings.rounds,
        "values": {str(seed): _rounded(value) for seed, value in result.values.items()},
        "mean": _rounded(mean),
        "interval": [_rounded(low), _rounded(high)],
        "published": result.arm.published,
        "spread": result.arm.spread,
        "epsilon": privacy["views"][privacy["view"]]["epsilon"],
        "delta": privacy["delta"],
        "view": privacy["view"],
        "noise": run.summary["noise"],
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "arm": attempt.arm,
        "parameters": dict(attempt.parameters),
        "seed": attempt.seed,
        "value": _rounded(attempt.value),
    }


def _claim(found: Judgement) -> dict[str, Any]:
    told = found.claim.model_dump()
    return {
        "kind": told["kind"],
        "text": told["text"],
        "arms": list(told["arms"]),
        "source": told["source"],
        "verdict": found.verdict,
        "why": found.why,
        "intervals": [[_rounded(end) for end in one] for one in found.intervals],
    }


def _rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def save(folder: Path, found: Mapping[str, Any]) -> Path:
    """papers/results/<paper>.<item>.<scale>.json."""
    from fedveil.comparing.outcome import write

    name = f"{found['item'].replace('/', '.')}.{found['scale']}.json"
    (folder / RESULTS).mkdir(exist_ok=True)
    text = json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False)
    write(folder / RESULTS / name, text + "\n")
    return folder / RESULTS / name


def read(folder: Path, item: Item) -> dict[str, dict[str, Any]]:
    """The committed results of an item, by scale."""
    found = {}
    for scale in item.scales:
        file = folder / RESULTS / f"{item.name.replace('/', '.')}.{scale}.json"
        if file.is_file():
            found[scale] = json.loads(file.read_text(encoding="utf-8"))
    return found
