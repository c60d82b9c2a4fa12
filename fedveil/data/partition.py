"""Partitions of a data set over clients."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedveil.errors import UserError


@dataclass(frozen=True, eq=False)
class Assignment:
    """Example indexes stored client by client; client i owns order[offsets[i]:offsets[i+1]].

    Examples may be left out. Only with `repeats` may several clients own copies of one example.
    """

    order: np.ndarray  # int64 [assigned examples]
    offsets: np.ndarray  # int64 [clients + 1]
    repeats: bool = False


class Partitioner(Protocol):
    """Assigns examples to clients from labels, keys and a random generator."""

    def assign(
        self, labels: np.ndarray, keys: np.ndarray | None, rng: np.random.Generator
    ) -> Assignment:
        """The assignment; the same generator state gives the same assignment."""
        ...


@dataclass(frozen=True)
class Iid:
    """A random split into `clients` parts whose sizes differ by at most one.

    Every example belongs to exactly one client.

    >>> import fedveil as fv
    >>> fv.load("digits").split(Iid(clients=20)).clients
    20
    """

    clients: int

    def __post_init__(self) -> None:
        _check_count("clients", self.clients)

    def assign(
        self, labels: np.ndarray, keys: np.ndarray | None, rng: np.random.Generator
    ) -> Assignment:
        """Deal out a random permutation in turn.

        >>> import numpy as np
        >>> Iid(2).assign(np.zeros(5), None, np.random.default_rng(0)).offsets.tolist()
        [0, 3, 5]
        """
        _check_enough(len(labels), self.clients, "client")
        owner = np.empty(len(labels), dtype=np.int64)
        owner[rng.permutation(len(labels))] = np.arange(len(labels)) % self.clients
        return _from_owner(owner, self.clients)


@dataclass(frozen=True)
class Shards:
    """Sort by label, cut into per_client·clients equal shards, assign them at random.

    Das et al. 2022, App. G. Clients have equal sizes, and at most `per_client` classes when no
    shard straddles two classes. Examples that do not fill a shard, drawn at random, are left out.

    >>> import fedveil as fv
    >>> fv.load("digits").split(Shards(clients=20, per_client=2)).clients
    20
    """

    clients: int
    per_client: int = 5

    def __post_init__(self) -> None:
        _check_count("clients", self.clients)
        _check_count("per_client", self.per_client)

    def assign(
        self, labels: np.ndarray, keys: np.ndarray | None, rng: np.random.Generator
    ) -> Assignment:
        """Shuffle within classes, so that a shard is a random subset of its class."""
        _check_classes(labels)
        count = self.clients * self.per_client
        _check_enough(len(labels), count, "shard")
        size = len(labels) // count
        mixed = rng.permutation(len(labels))[: count * size]  # not by label: no class is left out
        by_label = mixed[np.argsort(labels[mixed], kind="stable")]
        shards = by_label.reshape(count, size)
        order = shards[rng.permutation(count)].reshape(-1)
        return Assignment(order, np.arange(self.clients + 1) * (self.per_client * size))


@dataclass(frozen=True)
class MajorityClasses:
    """`majority` classes fill a client, every other class gives `minor` of each 500 examples.

    Zhang et al. 2022, §2.2: 2 classes of 230 and 8 of 5 make 500. No example is assigned twice.
    Where a class is used up, the classes with the most examples left replace it. Each of the
    `clients` has this number of `examples`.

    >>> import fedveil as fv
    >>> fv.load("digits").split(MajorityClasses(clients=4, examples=100)).sizes.tolist()
    [100, 100, 100, 100]
    """

    clients: int
    examples: int = 500
    majority: int = 2
    minor: int = 5

    def __post_init__(self) -> None:
        for name in ("clients", "examples", "majority"):
            _check_count(name, getattr(self, name))
        if not isinstance(self.minor, int | np.integer) or self.minor < 0:
            raise UserError(f"minor must be a whole number, 0 or more, not {self.minor!r}.")

    def quotas(self, classes: int) -> tuple[np.ndarray, int]:
        """Number of examples that each majority class and each minor class gives to a client.

        >>> MajorityClasses(1).quotas(10)
        (array([230, 230]), 5)
        >>> MajorityClasses(1, examples=125).quotas(10)
        (array([59, 58]), 1)
        """
        minor = round(self.minor * self.examples / 500)
        rest = self.examples - minor * (classes - self.majority)
        if classes < self.majority or rest < self.majority:
            raise UserError(
                f"{self.examples} examples per client cannot hold {self.majority} majority classes "
                f"and {minor} of each other class among {classes} classes. "
                "Use a smaller majority or minor."
            )
        each, extra = divmod(rest, self.majority)
        return each + (np.arange(self.majority) < extra).astype(np.int64), minor

    def assign(
        self, labels: np.ndarray, keys: np.ndarray | None, rng: np.random.Generator
    ) -> Assignment:
        """Draw majority classes in proportion to their remaining examples, to use them evenly."""
        _check_classes(labels)
        wanted = self.clients * self.examples
        if wanted > len(labels):
            raise UserError(
                f"{self.clients} clients of {self.examples} examples need {wanted} examples, but "
                f"the data set has {len(labels)}. Use fewer clients or fewer examples."
            )
        pools = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
        left = np.array([len(pool) for pool in pools])
        order = [self._client(pools, left, rng) for _ in range(self.clients)]
        return Assignment(np.concatenate(order), np.arange(self.clients + 1) * self.examples)

    def _client(
        self, pools: list[np.ndarray], left: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Indexes of one client; removes them from `left`."""
        large, minor = self.quotas(len(pools))
        want = np.full(len(pools), minor)
        drawn = min(self.majority, int(np.count_nonzero(left)))
        chosen = rng.choice(len(pools), drawn, replace=False, p=left / left.sum())
        want[chosen] = large[: len(chosen)]
        take = _filled(want, left, self.examples)
        picked = [pools[c][left[c] - take[c] : left[c]] for c in range(len(pools))]
        left -= take
        return np.concatenate(picked)


@dataclass(frozen=True)
class Dirichlet:
    """Each class is divided over the clients by proportions p ~ Dirichlet(alpha, …, alpha).

    Every example is assigned; an empty client gets one example from the largest client. A small
    `alpha` gives `clients` few classes each.

    >>> import fedveil as fv
    >>> fv.load("digits").split(Dirichlet(clients=20, alpha=0.5)).clients
    20
    """

    clients: int
    alpha: float

    def __post_init__(self) -> None:
        _check_count("clients", self.clients)
        if not (isinstance(self.alpha, int | float) and 0 < self.alpha < float("inf")):
            raise UserError(f"alpha must be a positive number, not {self.alpha}.")

    def assign(
        self, labels: np.ndarray, keys: np.ndarray | None, rng: np.random.Generator
    ) -> Assignment:
        """Small alpha: few classes per client. Large alpha: nearly the same mix everywhere."""
        _check_classes(labels)
        _check_enough(len(labels), self.clients, "client")
        owner = np.empty(len(labels), dtype=np.int64)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(self.clients, self.alpha))
            cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
            owner[members] = np.searchsorted(cuts, np.arange(len(members)), side="right")
        _feed_the_empty(owner, self.clients)
        return _from_owner(owner, self.clients)


@dataclass(frozen=True)
class Overlapping:
    """Each client draws `examples` examples of its own, equally many of every class.

    Zhang et al. 2022, §2.2: 1,920 clients of 500 from CIFAR-10's 50,000. Clients draw without
    replacement, but independently of each other, so several own copies of one example. The
    guarantee is about a client: replacing an example replaces it in one client only.
    """

    clients: int
    examples: int = 500

    def __post_init__(self) -> None:
        _check_count("clients", self.clients)
        _check_count("examples", self.examples)

    def assign(
        self, labels: np.ndarray, keys: np.ndarray | None, rng: np.random.Generator
    ) -> Assignment:
        """Draw class by class; the first classes give one more where the number does not divide."""
        _check_classes(labels)
        pools = [np.flatnonzero(labels == c) for c in np.unique(labels)]
        each, extra = divmod(self.examples, len(pools))
        counts = each + (np.arange(len(pools)) < extra)
        for pool, count in zip(pools, counts, strict=True):
            _check_enough(len(pool), int(count), "draw")
        order = [
            rng.choice(pool, count, replace=False)
            for _ in range(self.clients)
            for pool, count in zip(pools, counts, strict=True)
        ]
        return Assignment(
            np.concatenate(order), np.arange(self.clients + 1) * self.examples, repeats=True
        )


@dataclass(frozen=True)
class ByKey:
    """One client per key, in sorted order of the keys: a person, a device, a speaking role.

    Clients with fewer than `minimum` examples are left out.

    >>> import torch, fedveil as fv
    >>> x, y = torch.zeros(3, 2), torch.tensor([0, 1, 0])
    >>> data = fv.Dataset("x", fv.Examples(x, y), fv.Examples(x, y), 2, keys=["a", "b", "a"])
    >>> data.split(ByKey()).clients
    2
    """

    minimum: int = 1

    def __post_init__(self) -> None:
        _check_count("minimum", self.minimum)

    def assign(
        self, labels: np.ndarray, keys: np.ndarray | None, rng: np.random.Generator
    ) -> Assignment:
        """Group by key; nothing is random."""
        if keys is None:
            raise UserError(
                "This data set does not say which client an example belongs to. "
                "Split it with Iid, Shards, MajorityClasses or Dirichlet."
            )
        if len(keys) != len(labels):
            raise UserError(
                f"There are {len(keys)} keys for {len(labels)} examples. Give every example one "
                "key."
            )
        _, owner, counts = np.unique(named(keys), return_inverse=True, return_counts=True)
        kept = counts >= self.minimum
        if not kept.any():
            raise UserError(
                f"No client has {self.minimum} examples (the largest has "
                f"{counts.max(initial=0)}). Lower `minimum`."
            )
        number = np.where(kept, np.cumsum(kept) - 1, -1)
        return _from_owner(number[owner], int(kept.sum()))


def named(keys: np.ndarray) -> np.ndarray:
    """Keys that can be compared: objects as text, none of them missing."""
    keys = np.asarray(keys)
    if keys.dtype != object:
        return keys
    if any(key is None or key != key for key in keys):
        raise UserError("Some keys are None or NaN. Give every example the name of a client.")
    return keys.astype(str)


def codes(keys: np.ndarray) -> np.ndarray:
    """A number from 0 for each key, in sorted order of the keys, int64.

    >>> codes(np.array(["b", "a", "b"]))
    array([1, 0, 1])
    """
    return np.unique(named(keys), return_inverse=True)[1].reshape(-1)


def _from_owner(owner: np.ndarray, clients: int) -> Assignment:
    """The assignment of example j to owner[j]; −1 leaves it out."""
    given = np.flatnonzero(owner >= 0)
    order = given[np.argsort(owner[given], kind="stable")]
    sizes = np.bincount(owner[given], minlength=clients)
    return Assignment(order, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def _filled(want: np.ndarray, left: np.ndarray, total: int) -> np.ndarray:
    """`want` limited by `left`; the shortfall comes from the classes with the most left."""
    take: np.ndarray = np.minimum(want, left)
    for c in np.argsort(take - left, kind="stable"):
        take[c] += min(total - take.sum(), left[c] - take[c])
    return take


def _feed_the_empty(owner: np.ndarray, clients: int) -> None:
    """Move one example from the largest client to each empty one, in place."""
    sizes = np.bincount(owner, minlength=clients)
    starts = np.cumsum(sizes) - sizes
    mine = np.argsort(owner, kind="stable")  # client by client
    heap = [(-int(size), client) for client, size in enumerate(sizes) if size > 1]
    heapq.heapify(heap)
    for empty in np.flatnonzero(sizes == 0):
        left, donor = heap[0]
        owner[mine[starts[donor] + sizes[donor] + left]] = empty
        heapq.heapreplace(heap, (left + 1, donor))


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int | np.integer) or value < 1:
        raise UserError(f"{name} must be a whole number, 1 or more, not {value!r}.")


def _check_enough(examples: int, count: int, what: str) -> None:
    if examples < count:
        raise UserError(f"{examples} examples are too few for {count} {what}s. Use fewer clients.")


def _check_classes(labels: np.ndarray) -> None:
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        kind = "sequences" if labels.ndim != 1 else "numbers, not classes"
        raise UserError(
            f"The labels are {kind}, so they cannot be split by class. Use Iid or ByKey."
        )
