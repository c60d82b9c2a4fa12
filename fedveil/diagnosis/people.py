"""Rules about participation: cohort size, missing clients, rejected updates, memory."""

from __future__ import annotations

import math

import numpy as np

from fedveil.diagnosis.change import cohort_flags, flags
from fedveil.diagnosis.rule import Numbers, Rule, figure
from fedveil.diagnosis.run import DiagnosedRun

FEW = 5.0  # clients per round: with fewer, the standard error of a mean exceeds 45% of the spread
ABSENT = 0.8  # of the expected cohort: over a whole run, less is not chance
REJECTED = 0.01  # of updates
ABORTED = 0.05  # of rounds
STUCK = 0.9  # memory error of the last quarter over that of the first
SHORT = 8  # rounds: too few to judge a shorter run
UNSERVED = 0.5  # of the population
MANY = 10**9  # clients, if their number is not known


def _cohort(run: DiagnosedRun) -> Numbers | None:
    participants = run.mean("participants", "all")
    if participants is None:
        return None
    cohort, population = run.recipe.cohort, run.population
    if population is None:  # the run has not ended, and its summary names the population
        expected, sampled = participants, cohort.with_size(FEW, MANY) is not None
    else:
        expected = cohort.expected(population)
        sampled = expected < population
    capped = cohort.cap is not None and cohort.cap < run.rounds
    return {
        "came": participants,
        "expected": expected,
        "sampled": float(sampled),
        "capped": float(capped),
    }


FEW_CLIENTS = Rule(
    "too few clients",
    _cohort,
    lambda n: n["expected"] < FEW and bool(n["sampled"]),
    lambda n: f"only {figure(n['came'])} clients participate per round",
    lambda n: f"sample at least {FEW:g} clients per round",
    command=lambda run, n: cohort_flags(run.recipe, FEW, run.population or FEW),
)

MISSING = Rule(
    "missing clients",
    _cohort,
    lambda n: n["came"] < ABSENT * n["expected"],
    lambda n: (
        f"{figure(n['came'])} clients participated per round, but {figure(n['expected'])} were "
        "expected"
    ),
    lambda n: (
        "raise the cap, or use a smaller cohort or fewer rounds, so that clients do not reach it"
        if n["capped"]
        else "make sure that clients are available, and that the cohort draws as many as it expects"
    ),
)


def _rejected(run: DiagnosedRun) -> Numbers | None:
    lost, received = run.column("rejected").sum(), run.column("participants").sum()
    if not received:
        return None
    whom = run.clients
    worst = 0
    if whom is not None:
        lost_rows = whom.filter(whom["norm"].is_null())
        worst = lost_rows["client"].n_unique()
    return {"lost": float(lost), "share": float(lost / received), "clients": float(worst)}


REJECTED_UPDATES = Rule(
    "rejected updates",
    _rejected,
    lambda n: n["share"] >= REJECTED,
    lambda n: (
        f"{n['lost']:,.0f} updates ({n['share']:.1%})"
        + (f" of {n['clients']:.0f} clients" if n["clients"] else "")
        + " were rejected because they were not finite"
    ),
    lambda n: "lower the clients' learning rate, and check these clients' data",
    command=lambda run, n: flags(run.recipe, learning_rate=run.recipe.local.rate(0) / 2),
)


def _aborted(run: DiagnosedRun) -> Numbers | None:
    aborted = sum(bool(row.get("aborted")) for row in run.rows)
    return {"aborted": float(aborted), "rounds": float(run.rounds), "share": aborted / run.rounds}


ABORTED_ROUNDS = Rule(
    "aborted rounds",
    _aborted,
    lambda n: n["share"] >= ABORTED,
    lambda n: (
        f"{n['aborted']:.0f} of {n['rounds']:.0f} rounds were aborted because fewer clients "
        "participated than the noise requires"
    ),
    lambda n: "raise the sampling rate, or lower honest",
)


def _memory(run: DiagnosedRun) -> Numbers | None:
    memory, errors = run.recipe.memory, run.column("memory_error")
    errors = errors[np.isfinite(errors)]
    quarter = len(errors) // 4
    if not memory.kept or len(errors) < SHORT:
        return None
    first, last = errors[:quarter].mean(), errors[-quarter:].mean()
    rate = run.mean("participants", "all") or 1.0
    share = 1.0 if run.population is None else min(rate / run.population, 1.0)
    moves = max(run.total_rounds * share, 1.0)  # of a client's memory, each of at most β
    return {
        "first": float(first),
        "last": float(last),
        "ratio": float(last / first) if first else 0.0,
        "beta": memory.rate,
        "reach": memory.rate * moves,
        # With noise, v̂ should arrive at the end and not before: later moves are only noise.
        "raise_to": float(first / run.total_rounds if run.signal_to_noise else 2 * first / moves),
        "lower_to": memory.rate / 4,
    }


FORGETFUL = Rule(
    "memory error does not shrink",
    _memory,
    lambda n: n["ratio"] >= STUCK or (n["reach"] < n["first"] / 2 and n["raise_to"] > n["beta"]),
    lambda n: (
        "clients' memory does not catch up with their updates. Its mean error is "
        f"{figure(n['first'])} in the first quarter of the rounds and {figure(n['last'])} in the "
        f"last. β = {figure(n['beta'])} moves it by at most {figure(n['reach'])} over the run"
    ),
    lambda n: (
        f"raise β to {figure(n['raise_to'])}"
        if n["raise_to"] > n["beta"]
        else f"lower β to {figure(n['lower_to'])}, because the memory overshoots"
    ),
    needs=("memory_error",),
    command=lambda run, n: flags(
        run.recipe, beta=n["raise_to"] if n["raise_to"] > n["beta"] else n["lower_to"]
    ),
)


def _served(run: DiagnosedRun) -> Numbers | None:
    if run.clients is None or not run.population or run.recipe.unit == "example":
        return None
    counts = run.clients["client"].value_counts()["count"].to_numpy()
    unserved = run.population - len(counts)
    mean = counts.sum() / run.population
    square = float((counts.astype(np.float64) ** 2).sum()) / run.population
    spread = math.sqrt(max(square - mean**2, 0.0))
    return {
        "unserved": float(unserved),
        "population": float(run.population),
        "share": unserved / run.population,
        "mean": float(mean),
        "deviation": spread,
        "most": float(counts.max()) if len(counts) else 0.0,
    }


NEVER_SAMPLED = Rule(
    "unserved clients",
    _served,
    lambda n: n["share"] >= UNSERVED,
    lambda n: (
        f"{n['unserved']:,.0f} of {n['population']:,.0f} clients never participated. The most "
        f"frequent client participated {n['most']:.0f} times"
    ),
    lambda n: (
        "a larger cohort or more rounds include more of them, if the cohort can draw everyone"
    ),
    wrong=False,
)

RULES = (FEW_CLIENTS, MISSING, REJECTED_UPDATES, ABORTED_ROUNDS, FORGETFUL, NEVER_SAMPLED)
