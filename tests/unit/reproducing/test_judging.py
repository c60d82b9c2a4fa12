"""Verdicts: decided only if the whole interval is on one side and the baseline is trained."""

from __future__ import annotations

from typing import Any

import pytest

from fedveil.reproducing.item import Arm, Claim, Item, Power, Scale
from fedveil.reproducing.judging import Verdict, interval, judged

CLEAR = {"good": {0: 80.0, 1: 81.0, 2: 80.5}, "bad": {0: 70.0, 1: 71.2, 2: 70.4}}


def item(claim: Claim, better: str = "higher") -> Item:
    return Item(
        title="t", citation="c", measure="accuracy", better=better,  # type: ignore[arg-type]
        settings={}, arms=(Arm(name="good"), Arm(name="bad")), claims=(claim,), scales={},
    )  # fmt: skip


def verdict(
    claim: Claim, values: dict[str, dict[int, float]], better: str = "higher", **scale: Any
) -> Verdict:
    (found,) = judged(item(claim, better), Scale(changes=".", **scale), values)
    return found.verdict


def claim(kind: Any, *arms: str, **more: Any) -> Claim:
    return Claim(kind=kind, text="t", arms=arms, **more)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (claim("order", "good", "bad"), "holds"),
        (claim("order", "bad", "good"), "fails"),
        (claim("order", "bad", "good", tolerance=12.0), "holds"),
        (claim("gap", "good", "bad", at_least=5.0), "holds"),
        (claim("gap", "good", "bad", at_least=15.0), "fails"),
        (claim("gap", "good", "bad", at_least=10.0), "inconclusive"),
        (claim("level", "good", at_least=75.0), "holds"),
        (claim("level", "good", at_least=90.0), "fails"),
        (claim("level", "good", at_least=80.5), "inconclusive"),
        (claim("trend", "good", "bad"), "holds"),
        (claim("trend", "good", "bad", "good"), "fails"),
        (claim("exact", "good", value=80.5, tolerance=1.0), "holds"),
        (claim("exact", "good", value=80.5, tolerance=0.1), "fails"),
        (claim("order", "good", "absent"), "not testable at this scale"),
    ],
)
def test_each_kind_of_claim_has_a_rule(asked: Claim, expected: Verdict) -> None:
    assert verdict(asked, CLEAR) == expected


def test_lower_is_better_turns_the_rules_around() -> None:
    assert verdict(claim("order", "bad", "good"), CLEAR, "lower") == "holds"
    assert verdict(claim("order", "good", "bad"), CLEAR, "lower") == "fails"
    assert verdict(claim("level", "bad", at_least=75.0), CLEAR, "lower") == "holds"
    assert verdict(claim("level", "good", at_least=75.0), CLEAR, "lower") == "fails"


def test_noise_and_few_seeds_decide_nothing() -> None:
    noisy = {"good": {0: 80.0, 1: 60.0, 2: 75.0}, "bad": {0: 70.0, 1: 72.0, 2: 71.0}}
    assert verdict(claim("order", "good", "bad"), noisy) == "inconclusive"
    one = {arm: {0: values[0]} for arm, values in CLEAR.items()}
    assert verdict(claim("order", "good", "bad"), one) == "inconclusive"
    apart = {"good": {0: 80.0, 1: 80.1}, "bad": {2: 70.0, 3: 70.1}}  # no common seed
    assert verdict(claim("order", "good", "bad"), apart) == "inconclusive"


def test_an_undertrained_baseline_and_a_small_scale_decide_nothing() -> None:
    asked = claim("order", "good", "bad")
    enough, more = (Power(arm="bad", at_least=level) for level in (70.0, 75.0))
    assert verdict(asked, CLEAR, power=enough) == "holds"
    assert verdict(asked, CLEAR, power=more) == "not testable at this scale"
    assert verdict(asked, CLEAR, decides=False) == "not testable at this scale"
    errors = claim("order", "bad", "good")  # with "lower is better", 70 is enough of at most 75
    assert verdict(errors, CLEAR, "lower", power=more) == "holds"
    assert verdict(errors, CLEAR, "lower", power=enough) == "not testable at this scale"


def test_pairs_share_what_seeds_have_in_common() -> None:
    shared = {seed: 10.0 * seed for seed in range(3)}  # hard and easy problems
    values = {
        "good": {s: v + 1 for s, v in shared.items()},
        "bad": {s: v + 0.1 * s for s, v in shared.items()},
    }
    assert verdict(claim("order", "good", "bad"), values) == "holds"
    mean, low, high = interval([0.0, 1.0, 2.0])
    assert (mean, round(high - mean, 3), round(mean - low, 3)) == (1.0, 2.484, 2.484)


def test_a_loser_at_an_end_of_its_grid_has_not_lost() -> None:
    asked = claim("order", "good", "bad", tuned=True)
    for ends, expected in (({"bad": ["clip"]}, "inconclusive"), ({"good": ["clip"]}, "holds")):
        (found,) = judged(item(asked), Scale(changes="."), CLEAR, ends)
        assert found.verdict == expected
    (found,) = judged(item(asked), Scale(changes="."), CLEAR, {"bad": ["clip"]})
    assert "bad is at an end of its grid (clip)" in found.why
