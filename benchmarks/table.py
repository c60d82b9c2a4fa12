"""Outcomes as the table of README.md, with what is needed to read it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.runner import Outcome
from benchmarks.workloads import Workload

IGNORANT = math.log(10)  # the loss of one who knows nothing of ten classes
SHARE, LEAST = 0.1, 0.005  # what counts as noise in the loss: of what was learned, and at least
HEADER = (
    "contestant", "median s", "min s", "rounds", "× limit", "× fedveil", "peak MB",
    "accuracy", "loss", "check",
)  # fmt: skip


@dataclass(frozen=True)
class Conditions:
    """Under which circumstances a run was made."""

    quick: bool
    date: str
    processor: str
    cores: int
    rates: tuple[float, ...]  # matrix products, operations a second, before every contestant
    load: float  # average when the run began
    data: str

    @property
    def rate(self) -> float:
        """The median of what was measured during the run."""
        return statistics.median(self.rates)


def median(outcome: Outcome) -> float:
    """Seconds a round."""
    return statistics.median(outcome.seconds)


def best_of_ours(outcomes: Sequence[Outcome]) -> Outcome | None:
    """fedveil's fastest engine, if any has run."""
    ours = [one for one in outcomes if one.contestant.ours and one.seconds]
    return min(ours, key=median, default=None)


def check(outcome: Outcome, reference: Outcome | None) -> str:
    """Whether a contestant learned what fedveil did; one that learned nothing does not pass."""
    if reference is None:
        return "nothing to compare"
    if not outcome.contestant.private:
        return "reference"
    noise = max(LEAST, SHARE * (IGNORANT - reference.loss))
    near = abs(outcome.loss - reference.loss) <= noise
    return "agrees" if near else "differs"


def row(outcome: Outcome, limit: float, reference: Outcome | None) -> list[str]:
    """One line of the table."""
    if outcome.problem:
        return [outcome.contestant.name, "–", "–", "–", "–", "–", "–", "–", "–", outcome.problem]
    middle = median(outcome)
    return [
        outcome.contestant.name,
        f"{middle:.3g}",
        f"{min(outcome.seconds):.3g}",
        str(len(outcome.seconds)),
        f"{middle / limit:.2f}",
        f"{middle / median(reference):.2f}" if reference else "–",
        f"{outcome.peak / 1e6:.0f}",
        f"{outcome.accuracy:.3f}",
        f"{outcome.loss:.3f}",
        check(outcome, reference),
    ]


def section(one: Workload, outcomes: Sequence[Outcome], rate: float) -> str:
    """A workload's rows below its title and its limit, the fastest first."""
    limit = one.flops / rate
    reference = best_of_ours(outcomes)
    ranked = sorted(outcomes, key=lambda each: median(each) if each.seconds else float("inf"))
    lines = [row(each, limit, reference) for each in ranked]
    title = f"**{one.key}** {one.title}; {one.flops / 1e9:.3g} GFLOP, limit {limit:.3g} s"
    return "\n".join(_line(line) for line in ([title] + [""] * (len(HEADER) - 1), *lines))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(workloads: Sequence[Workload], outcomes: Sequence[Outcome], rate: float) -> str:
    """All workloads in one table."""
    head = [_line(HEADER), _line(["---", *["---:"] * (len(HEADER) - 2), "---"])]
    sections = [
        section(one, [each for each in outcomes if each.workload == one.key], rate)
        for one in workloads
    ]
    return "\n".join([*head, *sections])


def versions(outcomes: Sequence[Outcome]) -> str:
    """Which versions ran, each once."""
    seen = {(name, version) for one in outcomes for name, version in one.versions.items()}
    return ", ".join(f"{name} {version}" for name, version in sorted(seen))


def document(
    workloads: Sequence[Workload], outcomes: Sequence[Outcome], conditions: Conditions
) -> str:
    """README.md of this folder."""
    return TEXT.format(
        table=table(workloads, outcomes, conditions.rate),
        versions=versions(outcomes),
        circumstances=circumstances(conditions),
        share=f"{SHARE:.0%}",
        least=LEAST,
    )


def circumstances(conditions: Conditions) -> str:
    """Two sentences on when, where and how undisturbed."""
    low, high = min(conditions.rates) / 1e9, max(conditions.rates) / 1e9
    kind = "quick run" if conditions.quick else "full run"
    busy = (
        f" The load average was {conditions.load:.1f} at the start: other work was using the "
        "machine, which affects contestants unequally, so neither the seconds nor the ratios in "
        "this table are reliable."
        if conditions.load > 0.5
        else ""
    )
    return (
        f"The last {kind}: {conditions.date}, {conditions.cores} cores of {conditions.processor}. "
        f"Data: {conditions.data}. Matrix products ran at {conditions.rate / 1e9:.0f} GFLOP/s in "
        f"the median, from {low:.0f} to {high:.0f} over the run.{busy}"
    )


TEXT = """\
# Speed compared with other frameworks

`make bench` generates this file. `make bench QUICK=1` takes at most ten minutes; a contestant that
does not get any time is a row that says so.
`python -m benchmarks --only W1 --contestants fedveil,fedjax` prints part of the table.
`--tiny` runs every contestant for two small rounds with hardly any noise. On W1, W4 and W5, where
nothing else is random, losses should be equal (except for Flower, which samples its own
participants, and plain SGD, which does not clip).

{circumstances}

{table}

Versions: {versions}.

## How to read the table

- **median s, min s**: seconds of one round, after one warm-up round. A full run times at least 5
  rounds, a quick one at least 3, and fast contestants continue for some seconds (**rounds** is the
  number timed). A round is everything from sampling participants to the next model, without
  evaluation.
- **× limit**: the median over the limit. The limit is the time of the same local arithmetic without
  privacy at the rate of a 1024×1024 float32 matrix product, measured before every contestant of the
  same run. Operations are counted in `workloads.py`: forward pass, gradient of the weights,
  gradient of the inputs except the first layer's. An engine that needs less arithmetic can be
  below 1.
- **× fedveil**: the median over that of fedveil's fastest engine. Above 1 is slower.
- **peak MB**: the peak resident memory of all its processes together. About 400 MB of each is torch
  and the data.
- **accuracy, loss**: on 10,000 test examples after the warm-up and the first timed rounds.
  **check** is `agrees` where the loss differs from that of fedveil's fastest engine by at most
  {share} of what that engine has learned (log 10 minus its loss), or {least}. Noise, batches and
  Flower's own sampling differ; the mathematics does not.
- A contestant that does not install, fails or runs out of time is a row that says so.

## Setup of the comparison

All contestants have the same split, the same initial model, the same participants in the same
rounds (Flower samples its own), the same local steps, rates and clip of the whole difference, and
Gaussian noise of the same size. A client passes through its examples repeatedly, reshuffled each
time and without a gap. Noise is small where the model is large, so that a few rounds still learn:
this is about speed, not about ε.

Everything is pinned to two cores. A single process has two threads (`OMP_NUM_THREADS=2`), and each
of two processes has one. Every contestant is a separate process, and peers run in environments
below `.cache/bench`.

- **fedveil …**: `prepare` and `step` of `fedveil.training` with that engine.
- **torch, eager loop**: one client after the other, `torch.optim.SGD`.
- **torch.func vmap**: stacked parameters, groups of 4 million numbers.
- **plain SGD**: the same number of steps on the participants' examples together, without clipping
  and noise.
- **Opacus**: `make_private` with hooks or ghost clipping, on batches indexed directly, not by a
  DataLoader, which would take longer than the step.
- **pfl**: `FederatedAveraging` with a central `GaussianMechanism`; two processes by torch's gloo.
- **Flower**: `DifferentialPrivacyServerSideFixedClipping` around `FedAvg` in its simulation, two
  Ray actors of one core.
- **fedjax**: `for_each_client` (jit), the clip in `client_final`, noise on the mean.

pfl, Flower and fedjax work on clients and are in W1 to W3. Opacus has no local steps and is in W4.
"""
