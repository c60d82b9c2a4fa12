"""A federation under fuzzing: frames, requests to a client, replies to a server, and models.

What a network or a client can send goes in as it is. What only the agreement's server can send is
signed here first, so that the reading behind the signature is reached as well.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save

from fedveil.federation import frames
from fedveil.federation.participant import Participant
from fedveil.federation.requests import (
    ANSWERS,
    REFUSALS,
    SIGNED,
    RefusedError,
    Reply,
    Request,
    model_bytes,
    read_model,
)
from fedveil.federation.secagg import messages
from fedveil.federation.secagg.primitives import Identity
from fedveil.federation.serve import SERVER
from tests.unit.federation.hall import SECAGG, Federation, founded

KEY, DIM, MOST = Identity(bytes(range(32))), 8, 2**20
OPENING, NONCE, HASH = "ab" * 16, "00" * 16, "cd" * 32


def framed(content: bytes) -> None:
    """A frame: what is read is what is written, up to the order and spaces of its header."""
    head, parts = frames.read(content, MOST)
    assert sum(map(len, parts)) <= len(content)
    assert frames.read(frames.packed(head, parts)) == (head, parts)


def requests(content: bytes) -> None:
    """A request: unsigned if the first byte is odd, else with the server's signature."""
    frame = content[1:]
    if content[:1] and content[0] % 2 == 0:
        frame = KEY.sign(SIGNED + frame) + frame
    read = Request.read(frame, KEY.public, MOST)
    assert content[0] % 2 == 0  # nobody else can sign
    assert Request.read(read.signed(KEY), KEY.public, MOST) == read


def replies(content: bytes) -> None:
    """A reply of any client."""
    reply = Reply.read(content, MOST)
    assert reply.word in (*ANSWERS, *REFUSALS)
    assert Reply.read(reply.packed(), MOST) == reply


def models(content: bytes) -> None:
    """A model. With a first byte of 1 the length of its header is put right."""
    kind, content = content[:1], content[1:]
    if kind == b"\1":
        head, _, numbers = content.partition(b"\n")
        content = len(head).to_bytes(8, "little") + head + numbers
    x, public = read_model(content, DIM)
    assert x.shape == (DIM,)
    assert bool(torch.isfinite(x).all())
    for part in public.values():
        assert all(bool(torch.isfinite(value).all()) for value in part.values())
    again, state = read_model(model_bytes(x, public), DIM)
    assert torch.equal(again, x)
    assert all(state[slot].keys() == part.keys() for slot, part in public.items())


@cache
def _client() -> tuple[Federation, Participant, Identity]:
    """A client of view `sum`, in a home of this process's own."""
    place = tempfile.mkdtemp(prefix="fuzz-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    made = founded(Path(place), SECAGG)
    return made, made.participant(0), Identity((made.directory / SERVER).read_bytes())


def masked(content: bytes) -> None:
    """What the agreement's own server can ask in secure aggregation: a reply or a fixed word."""
    made, client, server = _client()
    client._members.clear()  # each input meets a client that has seen none
    asked, _, model = content[1:].partition(b"\n--\n")
    parts = (asked, model) if model else (asked,)
    round = content[0] % 4 if content else 0
    request = Request("secagg", made.agreement.hash, OPENING, 0, round, NONCE, parts=parts)
    reply = Reply.read(client.handle(request.signed(server)), MOST)
    if reply.word != "secagg":
        assert reply.word in REFUSALS
        assert reply.word != "failed"
        assert reply.body == b""
        raise RefusedError("malformed", "The request was refused.")
    assert messages.kind_of(reply.body) == messages.kind_of(asked) + 16


def _whole() -> Request:
    model = model_bytes(torch.zeros(DIM), {"bound": {"threshold": torch.ones(1).double()}})
    return Request("invite", HASH, OPENING, 0, 1, NONCE, -1, 1, (model,), 2)


def frame_seeds() -> list[bytes]:
    """Whole frames, and some that lie about their lengths."""
    whole = frames.packed({"kind": "hello", "n": 1}, [b"abc", b""])
    return [whole, frames.packed({}), whole[:-1], b"\0\0\0\x02{}", b"\xff\xff\xff\xff{}"]


def request_seeds() -> list[bytes]:
    """Signed requests of both kinds, and one whose signature is somebody else's."""
    whole = _whole()
    masked = Request("secagg", HASH, OPENING, 3, 0, NONCE, parts=(b"asked",))
    signed = [one.signed(KEY)[64:] for one in (whole, masked)]
    return [*(b"\0" + one for one in signed), b"\1" + whole.signed(Identity(bytes(32)))]


def reply_seeds() -> list[bytes]:
    """Answers and refusals."""
    answers = [Reply("message", b"body", NONCE, True), Reply("secagg", b"body", NONCE)]
    return [one.packed() for one in (*answers, Reply("budget"), Reply("unheard of"))]


def model_seeds() -> list[bytes]:
    """Models with and without the state of a bound, not finite, and of another type."""
    one = torch.ones(1).double()
    plain, adaptive = (model_bytes(torch.ones(DIM), b) for b in ({}, {"bound": {"threshold": one}}))
    wrong = save({"x": torch.full((DIM,), torch.nan)}), save({"x": torch.ones(DIM).half()})
    odd = model_bytes(torch.ones(DIM), {"bound": {"threshold": torch.full((1,), torch.inf)}})
    size = int.from_bytes(adaptive[:8], "little")
    split = b"\1" + adaptive[8 : 8 + size] + b"\n" + adaptive[8 + size :]
    return [*(b"\0" + each for each in (plain, adaptive, *wrong, odd)), split]


def masked_seeds() -> list[bytes]:
    """Requests for keys of two rounds, with and without a model, and stages out of order."""
    made, _, _ = _client()
    place = bytes.fromhex(made.agreement.hash), bytes.fromhex(OPENING)
    model = model_bytes(torch.zeros(made.agreement.dim), {})
    keys = [messages.keys_request(*place, round) for round in (0, 1)]
    return [b"\0" + keys[0], b"\1" + keys[1], b"\0" + keys[0] + b"\n--\n" + model, b"\0" + model]
