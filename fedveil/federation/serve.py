"""serve: start or resume the run of a federation's directory, and train its rounds.

federation.toml, roster.toml   the agreement          server      the server's private key
server.toml                    test set, ledger       run/        the run directory
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.data.federated import Examples
from fedveil.errors import UserError
from fedveil.federation.agreement import Agreement, read_toml
from fedveil.federation.described import setting
from fedveil.federation.rounds import Served
from fedveil.federation.secagg.primitives import Identity
from fedveil.federation.transport import Transport
from fedveil.training.prepare import prepare
from fedveil.training.result import Result
from fedveil.training.start import Watch, finish, resume, start

if TYPE_CHECKING:
    from fedveil.training.run import Training

RUN, SERVER, SETTINGS = "run", "server", "server.toml"
log = logging.getLogger("fedveil.server")


def serve(directory: Path, transport: Transport, watch: Watch | None = None) -> int:
    """Train all rounds that are left. 0 if the run is finished, 1 if it stopped early."""
    training = opened(directory, transport)
    finish(training, watch or _logged)
    return 0 if training.finished else 1


def served(directory: Path, transport: Transport, watch: Watch | None = None) -> Result:
    """The same, with the result."""
    return finish(opened(directory, transport), watch)


def opened(directory: Path, transport: Transport) -> Training:
    """The training of a directory: a new run, or the one that was begun there."""
    agreement, settings = Agreement.read(directory), _settings(directory)
    if not agreement.complete:
        raise UserError(
            f"The roster has {len(agreement.roster)} of {agreement.clients} clients. Add the "
            "others with `fedveil federate enrol`."
        )
    identity = Identity((directory / SERVER).read_bytes())
    ledger = settings.get("ledger")
    training = prepare(
        agreement.recipe,
        agreement.population(_test(settings)),
        agreement.model,
        agreement.rounds,
        agreement.epsilon,
        agreement.delta,
        agreement.seed,
        "loop",
        evaluate_every=1,
        noise="secure" if agreement.recipe.private else "seeded",
        diagnostics=False,
        ledger=None if ledger is None else Path(str(ledger)),
        checkpoint_every=1,
        named={"federation": agreement.hash},
        source=Served(agreement, transport, identity),
        setting=setting(agreement),
    )
    path = directory / RUN
    return resume(training, path) if path.exists() else start(training, path)


def _settings(directory: Path) -> dict[str, object]:
    file = directory / SETTINGS
    return read_toml(file) if file.exists() else {}


def _test(settings: dict[str, object]) -> Examples | None:
    """The public test set that server.toml names, if any."""
    from fedveil.training.settings import DataSettings
    from fedveil.training.sources import load_data

    named = settings.get("test")
    return None if named is None else load_data(DataSettings.model_validate(named)).test


def _logged(training: Training, record: object) -> None:
    log.info("Round %d of %d", training.state.round, training.rounds)
