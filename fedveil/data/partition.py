"""Ways to split a data set over clients: each is a value whose `assign` is the rule."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedveil.errors import UserError


@dataclass(frozen=True, eq=False)
class Assignment:
    """Example indexes lying client after client; client i owns order[offsets[i]:offsets[i+1]].

    No example is given twice; examples may be left out.
    """

    order: np.ndarray  # int64 [given examples]
    offsets: np.ndarray  # int64 [clients + 1]


class Partitioner(Protocol):
    """A rule that gives every client its examples, from labels, keys and a generator."""

    def assign(
        self, labels: np.ndarray, keys: np.ndarray | None, rng: np.random.Generator
    ) -> Assignment:
        """The split; the same generator state gives the same split."""
        ...


@dataclass(frozen=True)
class Iid:
    """A random split into `clients` parts whose sizes differ by at most one.

    Every example is given to exactly one client.
    """

    clients: int

    def __post_init__(self) -> None:
        _check_count("clients", self.clients)

    def assign(
        self, labels: np.ndarray, keys: np.ndarray | None, rng: np.random.Generator
    ) -> Assignment:
        """Deal a random permutation round.

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
    """Sort by label, cut into per_client·clients equal shards, deal them at random.

    Das et al. 2022, App. G. Clients have equal sizes, and at most `per_client` classes when no
    shard straddles two classes; examples that do not fill a shard are left out.
    """

    clients: int
    per_client: int = 5

    def __post_init__(self) -> None:
        _check_count("clients", self.clients)
        _check_count("per_client", self.per_client)

    def assign(
        self, labels: np.ndarray, keys: np.ndarray | None, rng: np.random.Generator
    ) -> Assignment:
        """Shuffle within classes, so that a shard is a random part of its class."""
        _check_classes(labels)
        count = self.clients * self.per_client
        _check_enough(len(labels), count, "shard")
        mixed = rng.permutation(len(labels))
        by_label = mixed[np.argsort(labels[mixed], kind="stable")]
        size = len(labels) // count
        shards = by_label[: count * size].reshape(count, size)
        order = shards[rng.permutation(count)].reshape(-1)
        return Assignment(order, np.arange(self.clients + 1) * (self.per_client * size))


@dataclass(frozen=True)
class MajorityClasses:
    """`majority` classes fill a client, every other class gives `minor` of each 500 examples.

    Zhang et al. 2022, §2.2: 2 classes of 230 and 8 of 5 make 500. No example is given twice;
    where a class has run out, the classes that have most left step in.
    """

    clients: int
    examples: int = 500
    majority: int = 2
    minor: int = 5

    def __post_init__(self) -> None:
        for name in ("clients", "examples", "majority"):
            _check_count(name, getattr(self, name))
        if self.minor < 0:
            raise UserError(f"minor must be 0 or more, not {self.minor}.")

    def quotas(self, classes: int) -> tuple[np.ndarray, int]:
        """How many examples each majority class and each minor class gives to a client.

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
                f"and {minor} of each other class among {classes} classes; "
                "use a smaller majority or minor."
            )
        each, extra = divmod(rest, self.majority)
        return each + (np.arange(self.majority) < extra).astype(np.int64), minor

    def assign(
        self, labels: np.ndarray, keys: np.ndarray | None, rng: np.random.Generator
    ) -> Assignment:
        """Draw majority classes in proportion to what they have left, which keeps them even."""
        _check_classes(labels)
        wanted = self.clients * self.examples
        if wanted > len(labels):
            raise UserError(
                f"{self.clients} clients of {self.examples} examples need {wanted} examples, but "
                f"the data set has {len(labels)}; use fewer clients or fewer examples."
            )
        pools = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
        left = np.array([len(pool) for pool in pools])
        order = [self._client(pools, left, rng) for _ in range(self.clients)]
        return Assignment(np.concatenate(order), np.arange(self.clients + 1) * self.examples)

    def _client(
        self, pools: list[np.ndarray], left: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """One client's indexes; `left` is counted down, so nobody gets them again."""
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
    """Each class is cut over the clients by proportions p ~ Dirichlet(alpha, …, alpha).

    Every example is given; a client left empty takes one example from the largest client.
    """

    clients: int
    alpha: float

    def __post_init__(self) -> None:
        _check_count("clients", self.clients)
        if not 0 < self.alpha < float("inf"):
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
class ByKey:
    """One client per key, in sorted order of the keys: a person, a device, a speaking role.

    Clients with fewer than `minimum` examples are left out.
    """

    minimum: int = 1

    def __post_init__(self) -> None:
        _check_count("minimum", self.minimum)

    def assign(
        self, labels: np.ndarray, keys: np.ndarray | None, rng: np.random.Generator
    ) -> Assignment:
        """Group by key; nothing is random here."""
        if keys is None:
            raise UserError(
                "This data set does not say which client an example belongs to; "
                "split it with Iid, Shards, MajorityClasses or Dirichlet."
            )
        if len(keys) != len(labels):
            raise UserError(
                f"{len(keys)} keys came with {len(labels)} examples; every example needs one key."
            )
        _, owner, counts = np.unique(keys, return_inverse=True, return_counts=True)
        kept = counts >= self.minimum
        if not kept.any():
            raise UserError(
                f"No client has {self.minimum} examples (the largest has "
                f"{counts.max(initial=0)}); lower `minimum`."
            )
        number = np.where(kept, np.cumsum(kept) - 1, -1)
        return _from_owner(number[owner], int(kept.sum()))


def _from_owner(owner: np.ndarray, clients: int) -> Assignment:
    """The assignment in which example j belongs to owner[j]; −1 leaves it out."""
    given = np.flatnonzero(owner >= 0)
    order = given[np.argsort(owner[given], kind="stable")]
    sizes = np.bincount(owner[given], minlength=clients)
    return Assignment(order, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def _filled(want: np.ndarray, left: np.ndarray, total: int) -> np.ndarray:
    """`want`, limited by what is left, with the shortfall taken where most is left."""
    take: np.ndarray = np.minimum(want, left)
    for c in np.argsort(take - left, kind="stable"):
        take[c] += min(total - take.sum(), left[c] - take[c])
    return take


def _feed_the_empty(owner: np.ndarray, clients: int) -> None:
    """Move one example from the largest client to each empty one, in place."""
    sizes = np.bincount(owner, minlength=clients)
    starts = np.cumsum(sizes) - sizes
    mine = np.argsort(owner, kind="stable")  # client after client
    heap = [(-int(size), client) for client, size in enumerate(sizes) if size > 1]
    heapq.heapify(heap)
    for empty in np.flatnonzero(sizes == 0):
        left, donor = heap[0]
        owner[mine[starts[donor] + sizes[donor] + left]] = empty
        heapq.heapreplace(heap, (left + 1, donor))


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{name} must be 1 or more, not {value}.")


def _check_enough(examples: int, count: int, what: str) -> None:
    if examples < count:
        raise UserError(
            f"{examples} examples cannot fill {count} {what}s with one each; use fewer clients."
        )


def _check_classes(labels: np.ndarray) -> None:
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        kind = "sequences" if labels.ndim != 1 else "numbers, not classes"
        raise UserError(
            f"The labels are {kind}, so they cannot be split by class; use Iid or ByKey."
        )
