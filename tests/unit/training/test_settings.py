from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedveil import algorithms
from fedveil.data.partition import ByKey, Dirichlet, Iid, MajorityClasses, Shards
from fedveil.errors import UserError
from fedveil.parts.bound import Clip
from fedveil.parts.report import Difference
from fedveil.parts.schedule import Decay
from fedveil.serialization.codec import to_plain
from fedveil.training.prepare import prepare
from fedveil.training.settings import (
    DataSettings,
    Settings,
    from_settings,
    read_run,
    read_settings,
    resolve_recipe,
)
from fedveil.training.sources import load_data


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str | dict[str, Any]], Path]:
    def write(content: str | dict[str, Any]) -> Path:
        text = content if isinstance(content, str) else tomli_w.dumps(content)
        path = tmp_path / "settings.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


Write = Callable[[str | dict[str, Any]], Path]


def test_nothing_given_is_the_default() -> None:
    assert read_settings(None, {}) == Settings()


def test_a_file_and_flags_are_merged_and_flags_win(file: Write) -> None:
    path = file({"seed": 1, "rounds": 9, "data": {"dataset": "digits", "clients": 7}})
    settings = read_settings(path, {"seed": 2, "data": {"clients": 8}})
    assert (settings.seed, settings.rounds) == (2, 9)
    assert (settings.data.dataset, settings.data.clients) == ("digits", 8)


def test_parameters_of_another_algorithm_are_dropped(file: Write) -> None:
    path = file({"algorithm": "dp_fedavg", "parameters": {"clip": 2.0}})
    assert read_settings(path, {"parameters": {"rate": 0.5}}).parameters == {
        "clip": 2.0,
        "rate": 0.5,
    }
    assert read_settings(path, {"algorithm": "fedavg"}).parameters == {}
    assert read_settings(path, {"algorithm": "dp_fedavg"}).parameters == {"clip": 2.0}


RECIPE = {
    "name": "own",
    "local": {"kind": "GD", "learning_rate": {"kind": "Constant", "rate": 0.1}},
}


@pytest.mark.parametrize(
    "flags",
    [{"rounds": 3}, {"epsilon": 1.0}, {"delta": 1e-6}, {"parameters": {"clip": 2.0}}],
    ids=str,
)
def test_a_flag_that_changes_the_recipe_resolves_it_anew(
    file: Write, flags: dict[str, Any]
) -> None:
    path = file({"algorithm": "dp_fedavg", "recipe": RECIPE})
    assert read_settings(path, flags).recipe is None
    assert read_settings(path, {"seed": 4}).recipe == RECIPE


def test_a_recipe_of_ones_own_stays_when_rounds_change(file: Write) -> None:
    settings = read_settings(file({"recipe": RECIPE}), {"rounds": 3})
    assert resolve_recipe(settings).name == "own"


def test_an_algorithm_by_flag_wins_over_a_recipe_of_ones_own(file: Write) -> None:
    settings = read_settings(file({"recipe": RECIPE}), {"algorithm": "fedavg"})
    assert resolve_recipe(settings).name == "fedavg"


def test_a_parameter_for_a_recipe_of_ones_own_is_refused(file: Write) -> None:
    with pytest.raises(UserError, match="but no algorithm, so --set has no parameters"):
        read_settings(file({"recipe": RECIPE}), {"parameters": {"clip": 1.0}})


BAD: dict[str, tuple[str, str]] = {
    "not TOML": ("rounds == 3", "is not valid TOML"),
    "not text": ("\ud800", "is not valid TOML"),
    "deeply nested": ("a = " + "[" * 5000, "is not valid TOML"),
    "huge": ("#" * (2**20 + 1), "larger than 1 MB"),
    "an unknown key": ("roundz = 3", "Did you mean 'rounds'"),
    "an unknown key of the data": (
        "[data]\nclient_count = 3",
        r"setting of the data in .* named 'client_count'",
    ),
    "a word for a number": ('rounds = "many"', "rounds is 'many'"),
    "a fraction for a count": ("rounds = 2.5", r"rounds is '2\.5'"),
    "a number for a name": ("algorithm = 3", "algorithm is '3'"),
    "a list for the data": ("data = [1]", "data is not a table"),
    "a word for parameters": ('parameters = "x"', "parameters is not a table"),
    "a word for a recipe": ('recipe = "x"', "recipe is 'x'"),
    "a negative seed of the data": ("[data]\nseed = -1", r"data\.seed is '-1'"),
    "a table for a number": ("[rounds]\nx = 1", "rounds is"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_sentence(name: str, tmp_path: Path) -> None:
    text, words = BAD[name]
    path = tmp_path / "settings.toml"
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    with pytest.raises(UserError, match=words) as refusal:
        read_settings(path, {})
    assert "settings.toml" in str(refusal.value)
    assert str(refusal.value).count("\n") == 0
    assert len(str(refusal.value)) < 500


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Could not read"):
        read_settings(tmp_path / "none.toml", {})


def test_a_run_that_does_not_name_its_data_cannot_go_on(file: Write) -> None:
    with pytest.raises(UserError, match="does not name the data of the run"):
        read_run(file({"recipe": RECIPE}))
    assert read_run(file({"data": {"dataset": "digits"}})).data.dataset == "digits"


# Recipes


def test_parameters_reach_the_algorithm() -> None:
    parts = {
        "clip": 2,
        "learning_rate": {"kind": "Decay", "rate": 0.5},
        "report": {"kind": "Difference"},
    }
    recipe = resolve_recipe(Settings(algorithm="dp_fedavg", parameters=parts))
    assert recipe.bound == Clip(2)
    assert recipe.local.learning_rate == Decay(0.5)
    assert recipe.report == Difference()


PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown name": ({"clipp": 1.0}, "Did you mean 'clip'"),
    "a word": ({"clip": "much"}, "dp_fedavg: clip is 'much'; it must be a number"),
    "true for a number": ({"clip": True}, "clip is True"),
    "a word for a rate": ({"learning_rate": "x"}, "it must be a number or a part of kind Constant"),
    "a word for a count": ({"steps": "x"}, "it must be a whole number"),
    "an unknown choice": ({"noise_at": "home"}, "'server' or 'client'"),
    "a part of no kind": ({"report": {}}, r"\[parameters\.report\] has no kind\. Add one"),
    "a part of an unknown kind": ({"report": {"kind": "Gossip"}}, "'Gossip'"),
    "a part of another kind": ({"report": {"kind": "Exact"}}, "a part of kind Difference"),
    "a list": ({"clip": [1.0]}, "it must be a number"),
    "both lengths": ({"steps": 1, "epochs": 1}, "both or neither of steps and epochs"),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_bad_parameter_is_one_sentence(name: str) -> None:
    parameters, words = PARAMETERS[name]
    with pytest.raises(UserError, match=words) as refusal:
        resolve_recipe(Settings(algorithm="dp_fedavg", parameters=parameters))
    assert "\n" not in str(refusal.value)


# Data


@pytest.mark.parametrize("partition", ["iid", "shards", "dirichlet", "majority"])
def test_every_partition_splits(partition: str) -> None:
    given = DataSettings(dataset="digits", partition=partition, clients=5, examples=100)
    assert load_data(given).clients == 5


def table_names(table: Path) -> list[str]:
    return [line.split(",")[0] for line in table.read_text().splitlines()[1:]]


def test_a_table_is_split_by_its_clients_and_never_otherwise(table: Path) -> None:
    """Another split would tear a client's rows apart under a guarantee for clients."""
    given = DataSettings(path=table, client="who", label="y", holdout="rows")
    assert load_data(given).clients == 8
    held = load_data(given.model_copy(update={"holdout": None}))
    assert held.clients + len({*table_names(table)} - {*held.names.tolist()}) == 8
    with pytest.raises(UserError, match="Remove clients"):
        load_data(given.model_copy(update={"clients": 3}))
    with pytest.raises(UserError, match="would separate the rows of a client"):
        load_data(given.model_copy(update={"clients": 3, "partition": "iid"}))


def test_public_ranges_of_a_table_come_from_the_file(table: Path, file: Write) -> None:
    data = {"path": str(table), "client": "who", "label": "y", "ranges": {"x": [-10.0, 10.0]}}
    settings = read_settings(file({"data": data}), {})
    assert settings.data.ranges == {"x": (-10.0, 10.0)}
    update = {"standardize": True, "classes": ("no", "yes")}
    ranged = load_data(settings.data.model_copy(update=update))
    leaking = load_data(settings.data.model_copy(update={"ranges": {}, **update}))
    assert leaking.origin.exclusions[1] == "the means and deviations of x and [bold]"
    assert ranged.origin.exclusions[1] == "the means and deviations of [bold]"
    assert load_data(settings.data).origin.exclusions == ("the classes of 'y'",)


def test_a_file_whose_recipe_and_algorithm_disagree_is_refused(file: Write) -> None:
    recipe = to_plain(algorithms.dp_fedavg(clip=0.5, noise_multiplier=1.0))
    plain = {"algorithm": "dp_fedavg", "parameters": {"clip": 0.5}, "recipe": recipe}
    assert resolve_recipe(read_settings(file(plain), {})).bound == Clip(0.5)
    for edited in ({"parameters": {"clip": 3.0}}, {"algorithm": "dp_norm_fedavg"}):
        with pytest.raises(UserError, match="Delete the \\[recipe\\] tables"):
            resolve_recipe(read_settings(file({**plain, "parameters": {}, **edited}), {}))


def test_the_names_of_partitions_are_the_rules_there_are() -> None:
    from fedveil.training.sources import _partitioner

    class Keyed:
        keys = ()
        name = "keyed"

    wanted = {"key": ByKey, "iid": Iid, "shards": Shards, "majority": MajorityClasses}
    for name, kind in {**wanted, "dirichlet": Dirichlet}.items():
        made = _partitioner(DataSettings(partition=name, clients=4), Keyed())  # type: ignore[arg-type]
        assert isinstance(made, kind)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"clients": -1}, "clients"),
        ({"partition": "shards", "per_client": 0}, "per_client"),
        ({"partition": "dirichlet", "alpha": float("nan")}, "alpha"),
        ({"partition": "dirichlet", "alpha": -1.0}, "alpha"),
        ({"partition": "majority", "examples": 0, "clients": 5}, "examples"),
        ({"partition": "IID"}, "Did you mean|There is no partition 'IID'"),
        ({"client": "x"}, "is not a table"),
    ],
)
def test_bad_data_settings_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_data(DataSettings(dataset="digits", **given))


# What is written down


def test_what_ran_is_written_down_and_read_again(file: Write, table: Path) -> None:
    data = DataSettings(path=table, client="who", label="y", classes=("no", "yes"))
    settings = Settings(algorithm="fed_alpha_normec", data=data, rounds=2, epsilon=3.0)
    training = from_settings(settings)
    again = read_settings(file(training.spec.plain()), {})
    assert again.data.path == table.resolve()
    assert (again.model, again.engine) == ("softmax", "auto")
    assert again.evaluate_every == 1
    assert resolve_recipe(again) == training.recipe
    assert resolve_recipe(again).noise.calibrated
    assert from_settings(again).recipe == training.recipe


def test_a_recipe_without_an_algorithm_is_written_down_without_one(file: Write, blobs: Any) -> None:
    """As a run from Python leaves it: the default algorithm did not make this recipe."""
    from_python = prepare(algorithms.dp_fedavg(noise_multiplier=2.0), blobs, rounds=2).spec.plain()
    data = {"dataset": "digits"}
    settings = read_settings(file(from_python), {"data": data})
    training = from_settings(settings, blobs)
    again = read_settings(file(training.spec.plain()), {})
    assert "algorithm" not in training.spec.plain()
    assert resolve_recipe(again) == training.recipe


def test_a_spec_is_the_same_whoever_asks_for_it(blobs: Any) -> None:
    """From settings it also has what they named; from Python it has no names."""
    settings = Settings(algorithm="fedavg", rounds=3, seed=2, checkpoint_every=2, model="softmax")
    named = from_settings(settings, blobs).spec
    plain = prepare(resolve_recipe(settings), blobs, rounds=3, seed=2, checkpoint_every=2).spec
    assert named.identity == plain.identity
    assert plain.plain().items() <= named.plain().items()
    assert named.plain().keys() - plain.plain().keys() == {
        "algorithm", "data", "parameters", "per_round",
    }  # fmt: skip


def test_the_data_set_is_written_down(blobs: Any) -> None:
    settings = Settings(algorithm="fedavg", rounds=1)
    assert from_settings(settings, blobs).spec.plain()["data"]["dataset"] == "fashion-mnist"


EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_understood(path: Path) -> None:
    settings = read_settings(path, {})
    assert settings.data.dataset is not None or settings.data.path is not None
    assert resolve_recipe(settings).name
