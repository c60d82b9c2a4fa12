"""The tables of docs/audit.md: coverage of the auditor, every recipe, planted bugs, Flower.

python experiments/audit.py coverage | recipes | discrete | noises | planted | flower PYTHON

Each command writes its table into docs/audit.md, between the two comments that name it.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fedveil import algorithms  # noqa: E402
from fedveil.audit import bounds, guessing  # noqa: E402
from fedveil.audit.mechanism import DELTA as NOISE_DELTA  # noqa: E402
from fedveil.audit.mechanism import audit_noise  # noqa: E402
from fedveil.audit.report import Audit, down  # noqa: E402
from fedveil.audit.run import audit  # noqa: E402
from fedveil.data.catalog import load  # noqa: E402
from fedveil.data.federated import Federated  # noqa: E402
from fedveil.data.partition import Iid, Shards  # noqa: E402
from fedveil.parts import (  # noqa: E402
    Binomial,
    DiscreteGaussian,
    Everyone,
    PublishedLaplace,
    RoundedGaussian,
    TruncatedDiscreteLaplace,
)
from fedveil.privacy.statement import rounded_up  # noqa: E402
from fedveil.recipe import Recipe  # noqa: E402

DOCUMENT = ROOT / "docs" / "audit.md"
DELTA = 1e-5
CANARIES = 500


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def write(name: str, lines: list[str]) -> None:
    """Put lines between the comments of this name."""
    text = DOCUMENT.read_text(encoding="utf-8")
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    DOCUMENT.write_text(before + start + "\n".join(lines) + "\n" + end + after, encoding="utf-8")


# ------------------------------------------------------------------- coverage of the auditor


def release(mu: float, dim: int, rounds: int, others: float, rng: np.random.Generator) -> float:
    """The ε that the Gaussian bound finds for one release, from real draws of canaries."""
    seen: list[bounds.Aligned] = []
    answer = np.ones(dim, dtype=np.float32) / math.sqrt(dim)
    for _ in range(rounds):
        rows = rng.standard_normal((CANARIES // rounds, dim), dtype=np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        total = rows.sum(axis=0, dtype=np.float64)
        noise = rng.standard_normal(dim) / (mu or 1.0)
        shown = others * answer + (total if mu else 0.0) + noise
        answer = (shown / np.linalg.norm(shown)).astype(np.float32)
        seen += bounds.Aligned.of(total, shown)
    return bounds.gaussian_epsilon(bounds.alignment_mu(seen), DELTA)


@cache
def one_run(guesses: guessing.Guesses) -> float:
    """The assumption-free bound."""
    return guessing.one_run_epsilon(guesses, DELTA)


@cache
def by_curve(guesses: guessing.Guesses) -> float:
    """The bound by the trade-off curve."""
    return bounds.gaussian_epsilon(guessing.trade_off_mu(guesses), DELTA)


Bound = Callable[[guessing.Guesses], float]


def guessed(bound: Bound, mu: float, made: int, rng: np.random.Generator) -> float:
    """A bound from scores N(0, 1) of excluded canaries and N(μ, 1) of included ones."""
    included = rng.random(CANARIES) < 0.5
    scores = rng.standard_normal(CANARIES) + mu * included
    return bound(guessing.guess(scores, included, made))


def whole_audits(repetitions: int) -> list[float]:
    """Audits of real runs on digits, calibrated to ε = 4."""
    data = load("digits").split(Iid(100))
    recipe = replace(algorithms.dp_fedavg(clip=0.3, steps=2), cohort=Everyone())
    runs = (
        audit(recipe, data, rounds=3, epsilon=4.0, delta=DELTA, canaries=CANARIES, seed=seed)
        for seed in range(repetitions)
    )
    return [run.towards("models").audited for run in runs]


def row(what: str, truth: float, found: list[float]) -> list[str]:
    """How often a bound exceeded the true ε, and its values."""
    wrong = np.mean(np.array(found) > truth * (1 + 1e-9))
    margin = 0.05 + 2 * math.sqrt(0.05 * 0.95 / len(found))
    return [
        what, f"{truth:g}", f"{len(found)}", f"{wrong:.1%}", f"{margin:.1%}",
        f"{np.mean(found):.3f}", f"{np.max(found):.3f}",
    ]  # fmt: skip


def coverage_rows(repetitions: int) -> Iterator[list[str]]:
    """Every method on mechanisms with a known ε."""
    rng = np.random.default_rng(0)
    for epsilon, dim in ((0.0, 1000), (1.0, 1000), (4.0, 7850), (8.0, 1000)):
        mu = bounds.gaussian_mu(epsilon, DELTA) if epsilon else 0.0
        found = [release(mu, dim, 1, 0.0, rng) for _ in range(repetitions)]
        yield row(f"gaussian, one release of d = {dim}", epsilon, found)
    mu = bounds.gaussian_mu(4.0, DELTA)
    found = [release(mu, 300, 5, 40.0, rng) for _ in range(repetitions)]
    yield row(
        "gaussian, 5 rounds of d = 300, others answer with ten times a canary's share", 4.0, found
    )
    for name, bound in (("one-run", one_run), ("f-DP", by_curve)):
        for epsilon in (0.0, 1.0, 4.0, 8.0):
            mu = bounds.gaussian_mu(epsilon, DELTA) if epsilon else 0.0
            made = guessing.number_of_guesses(CANARIES, mu)
            found = [guessed(bound, mu, made, rng) for _ in range(repetitions)]
            yield row(f"{name}, {made} guesses at a Gaussian release", epsilon, found)
    right = rng.binomial(100, 1 / (1 + math.exp(-1.5)), size=repetitions)
    found = [one_run(guessing.Guesses(100, 100, int(v))) for v in right]
    yield row("one-run, randomized response of 100 coins", 1.5, found)
    yield row("gaussian, whole audits of dp_fedavg on digits", 4.0, whole_audits(repetitions))


def coverage() -> list[str]:
    """500 repetitions of each."""
    head = ["method", "true ε", "runs", "above it", "allowed", "mean bound", "largest"]
    return table(head, coverage_rows(500))


# ------------------------------------------------------------------- every recipe


def gaussian_recipes() -> dict[str, Recipe]:
    """The recipes with Gaussian noise, in the setting of W1."""
    rate = {"rate": 0.2, "steps": 20, "learning_rate": 0.016}
    fixed = {"clients": 600, "steps": 20, "learning_rate": 0.016}
    return {
        "`dp_fedavg`": algorithms.dp_fedavg(clip=62.5, **rate),
        "`dp_fedavg`, 600 clients, who add the noise": algorithms.dp_fedavg(
            clip=62.5, noise_at="client", **fixed
        ),
        "`dp_fedavg_adaptive`": algorithms.dp_fedavg_adaptive(start=30.0, **rate),
        "`dp_norm_fedavg`": algorithms.dp_norm_fedavg(scale=62.5, **rate),
        "`dp_norm_fedavg`, few levels": algorithms.dp_norm_fedavg(
            scale=62.5, levels="auto", **rate
        ),
        "`alpha_normec`": algorithms.alpha_normec(private=True),
        "`fed_alpha_normec`": algorithms.fed_alpha_normec(rate=0.2),
        "`dp_sgd`": algorithms.dp_sgd(rate=0.05),
        "`dp_lsgd`": algorithms.dp_lsgd(rate=0.05),
    }


def discrete_recipes() -> dict[str, Recipe]:
    """The recipes whose clients add integer noise, with every client in every round."""
    return {
        "`dp_norm_fedavg_discrete`": algorithms.dp_norm_fedavg_discrete(rate=1.0, steps=2),
        "`dp_norm_fedavg_secagg`": algorithms.dp_norm_fedavg_secagg(clients=600, steps=2),
        "`dp_norm_fedavg_qtdl`": algorithms.dp_norm_fedavg_qtdl(clients=600, steps=2),
        "`dp_norm_fedavg_binomial`": algorithms.dp_norm_fedavg_binomial(clients=600, steps=2),
    }


HEAD = ["recipe", "unit", "view", "proven ε ≤", "found ε ≥", "by", "f-DP ε ≥", "estimate", "alarm"]


def recipes() -> list[str]:
    """20 rounds on the data of W1."""
    data = load("fashion-mnist").split(Shards(3000, 5))
    return table(HEAD, audit_rows(gaussian_recipes(), data, 20))


def discrete() -> list[str]:
    """5 rounds on digits over 100 clients."""
    data = load("digits").split(Iid(100))
    return table(HEAD, audit_rows(discrete_recipes(), data, 5))


def audit_rows(listed: dict[str, Recipe], data: Federated, rounds: int) -> Iterator[list[str]]:
    """An audit of each recipe, calibrated to ε = 4 in its own view."""
    for name, recipe in listed.items():
        found = audit(
            recipe, data, rounds=rounds, epsilon=4.0, delta=DELTA, canaries=CANARIES, seed=1
        )
        yield from finding_rows(name, found)


def finding_rows(name: str, found: Audit) -> Iterator[list[str]]:
    """The views of one audit that have a proven ε."""
    for finding in found.findings:
        if not finding.bounds:
            continue
        curve = next((down(one.epsilon) for one in finding.bounds if one.method == "f-DP"), "")
        estimate = finding.estimate
        about = "" if estimate is None else f"{estimate.epsilon:.3g} ({estimate.method})"
        yield [
            name, found.unit, finding.view, rounded_up(finding.proven), down(finding.audited),
            finding.bounds[0].method, curve, about, "**yes**" if found.alarm else "no",
        ]  # fmt: skip


# ------------------------------------------------------------------- noises, planted bugs, Flower


def noises() -> list[str]:
    """Black-box tests of every discrete noise, in one, two and four dimensions."""
    listed = [
        RoundedGaussian(2.0), RoundedGaussian(0.5), DiscreteGaussian(20.0, 200),
        DiscreteGaussian(4.0, 40), Binomial(800), Binomial(100),
        TruncatedDiscreteLaplace(0.05, 400), PublishedLaplace(epsilon=0.5),
    ]  # fmt: skip
    rows = []
    for noise in listed:
        for dim in (1, 2, 4):
            found = audit_noise(noise, np.random.default_rng(0), dim=dim)
            claimed = f"{found.claimed:.3g}" if math.isfinite(found.claimed) else "nothing"
            verdict = found.violation or "none"
            rows.append([f"`{noise}`", f"{dim}", claimed, f"{found.audited:.3g}", verdict])
    head = ["noise", "d", f"claimed ε at δ = {NOISE_DELTA:g}", "found ε ≥", "contradiction"]
    return table(head, rows)


def planted() -> list[str]:
    """Which check detects which planted bug."""
    from tests.statistics.audit.planted import LISTED, PLANTED, noticed

    data = load("digits").split(Iid(100))
    rows = []
    for place, bug in enumerate(PLANTED):
        found = noticed(bug, data)
        marks = ["yes" if by else "" for by in found.values()]
        rows.append([str(place + 1), bug.mistake, *marks])
        assert any(found.values()), bug.mistake
    head = ["", "bug", "audit of a run", "test of its noise", "contract suite"]
    counts = ", ".join(
        f"{who} {sum(r[i + 2] == 'yes' for r in rows)}" for i, who in enumerate(head[2:])
    )
    caught = (
        f"{len(rows)} planted, {len(rows)} caught ({counts}); 1 to {len(LISTED)} are the list's."
    )
    return [*table(head, rows), "", caught]


def flower(python: str) -> list[str]:
    """`fedveil conform examples/flower_adapter.py`, run by a Python that has flwr 1.41."""
    done = subprocess.run(
        [python, "-m", "fedveil", "conform", "examples/flower_adapter.py"],
        cwd=ROOT, capture_output=True, text=True, check=False, env={"NO_COLOR": "1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    return ["```", *done.stdout.splitlines(), "```"]


def main() -> None:
    """Write one section."""
    listed = (coverage, recipes, discrete, noises, planted)
    sections = {section.__name__: section for section in listed}
    match sys.argv[1:]:
        case [name] if name in sections:
            write(name, sections[name]())
        case ["flower", python]:
            write("flower", flower(python))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
