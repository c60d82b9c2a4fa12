"""A client's table is checked at `init`, and against an agreement at `check` and `accept`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedveil import algorithms
from fedveil.data.table import load_table
from fedveil.federation.agreement import Agreement
from fedveil.federation.founding import enrol, found
from fedveil.federation.home import PUBLIC, Home, read_seat
from fedveil.federation.participant import own_data
from fedveil.runs.opened import Interface
from tests.conftest import Run

Refused = Callable[..., str]
HEAD = "user_id,age,visits,returned\n"
MINE = HEAD + "u0,34,3,no\nu0,35,1,yes\nu0,36,2,no\n"
AGREED = {"label": "returned", "classes": ["no", "yes"]}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """The rows of one person."""
    path = tmp_path / "mine.csv"
    path.write_text(MINE)
    return path


def agreed(directory: Path, home: Path, rounds: int = 2) -> Agreement:
    """A federation of one client, who trains on tables like the example."""
    rows = {"user_id": ["a", "b"], "age": [1, 2], "visits": [1, 2], "returned": ["no", "yes"]}
    data = load_table(rows, "user_id", "returned", classes=["no", "yes"], holdout="rows")
    shapes = Interface((data.train.inputs.shape[1],), False, 2, "cross_entropy")
    recipe = algorithms.fedavg(steps=1)
    found(directory, "ward", recipe, shapes, 1, "softmax", rounds, data=AGREED)
    return enrol(directory, [read_seat(home / PUBLIC)])


def test_a_table_of_one_client_is_used_whole(run: Run, table: Path, tmp_path: Path) -> None:
    made = run("client", "init", "--home", "me", "--path", table, "--client", "user_id")
    assert made.code == 0, made.err
    agreement = agreed(tmp_path / "ward", tmp_path / "me")
    shown = run("client", "check", "ward", "--home", "me")
    assert shown.code == 0, shown.err
    assert "Your data    3 examples" in shown.out
    accepted = run("client", "accept", agreement.hash, "--not-private", "--home", "me")
    assert accepted.code == 0, accepted.err
    data = own_data(Home.open(tmp_path / "me"), agreement)
    assert (data.clients, len(data.labels), len(data.test)) == (1, 3, 0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--client", "userid"), "Did you mean 'user_id'"),
        (("--client", "user_id", "--label", "return"), "Did you mean 'returned'"),
        (("--client", "user_id", "--data", "drop=agee"), "Did you mean 'age'"),
        (("--client", "user_id", "--data", "ranges={ages=[0,99]}"), "Did you mean 'age'"),
        ((), "Give --client"),
    ],
)
def test_columns_that_a_table_does_not_have_are_refused_at_init(
    refused: Refused, table: Path, given: tuple[str, ...], says: str
) -> None:
    assert says in refused("client", "init", "--home", "me", "--path", table, *given)
    assert not Path("me").exists()


def test_a_home_without_data_is_refused(refused: Refused) -> None:
    assert "No data are named" in refused("client", "init", "--home", "me")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("user_id,age,returned\nu0,34,no\nu0,3,yes\n", "but the agreement has inputs"),
        ("user_id,age,visits,back\nu0,34,3,no\n", "no label column 'returned'"),
    ],
)
def test_data_of_another_form_are_refused_at_check_and_accept(
    run: Run, refused: Refused, table: Path, tmp_path: Path, content: str, says: str
) -> None:
    assert run("client", "init", "--home", "me", "--path", table, "--client", "user_id").code == 0
    agreement = agreed(tmp_path / "ward", tmp_path / "me")
    Home.open(tmp_path / "me").offer(tmp_path / "ward")
    table.write_text(content)
    accept = ("client", "accept", agreement.hash, "--not-private", "--home", "me")
    for command in (("client", "check", "ward", "--home", "me"), accept):
        assert says in refused(*command)
