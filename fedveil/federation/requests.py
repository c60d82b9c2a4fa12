"""Requests of the server and replies of clients, as frames.

Every request carries the agreement's hash, the opening (one for each process of the server), the
client, the round and a nonce, and is signed with the server's key from the agreement. So nobody
else can ask a client for a message, and a request is valid for one client, round and opening. A
reply is a message, a step of secure aggregation, or a refusal in one of a few fixed words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from fedveil.errors import UserError
from fedveil.federation import frames
from fedveil.federation.secagg import refusals
from fedveil.federation.secagg.primitives import SIGNATURE, Identity, is_signed

if TYPE_CHECKING:
    from fedveil.recipe import Recipe

SIGNED = b"fedveil request\n"
OPENING, NONCE, HASH = 16, 16, 32  # bytes
MOST_REDRAWN = 2**16  # rounds that a client would charge one by one
HEADROOM = 2**20  # bytes beside the numbers of a frame

Kind = Literal["invite", "secagg"]
Word = Literal[
    "malformed", "signature", "agreement", "client", "opening", "answered", "budget", "round",
    "busy", "failed",
]  # fmt: skip
WORDS: tuple[Word, ...] = get_args(Word)
ANSWERS = ("message", "secagg")
REFUSALS = frozenset({*WORDS, *refusals.WORDS})  # all that a client says instead of an answer


class RefusedError(UserError):
    """A client's refusal: `word` goes to the server, the sentence to the client's owner only."""

    def __init__(self, word: Word, sentence: str) -> None:
        super().__init__(sentence)
        self.word = word


@dataclass(frozen=True)
class Request:
    """What the server asks of one client in one round."""

    kind: Kind
    agreement: str
    opening: str
    client: int
    round: int
    nonce: str
    counted: int = -1  # the last round in which this client's message was counted; −1: none
    since: int = 0  # the first round of this opening
    parts: tuple[bytes, ...] = ()  # the model; in secure aggregation also its own request
    redrawn: int = 0  # rounds that earlier openings have drawn and lost

    def signed(self, identity: Identity) -> bytes:
        """The request as a frame, with the server's signature in front."""
        frame = frames.packed(self._head(), self.parts)
        return identity.sign(SIGNED + frame) + frame

    def _head(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "parts"}

    @classmethod
    def read(cls, content: bytes, server: bytes, most: int) -> Request:
        """The request in these bytes, if the server has signed them."""
        if len(content) > most:
            raise RefusedError("malformed", f"A request has {len(content)} bytes; {most} fit.")
        signature, frame = content[:SIGNATURE], content[SIGNATURE:]
        if not is_signed(server, signature, SIGNED + frame):
            raise RefusedError("signature", "A request is not signed by the agreement's server.")
        try:
            head, parts = frames.read(frame)
        except UserError as problem:
            raise RefusedError("malformed", str(problem)) from None
        if not _is_head(head):
            raise RefusedError("malformed", "A request has missing or unknown fields.")
        return cls(**head, parts=parts)


def _is_head(head: Mapping[str, Any]) -> bool:
    texts = {"agreement": HASH, "opening": OPENING, "nonce": NONCE}
    numbers = ("client", "round", "counted", "since", "redrawn")
    return (
        head.keys() == {"kind", *texts, *numbers}
        and head["kind"] in get_args(Kind)
        and all(_is_hex(head[name], size) for name, size in texts.items())
        and all(type(head[name]) is int and -1 <= head[name] < 2**63 for name in numbers)
        and head["client"] >= 0
        and 0 <= head["redrawn"] < MOST_REDRAWN
        and 0 <= head["since"] <= head["round"]
    )


def _is_hex(text: object, size: int) -> bool:
    whole = isinstance(text, str) and len(text) == 2 * size
    return whole and all(digit in "0123456789abcdef" for digit in str(text))


@dataclass(frozen=True)
class Reply:
    """What a client returns. The server trusts none of it."""

    word: str  # "message", "secagg", or why there is none
    body: bytes = b""
    nonce: str = ""
    short: bool | None = None

    def packed(self) -> bytes:
        """As a frame."""
        head = {"word": self.word, "nonce": self.nonce, "short": self.short}
        return frames.packed(head, [self.body])

    @classmethod
    def read(cls, content: bytes, most: int) -> Reply:
        """The reply in these bytes; refused unless it has exactly its fields."""
        head, parts = frames.read(content, most)
        short = head.get("short")
        sound = head.keys() == {"word", "nonce", "short"} and len(parts) == 1
        if not sound or not (short is None or isinstance(short, bool)):
            raise UserError("A reply has missing or unknown fields. It was rejected.")
        if not isinstance(head["word"], str) or not isinstance(head["nonce"], str):
            raise UserError("A reply's word or nonce is not a text. It was rejected.")
        if head["word"] not in ANSWERS and head["word"] not in REFUSALS:
            raise UserError("A reply has an unknown word. It was rejected.")
        return cls(head["word"], parts[0], head["nonce"][:64], short)


Public = dict[str, dict[str, Tensor]]  # what clients need of the state of parts, by slot


def model_bytes(x: Tensor, public: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    """The model and the public state of parts, as a round's requests carry them."""
    from safetensors.torch import save

    parts = {f"{slot}.{name}": v for slot, one in public.items() for name, v in one.items()}
    return save({"x": x, **parts})


def public_state(recipe: Recipe, parts: Mapping[str, Mapping[str, Tensor]]) -> Public:
    """The state of the bound, and the vectors that the memory shares: functions of releases."""
    shared = {name: parts["memory"][name] for name in recipe.memory.shared}
    return {"bound": dict(parts["bound"]), "memory": shared}


def read_model(content: bytes, dim: int) -> tuple[Tensor, Public]:
    """What `model_bytes` wrote: d finite float32 numbers, and the state of parts."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        leaves = load(content)
    except (SafetensorError, KeyError, ValueError, RuntimeError, OverflowError):
        raise RefusedError("malformed", "A request's model is not valid safetensors.") from None
    x = leaves.pop("x", torch.empty(0))
    if not _is_vector(x, dim):
        raise RefusedError("malformed", f"A request's model is not {dim} finite float32 numbers.")
    public: Public = {"bound": {}, "memory": {}}
    for path, value in leaves.items():
        slot, _, name = path.partition(".")
        fits = {"bound": _is_number(value), "memory": _is_vector(value, dim)}
        if not fits.get(slot):
            raise RefusedError("malformed", "A request has unknown tensors beside its model.")
        public[slot][name] = value
    return x, public


def _is_vector(value: Tensor, dim: int) -> bool:
    fits = value.shape == (dim,) and value.dtype == torch.float32
    return fits and bool(torch.isfinite(value).all())


def _is_number(value: Tensor) -> bool:
    single = value.numel() == 1 and value.dtype in (torch.float32, torch.float64)
    return single and bool(torch.isfinite(value).all())


def most_bytes(dim: int, clients: int) -> int:
    """The largest frame of a federation: a model, or the shares of a cohort."""
    return 16 * dim + 2048 * clients + HEADROOM
