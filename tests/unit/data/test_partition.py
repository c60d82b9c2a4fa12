from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.data.catalog import load
from fedveil.data.describe import describe
from fedveil.data.partition import (
    Assignment,
    ByKey,
    Dirichlet,
    Iid,
    MajorityClasses,
    Partitioner,
    Shards,
    _feed_the_empty,
)
from fedveil.errors import UserError
from tests.unit.data.paths import needs_fashion

LABELS = np.repeat(np.arange(10), 600)
ALL = [
    Iid(7),
    Shards(60),
    MajorityClasses(12),
    MajorityClasses(48, examples=125),
    Dirichlet(40, 0.1),
]


def split(partitioner: Partitioner, seed: int = 0, labels: np.ndarray = LABELS) -> Assignment:
    return partitioner.assign(labels, None, np.random.default_rng(seed))


def groups(assignment: Assignment) -> list[np.ndarray]:
    return np.split(assignment.order, assignment.offsets[1:-1])


@pytest.mark.parametrize("partitioner", ALL, ids=repr)
def test_no_example_is_given_twice_and_no_client_is_empty(partitioner: Partitioner) -> None:
    result = split(partitioner)
    assert result.order.dtype == result.offsets.dtype == np.int64
    assert len(np.unique(result.order)) == len(result.order) == result.offsets[-1]
    assert result.offsets[0] == 0
    assert (np.diff(result.offsets) > 0).all()
    assert len(result.offsets) == partitioner.clients + 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("partitioner", ALL, ids=repr)
def test_the_seed_decides_the_split(partitioner: Partitioner) -> None:
    first, again, other = split(partitioner, 3), split(partitioner, 3), split(partitioner, 4)
    assert np.array_equal(first.order, again.order)
    assert not np.array_equal(first.order, other.order)


def test_iid_gives_everything_in_even_parts() -> None:
    sizes = np.diff(split(Iid(7)).offsets)
    assert sizes.sum() == 6000
    assert sizes.max() - sizes.min() <= 1


def test_iid_mixes_classes() -> None:
    for group in groups(split(Iid(6))):
        assert (np.bincount(LABELS[group], minlength=10) > 60).all()


def test_shards_are_equal_and_drop_the_rest() -> None:
    result = split(Shards(7, per_client=2), labels=np.arange(100) // 10)
    assert np.diff(result.offsets).tolist() == [14] * 7  # 14 shards of 7, two left out


def test_shards_of_a_client_have_at_most_so_many_classes() -> None:
    counts = [len(np.unique(LABELS[g])) for g in groups(split(Shards(60, per_client=2)))]
    assert max(counts) == 2


def test_shards_are_dealt_at_random() -> None:
    firsts = [int(LABELS[g[0]]) for g in groups(split(Shards(60)))]
    assert firsts != sorted(firsts)


def test_majority_classes_have_the_published_counts() -> None:
    for group in groups(split(MajorityClasses(6))):
        assert sorted(np.bincount(LABELS[group], minlength=10)) == [5] * 8 + [230] * 2


def test_majority_classes_scale() -> None:
    for group in groups(split(MajorityClasses(10, examples=125))):
        assert sorted(np.bincount(LABELS[group], minlength=10)) == [1] * 8 + [58, 59]


def test_majority_classes_can_use_every_example() -> None:
    result = split(MajorityClasses(12))
    assert np.array_equal(np.sort(result.order), np.arange(6000))


def test_majority_classes_fall_back_when_a_class_runs_out() -> None:
    labels = np.array([0] * 5 + [1] * 50 + [2] * 45)
    result = split(MajorityClasses(10, examples=10, majority=1, minor=50), labels=labels)
    assert np.diff(result.offsets).tolist() == [10] * 10
    assert len(np.unique(result.order)) == 100


def test_dirichlet_gives_everything() -> None:
    result = split(Dirichlet(40, 0.1))
    assert np.array_equal(np.sort(result.order), np.arange(6000))


def test_dirichlet_alpha_sets_the_skew() -> None:
    def mean_classes(alpha: float) -> float:
        parts = groups(split(Dirichlet(20, alpha)))
        return float(np.mean([len(np.unique(LABELS[g])) for g in parts]))

    assert mean_classes(0.01) < 3
    assert mean_classes(100.0) == 10


@pytest.mark.parametrize("seed", range(5))
def test_each_empty_client_is_fed_by_the_largest_one_in_turn(seed: int) -> None:
    owner = np.random.default_rng(seed).integers(6, size=40) ** 2
    plain = owner.copy()
    for empty in range(30):
        if empty not in plain:
            donor = int(np.argmax(np.bincount(plain, minlength=30)))
            plain[np.flatnonzero(plain == donor)[0]] = empty
    _feed_the_empty(owner, 30)
    assert owner.tolist() == plain.tolist()


def test_many_thousand_empty_clients_are_fed() -> None:
    labels = np.arange(300_000) % 2
    split = Dirichlet(200_000, 0.05).assign(labels, None, np.random.default_rng(0))
    assert np.diff(split.offsets).min() == 1


@given(
    clients=st.integers(1, 30), alpha=st.sampled_from([1e-3, 0.05, 1.0]), seed=st.integers(0, 99)
)
def test_dirichlet_leaves_no_client_empty(clients: int, alpha: float, seed: int) -> None:
    result = split(Dirichlet(clients, alpha), seed, np.arange(30) % 3)
    assert (np.diff(result.offsets) >= 1).all()
    assert np.array_equal(np.sort(result.order), np.arange(30))


def test_by_key_is_one_client_per_key_in_order() -> None:
    keys = np.array(["b", "a", "c", "a", "b", "a"])
    result = ByKey().assign(np.zeros(6), keys, np.random.default_rng(0))
    assert [keys[g].tolist() for g in groups(result)] == [["a"] * 3, ["b"] * 2, ["c"]]


def test_by_key_drops_small_clients() -> None:
    keys = np.array([5, 3, 5, 4, 3])
    result = ByKey(minimum=2).assign(np.zeros(5), keys, np.random.default_rng(0))
    assert result.order.tolist() == [1, 4, 0, 2]
    assert result.offsets.tolist() == [0, 2, 4]


def test_sequences_can_be_split_by_iid_and_key() -> None:
    labels, keys = np.zeros((6, 3), dtype=np.int64), np.arange(6) // 2
    for partitioner in (Iid(3), ByKey()):
        result = partitioner.assign(labels, keys, np.random.default_rng(0))
        assert np.diff(result.offsets).tolist() == [2, 2, 2]


@pytest.mark.parametrize("partitioner", [Shards(2), MajorityClasses(1), Dirichlet(2, 1.0)])
@pytest.mark.parametrize("labels", [np.zeros((50, 3), dtype=np.int64), np.zeros(50)])
def test_splits_by_label_refuse_what_is_not_a_class(
    partitioner: Partitioner, labels: np.ndarray
) -> None:
    with pytest.raises(UserError, match="Use Iid or ByKey"):
        split(partitioner, labels=labels)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Iid(0), "clients must be a whole number, 1 or more"),
        (lambda: Shards(-1), "clients must be a whole number, 1 or more"),
        (lambda: Shards(1, 0), "per_client must be a whole number, 1 or more"),
        (lambda: MajorityClasses(1, examples=0), "examples must be a whole number, 1 or more"),
        (lambda: MajorityClasses(1, minor=-1), "minor must be a whole number, 0 or more"),
        (lambda: Dirichlet(1, 0.0), "alpha must be a positive"),
        (lambda: Dirichlet(1, float("nan")), "alpha must be a positive"),
        (lambda: ByKey(0), "minimum must be a whole number, 1 or more"),
        (lambda: split(Iid(6001)), "6000 examples are too few for 6001 clients"),
        (lambda: split(Shards(2000)), "6000 examples are too few for 10000 shards"),
        (lambda: split(Dirichlet(6001, 1.0)), "Use fewer clients"),
        (lambda: split(MajorityClasses(13)), "need 6500 examples, but the data set has 6000"),
        (lambda: split(MajorityClasses(1, 50, 11)), "cannot hold 11 majority classes"),
        (lambda: split(ByKey()), "does not say which client"),
        (
            lambda: ByKey().assign(LABELS, np.arange(3), np.random.default_rng(0)),
            "3 keys for 6000 examples",
        ),
        (
            lambda: ByKey(9).assign(np.zeros(4), np.arange(4), np.random.default_rng(0)),
            "No client has 9 examples",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(make, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=says):
        make()


@needs_fashion
def test_the_published_split_of_fashion_mnist() -> None:
    """Das et al. 2022: 3000 clients of 20 examples from at most five classes."""
    table = describe(load("fashion-mnist", download=False).split(Shards(3000)))
    assert (table.clients, table.smallest, table.largest) == (3000, 20, 20)
    assert max(table.classes_per_client) == 5
    assert sum(table.classes_per_client.values()) == 3000
    assert table.class_totals == (6000,) * 10


def test_examples_that_fill_no_shard_are_left_out_of_all_classes_alike() -> None:
    labels = np.repeat(np.arange(10), 60)  # 600 examples in 400 shards of one: 200 are left out
    found = Shards(80, 5).assign(labels, None, np.random.default_rng(0))
    kept = np.bincount(labels[found.order], minlength=10)
    assert kept.sum() == 400
    assert kept.min() >= 25  # 40 ± 4 each; the last classes would have none
