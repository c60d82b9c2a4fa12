"""What decides a module's function is read as values: equal ones are equal, others differ."""

from __future__ import annotations

import copy
import enum
import functools
import importlib
import logging
import re
import sys
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fedveil.models import references
from fedveil.models.contents import _digest_of as read_again
from fedveil.models.contents import contents

LIMIT = 3.0
OPTIONS = {"limit": 3.0}
log = logging.getLogger(__name__)
lock = threading.Lock()
own_module = types.ModuleType("own_module")  # as a file of the user's beside the script


class Net(nn.Module):
    """A linear model whose inputs pass through a function of one's own."""

    def __init__(self, before: Any = None, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)
        self.before = before
        self.offset = nn.Parameter(torch.zeros(2))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Squared(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * x)


class Special(Net):
    __limit__ = 3.0


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


@dataclass
class Config:
    limit: float
    kinds: set[str] = field(default_factory=lambda: {"a", "b", "c"})


class Slotted:
    __slots__ = ("limit",)

    def __init__(self, limit: float) -> None:
        self.limit = limit


class Hiding:
    """What pickle stores of it leaves the limit out."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __getstate__(self) -> dict[str, float]:
        return {}


def clamped(limit: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x.clamp(-limit, limit)


def defaulted(limit: float) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor, *, bound: float = limit) -> Tensor:
        return x.clamp(-bound, bound)

    return function


def wrapped(limit: float) -> Callable[[Tensor], Tensor]:
    """It says that it is torch's."""

    @functools.wraps(F.relu)
    def function(x: Tensor) -> Tensor:
        return x.clamp(-limit, limit)

    return function


def hooked(limit: float) -> Net:
    net = Net()
    net.register_forward_pre_hook(lambda module, given: (given[0].clamp(-limit, limit),))
    return net


def buffered(limit: float) -> Net:
    net = Net()
    net.register_buffer("limit", torch.tensor(limit), persistent=False)
    return net


def referring(limit: float) -> Net:
    """Two equal objects, of which one is used."""
    one, two = Config(3.0), Config(3.0)
    return Net(parts=[one, two], used=one if limit == 3.0 else two)


def transformer(limit: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2 if limit == 3.0 else 4, 8, batch_first=True)


def recurrent(limit: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.LSTM(3, 2, batch_first=limit == 3.0)


def scripted(limit: float) -> Any:
    source = f"def function(x: torch.Tensor) -> torch.Tensor:\n    return x.clamp(max={limit})\n"
    return Net(torch.jit.CompilationUnit(source).function)


def cached(limit: float) -> Net:
    """It is pickled by its name."""
    space: dict[str, Any] = {"functools": functools, "__name__": "own"}
    exec(f"@functools.cache\ndef cap():\n    return {limit}", space)
    return Net(space["cap"])


def limited(limit: float) -> type[Net]:
    class Limited(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.clamp(max=limit))

    return Limited


def parametrized(limit: float) -> Net:
    """torch makes a class of the module's, with a name of torch's."""
    net = limited(limit)()
    nn.utils.parametrize.register_parametrization(net.layer, "weight", nn.Identity())
    nn.utils.parametrize.register_parametrization(net, "offset", nn.Identity())
    return net


class Table(Tensor):
    """A tensor with attributes."""


class Column(np.ndarray):
    """An array with attributes."""


def noted(numbers: Any, limit: float) -> Any:
    numbers.limit = limit
    return numbers


def noted_buffer(limit: float) -> Net:
    net = Net()
    net.register_buffer("table", noted(torch.ones(2), limit))
    return net


def meta(limit: float) -> type:
    return type("Meta", (type,), {"limit": property(lambda _: limit), "__module__": "own"})


KINDS: dict[str, Callable[[float], Any]] = {
    "an attribute": lambda limit: Net(limit=limit),
    "a list": lambda limit: Net(sizes=[1, limit]),
    "a set": lambda limit: Net(kinds={"a", "b", f"{limit}"}),
    "a dictionary": lambda limit: Net(known={"limit": limit}),
    "its keys": lambda limit: Net(known={limit: 1}),
    "an array": lambda limit: Net(table=np.array([limit])),
    "a buffer that is not saved": buffered,
    "an enumeration": lambda limit: Net(level=Level.LOW if limit == 3.0 else Level.HIGH),
    "a data class": lambda limit: Net(config=Config(limit)),
    "a name space": lambda limit: Net(config=types.SimpleNamespace(limit=limit)),
    "slots": lambda limit: Net(config=Slotted(limit)),
    "what pickle leaves out": lambda limit: Net(config=Hiding(limit)),
    "a closure": lambda limit: Net(clamped(limit)),
    "a default": lambda limit: Net(defaulted(limit)),
    "a function with a name of torch's": lambda limit: Net(wrapped(limit)),
    "a partial": lambda limit: Net(functools.partial(torch.clamp, max=limit)),
    "a partial of a closure": lambda limit: Net(functools.partial(clamped(limit))),
    "a method": lambda limit: Net(Config(limit).__eq__),
    "a pattern": lambda limit: Net(re.compile(f"a{limit}")),
    "a method of a built-in": lambda limit: Net({"limit": limit}.get),
    "a weak reference": lambda limit: Net(weakref.ref(Level.LOW if limit == 3 else Level.HIGH)),
    "a hook": hooked,
    "which of two equal objects": referring,
    "a function of torch": lambda limit: Net(F.relu if limit == 3.0 else F.elu),
    "a built-in function": lambda limit: Net(torch.tanh if limit == 3.0 else torch.sigmoid),
    "an operation of torch": lambda limit: Net(
        torch.ops.aten.relu if limit == 3.0 else torch.ops.aten.tanh
    ),
    "its overload": lambda limit: Net(
        torch.ops.aten.clamp.default if limit == 3.0 else torch.ops.aten.clamp.Tensor
    ),
    "a sparse tensor": lambda limit: Net(table=(torch.eye(3) * limit).to_sparse()),
    "a pool of torch": lambda limit: Net(F.max_pool1d if limit == 3.0 else F.max_pool2d),
    "heads of a transformer": transformer,
    "an option of a recurrent layer": recurrent,
    "a class": lambda limit: Net() if limit == 3.0 else Squared(),
    "a special attribute of a class": lambda limit: Net(
        kind=type(
            "Kind",
            (Special,),
            {
                "__module__": __name__,
                "__limit__": limit,
            },
        )
    ),
    "a scripted function": scripted,
    "a cached function": cached,
    "a class made of a user's": lambda limit: types.new_class("Made", (limited(limit),))(),
    "a class with a parametrization": parametrized,
    "a data class made by a function": lambda limit: Net(
        config=make_dataclass("Made", ["x"], namespace={"limit": limit})(1)
    ),
    "a metaclass": lambda limit: Net(kind=meta(limit)("Kind", (), {"__module__": "own"})),
    "what a dictionary makes of missing keys": lambda limit: Net(
        caps=defaultdict(functools.partial(float, limit))
    ),
    "the length of a queue": lambda limit: Net(seen=deque([1], maxlen=int(limit))),
    "an attribute of a tensor": lambda limit: Net(table=noted(torch.ones(2), limit)),
    "an attribute of a buffer": lambda limit: noted_buffer(limit),
    "an attribute of a tensor of a class of one's own": lambda limit: Net(
        table=noted(torch.ones(2).as_subclass(Table), limit)
    ),
    "an attribute of an array": lambda limit: Net(table=noted(np.ones(2).view(Column), limit)),
    "a masked array": lambda limit: Net(table=np.ma.array([1.0, 2.0], mask=[limit == 3.0, False])),
    "a dispatching function": lambda limit: Net(functools.singledispatch(clamped(limit))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_modules_that_differ_have_other_contents_and_equal_ones_the_same(kind: str) -> None:
    make = KINDS[kind]
    first, again, other = contents(make(3.0)), contents(make(3.0)), contents(make(5.0))
    assert first == again
    assert first.digest != other.digest
    assert not first.unread


def test_a_copy_has_the_same_contents() -> None:
    """Training works on one."""
    net = hooked(3.0)
    assert contents(copy.deepcopy(net)) == contents(net)


def test_values_that_code_names_belong_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of modules, dictionaries and other functions too."""

    def of_global(x: Tensor) -> Tensor:
        return x.clamp(max=LIMIT)

    def of_dictionary(x: Tensor) -> Tensor:
        return x.clamp(max=OPTIONS["limit"])

    def of_module(x: Tensor) -> Tensor:
        return x.clamp(max=own_module.limit)

    def of_function(x: Tensor) -> Tensor:
        return of_global(x)

    monkeypatch.setattr(own_module, "limit", 3.0, raising=False)
    known = (of_global, of_dictionary, of_module, of_function)
    before = [contents(function) for function in known]
    assert [contents(function) for function in known] == before
    monkeypatch.setitem(globals(), "LIMIT", 5.0)
    monkeypatch.setitem(OPTIONS, "limit", 5.0)
    monkeypatch.setattr(own_module, "limit", 5.0)
    for function, was in zip(known, before, strict=True):
        assert contents(function) != was


def test_functions_in_a_set_name_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a module that another function has named before."""
    net = Net(lambda x: x * own_module.scale, kinds={lambda x: x.clamp(max=own_module.limit)})
    monkeypatch.setattr(own_module, "scale", 1.0, raising=False)
    monkeypatch.setattr(own_module, "limit", 3.0, raising=False)
    before = contents(net)
    monkeypatch.setattr(own_module, "limit", 5.0)
    assert contents(net) != before


def test_attributes_by_a_name_that_is_computed_belong_to_the_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_module, "limit", 3.0, raising=False)
    known = (
        lambda x: x.clamp(max=getattr(own_module, "lim" + "it")),
        lambda x: x.clamp(max=vars(own_module)["lim" + "it"]),
    )
    before = [contents(function) for function in known]
    monkeypatch.setattr(own_module, "limit", 5.0)
    for function, was in zip(known, before, strict=True):
        assert contents(function).digest != was.digest
        assert not was.unread


def test_code_that_reaches_any_variable_cannot_be_read() -> None:
    found = contents(lambda x: x.clamp(max=globals()["LIMIT"]))
    assert found.unread == ("'globals()' (builtin function)",)


def test_a_function_of_numpy_s_that_is_made_of_one_in_python_cannot_be_read() -> None:
    assert contents(Net(np.frompyfunc(abs, 1, 1))).unread == ("'before' (ufunc)",)
    assert not contents(Net(np.exp)).unread


def test_a_mapping_that_raises_cannot_be_read() -> None:
    class Lazy(dict[str, float]):
        def items(self) -> Any:
            raise ValueError("not installed")

    assert contents(Net(names=Lazy(a=1.0))).unread == ("'names' (Lazy)",)


IMPORTS = {
    "import": "import project_caps\n        cap = project_caps.CAP",
    "import of a part": "import project.caps\n        cap = project.caps.CAP",
    "from": "from project.caps import CAP as cap",
    "from a package": "from project import caps\n        cap = caps.CAP",
    "relative": "from .caps import CAP as cap",
    "relative to a package": "from . import caps\n        cap = caps.CAP",
}


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.invalidate_caches()
    for name in [each for each in sys.modules if each.partition(".")[0].startswith("project")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("kind", IMPORTS)
def test_what_a_function_imports_when_it_is_called_belongs_to_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was called before or not."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "__init__.py").touch()
    text = f"class Net:\n    def forward(self, x):\n        {IMPORTS[kind]}\n        return cap"
    (folder / "net.py").write_text(text)
    found = []
    for cap in (3.0, 3.0, 5.0):
        for place in (folder / "caps.py", tmp_path / "project_caps.py"):
            place.write_text(f"CAP = {cap}")
        forget(monkeypatch)
        net = importlib.import_module("project.net").Net()
        found.append(contents(net))
        assert net.forward(0) == cap
        assert contents(net) == found[-1]
    forget(monkeypatch)
    assert found[0] == found[1] != found[2]


def test_a_user_s_module_with_the_name_of_one_of_python_s_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = []
    for cap in (3.0, 5.0):
        (tmp_path / "this.py").write_text(f"CAP = {cap}\ndef function(x):\n    return x * CAP\n")
        monkeypatch.delitem(sys.modules, "this", raising=False)
        importlib.invalidate_caches()
        found.append(contents(importlib.import_module("this").function))
    monkeypatch.delitem(sys.modules, "this")
    assert found[0] != found[1]


@pytest.mark.parametrize("place", ["lib/python3/dist-packages", "target"])
def test_a_package_is_installed_wherever_its_files_lie(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of the user, of the system, or that pip was told."""
    folder = tmp_path / place
    (folder / "some-1.0.dist-info").mkdir(parents=True)
    (folder / "some_package.py").write_text("class Layer:\n    pass\n")
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    module = importlib.import_module("some_package")
    assert references.installed(module)
    assert references.installed(module.Layer)
    assert not references.installed(Net)


def test_constants_of_inner_functions_belong_to_the_code() -> None:
    def made(source: str) -> Callable[[Tensor], Tensor]:
        found: dict[str, Any] = {"__name__": "own"}
        exec(source, found)
        return found["function"]  # type: ignore[no-any-return]

    source = "def function(x):\n    return (lambda y: y in {'a', 'b', LIMIT} or 3.0)(x)"
    assert contents(made(source)) == contents(made(source))
    assert contents(made(source)) != contents(made(source.replace("3.0", "5.0")))
    assert contents(made(source)) != contents(made(source.replace("'a'", "'c'")))


def test_code_of_an_installed_package_belongs_to_it_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of the package is another model; what the file imports is not read."""
    monkeypatch.setattr(references, "INSTALLED", (str(tmp_path),))
    found = []
    for factor in (2, 2, 3):
        (tmp_path / "installed_layers.py").write_text(f"def function(x):\n    return x * {factor}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "installed_layers", raising=False)
        read_again.cache_clear()
        importlib.invalidate_caches()
        module = importlib.import_module("installed_layers")
        found.append(contents(Net(module.function)))
    assert found[0] == found[1] != found[2]


def test_generators_locks_and_loggers_decide_nothing() -> None:
    def logging_and_locking(x: Tensor) -> Tensor:
        with lock:
            log.debug("%s", x)
        return x

    rng = np.random.default_rng(0)
    net = Net(logging_and_locking, rng=rng)
    before = contents(net)
    assert not before.unread
    rng.random()
    log.addHandler(logging.NullHandler())
    assert contents(net) == before


def test_what_cannot_be_read_is_named() -> None:
    def counting() -> Iterator[int]:
        yield 1

    found = contents(Net(config=types.SimpleNamespace(source=counting())))
    assert found.unread == ("'config.source' (generator)",)


def test_a_cycle_is_read_once() -> None:
    def tied() -> Net:
        net = Net(names={"a"})
        net.config = Config(1.0, kinds={"b"})
        net.parts = [net.config]
        net.parts.append(net.parts)
        return net

    assert contents(tied()) == contents(tied())
