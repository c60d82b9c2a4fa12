"""Unmasking: restore the secrets that t clients have revealed, and take the masks off the sum."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedveil.federation.secagg.derived import check_value, mask_key, self_mask_key
from fedveil.federation.secagg.keys import KeyRecord
from fedveil.federation.secagg.primitives import KEY, Pair, add_masks
from fedveil.federation.secagg.refusals import Aborted
from fedveil.federation.secagg.shamir import combine, weights
from fedveil.federation.secagg.terms import RoundContext


class Unmasking:
    """One secret of every client that sent boxes: its self-mask seed, or its private mask key."""

    def __init__(
        self,
        context: RoundContext,
        session: bytes,
        records: Mapping[int, KeyRecord],
        checks: Mapping[int, bytes],  # of U2
        shares: Mapping[int, tuple[int, ...]],  # in the order of U2
    ) -> None:
        revealers = sorted(shares)[: context.terms.threshold]
        self._session, self._records, self._checks = session, records, checks
        self._weights = weights([context.point(client) for client in revealers])
        columns = zip(*(shares[client] for client in revealers), strict=True)
        self._columns = dict(zip(sorted(checks), columns, strict=True))

    def remove_masks(self, total: np.ndarray, survivors: tuple[int, ...]) -> None:
        """total −= self masks of survivors, and their masks with clients that were lost."""
        lost = sorted(self._checks.keys() - set(survivors))
        plus: list[bytes] = []
        minus = [self._self_mask(client) for client in survivors]
        for client in lost:
            pair = self._mask_pair(client)
            for other in survivors:
                key = mask_key(pair, self._records[other].mask, self._session, (client, other))
                (minus if other < client else plus).append(key)
        add_masks(total, plus, minus)

    def _self_mask(self, client: int) -> bytes:
        seed = self._secret(client)
        if check_value(seed, self._session, client) != self._checks[client]:
            raise _wrong(client)
        return self_mask_key(seed, self._session, client)

    def _mask_pair(self, client: int) -> Pair:
        pair = Pair(self._secret(client))
        if pair.public != self._records[client].mask:
            raise _wrong(client)
        return pair

    def _secret(self, client: int) -> bytes:
        value = combine(self._columns[client], self._weights)
        if value.bit_length() > 8 * KEY:
            raise _wrong(client)
        return value.to_bytes(KEY, "big")


def _wrong(client: int) -> Aborted:
    return Aborted(
        "shares",
        f"The shares of client {client} do not restore its secret: this client or one that "
        "revealed them is not honest. Run the round again, without suspects.",
    )
