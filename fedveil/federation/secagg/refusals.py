"""Refusals: how a client or a round says no, without saying anything else.

A refusal has two halves. The word is one of a fixed list and may be sent to the server. The
sentence is for the owner of the client, and never leaves it.
"""

from __future__ import annotations

from typing import Literal, get_args

from fedveil.errors import UserError

Word = Literal[
    "malformed",
    "stage",
    "agreement",
    "opening",
    "round",
    "model",
    "terms",
    "cohort",
    "keys",
    "signature",
    "session",
    "boxes",
    "survivors",
    "too-few",
    "repeated",
    "shares",
    "spoiled",
    "declined",  # by the client's owner: a ledger, a budget, a message that cannot be computed
]
WORDS: tuple[Word, ...] = get_args(Word)


class Refusal(UserError):  # noqa: N818
    """A client's refusal: `word` for the server, `sentence` for the client's owner."""

    def __init__(self, word: Word, sentence: str) -> None:
        super().__init__(sentence)
        self.word, self.sentence = word, sentence


class Aborted(UserError):  # noqa: N818
    """A round that ends without a sum: `word` for the record, `sentence` for the server's owner."""

    def __init__(self, word: Word, sentence: str) -> None:
        super().__init__(sentence)
        self.word, self.sentence = word, sentence
