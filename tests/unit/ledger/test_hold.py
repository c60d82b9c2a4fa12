from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fedveil.errors import UserError
from fedveil.ledger.lock import FileLock

HOLDER = """
import sys, time
from pathlib import Path
from fedveil.ledger.lock import FileLock

hold = FileLock(Path(sys.argv[1]), "The ledger")
hold.take()
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_told_who_holds_it_until_that_one_dies(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(UserError) as refusal:
            FileLock(file, "The ledger").take()
        assert re.fullmatch(
            rf"The ledger is in use by process {child.pid} on {re.escape(socket.gethostname())} "
            r"since \d{4}-\d\d-\d\dT[\d:+-]+\. Wait until it ends, or end it\.",
            str(refusal.value),
        )
        child.send_signal(signal.SIGKILL)
        child.wait()
    FileLock(file, "The ledger").take()  # what it wrote is still there, and in nobody's way


def test_a_holder_that_has_not_written_its_name_is_another_process(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock", "It"), FileLock(tmp_path / "lock", "It")
    first.take()
    (tmp_path / "lock").write_bytes(b"{half")
    with pytest.raises(UserError, match="in use by another process"):
        second.take()


def test_it_can_be_taken_again_after_it_was_let_go(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock", "It"), FileLock(tmp_path / "lock", "It")
    for _ in range(2):
        first.take()
        first.take()  # once more does no harm
        with pytest.raises(UserError):
            second.take()
        first.release()
        second.take()
        second.release()
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_one_that_is_forgotten_is_let_go(tmp_path: Path) -> None:
    FileLock(tmp_path / "lock", "It").take()
    FileLock(tmp_path / "lock", "It").take()
