"""Mistakes in secure aggregation: each check that is left out must be missed by a test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from fedveil.errors import UserError
from fedveil.federation.secagg import (
    aggregator,
    derived,
    keys,
    member,
    messages,
    primitives,
    seat,
    shamir,
    terms,
)
from fedveil.federation.secagg.aggregator import Aggregator
from fedveil.federation.secagg.member import SecureMember
from fedveil.federation.secagg.messages import Reader
from fedveil.federation.secagg.primitives import Pair
from fedveil.federation.secagg.refusals import Refusal
from fedveil.federation.secagg.seat import SecureSeat
from fedveil.federation.secagg.terms import RoundContext, SecAggTerms
from fedveil.federation.secagg.unmasking import Unmasking
from tests.mutations.making import Mutation, line, mutate, named, require_caught, returning
from tests.unit.federation.secagg import (
    test_checks,
    test_hostile_client,
    test_hostile_server,
    test_messages,
    test_primitives,
    test_rounds,
    test_secrecy,
    test_shamir,
    test_terms,
)
from tests.unit.federation.secagg.attack import Attack, LentClient, UnevenLists, violations
from tests.unit.federation.secagg.test_hostile_server import (
    CORRUPT,
    FOURTH,
    ME,
    SECOND,
    THIRD,
)

Make = Callable[[Any], None]


def entry(case: str) -> Callable[[], None]:
    return lambda: test_hostile_server.test_a_round_that_is_not_as_agreed_is_not_entered(case)


def boxes(case: str) -> Callable[[], None]:
    return lambda: test_hostile_server.test_no_message_is_sent_unless_every_box_opens(case)


def survivors(listed: tuple[int, ...], word: str) -> Callable[[], None]:
    return lambda: test_hostile_server.test_survivors_that_do_not_fit_are_not_signed(listed, word)


def secret(test: Callable[[], None]) -> Callable[[], None]:
    """A test of what a curious server sees, from a round of its own."""

    def check() -> None:
        test_secrecy.curious.cache_clear()
        try:
            test()
        finally:
            test_secrecy.curious.cache_clear()

    check.test = test  # type: ignore[attr-defined]
    return check


def everywhere(owner: ModuleType, name: str, *changes: tuple[str, str]) -> Make:
    """A function changed in its module and wherever it was imported."""

    def make(patch: pytest.MonkeyPatch) -> None:
        mutate(patch, owner, name, *changes)
        for place, module in list(sys.modules.items()):
            if "federation.secagg" in place and hasattr(module, name):
                patch.setattr(module, name, getattr(owner, name))

    return make


def both(*makes: Make) -> Make:
    def make(patch: pytest.MonkeyPatch) -> None:
        for one in makes:
            one(patch)

    return make


def strict(check: Callable[[], Any]) -> Callable[[], None]:
    """A guard for which a missing exception, or a crash on hostile bytes, is a failed assertion."""

    def run() -> None:
        try:
            check()
        except UserError:
            raise
        except (pytest.fail.Exception, KeyError, ValueError) as problem:
            raise AssertionError(str(problem)) from None

    return run


def wrong_shares() -> None:
    for lost in ((), (SECOND,)):
        test_hostile_client.test_wrong_shares_abort_the_round_and_make_no_sum(lost, 0)


def out_of_order() -> None:
    for stage in ("shares", "masked", "consistency"):
        test_hostile_server.test_requests_out_of_order_are_refused(stage)


def models_apart() -> None:
    test_hostile_server.test_clients_with_different_models_cannot_be_used_together()


def exact() -> None:
    for stage in test_rounds.ASKED:
        test_rounds.test_one_client_is_lost(stage)


def attacked(kind: type[Attack] = Attack, attacks: int = 50) -> None:
    played = (kind(seed).play() for seed in range(attacks))
    assert next(violations(played), None) is None  # one is enough


def tolerant(key: bytes, box: bytes, facts: bytes) -> bytes:
    """A client that goes on without the shares of a box that does not open."""
    try:
        return primitives.unseal(key, box, facts)
    except Refusal:
        return bytes(66)


def digests(**changes: Any) -> Callable[[], None]:
    return lambda: test_terms.test_the_digest_names_everything(changes)


def threshold_of_shares() -> None:
    """t − 1 shares of a seat do not restore its seed."""
    world = test_hostile_server.World()
    world.at("masked")
    own = world.members[ME]._seat
    assert own is not None
    shares = own._split(own._own.seed)
    some = sorted(shares)[: world.terms.threshold - 1]
    points = shamir.weights([own.context.point(client) for client in some])
    restored = shamir.combine([shares[client] for client in some], points)
    assert restored != int.from_bytes(own._own.seed, "big")


SERVER = test_hostile_server
CLIENT = test_hostile_client
MISTAKES: list[tuple[str, Make, Callable[[], Any]]] = [
    # what a client checks before it enters a round
    (
        "another agreement",
        line(SecureMember, "_check_place", ("agreement != self._agreement", "False")),
        entry("another agreement"),
    ),
    (
        "another opening",
        line(SecureMember, "_check_place", ("opening != self._opening", "False")),
        entry("another opening"),
    ),
    (
        "another model",
        line(SecureMember, "_check_model", ("model != context.model", "False")),
        entry("another model"),
    ),
    (
        "another model later on",
        line(SecureMember, "_seated", ("self._check_model(seat.context, model)", "pass")),
        SERVER.test_another_model_after_the_round_was_entered_is_refused,
    ),
    (
        "other terms",
        line(SecureMember, "_check_context", ("context.terms != self._terms", "False")),
        entry("fewer survivors"),
    ),
    (
        "terms compared in part",
        line(
            SecureMember,
            "_check_context",
            ("context.terms != self._terms", "context.terms.threshold < self._terms.threshold"),
        ),
        entry("fewer survivors"),
    ),
    (
        "a cohort without oneself",
        line(SecureMember, "_check_context", ("{self._client} <= ", "")),
        entry("a cohort without this client"),
    ),
    (
        "a client without an identity",
        line(SecureMember, "_check_context", (" <= self._roster.keys()", "")),
        entry("a client without an identity"),
    ),
    (
        "foreign keys",
        line(SecureMember, "_check_records", ("not records.keys() <= set(context.cohort) or ", "")),
        entry("keys of a client outside the cohort"),
    ),
    (
        "one's own keys exchanged",
        line(SecureMember, "_check_records", (" or records.get(self._client) != own", "")),
        entry("one's own keys exchanged"),
    ),
    (
        "too few keys",
        line(
            SecureMember,
            "_check_records",
            ("len(records) < (needed := context.terms.needed)", "(needed := 0)"),
        ),
        entry("too few keys"),
    ),
    (
        "a key twice",
        line(SecureMember, "_check_records", ("have_duplicates(records)", "False")),
        entry("one client's keys given to another"),
    ),
    (
        "unsigned keys",
        line(
            SecureMember,
            "_check_records",
            ("not record.signed(where, client, self._roster[client])", "False"),
        ),
        entry("swapped keys"),
    ),
    (
        "keys signed by anyone",
        line(
            SecureMember,
            "_check_records",
            (
                "not record.signed(where, client, self._roster[client])",
                "not any(record.signed(where, client, key) for key in self._roster.values())",
            ),
        ),
        entry("keys signed by another client"),
    ),
    (
        "keys not bound to a round",
        line(keys, "_text", ("where + ", "where[:-8] + ")),
        entry("keys of an old round"),
    ),
    (
        "keys not bound to a client",
        line(keys, "_text", ('client.to_bytes(4, "big") + ', "")),
        test_primitives.test_signatures_name_their_client,
    ),
    (
        "points in a second form",
        returning(keys, "is_point", lambda point: True),
        lambda: SERVER.test_points_with_a_second_form_are_refused(2**255 - 10),
    ),
    (
        "points of low order",
        both(
            returning(keys, "is_point", lambda point: True),
            returning(Pair, "agree", lambda own, other: bytes(32)),
        ),
        lambda: SERVER.test_points_of_low_order_are_refused(1),
    ),
    (
        "a secret of zero",
        line(
            Pair,
            "agree",
            (
                'raise Refusal("keys", "A public key has low order. The round was refused.") '
                "from None",
                "return bytes(32)",
            ),
        ),
        test_primitives.test_low_order_points_are_those_whose_secret_is_zero,
    ),
    (
        "keys used twice",
        line(
            SecureMember, "_shares", ("self._seat, self._ahead = seat, None", "self._seat = seat")
        ),
        SERVER.test_a_second_session_in_the_same_round_is_not_entered,
    ),
    (
        "an old round entered again",
        line(SecureMember, "_keys_of", ("round <= self._newest", "False")),
        SERVER.test_old_rounds_are_not_entered_again,
    ),
    (
        "secrets kept after the round",
        line(SecureMember, "_keys", ("self._seat = None", "pass")),
        SERVER.test_secrets_are_erased_when_no_later_stage_needs_them,
    ),
    # terms and context
    (
        "a threshold too low",
        line(SecAggTerms, "check", ("least <= self.threshold", "1 <= self.threshold")),
        SERVER.test_a_larger_cohort_does_not_weaken_the_threshold,
    ),
    (
        "a threshold too low by one",
        returning(terms, "least_threshold", lambda clients, corrupt: (clients + corrupt) // 2),
        SERVER.test_a_larger_cohort_does_not_weaken_the_threshold,
    ),
    (
        "corrupt clients not counted",
        returning(terms, "least_threshold", lambda clients, corrupt: clients // 2 + 1),
        SERVER.test_a_larger_cohort_does_not_weaken_the_threshold,
    ),
    (
        "more survivors than clients",
        line(SecAggTerms, "check", ("self.enough <= clients", "True")),
        lambda: test_terms.test_terms_that_a_cohort_cannot_keep_are_refused(5, {"enough": 6}),
    ),
    (
        "corrupt survivors counted as honest",
        line(SecAggTerms, "__post_init__", ("self.enough > self.corrupt", "True")),
        lambda: test_terms.test_terms_that_make_no_sense_are_refused({"enough": 1}),
    ),
    (
        "a context without its model",
        line(RoundContext, "digest", (" + self.model", "")),
        digests(model=test_terms.OTHER),
    ),
    (
        "a context without its terms",
        line(RoundContext, "digest", ("astuple(self.terms)", "()")),
        digests(terms=SecAggTerms(5, 1, 3, 12, 7)),
    ),
    (
        "a context without its cohort",
        line(RoundContext, "digest", ("for client in self.cohort:", "for client in ():")),
        digests(cohort=(2, 5, 8, 11, 1000)),
    ),
    (
        "a context without its identities",
        line(RoundContext, "digest", (" + roster[client]", "")),
        test_terms.test_the_digest_names_the_identities_of_the_cohort,
    ),
    (
        "a context without its round",
        everywhere(terms, "place", (' + round.to_bytes(8, "big")', "")),
        digests(round=1),
    ),
    (
        "a session without its context",
        everywhere(keys, "session_of", (" + context.digest(roster)", "")),
        models_apart,
    ),
    (
        "a session without its keys",
        everywhere(keys, "session_of", ("sorted(records)", "()")),
        SERVER.test_clients_with_different_keys_cannot_be_used_together,
    ),
    # boxes
    (
        "a box from nobody",
        line(SecureSeat, "masked", ("not boxes.keys() <= self._own.opening.keys()", "False")),
        boxes("a box from outside"),
    ),
    (
        "too few boxes",
        line(SecureSeat, "masked", ("self._check_size(len(boxes) + 1)", "pass")),
        boxes("too few boxes"),
    ),
    (
        "boxes that do not open",
        returning(seat, "unseal", lambda key, box, facts: bytes(66)),
        boxes("a changed bit"),
    ),
    (
        "boxes of another model",
        returning(seat, "unseal", lambda key, box, facts: bytes(66)),
        models_apart,
    ),
    (
        "one key for both directions",
        everywhere(
            derived,
            "box_label",
            ("_named(sender, receiver)", "_named(*sorted((sender, receiver)))"),
        ),
        boxes("one's own box reflected"),
    ),
    (
        "shares not below the prime",
        line(messages, "element", (">= PRIME", "< 0")),
        lambda: test_messages.test_shares_are_below_the_prime(shamir.PRIME),
    ),
    # masks
    (
        "no self mask",
        line(SecureSeat, "_add_masks", ("[own, *plus]", "plus")),
        secret(test_secrecy.test_a_late_message_stays_hidden_after_its_pair_masks_are_known),
    ),
    (
        "no masks between clients",
        line(SecureSeat, "_add_masks", ("[own, *plus], minus", "[own], []")),
        secret(test_secrecy.test_survivors_stay_hidden_after_their_self_masks_are_known),
    ),
    (
        "masks with half of the clients",
        line(SecureSeat, "_add_masks", ("[own, *plus], minus", "[own, *plus], []")),
        exact,
    ),
    (
        "one mask for all pairs",
        everywhere(
            derived,
            "mask_key",
            ("derive(own.agree(other), session, label)", "derive(bytes(32), session, VERSION)"),
        ),
        secret(test_secrecy.test_survivors_stay_hidden_after_their_self_masks_are_known),
    ),
    (
        "masks of no session",
        everywhere(primitives, "derive", ("KEY, session, label", "KEY, bytes(32), label")),
        test_primitives.test_every_key_has_one_purpose,
    ),
    (
        "masks that start over in every chunk",
        line(
            primitives,
            "_add_mask",
            ("stream.update_into(", "Cipher(AES256(key), CTR(bytes(16))).encryptor().update_into("),
        ),
        test_primitives.test_masks_do_not_depend_on_chunks,
    ),
    # the order of stages
    (
        "a stage answered again",
        line(
            SecureSeat,
            "once",
            ("if kind in self._answers:", "if False:"),
            ("kind != self._next", "False"),
        ),
        SERVER.test_a_second_list_of_survivors_is_not_signed,
    ),
    (
        "shares revealed again",
        line(
            SecureSeat,
            "once",
            ("if kind in self._answers:", "if False:"),
            ("kind != self._next", "False"),
        ),
        SERVER.test_shares_are_revealed_once,
    ),
    (
        "stages out of order",
        line(SecureSeat, "once", ("kind != self._next", "False")),
        out_of_order,
    ),
    (
        "a message computed twice",
        line(SecureSeat, "masked", ("self._next = None", "pass"), ("self._secrets = None", "pass")),
        test_rounds.test_a_message_is_computed_at_most_once_even_if_it_fails,
    ),
    (
        "secrets kept",
        line(SecureSeat, "masked", ("self._secrets = None", "pass")),
        SERVER.test_secrets_are_erased_when_no_later_stage_needs_them,
    ),
    (
        "shares kept",
        line(SecureSeat, "reveal", ("self._held = {}", "pass")),
        SERVER.test_secrets_are_erased_when_no_later_stage_needs_them,
    ),
    (
        "another session",
        line(SecureSeat, "_check_session", ("session != self._session", "False")),
        SERVER.test_another_session_is_refused_at_every_later_stage,
    ),
    # survivors and shares
    (
        "a list without oneself",
        line(SecureSeat, "consistency", ("{self._client} <= ", "")),
        survivors((SECOND, THIRD, FOURTH, CORRUPT), "survivors"),
    ),
    (
        "a list with strangers",
        line(SecureSeat, "consistency", (" <= self._held.keys()", "")),
        survivors((ME, SECOND, THIRD, FOURTH, 1000), "survivors"),
    ),
    (
        "survivors without shares",
        line(SecureSeat, "consistency", (" <= self._held.keys()", "")),
        SERVER.test_survivors_without_shares_are_not_signed,
    ),
    (
        "too few survivors",
        line(SecureSeat, "consistency", ("self._check_size(len(survivors))", "pass")),
        survivors((ME, SECOND, THIRD), "too-few"),
    ),
    (
        "enough not awaited",
        line(
            SecureSeat, "_check_size", ("self.context.terms.needed", "self.context.terms.threshold")
        ),
        SERVER.test_enough_survivors_are_awaited_even_if_the_threshold_is_lower,
    ),
    (
        "a list not in ascending order",
        line(messages, "ascending", ("not is_ascending(clients)", "False")),
        survivors((ME, ME, SECOND, THIRD, FOURTH), "malformed"),
    ),
    (
        "too few signatures",
        line(
            SecureSeat,
            "_check_signatures",
            ("len(signatures) < (needed := self.context.terms.threshold)", "(needed := 0)"),
        ),
        SERVER.test_split_lists_of_survivors_reveal_nothing,
    ),
    (
        "signatures of strangers",
        line(
            SecureSeat,
            "_check_signatures",
            ("not signatures.keys() <= set(self._survivors)", "False"),
        ),
        SERVER.test_too_few_or_foreign_signatures_reveal_nothing,
    ),
    (
        "unsigned lists",
        returning(seat, "is_signed", lambda identity, signature, text: True),
        lambda: SERVER.test_a_list_that_is_not_signed_by_t_survivors_reveals_nothing(
            lambda *_: bytes(64)
        ),
    ),
    (
        "signatures of no session",
        everywhere(derived, "survivors_text", (" + session", "")),
        lambda: SERVER.test_a_list_that_is_not_signed_by_t_survivors_reveals_nothing(
            lambda world, server, good: SERVER.identity(CORRUPT).sign(
                SERVER.survivors_text(bytes(32), CORRUPT, world.cohort, world.cohort)
            )
        ),
    ),
    (
        "signatures of no boxes",
        everywhere(derived, "survivors_text", ("write_clients(sharers) + ", "")),
        lambda: SERVER.test_a_list_that_is_not_signed_by_t_survivors_reveals_nothing(
            lambda world, server, good: SERVER.identity(CORRUPT).sign(
                SERVER.survivors_text(server._session, CORRUPT, world.cohort[1:], world.cohort)
            )
        ),
    ),
    (
        "signatures of no list",
        everywhere(derived, "survivors_text", (" + write_clients(survivors)", "")),
        lambda: SERVER.test_a_list_that_is_not_signed_by_t_survivors_reveals_nothing(
            lambda world, server, good: SERVER.signed(
                world, CORRUPT, server, (ME, SECOND, THIRD, CORRUPT)
            )
        ),
    ),
    (
        "signatures of no signer",
        everywhere(derived, "survivors_text", (" + _named(signer)", "")),
        test_primitives.test_signatures_name_their_client,
    ),
    (
        "the wrong share of survivors",
        line(SecureSeat, "reveal", ("if client in alive", "if client not in alive")),
        SERVER.test_one_share_of_each_client_and_never_the_other,
    ),
    (
        "keys of survivors revealed",
        line(
            SecureSeat, "reveal", ("held.self_mask if client in alive else held.mask", "held.mask")
        ),
        SERVER.test_one_share_of_each_client_and_never_the_other,
    ),
    # parsers
    (
        "bytes left over",
        line(Reader, "end", ("self._place != len(self._content)", "False")),
        lambda: SERVER.test_broken_requests_are_refused_with_a_word_of_the_list("consistency"),
    ),
    (
        "bytes missing",
        both(
            line(Reader, "take", ("len(taken) != size", "False")),
            returning(Reader, "end", lambda reader: None),
        ),
        lambda: SERVER.test_broken_requests_are_refused_with_a_word_of_the_list("keys"),
    ),
    (
        "lists of any length",
        line(Reader, "count", ("> MOST_CLIENTS", "< 0")),
        test_messages.test_a_list_that_claims_too_many_allocates_nothing,
    ),
    # the server
    (
        "one identity for two clients",
        both(
            returning(member, "check_roster", lambda roster: None),
            returning(aggregator, "check_roster", lambda roster: None),
        ),
        lambda: test_terms.test_a_roster_has_one_identity_per_client(test_terms.ROSTER[5]),
    ),
    (
        "unsigned keys taken",
        line(
            Aggregator,
            "_add_record",
            (
                "not record.signed(context_place(self.context), client, self._roster[client])",
                "False",
            ),
        ),
        lambda: CLIENT.test_keys_that_are_not_signed_for_this_round_are_forged(
            lambda: SERVER.keys_of(CORRUPT, round=1).record
        ),
    ),
    (
        "copied keys taken",
        line(
            Aggregator,
            "_add_record",
            ("have_duplicates({**self._records, client: record})", "False"),
        ),
        CLIENT.test_a_key_of_another_client_is_not_taken,
    ),
    (
        "replies of another session taken",
        line(Aggregator, "_check_session", ("session != self._session", "False")),
        lambda: CLIENT.test_replies_of_another_session_are_not_taken("masked"),
    ),
    (
        "a message taken twice",
        line(Aggregator, "_verdict", ("client in self._replies", "False")),
        lambda: CLIENT.test_replies_of_another_session_are_not_taken("masked"),
    ),
    (
        "messages of strangers taken",
        line(Aggregator, "_verdict", ("client not in self._asked", "False")),
        lambda: CLIENT.test_replies_of_another_session_are_not_taken("masked"),
    ),
    (
        "any signature taken",
        line(
            Aggregator,
            "_take_signature",
            ("not is_signed(self._roster[client], signature, text)", "False"),
        ),
        CLIENT.test_a_signature_on_another_list_is_forged,
    ),
    (
        "any next keys taken",
        line(
            Aggregator,
            "_take_reveal",
            ("revealed.record.signed(following, client, self._roster[client])", "True"),
        ),
        CLIENT.test_next_keys_that_are_not_signed_for_the_next_round_are_dropped,
    ),
    (
        "a stage closed with too few",
        returning(Aggregator, "_needed", 0),
        lambda: test_rounds.test_a_stage_with_too_few_aborts_the_round("reveal"),
    ),
    (
        "wrong seeds used",
        line(
            Unmasking,
            "_self_mask",
            ("check_value(seed, self._session, client) != self._checks[client]", "False"),
        ),
        wrong_shares,
    ),
    (
        "wrong keys used",
        line(Unmasking, "_mask_pair", ("pair.public != self._records[client].mask", "False")),
        wrong_shares,
    ),
    (
        "masks of lost clients left on",
        line(Unmasking, "remove_masks", ("for other in survivors:", "for other in ():")),
        exact,
    ),
    (
        "masks of lost clients added again",
        line(Unmasking, "remove_masks", ("other < client", "other > client")),
        exact,
    ),
    # Shamir
    (
        "a polynomial of too low degree",
        line(
            SecureSeat,
            "_split",
            ("self.context.terms.threshold - 1", "self.context.terms.threshold - 2"),
        ),
        threshold_of_shares,
    ),
    (
        "a constant polynomial",
        everywhere(shamir, "split", ("value * x + secret", "secret + 0 * x")),
        test_shamir.test_fewer_shares_are_distributed_alike_for_every_secret,
    ),
    (
        "draws reduced",
        everywhere(shamir, "draw_element", (">= PRIME", "< 0")),
        test_shamir.test_draws_are_below_the_prime_and_reach_beyond_256_bits,
    ),
    # what a random active server finds by itself
    (
        "a threshold that two lists reach",
        returning(terms, "least_threshold", lambda clients, corrupt: (clients + corrupt) // 2),
        attacked,
    ),
    (
        "clients go on without a box",
        returning(seat, "unseal", tolerant),
        lambda: attacked(LentClient, 2),
    ),
    (
        "shares for a list with one signature",
        returning(SecureSeat, "_check_signatures", lambda seat, signatures: None),
        lambda: attacked(UnevenLists, 2),
    ),
    (
        "shares for several lists",
        both(
            line(
                SecureSeat,
                "once",
                ("if kind in self._answers:", "if False:"),
                ("kind != self._next", "False"),
            ),
            line(SecureSeat, "reveal", ("self._held = {}", "pass")),
        ),
        attacked,
    ),
    (
        "survivors that are too few",
        line(SecureSeat, "_check_size", ("self.context.terms.needed", "0")),
        attacked,
    ),
    # the released sum
    (
        "spoiled sums released",
        returning(test_checks, "check_sum", lambda *_: None),
        test_checks.test_a_coordinate_out_of_reach_is_spoiled,
    ),
]


def guard_of(check: Callable[[], Any]) -> str:
    """The name of the test that a guard calls, or its own."""
    inner = getattr(check, "test", check)
    names = (*reversed(inner.__code__.co_names), inner.__name__)
    return next((name for name in names if name.startswith(("test_", "attacked"))), inner.__name__)


MUTATIONS = [
    Mutation(mistake, make, guard_of(check), strict(check)) for mistake, make, check in MISTAKES
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
