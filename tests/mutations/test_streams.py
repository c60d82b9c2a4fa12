"""Mistakes that let two purposes, runs or coordinates draw the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedveil import loop
from fedveil.models import contents, references
from fedveil.random import samplers, streams
from fedveil.testing.recipes import check_streams
from fedveil.training import prepare
from tests.contracts.examples import PRIVATE
from tests.mutations.making import Mutation, line, mutate, named, require_caught, returning
from tests.statistics.random import test_samplers as drawn
from tests.unit.models import test_contents as held
from tests.unit.models import test_losses as losses
from tests.unit.random import test_samplers as repeated
from tests.unit.random import test_streams as keyed
from tests.unit.training import test_prepared as prepared


def streams_of(name: str) -> Callable[[], None]:
    return lambda: check_streams(PRIVATE[name])


def check_normals() -> None:
    drawn.test_no_block_of_a_long_vector_repeats_another(
        lambda count, rng: samplers.normals(count, rng), samplers.PIECE
    )


def check_rounded() -> None:
    drawn.test_no_block_of_a_long_vector_repeats_another(
        lambda count, rng: samplers.rounded_gaussian(50.0, count, rng), samplers.BLOCK
    )


def check_second_call() -> None:
    sizes = repeated.LONG, repeated.LONG
    repeated.test_no_call_on_a_stream_repeats_the_numbers_of_an_earlier_one(sizes, "public")


def unadvanced(patch: pytest.MonkeyPatch) -> None:
    mutate(patch, samplers, "normals", ("own.jumped(blocks).state", "own.state"))
    patch.setattr(repeated, "normals", samplers.normals)  # which the guard knows by name


def repeated_blocks(patch: pytest.MonkeyPatch) -> None:
    real = samplers._rounded_block

    def block(sigma: float, size: int, rng: np.random.Generator) -> np.ndarray:
        return real(sigma, size, np.random.default_rng(0))

    patch.setattr(samplers, "_rounded_block", block)


def unseparated(patch: pytest.MonkeyPatch) -> None:
    mutate(patch, streams, "run_key", ('"\\x00".join', '"".join'))
    patch.setattr(keyed, "run_key", streams.run_key)  # which the guard knows by name


def patched(test: Callable[[pytest.MonkeyPatch], None]) -> Callable[[], None]:
    """A test that changes globals, as a guard."""

    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(patch)

    return check


def check_unread() -> None:
    try:
        prepared.test_a_model_that_cannot_be_read_does_not_get_seeded_noise()
    except pytest.fail.Exception as failure:
        raise AssertionError(failure.msg) from None


def check_contents(kind: str) -> None:
    held.test_modules_that_differ_have_other_contents_and_equal_ones_the_same(kind)


MUTATIONS = [
    Mutation(
        "a user's module by its text and its outputs only",
        line(prepare, "make_task", ("task.read_contents()", "pass")),
        "test_models_that_differ_in_an_attribute_do_not_share_noise",
        prepared.test_models_that_differ_in_an_attribute_do_not_share_noise,
    ),
    Mutation(
        "a loss without what it refers to",
        line(prepare, "_model_facts", ("type(loss) not in KINDS.values() or isinstance(loss, Own)",
                                       "False")),
        "test_losses_that_differ_in_what_they_refer_to_do_not_share_noise",
        patched(losses.test_losses_that_differ_in_what_they_refer_to_do_not_share_noise),
    ),
    Mutation(
        "code without the globals that it names",
        line(contents._Reader, "_function", ("sorted(named.variables &", "sorted(set() &")),
        "test_values_that_code_names_belong_to_it",
        patched(held.test_values_that_code_names_belong_to_it),
    ),
    Mutation(
        "the first of two references only",
        line(contents._Reader, "read", ("self._write(str(self._places[id(value)]))", "pass")),
        "which of two equal objects",
        lambda: held.test_modules_that_differ_have_other_contents_and_equal_ones_the_same(
            "which of two equal objects"
        ),
    ),
    Mutation(
        "a cached function by its name",
        line(contents._Reader, "_other", ("named and not installed(value)", "False")),
        "a cached function",
        lambda: check_contents("a cached function"),
    ),
    Mutation(
        "a class by the module that it names",
        returning(references, "_found", lambda thing: True),
        "a class made of a user's",
        lambda: check_contents("a class made of a user's"),
    ),
    Mutation(
        "a tensor by its numbers",
        returning(contents._Reader, "_array", contents._Reader._numbers),
        "an attribute of a buffer",
        lambda: check_contents("an attribute of a buffer"),
    ),
    Mutation(
        "a dictionary without what it makes of missing keys",
        line(contents._Reader, "_container", ("self.read(values.default_factory)", "pass")),
        "what a dictionary makes of missing keys",
        lambda: check_contents("what a dictionary makes of missing keys"),
    ),
    Mutation(
        "code by the names in it, also where it computes names",
        returning(contents, "BY_NAME", frozenset()),
        "test_attributes_by_a_name_that_is_computed_belong_to_the_code",
        patched(held.test_attributes_by_a_name_that_is_computed_belong_to_the_code),
    ),
    Mutation(
        "names in a set of functions for that set only",
        line(contents._Reader, "_beside", (
            "reader._modules, reader._attributes = self._modules, self._attributes", "pass"
        )),
        "test_functions_in_a_set_name_values_too",
        patched(held.test_functions_in_a_set_name_values_too),
    ),
    Mutation(
        "seeded noise for a module that cannot be read",
        line(prepare, "_read", ("known.unread and not hidden", "False")),
        "test_a_model_that_cannot_be_read_does_not_get_seeded_noise",
        check_unread,
    ),
    Mutation(
        "long noise repeats its first block",
        line(samplers, "normals", ("own.jumped(block)", "own.jumped(0)")),
        "check_normals",
        check_normals,
    ),
    Mutation(
        "long noise leaves its stream where it was",
        unadvanced,
        "check_second_call",
        check_second_call,
    ),
    Mutation(
        "exact noise repeats its first block", repeated_blocks, "check_rounded", check_rounded
    ),
    Mutation(
        "the facts of a run's key run into one another",
        unseparated,
        "test_a_run_s_key_tells_where_one_fact_ends",
        keyed.test_a_run_s_key_tells_where_one_fact_ends,
    ),
    Mutation(
        "the count drawn from the sum's noise",
        line(loop, "conclude_round", ('"count"', '"noise"')),
        "check_streams",
        streams_of("dp_fedavg_adaptive"),
    ),
    Mutation(
        "batches drawn from the cohort's coins",
        line(loop, "local_plan", ('f"batches from {named[0]}"', '"cohort"')),
        "check_streams",
        streams_of("dp_fedavg"),
    ),
    Mutation(
        "all clients round alike",
        line(loop._Work, "_quantized", ('f"rounding of {client}"', '"rounding"')),
        "check_streams",
        streams_of("dp_norm_fedavg_secagg"),
    ),
    Mutation(
        "rounding drawn from a client's noise",
        line(loop._Work, "_quantized", ('f"rounding of {client}"', 'f"noise of {client}"')),
        "check_streams",
        streams_of("dp_norm_fedavg_secagg"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
