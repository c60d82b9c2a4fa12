"""Flags of settings come from the settings' model: type, help and default."""

from __future__ import annotations

import re

import pytest

from fedveil.commands import flags
from fedveil.training.settings import DataSettings, Settings
from tests.conftest import Run

FLAGS = {**Settings.model_fields, **DataSettings.model_fields}
COMMANDS = {
    "train": (*flags.ALGORITHM, *flags.DATA, "rounds", "delta", "view", "noise", "engine"),
    "compare": (*flags.DATA, "model", "rounds", "epsilon", "delta", "checkpoint_every"),
    "plan": (*flags.ALGORITHM, "rounds", "epsilon", "delta", "view", "partition", "data"),
    "bench": (*flags.ALGORITHM, *flags.DATA, "model"),
    "datasets": ("client", "label"),
}


def test_every_setting_is_described() -> None:
    for model in (Settings, DataSettings):
        for name, field in model.model_fields.items():
            assert (field.description or "").endswith((".", "]")), name


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_shows_the_model_s_description_and_default(command: str, run: Run) -> None:
    shown = " ".join(run(command, "--help").out.split())
    for name in COMMANDS[command]:
        flag = flags.OPTIONS.get(name, (f"--{name.replace('_', '-')}",))[0]
        assert f"{flag} " in shown
        assert flags.described(FLAGS[name]) in shown, name


def test_help_lists_the_flags_of_a_setting_by_group(run: Run) -> None:
    """In the same order in every command, with the command's own options at the end."""
    for command in ("train", "plan", "compare"):
        shown = run(command, "--help").out
        heads = [line[:-1] for line in shown.splitlines() if re.fullmatch(r"[A-Z]\w+:", line)]
        assert heads == ["Arguments", *flags.GROUPS, "Options"]
        privacy = shown.partition("\nPrivacy:\n")[2].partition("\n\n")[0]
        assert {"--epsilon", "--delta", "--view"} <= set(privacy.split())
        assert "--rounds" not in privacy


def test_only_given_settings_are_asked_for() -> None:
    heard = []

    @flags.from_settings("rounds", "clients", "parameters", "noise_multiplier")
    def command(asked: flags.Asked = flags.NOTHING, out: int = 3) -> None:
        heard.append((asked, out))

    command(rounds=7, parameters=["clip=2"])
    command(clients=5, noise_multiplier=1.5, out=4)
    assert heard == [
        ({"parameters": {"clip": 2}, "rounds": 7}, 3),
        ({"parameters": {"noise_multiplier": 1.5}, "data": {"clients": 5}}, 4),
    ]
