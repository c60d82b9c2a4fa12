"""A federation without a protocol: a server that follows a plan, and clients that echo.

    python -m tests.system.federation.echo agent SOCKET
    python -m tests.system.federation.echo join SUPERLINK KEY CERTIFICATE

A request of the form `wait FILE` is answered once the file exists, `large N` with N bytes.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

from fedveil.federation.flower.agent import listen
from fedveil.federation.flower.join import join
from fedveil.federation.transport import Transport

PLAN, RESULTS, LOG = "plan.json", "results.jsonl", "server.log"
PATIENCE = 30.0  # seconds


def serve(directory: Path, transport: Transport) -> int:
    """Carry out the plan: one exchange a line, whose replies are written to the results."""
    logging.basicConfig(filename=directory / LOG)
    plan = json.loads((directory / PLAN).read_text())
    wait(lambda: len(transport.connected()) >= plan["clients"])
    for step in plan["exchanges"]:
        if step["after"] is not None:
            wait(Path(step["after"]).exists)
        exchanged(directory, transport, step)
    return int(plan["status"])


def exchanged(directory: Path, transport: Transport, step: dict[str, object]) -> None:
    requests = {int(client): bytes.fromhex(body) for client, body in step["requests"].items()}  # type: ignore[attr-defined]
    began = time.monotonic()
    replies = transport.exchange(requests, float(step["seconds"]))  # type: ignore[arg-type]
    note(directory, {"sent": len(requests), "pid": os.getpid()})
    got = {client: body.hex() for client, body in replies}
    note(directory, {"replies": got, "seconds": time.monotonic() - began})


def note(directory: Path, what: dict[str, object]) -> None:
    with (directory / RESULTS).open("a") as file:
        file.write(json.dumps(what) + "\n")


def wait(ready: object) -> None:
    until = time.monotonic() + PATIENCE
    while not ready() and time.monotonic() < until:  # type: ignore[operator]
        time.sleep(0.05)


def answer(request: bytes) -> bytes:
    """The request itself, if it asks for nothing else."""
    if request.startswith(b"wait "):
        wait(Path(request[5:].decode()).exists)
    return bytes(int(request[6:])) if request.startswith(b"large ") else request


def main(kind: str, *arguments: str) -> None:
    if kind == "agent":
        listen(Path(arguments[0]), answer)
    else:
        superlink, key, certificate = arguments
        join(superlink, answer, Path(key), Path(certificate))


if __name__ == "__main__":
    main(*sys.argv[1:])
