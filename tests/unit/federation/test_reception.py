"""What a federation's server takes in, and what it does with everything else."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from scipy.stats import binom
from torch import Tensor

from fedveil import algorithms, loop
from fedveil.accounting.accountant import delta
from fedveil.accounting.norms import Norms
from fedveil.engines.bounding import held_steps
from fedveil.errors import UserError
from fedveil.federation.reception import (
    MOST_EXAMPLES,
    Message,
    Reception,
    read_floats,
    read_levels,
    write_floats,
    write_levels,
)
from fedveil.loop import Info, State, begin, client_message, run_round
from fedveil.parts.cohort import Everyone, FixedSize, Poisson
from fedveil.parts.discrete import Binomial
from fedveil.privacy.secure import secured
from fedveil.recipe import Recipe
from fedveil.runs.saved import SavedRun
from fedveil.testing.replay import Scripted, people
from fedveil.training import start as starting
from fedveil.training.prepare import prepare
from fedveil.training.run import Training
from fedveil.wire import Wire
from tests.unit.accounting.test_integers import hockey_stick

SHAPES = {"weight": (2, 3), "bias": (2,)}
DIM, CLIENTS, KEY = 8, 12, 5
CLIP = 1.0
PLAIN = replace(algorithms.clipped_fedavg(clip=CLIP, server_rate=1.0), cohort=Everyone())
NOISY = algorithms.dp_fedavg(clip=CLIP, rate=0.5, noise_multiplier=1.0)
ADAPTIVE = algorithms.dp_fedavg_adaptive(rate=0.5, noise_multiplier=1.0)
SECURE = secured(NOISY)
BINOMIAL = replace(
    algorithms.dp_norm_fedavg_binomial(clients=6, trials=64, levels=8), view="messages"
)
MODULAR = replace(BINOMIAL, view="sum")
WHOLE = secured(ADAPTIVE)
COMPENSATED = replace(algorithms.alpha_normec(), cohort=FixedSize(6))
ALL = [PLAIN, NOISY, ADAPTIVE, SECURE, WHOLE, BINOMIAL, COMPENSATED]
ANSWERS = [torch.randn(DIM, generator=torch.Generator().manual_seed(i)) for i in range(CLIENTS)]
ANSWERS[3] = torch.zeros(DIM)


def opened(recipe: Recipe, state: State | None = None) -> Reception:
    return Reception(recipe, state or start(recipe), SHAPES, CLIENTS, KEY)


def start(recipe: Recipe) -> State:
    return begin(recipe, torch.zeros(DIM), people(CLIENTS), 3, KEY)


def honest(recipe: Recipe, state: State, client: int) -> bytes:
    """What a client of the recipe sends, computed from its own data alone."""
    remembered = None if state.memory is None else state.memory[np.array([client])][0]
    answer = Scripted([ANSWERS[client]])
    made = client_message(recipe, state, people(1), answer, KEY, client, remembered)
    wire = recipe.wire(DIM, CLIENTS)
    if wire is None:
        return write_floats(made.numbers, SHAPES)
    return write_levels(made.numbers.numpy(), wire)


def sent(reception: Reception, body: Callable[[int], bytes]) -> list[Message]:
    return [Message(i.client, i.round, i.nonce, 20, body(i.client)) for i in reception.invitations]


def counting(message: Message, state: State) -> Message:
    """A client under an adaptive clip says whether its update was short, before it clipped it."""
    scale, offset = WHOLE.report.affine(WHOLE.local.rate(state.round))
    report = scale * ANSWERS[message.client] + offset * state.x
    threshold = float(state.parts["bound"]["threshold"])
    return replace(message, short=float(report.double().norm()) <= threshold)


@pytest.mark.parametrize("recipe", ALL, ids=lambda r: f"{r.name} {r.view} {type(r.noise).__name__}")
def test_honest_messages_make_the_loop_s_own_round(recipe: Recipe) -> None:
    before = start(recipe)
    reception = opened(recipe, before)
    for message in reversed(sent(reception, lambda client: honest(recipe, before, client))):
        full = counting(message, before) if recipe is WHOLE else message
        assert reception.take(full).taken, message
    state, info = reception.close()
    expected, told = run_round(recipe, start(recipe), people(CLIENTS), Scripted(ANSWERS), KEY)
    tolerance = 0.0 if recipe.wire(DIM, CLIENTS) else 1e-6
    torch.testing.assert_close(state.x, expected.x, rtol=0, atol=tolerance)
    assert (info.participants, info.rejected) == (told.participants, 0)
    assert info.threshold == told.threshold
    if expected.parts["bound"] is not None:
        assert state.parts["bound"] == expected.parts["bound"]


class Served:
    """A source whose rounds go through a reception: reserve, receive, publish, commit."""

    def __call__(self, run: Training) -> tuple[State, Info]:
        assert run.session is not None
        self.reserved = run.session.rounds  # when the first invitation goes out
        shapes = {name: tuple(shape) for name, shape in run.task.shapes.items()}
        reception = Reception(run.recipe, run.state, shapes, run.data.clients, run.key)
        zeros = write_floats(torch.zeros(run.task.dim), shapes)
        for message in sent(reception, lambda client: zeros):
            assert reception.take(message).taken
        return reception.close()


def test_a_served_round_is_reserved_in_the_ledger_before_anyone_is_asked(tmp_path: Any) -> None:
    source = Served()
    made = prepare(NOISY, people(CLIENTS), rounds=1, delta=1e-5, source=source)
    asked = len(loop.cohort_of(NOISY, made.state, CLIENTS, made.key))
    made.enrol(tmp_path / "ledger.sqlite", saved=True)
    assert made.session is not None
    record = made.step()
    assert (record.round, made.session.rounds, source.reserved) == (1, 1, 1)
    assert record.signal == 0.0  # every client of this reception sends zeros
    assert record.participants == asked > 0
    made.session.close()


def test_a_served_run_is_started_saved_and_concluded_like_any_other(tmp_path: Any) -> None:
    made = prepare(NOISY, people(CLIENTS), rounds=2, delta=1e-5, source=Served())
    result = starting.finish(starting.start(made, tmp_path / "a"))
    saved = SavedRun.open(tmp_path / "a")
    assert saved.summary["rounds"] == saved.rounds == len(saved.rows) == len(result.records) == 2
    assert saved.summary["privacy"]["ledger"] == "Recorded (`fedveil budget show`)."
    again = prepare(NOISY, people(CLIENTS), rounds=2, delta=1e-5, source=Served())
    assert starting.resume(again, tmp_path / "a").finished


def one(reception: Reception, body: bytes | None = None, **changes: Any) -> Message:
    first = reception.invitations[0]
    good = Message(
        first.client,
        first.round,
        first.nonce,
        20,
        floats(torch.zeros(DIM)) if body is None else body,
    )
    return replace(good, **changes)


def floats(vector: Tensor) -> bytes:
    return write_floats(vector.float(), SHAPES)


def filled(value: float, place: int = 2) -> Tensor:
    vector = torch.zeros(DIM)
    vector[place] = value
    return vector


def lying(header: dict[str, Any], numbers: bytes = b"\0" * 32) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + numbers


def entry(shape: list[int], ends: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": ends}


GOOD = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
MALFORMED = {
    "NaN": floats(filled(math.nan)),
    "+∞": floats(filled(math.inf)),
    "−∞": floats(filled(-math.inf)),
    "wrong shape": save({**GOOD, "bias": torch.zeros(3)}),
    "transposed": save({**GOOD, "weight": torch.zeros(3, 2)}),
    "float64": save({**GOOD, "bias": torch.zeros(2, dtype=torch.float64)}),
    "whole numbers": save({**GOOD, "bias": torch.zeros(2, dtype=torch.int32)}),
    "an extra key": save({**GOOD, "more": torch.zeros(1)}),
    "a missing key": save({"weight": torch.zeros(2, 3)}),
    "empty": b"",
    "no safetensors": b"garbage" * 9,
    "too long": floats(torch.zeros(DIM)) + b"\0" * 2**21,
    "cut off": floats(torch.zeros(DIM))[:-1],
    "a header longer than the message": (2**40).to_bytes(8, "little") + b"{}",
    "a header of 2^64": b"\xff" * 8 + b"{}",
    "shape and bytes differ": lying({"weight": entry([2, 3], [0, 8]), "bias": entry([2], [8, 16])}),
    "overlapping numbers": lying({"weight": entry([2, 3], [0, 24]), "bias": entry([2], [0, 8])}),
    "numbers beyond the end": lying(
        {"weight": entry([2, 3], [0, 24]), "bias": entry([2], [90, 98])}
    ),
    "an overflowing shape": lying(
        {"weight": entry([2**62, 2**62], [0, 24]), "bias": entry([2], [24, 32])}
    ),
    "a negative shape": lying({"weight": entry([-2, -3], [0, 24]), "bias": entry([2], [24, 32])}),
    "an unknown type": lying(
        {"weight": entry([2, 3], [0, 24], "F33"), "bias": entry([2], [24, 32])}
    ),
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_message_counts_as_zero_and_its_client_may_send_again(body: bytes) -> None:
    reception = opened(PLAIN)
    messages = sent(reception, lambda client: floats(filled(0.5)))
    verdict = reception.take(replace(messages[0], body=body))
    assert (verdict.reason, verdict.taken) == ("malformed", False)
    assert verdict.why.count("\n") == 0
    for message in messages[1:]:
        assert reception.take(message).taken
    state, info = reception.close()
    assert (info.participants, info.rejected) == (CLIENTS - 1, 1)
    torch.testing.assert_close(state.x, filled(0.5 * (CLIENTS - 1) / CLIENTS))
    again = opened(PLAIN)
    assert not again.take(one(again, body)).taken
    assert again.take(one(again)).taken


@pytest.mark.parametrize(
    ("vector", "norm"),
    [
        (filled(7.0), CLIP),
        (filled(1.005), CLIP),
        (filled(1 + 2.0**-20), CLIP),
        (torch.full((DIM,), 1e30), CLIP),  # the square of the norm is beyond float32
        (torch.full((DIM,), 3e38), 0.0),  # and so is the scale: sent as zero, as in the loop
        (filled(1e-45), 0.0),
        (filled(1e-39), 0.0),
        (torch.zeros(DIM), 0.0),
    ],
    ids=[
        "over-norm",
        "half a percent over",
        "a millionth over",
        "norm overflow",
        "scale underflow",
        "smallest subnormal",
        "subnormal",
        "zero",
    ],
)
def test_the_server_bounds_again(vector: Tensor, norm: float) -> None:
    reception = opened(PLAIN)
    assert reception.take(one(reception, floats(vector))).taken
    state, info = reception.close()
    length = float(state.x.double().norm()) * CLIENTS
    assert length <= CLIP
    assert length == pytest.approx(norm, abs=1e-5)
    assert bool(torch.isfinite(state.x).all())
    assert float(info.norms[0]) == pytest.approx(float(vector.double().norm()))


def test_whole_numbers_are_bounded_again() -> None:
    reception = opened(SECURE)
    wire = SECURE.wire(DIM, CLIENTS)
    steps = SECURE.message(DIM).steps
    assert wire is not None
    most = np.full(DIM, wire.low + 2**wire.bits - 1)
    assert reception.take(one(reception, write_levels(most, wire))).taken
    total = reception._total.sum.numpy()
    assert np.abs(total).sum() <= steps.l1
    assert np.sqrt((total.astype(float) ** 2).sum()) <= steps.l2
    assert np.abs(total).max() <= steps.linf
    assert (total > 0).all()


def test_short_updates_are_counted_where_messages_are_whole_numbers() -> None:
    """The threshold follows what clients say; a message that does not say it is refused."""
    ends = {}
    for short in (True, False):
        reception = opened(WHOLE)
        for message in sent(reception, lambda client: honest(WHOLE, start(WHOLE), client)):
            assert reception.take(message).reason == "malformed"
            assert reception.take(replace(message, short=2)).reason == "malformed"
            assert reception.take(replace(message, short=short)).taken
        ends[short] = float(reception.close()[0].parts["bound"]["threshold"])
    came = len(opened(WHOLE).invitations)
    step = WHOLE.bound.rate * came / WHOLE.cohort.expected(CLIENTS)
    assert math.log(ends[False] / ends[True]) == pytest.approx(min(step, WHOLE.bound.rate), rel=0.2)


def test_whoever_takes_messages_one_by_one_is_no_secure_aggregation() -> None:
    with pytest.raises(UserError, match="a reception sees every single message, as in view"):
        opened(MODULAR)


@pytest.mark.parametrize("cohort", [FixedSize(6), FixedSize(6, cap=2), Everyone()], ids=repr)
def test_clients_noise_that_is_amplified_is_not_received(cohort: Any) -> None:
    """A message that stays out voids the round: the model shows who was drawn."""
    hidden = replace(BINOMIAL, view="models", cohort=cohort)
    with pytest.raises(
        UserError, match=r"accounted as if nobody saw who takes part.*a missing mess"
    ):
        opened(hidden)
    opened(replace(hidden, view="messages"))
    opened(replace(hidden, cohort=replace(cohort, honest=6)))


def test_a_missing_message_would_raise_the_rate_of_those_who_come() -> None:
    """Why: 2 of 20 clients, 12 of which never answer, by enumeration of all cohorts."""
    noise, most, drawn, clients = Binomial(4000), 32, 2, 20
    message = Norms(1, most, most, most, 1.0)
    move = message.sensitivity("replace-one")
    claimed = FixedSize(drawn).amplify(noise.event(message, move, drawn, drawn), clients)
    trials = 4000 * drawn
    masses = binom.pmf(np.arange(trials + 1), trials, 0.5)

    def law(unit: int, offline: int) -> np.ndarray:
        """Of the sum, and last of a void round; all others send −most, the unit its own."""
        released, aborted = np.zeros(trials + 1 + 2 * drawn * most), 0.0
        cohorts = list(itertools.combinations(range(clients), drawn))
        for cohort in cohorts:
            if any(1 <= client <= offline for client in cohort):
                aborted += 1 / len(cohorts)
                continue
            place = sum(unit if client == 0 else -most for client in cohort) + drawn * most
            released[place : place + len(masses)] += masses / len(cohorts)
        return np.append(released, aborted)

    def true(offline: int) -> float:
        return hockey_stick(law(most, offline), law(-most, offline), 2.0)

    assert true(0) <= delta(claimed, 2.0) < 5e-4 < 8e-4 < true(12)


def test_residues_of_another_form_are_refused() -> None:
    wire = MODULAR.wire(DIM, CLIENTS)
    assert wire is not None
    good = write_levels(np.zeros(DIM, np.int64), wire)
    assert not read_levels(good, wire, DIM).any()
    for body in (b"", good[:-1], good + b"\0", floats(torch.zeros(DIM))):
        with pytest.raises(UserError):
            read_levels(body, wire, DIM)


@pytest.mark.parametrize("recipe", [BINOMIAL], ids=["packed"])
def test_packed_messages_of_another_form_are_refused(recipe: Recipe) -> None:
    wire = recipe.wire(DIM, CLIENTS)
    assert wire is not None
    good = write_levels(np.zeros(DIM, np.int64), wire)
    reach = int(recipe.message(DIM).steps.linf) + recipe.noise.max_magnitude(recipe.message(DIM))
    far = write_levels(np.array([reach + 1] + [0] * (DIM - 1)), wire)
    for body in (b"", good[:-1], good + b"\0", far, floats(torch.zeros(DIM))):
        reception = opened(recipe)
        assert reception.take(one(reception, body)).reason == "malformed"
        assert reception.take(one(reception, good)).taken


@pytest.mark.parametrize(
    "count", [-1, MOST_EXAMPLES + 1, math.nan, math.inf, 2.5, "7", None, True, 10**400]
)
def test_a_count_of_examples_that_is_none_is_refused(count: Any) -> None:
    reception = opened(PLAIN)
    assert reception.take(one(reception, examples=count)).reason == "miscounted"


def test_a_count_of_examples_is_no_weight() -> None:
    ends = []
    for count in (0, 1, MOST_EXAMPLES):
        reception = opened(PLAIN)
        assert reception.take(one(reception, floats(filled(0.5)), examples=count)).taken
        ends.append(reception.close()[0].x)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_a_message_counts_once() -> None:
    reception = opened(PLAIN)
    message = one(reception, floats(filled(0.5)))
    assert reception.take(message).taken
    assert reception.take(message).reason == "duplicate"
    assert reception.take(replace(message, body=floats(filled(0.9)))).reason == "duplicate"
    state, info = reception.close()
    torch.testing.assert_close(state.x, filled(0.5 / CLIENTS))
    assert info.participants == 1


def test_messages_of_other_rounds_are_refused() -> None:
    first = opened(PLAIN)
    old = one(first)
    state, _ = first.close()
    second = opened(PLAIN, state)
    assert second.take(old).reason == "stale"
    assert second.take(one(second, round=2)).reason == "stale"
    assert second.take(replace(old, round=1)).reason == "replayed"


def test_a_message_of_an_earlier_opening_of_the_same_round_is_refused() -> None:
    """After a crash a round is opened anew; what was caught on the wire before is worth nothing."""
    before, after = opened(PLAIN), opened(PLAIN)
    assert after.take(one(before)).reason == "replayed"
    assert after.take(one(after, nonce=b"")).reason == "replayed"
    other = after.invitations[1].nonce
    assert after.take(one(after, nonce=other)).reason == "replayed"


def test_one_who_was_not_drawn_is_refused() -> None:
    recipe = replace(PLAIN, cohort=FixedSize(3))
    reception = opened(recipe)
    drawn = {i.client for i in reception.invitations}
    outsider = next(c for c in range(CLIENTS) if c not in drawn)
    for client in (outsider, -1, CLIENTS, 10**30):
        assert reception.take(one(reception, client=client)).reason == "uninvited"


def test_a_straggler_after_the_deadline_changes_nothing() -> None:
    reception = opened(PLAIN)
    late = one(reception, floats(filled(0.5)))
    state, info = reception.close()
    assert reception.take(late).reason == "late"
    assert info.participants == 0
    assert torch.equal(state.x, torch.zeros(DIM))
    with pytest.raises(UserError, match="already closed"):
        reception.close()


def test_with_fewer_arrivals_the_denominator_stays() -> None:
    reception = opened(PLAIN)
    for message in sent(reception, lambda client: floats(filled(0.6)))[:4]:
        assert reception.take(message).taken
    state, info = reception.close()
    torch.testing.assert_close(state.x, filled(0.6 * 4 / CLIENTS))
    assert (info.participants, info.rejected) == (4, 0)


def test_with_no_arrivals_noise_alone_is_released() -> None:
    state, info = opened(NOISY).close()
    assert (info.participants, info.signal) == (0, 0.0)
    assert bool((state.x != 0).all())
    full = opened(NOISY)
    for message in sent(full, lambda client: floats(torch.zeros(DIM))):
        assert full.take(message).taken
    assert torch.equal(full.close()[0].x, state.x)  # the noise does not know who came


@pytest.mark.parametrize("arrivals", [0, 5])
def test_a_round_with_too_few_for_the_promised_noise_is_void(arrivals: int) -> None:
    reception = opened(BINOMIAL)
    wire = BINOMIAL.wire(DIM, CLIENTS)
    assert wire is not None
    body = write_levels(np.ones(DIM, np.int64), wire)
    messages = sent(reception, lambda client: body)
    for message in messages[:arrivals]:
        assert reception.take(message).taken
    for message in messages[arrivals:]:  # what is refused brings no noise
        assert not reception.take(replace(message, body=b"")).taken
    state, info = reception.close()
    assert (info.aborted, info.participants, state.round) == (True, arrivals, 1)
    assert torch.equal(state.x, torch.zeros(DIM))


def test_capped_clients_are_counted_whether_or_not_they_arrive() -> None:
    recipe = replace(NOISY, cohort=Poisson(0.5, cap=1))
    reception = opened(recipe)
    state, _ = reception.close()
    assert state.parts["cohort"]["taken"] is not None
    assert state.parts["cohort"]["taken"].sum() == len(reception.invitations) > 0


@pytest.mark.parametrize(
    "wrong",
    [{"client": [0]}, {"client": "0"}, {"client": 0.0}, {"round": None}, {"round": True},
     {"nonce": "é"}, {"nonce": None}, {"body": None}, {"body": "text"}],
    ids=str,
)  # fmt: skip
def test_fields_of_another_type_are_refused(wrong: dict[str, Any]) -> None:
    reception = opened(PLAIN)
    assert reception.take(replace(one(reception), **wrong)).reason == "malformed"


def test_verdicts_are_counted() -> None:
    reception = opened(PLAIN)
    good = one(reception)
    for message in (good, good, replace(good, round=9), replace(good, client=-1)):
        reception.take(message)
    assert reception.verdicts == {"taken": 1, "duplicate": 1, "stale": 1, "uninvited": 1}


def test_recipes_whose_noise_has_no_form_as_a_message_are_refused() -> None:
    recipe = replace(NOISY, noise=replace(NOISY.noise, at="client"))
    with pytest.raises(UserError, match="cannot be part of a message"):
        opened(recipe)
    with pytest.raises(UserError, match="have 8 numbers, but the model has 5"):
        Reception(PLAIN, begin(PLAIN, torch.zeros(5), people(3), 1, KEY), SHAPES, 3, KEY)


def test_bodies_come_back_as_they_were() -> None:
    vector = torch.randn(DIM, generator=torch.Generator().manual_seed(0))
    assert torch.equal(read_floats(write_floats(vector, SHAPES), SHAPES), vector)
    levels = np.array([-3, 0, 7, -8])
    for wire in (Wire(4, low=-8), Wire(9, modular=True)):
        assert np.array_equal(read_levels(write_levels(levels, wire), wire, 4), levels)


def test_what_keeps_its_norms_is_not_touched() -> None:
    steps = PLAIN.message(DIM).steps
    kept = np.array([1] + [0] * (DIM - 1))
    assert held_steps(kept, steps) is kept
    assert np.array_equal(
        held_steps(5 * kept, steps), 0 * kept
    )  # cut towards zero on so coarse a grid
