"""Rules about who takes part: how many, how often, and whose updates were lost."""

from __future__ import annotations

import math

import numpy as np

from fedveil.diagnosis.change import cohort_flags, flags
from fedveil.diagnosis.rule import Numbers, Rule, figure
from fedveil.diagnosis.run import Run
from fedveil.parts.memory import ErrorCompensation

FEW = 5.0  # clients a round: with fewer, a mean's standard error is over 45% of their spread
ABSENT = 0.8  # of the expected cohort: a fifth missing over a whole run is no chance
REJECTED = 0.01  # of updates: not finite, so lost
VOID = 0.05  # of rounds
STUCK = 0.9  # memory error of the last quarter over that of the first
SHORT = 8  # rounds of which too little can be said
UNSERVED = 0.5  # of the population


def _cohort(run: Run) -> Numbers | None:
    came = run.mean("participants", "all")
    if came is None:
        return None
    expected = came if run.population is None else run.recipe.cohort.expected(run.population)
    others = expected < (run.population or 0) or run.recipe.cohort.expected(10**9) < 10**9
    return {"came": came, "expected": expected, "sampled": float(others)}


FEW_CLIENTS = Rule(
    "too few clients",
    _cohort,
    lambda n: n["expected"] < FEW and bool(n["sampled"]),
    lambda n: f"{figure(n['came'])} clients a round speak for all",
    lambda n: f"raise the cohort to {FEW:g} at least",
    command=lambda run, n: cohort_flags(run.recipe, FEW, run.population or FEW),
)

MISSING = Rule(
    "missing clients",
    _cohort,
    lambda n: n["came"] < ABSENT * n["expected"],
    lambda n: f"{figure(n['came'])} clients came to a round where {figure(n['expected'])} were due",
    lambda n: "raise the cap, or lower the rate or the rounds, so that clients do not run out",
)


def _rejected(run: Run) -> Numbers | None:
    lost, came = run.column("rejected").sum(), run.column("participants").sum()
    if not came:
        return None
    whom = run.clients
    worst = 0
    if whom is not None:
        lost_rows = whom.filter(whom["norm"].is_null())
        worst = lost_rows["client"].n_unique()
    return {"lost": float(lost), "share": float(lost / came), "clients": float(worst)}


LOST = Rule(
    "rejected updates",
    _rejected,
    lambda n: n["share"] >= REJECTED,
    lambda n: (
        f"{n['lost']:,.0f} updates ({n['share']:.1%}) were rejected, as they were not finite "
        "numbers" + (f", from {n['clients']:.0f} clients" if n["clients"] else "")
    ),
    lambda n: "lower the clients' learning rate, and look at these clients' data",
    command=lambda run, n: flags(run.recipe, learning_rate=run.recipe.local.rate(0) / 2),
)


def _void(run: Run) -> Numbers | None:
    void = sum(bool(row.get("void")) for row in run.rows)
    return {"void": float(void), "rounds": float(run.rounds), "share": void / run.rounds}


EMPTY = Rule(
    "void rounds",
    _void,
    lambda n: n["share"] >= VOID,
    lambda n: (
        f"{n['void']:.0f} of {n['rounds']:.0f} rounds were void, since fewer clients came than "
        "the noise counts on"
    ),
    lambda n: "raise the rate of the cohort, or lower honest",
)


def _memory(run: Run) -> Numbers | None:
    memory, errors = run.recipe.memory, run.column("memory_error")
    errors = errors[np.isfinite(errors)]
    quarter = len(errors) // 4
    if not isinstance(memory, ErrorCompensation) or len(errors) < SHORT:
        return None
    first, last = errors[:quarter].mean(), errors[-quarter:].mean()
    rate = run.mean("participants", "all") or 1.0
    share = 1.0 if run.population is None else min(rate / run.population, 1.0)
    moves = max(run.whole * share, 1.0)  # of a client's memory, each β long at most
    return {
        "first": float(first),
        "last": float(last),
        "ratio": float(last / first) if first else 0.0,
        "beta": memory.beta,
        "reach": memory.beta * moves,
        # With noise, v̂ is to arrive at the end and no sooner: what comes after is noise alone.
        "raise_to": float(first / run.whole if run.signal_to_noise else 2 * first / moves),
        "lower_to": memory.beta / 4,
    }


FORGETFUL = Rule(
    "memory error does not shrink",
    _memory,
    lambda n: n["ratio"] >= STUCK or (n["reach"] < n["first"] / 2 and n["raise_to"] > n["beta"]),
    lambda n: (
        "clients' memory does not catch up with their updates: it is off by "
        f"{figure(n['first'])} on average in the first quarter of the rounds and by "
        f"{figure(n['last'])} in the last, and β = {figure(n['beta'])} moves it by "
        f"{figure(n['reach'])} at most in the whole run"
    ),
    lambda n: (
        f"raise β to {figure(n['raise_to'])}"
        if n["raise_to"] > n["beta"]
        else f"lower β to {figure(n['lower_to'])}, as the memory overshoots"
    ),
    needs=("memory_error",),
    command=lambda run, n: flags(
        run.recipe, beta=n["raise_to"] if n["raise_to"] > n["beta"] else n["lower_to"]
    ),
)


def _served(run: Run) -> Numbers | None:
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


UNHEARD = Rule(
    "unserved clients",
    _served,
    lambda n: n["share"] >= UNSERVED,
    lambda n: (
        f"{n['unserved']:,.0f} of {n['population']:,.0f} clients never took part, and the busiest "
        f"took part {n['most']:.0f} times"
    ),
    lambda n: "a larger cohort or more rounds would hear more of them",
    wrong=False,
)

RULES = (FEW_CLIENTS, MISSING, LOST, EMPTY, FORGETFUL, UNHEARD)
