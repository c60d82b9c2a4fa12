"""What secure aggregation costs: CPU per client and for the server, and bytes per stage.

`python -m benchmarks.secagg` prints one table: n clients, of whom 10 % may be corrupt and none or
10 % are lost before their message, d coordinates of 20 bits. Times are CPU times of one thread. A
client's is the mean over all clients of a first round, keys included. Beside them is the bare cost
of the pseudo-random generator: AES-256-CTR over the same number of masks, added to nothing.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from fedveil.federation.secagg.aggregator import Aggregator
from fedveil.federation.secagg.member import SecureMember
from fedveil.federation.secagg.primitives import CHUNK, ZEROS, Identity, words
from fedveil.federation.secagg.terms import RoundContext, SecAggTerms, least_threshold

BITS, LOST = 20, 10  # bits per coordinate; one of LOST clients is lost
AGREEMENT, OPENING, MODEL = b"a" * 32, b"o" * 16, b"m" * 32
STAGES = ("keys", "shares", "masked", "consistency", "reveal")


@dataclass
class Cost:
    """CPU seconds and bytes of one round."""

    client: float = 0.0  # of a client that answers everything
    server: float = 0.0
    down: dict[str, int] = field(default_factory=dict)  # bytes to one client
    up: dict[str, int] = field(default_factory=dict)


def terms(clients: int, dim: int) -> SecAggTerms:
    """Terms with a tenth of corrupt clients, and half of the cohort honest in every sum."""
    corrupt = clients // 10
    return SecAggTerms(
        least_threshold(clients, corrupt), corrupt, clients // 2 + corrupt, BITS, dim
    )


def round_cost(clients: int, dim: int, lost: int) -> Cost:
    """One round with `lost` clients that send no message; its sum is checked."""
    draw, agreed = random.Random(0).randbytes, terms(clients, dim)
    identities = {client: Identity(draw(32)) for client in range(clients)}
    roster = {client: identity.public for client, identity in identities.items()}
    members = {
        client: SecureMember(client, identity, roster, AGREEMENT, OPENING, agreed)
        for client, identity in identities.items()
    }
    levels = np.random.default_rng(0).integers(-1000, 1000, dim)
    context = RoundContext(AGREEMENT, OPENING, 0, MODEL, tuple(range(clients)), agreed)
    cost, spent = Cost(), defaultdict(list)
    started = time.process_time()
    server = Aggregator(context, roster, {})
    while server.stage != "done":
        stage, requests = server.stage, server.requests()
        for client, request in requests.items():
            if stage == "masked" and client >= clients - lost:
                continue
            cost.server += time.process_time() - started
            started = time.process_time()
            reply = members[client].answer(request, MODEL, lambda _: levels)
            spent[stage].append(time.process_time() - started)
            started = time.process_time()
            assert server.take(client, reply) == "taken"
            cost.down[stage], cost.up[stage] = len(request), len(reply)
        server.close()
    total = server.total
    cost.server += time.process_time() - started
    cost.client = sum(float(np.mean(times)) for times in spent.values())
    assert np.array_equal(agreed.wire.settle(total), (clients - lost) * levels)
    return cost


def bare_seconds(masks: int, dim: int) -> float:
    """CPU seconds of this number of key streams, from a sample of at most 200."""
    buffer, size = bytearray(CHUNK + 15), dim * words(BITS).itemsize
    sample = min(masks, 200)
    started = time.process_time()
    for key in range(sample):
        stream = Cipher(AES256(key.to_bytes(32, "big")), CTR(bytes(16))).encryptor()
        for start in range(0, size, CHUNK):
            stream.update_into(memoryview(ZEROS)[: min(CHUNK, size - start)], buffer)
    return (time.process_time() - started) * masks / sample


def row(clients: int, dim: int, lost: int) -> str:
    """One line of the table of times."""
    cost = round_cost(clients, dim, lost)
    alive = clients - lost
    client, server = bare_seconds(clients, dim), bare_seconds(alive + lost * alive, dim)
    cells = [clients, f"{dim:,}", lost, *map(_ms, (cost.client, client, cost.server, server))]
    cells += [f"{sum(sizes.values()) / 1000:,.0f}" for sizes in (cost.up, cost.down)]
    return "| " + " | ".join(map(str, cells)) + " |"


def stage_row(clients: int, dim: int) -> str:
    """One line of the table of bytes: to a client and back, by stage."""
    cost = round_cost(clients, dim, 0)
    cells = (f"{cost.down[stage]:,} / {cost.up[stage]:,}" for stage in STAGES)
    return f"| {clients} | {dim:,} | " + " | ".join(cells) + " |"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.secagg", description=__doc__)
    parser.add_argument("--clients", type=int, nargs="*", default=[10, 100, 300])
    parser.add_argument("--dims", type=int, nargs="*", default=[10**4, 10**5, 10**6])
    asked = parser.parse_args()
    print("| n | d | lost | client ms | PRG ms | server ms | PRG ms | kB up | kB down |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for clients in asked.clients:
        for dim in asked.dims:
            for lost in (0, clients // LOST):
                print(row(clients, dim, lost), flush=True)
    print("\n| n | d | " + " | ".join(STAGES) + " |\n|--:|--:|" + "--:|" * len(STAGES))
    for clients in asked.clients:
        print(stage_row(clients, min(asked.dims)), flush=True)


if __name__ == "__main__":
    main()
