"""Terms and context: what cannot be kept is refused, and the digest names everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedveil.errors import UserError
from fedveil.federation.secagg.aggregator import Aggregator
from fedveil.federation.secagg.keys import session_of
from fedveil.federation.secagg.member import SecureMember
from fedveil.federation.secagg.terms import MOST_CLIENTS, RoundContext, SecAggTerms, least_threshold
from tests.unit.federation.secagg.test_hostile_server import keys_of
from tests.unit.federation.secagg.world import AGREEMENT, MODEL, OPENING, OTHER, World, identity

TERMS = SecAggTerms(threshold=4, corrupt=1, enough=3, bits=12, dim=7)
COHORT = (2, 5, 8, 11, 14)
CONTEXT = RoundContext(AGREEMENT, OPENING, 0, MODEL, COHORT, TERMS)
ROSTER = World().roster
OWN = identity(2)


@pytest.mark.parametrize(
    "changes",
    [
        {"corrupt": -1},
        {"enough": 1},
        {"bits": 0},
        {"bits": 63},
        {"dim": 0},
        {"dim": 2**28 + 1},
        {"threshold": 4.0},
        {"threshold": True},
        {"dim": "7"},
    ],
)
def test_terms_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="Secure aggregation"):
        replace(TERMS, **changes)


@pytest.mark.parametrize(
    ("clients", "changes"),
    [
        (5, {"threshold": 3}),
        (5, {"threshold": 6}),
        (7, {}),
        (5, {"enough": 6}),
        (1, {"threshold": 1, "corrupt": 0, "enough": 1}),
        (MOST_CLIENTS + 1, {"threshold": MOST_CLIENTS}),
    ],
)
def test_terms_that_a_cohort_cannot_keep_are_refused(clients: int, changes: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"Give|Invite"):
        replace(TERMS, **changes).check(clients)


def test_two_lists_never_get_t_signatures_each() -> None:
    """Honest clients sign one list, corrupt ones both: 2t ≤ honest + 2·corrupt is impossible."""
    for clients in range(2, 40):
        for corrupt in range(clients):
            threshold = least_threshold(clients, corrupt)
            if threshold <= clients:
                SecAggTerms(threshold, corrupt, corrupt + 1, 8, 1).check(clients)
                assert 2 * threshold > (clients - corrupt) + 2 * corrupt
                assert threshold > corrupt
                with pytest.raises(UserError):
                    SecAggTerms(threshold - 1, corrupt, corrupt + 1, 8, 1).check(clients)


@pytest.mark.parametrize(
    "changes",
    [
        {"agreement": b"short"},
        {"opening": bytes(15)},
        {"opening": bytes(65)},
        {"round": -1},
        {"round": 2**63},
        {"round": True},
        {"model": bytes(31)},
        {"model": "m" * 32},
        {"cohort": (5, 2, 8, 11, 14)},
        {"cohort": (2, 2, 8, 11, 14)},
        {"cohort": (-1, 2, 8, 11, 14)},
        {"cohort": (2, 5, 8, 11, 2**32)},
    ],
)
def test_a_context_without_a_canonical_form_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="Secure aggregation"):
        replace(CONTEXT, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"agreement": OTHER},
        {"opening": b"p" * 16},
        {"opening": b"o" * 17},
        {"round": 1},
        {"model": OTHER},
        {"cohort": (2, 5, 8, 11)},
        {"cohort": (2, 5, 8, 11, 1000)},
        {"terms": replace(TERMS, threshold=5)},
        {"terms": replace(TERMS, corrupt=0)},
        {"terms": replace(TERMS, enough=4)},
        {"terms": replace(TERMS, bits=13)},
        {"terms": replace(TERMS, dim=8)},
    ],
)
def test_the_digest_names_everything(changes: dict[str, Any]) -> None:
    assert replace(CONTEXT, **changes).digest(ROSTER) != CONTEXT.digest(ROSTER)


def test_the_digest_names_the_identities_of_the_cohort() -> None:
    swapped = {**ROSTER, 2: ROSTER[5], 5: ROSTER[2]}
    assert CONTEXT.digest(swapped) != CONTEXT.digest(ROSTER)
    assert CONTEXT.digest({**ROSTER, 1000: bytes(32)}) == CONTEXT.digest(ROSTER)


def test_a_session_names_the_context_and_all_keys() -> None:
    records = {client: keys_of(client, seed=client).record for client in COHORT}
    usual = session_of(CONTEXT, ROSTER, records)
    fewer = {client: records[client] for client in COHORT[1:]}
    other = {**records, 5: keys_of(5, seed=99).record}
    swapped = {**records, 2: records[5], 5: records[2]}
    for changed in (fewer, other, swapped):
        assert session_of(CONTEXT, ROSTER, changed) != usual
    assert session_of(replace(CONTEXT, model=OTHER), ROSTER, records) != usual


@pytest.mark.parametrize("key", [ROSTER[5], b"short", "k" * 32])
def test_a_roster_has_one_identity_per_client(key: Any) -> None:
    """A client with two places would count as two honest ones."""
    with pytest.raises(UserError, match="Register"):
        Aggregator(CONTEXT, {**ROSTER, 8: key}, {})
    with pytest.raises(UserError, match="Register"):
        SecureMember(2, OWN, {**ROSTER, 8: key}, AGREEMENT, OPENING, TERMS)


def test_a_member_needs_the_identity_of_the_roster() -> None:
    with pytest.raises(UserError, match="identity"):
        SecureMember(2, identity(5), ROSTER, AGREEMENT, OPENING, TERMS)
    with pytest.raises(UserError, match="identity"):
        SecureMember(3, identity(3), ROSTER, AGREEMENT, OPENING, TERMS)
