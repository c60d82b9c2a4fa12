"""A synthetic population: a formula computes every example on demand, and none is stored.

Example j of client i has the label y and the input

    y: drawn from the client's own urn              x = 2^−s · S (μ_y + ν_i + 3·ε_ij)

where μ_y (the class), ν_i (the client) and ε_ij (the example) are 64 random bytes each, and S is a
matrix of random signs. Inputs are thus a mixture of classes in 64 dimensions, shifted by client,
under a map that nearly preserves distances (Achlioptas 2003).

Random words come from a counter-based generator, and all sums are of whole numbers below 2^24,
which float32 adds exactly in any order. An example is therefore the same to the last bit on every
machine, in any batch, and in populations of other sizes.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import astuple, dataclass
from functools import cached_property
from numbers import Integral

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.data.columns import Index, positions
from fedveil.data.federated import Dataset, Examples, Federated
from fedveil.data.origin import SIMULATED
from fedveil.errors import UserError
from fedveil.serialization.arguments import for_python

LATENT = 64  # random bytes per class, client and example
TEST = 10_000  # test examples
MOST = 2**40  # training examples at most; the test examples are numbered after them
BLOCK = 2**12  # examples computed at a time, so that intermediate results stay in the cache
NOTE = "Synthetic data: a formula generates them, so no one's privacy is at stake."

_Words = NDArray[np.uint64]
_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Population:
    """The distribution of all examples; example j of client i has number i·examples + j.

    A client's classes follow Dirichlet(alpha, …, alpha): drawing from the urn is drawing from such
    a mixture (Blackwell and MacQueen 1973), and needs only the client's own earlier draws.
    """

    clients: int = 100
    examples: int = 20  # per client
    features: int = 784
    classes: int = 10
    alpha: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("clients", "examples", "features", "classes"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 1:
                raise UserError(f"synthetic: {name} is {value!r}. Give a whole number, 1 or more.")
            object.__setattr__(self, name, int(value))  # numpy integers would print differently
        if self.clients * self.examples > MOST:
            raise UserError(
                f"synthetic: {self.clients} clients of {self.examples} examples exceed the limit "
                f"of {MOST} examples. Use fewer."
            )
        if not 0 < self.alpha < math.inf:
            raise UserError(f"synthetic: alpha is {self.alpha}. Give a positive number.")

    def labels(self, numbers: _Ints) -> _Ints:
        """y of these examples, [n]: a new class, or the class of an earlier example of the client.

        Example j gets a new class with probability α·classes / (α·classes + j).
        """
        new = self.alpha * self.classes
        source = numbers.copy()
        rest = np.arange(len(source))
        while len(rest):
            now = source[rest]
            earlier = now % self.examples
            drawn = _uniform(_words(self._key("urn"), now)) * (new + earlier)
            copied = (drawn >= new) & (earlier > 0)
            back = np.minimum((drawn[copied] - new).astype(np.int64), earlier[copied] - 1)
            rest, now, earlier = rest[copied], now[copied], earlier[copied]
            source[rest] = now - earlier + back
        fresh = _words(self._key("classes"), source) % np.uint64(self.classes)
        return fresh.astype(np.int64)

    def inputs(self, numbers: _Ints) -> Tensor:
        """x of these examples, [n, features]."""
        x = torch.empty(len(numbers), self.features)
        for start in range(0, len(numbers), BLOCK):
            some = slice(start, start + BLOCK)
            torch.mm(self._latent(numbers[some]), self._signs, out=x[some])
        return x

    def _latent(self, numbers: _Ints) -> Tensor:
        """μ_y + ν_i + 3·ε_ij of these examples, [n, 64]."""
        codes = np.take(self._class_codes, self.labels(numbers), axis=0)
        codes += _codes(self._key("clients"), numbers // self.examples)
        codes += np.int16(3) * _codes(self._key("examples"), numbers)
        return torch.from_numpy(codes).float()

    @cached_property
    def _class_codes(self) -> NDArray[np.int16]:
        return _codes(self._key("prototypes"), np.arange(self.classes)).astype(np.int16)

    @cached_property
    def _signs(self) -> Tensor:
        """2^−s·S, [64, features], scaled so that x is about as long as 64 standard normals.

        The scale is a power of two, which keeps the sums exact.
        """
        bits = _words(self._key("signs"), np.arange(self.features))[None, :]
        signs = 1.0 - 2.0 * ((bits >> np.arange(LATENT, dtype=np.uint64)[:, None]) & np.uint64(1))
        spread = 3 * math.sqrt((2**16 - 1) / 12)  # standard deviation of 3·ε
        scale = 2.0 ** -round(math.log2(spread * math.sqrt(self.features)))
        return torch.from_numpy((signs * scale).astype(np.float32))

    def _key(self, purpose: str) -> int:
        label = f"fedveil/synthetic/{self.seed}/{purpose}".encode()
        return int.from_bytes(hashlib.blake2b(label, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class _Generated:
    """`count` examples of a population, starting at number `first`."""

    population: Population
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def digest(self) -> str:
        """Digest of the formula and its parameters; computes no example."""
        facts = [type(self).__name__, *astuple(self.population), self.first, self.count]
        label = " ".join(["synthetic population 1:", *(str(fact) for fact in facts)])
        return hashlib.sha256(label.encode()).hexdigest()

    def _numbers(self, index: Index) -> tuple[_Ints, torch.Size]:
        wanted = positions(index, self.count)
        return wanted.reshape(-1).numpy() + self.first, wanted.shape


class Inputs(_Generated):
    """x of every example, float32 [count, features]."""

    dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        """[count, features]."""
        return torch.Size((self.count, self.population.features))

    def __getitem__(self, index: Index) -> Tensor:
        numbers, shape = self._numbers(index)
        return self.population.inputs(numbers).reshape(*shape, -1)

    def span(self) -> tuple[float, float]:
        """The largest magnitude the formula allows."""
        reach = 5 * 128 * LATENT * float(self.population._signs[0, 0].abs())
        return -reach, reach


class Labels(_Generated):
    """y of every example, int64 [count]."""

    dtype = torch.int64

    @property
    def shape(self) -> torch.Size:
        """[count]."""
        return torch.Size((self.count,))

    def __getitem__(self, index: Index) -> Tensor:
        numbers, shape = self._numbers(index)
        return torch.from_numpy(self.population.labels(numbers)).reshape(shape)

    def span(self) -> tuple[float, float]:
        """All classes."""
        return 0, self.population.classes - 1


@for_python
def synthetic(
    clients: int = 100,
    examples: int = 20,
    features: int = 784,
    classes: int = 10,
    alpha: float = 0.5,
    seed: int = 0,
) -> Federated:
    """A synthetic population; it takes 8 bytes per client, whatever the size of an example.

    Each of `clients` has this number of `examples` with `features` inputs and one of `classes`
    labels. A small `alpha` gives clients different classes, and `seed` another population.

    A larger population starts with the clients of a smaller one. Test examples belong to other
    clients and do not depend on the number of clients.

    >>> synthetic(clients=1_000_000)
    <Federated synthetic: 1000000 clients, 20000000 examples, 10 classes>
    """
    law = Population(clients, examples, features, classes, float(alpha), seed)
    count, tested = law.clients * law.examples, -(-MOST // law.examples) * law.examples
    return Federated(
        name="synthetic",
        inputs=Inputs(law, 0, count),
        labels=Labels(law, 0, count),
        offsets=torch.arange(law.clients + 1) * law.examples,
        test=Examples(Inputs(law, tested, TEST), Labels(law, tested, TEST)),
        classes=law.classes,
        notes=(NOTE,),
        origin=SIMULATED,
    )


def load_synthetic() -> Dataset:
    """The population with all defaults, computed and held in memory."""
    data = synthetic()
    return Dataset(
        name=data.name,
        train=Examples(data.inputs[:], data.labels[:]),
        test=Examples(data.test.inputs[:], data.test.labels[:]),
        classes=data.classes,
        keys=np.repeat(np.arange(data.clients), data.sizes.numpy()),
        origin=SIMULATED,
        notes=data.notes,
    )


def _codes(key: int, counters: _Ints) -> NDArray[np.int8]:
    """64 random bytes for each counter, [n, 64]."""
    each = np.arange(LATENT // 8)
    words = _words(key, counters[:, None] * len(each) + each)
    return words.astype("<u8", copy=False).view(np.int8)


def _uniform(words: _Words) -> NDArray[np.float64]:
    """Uniform on [0, 1), with 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def _words(key: int, counters: _Ints) -> _Words:
    """Output number `counter` of the generator SplitMix64 started at `key`.  Steele et al. 2014."""
    z: _Words = counters.astype(np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(key)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z
