"""Rules about noise: signal to noise, and which of its three factors is to blame.

    ρ = C/‖noise‖ · mean‖b‖/C · signal/mean‖b‖

The first is what noise, cohort and dimension allow at best, the second how far updates fill C, the
third how far clients agree.
"""

from __future__ import annotations

from fedveil.diagnosis.people import MISSING
from fedveil.diagnosis.rule import Numbers, Rule, figure
from fedveil.diagnosis.run import Run

LOW = 0.3  # below, over 90% of a step's squared length is noise: 1/(1 + 0.3²) = 0.92
AIM = 1.0  # signal to noise worth aiming at: half of a step's squared length


def _factors(run: Run) -> Numbers | None:
    ratio, noise = run.signal_to_noise, run.mean("noise")
    signal, came = run.mean("signal"), run.mean("participants")
    if ratio is None or not noise or signal is None or not came or MISSING(run):
        return None
    bounded = run.bounded() or min(run.reach, run.mean("norm") or run.reach)
    return {
        "signal_to_noise": ratio,
        "best": run.reach / noise,
        "fill": bounded / run.reach,
        "agreement": signal / max(bounded, 1e-30),
        "cohort": came,
        "aim": came * AIM / max(ratio, 1e-9),
        "population": float(run.population or 0),
        "dim": float(run.dim or 0),
    }


def _more_clients(n: Numbers) -> str:
    wanted = f"about {figure(n['aim'])} clients a round would bring it to {AIM:g}"
    if n["population"] and n["aim"] > n["population"]:
        wanted += f", and there are {figure(n['population'])}"
    return f"raise the cohort ({figure(n['cohort'])} now) before the rounds: {wanted}"


DIMENSION = Rule(
    "too much noise for the dimension",
    _factors,
    lambda n: n["signal_to_noise"] < LOW and n["best"] < 1,
    lambda n: (
        f"signal to noise is {figure(n['signal_to_noise'])}, and could be {figure(n['best'])} at "
        "most if all clients agreed, since noise grows with √d"
        + (f" and d is {figure(n['dim'])}" if n["dim"] else "")
    ),
    lambda n: f"{_more_clients(n)}; or take a smaller model, or a larger ε",
)

NOISY = Rule(
    "too much noise",
    _factors,
    lambda n: n["signal_to_noise"] < LOW and n["best"] >= 1 and n["fill"] >= n["agreement"],
    lambda n: (
        f"signal to noise is {figure(n['signal_to_noise'])}, as clients' updates add up to only "
        f"{n['agreement']:.0%} of their norms"
    ),
    lambda n: f"{_more_clients(n)}; or allow a larger ε",
)

RULES = (DIMENSION, NOISY)
