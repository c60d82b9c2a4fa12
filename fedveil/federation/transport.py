"""Transport: how requests reach clients and replies come back, as opaque bytes.

The federation's protocol is bytes in, bytes out on both sides. What carries them (Flower, a socket,
a test's own memory) knows nothing of their contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

Handler = Callable[[bytes], bytes]  # a client's side: the reply to a request


class Transport(Protocol):
    """The server's side: exchange bytes with the clients of a roster, by their index."""

    def connected(self) -> frozenset[int]:
        """The clients that can be reached now."""
        ...

    def exchange(
        self, requests: Mapping[int, bytes], seconds: float
    ) -> Iterator[tuple[int, bytes]]:
        """Send each client its own request, and yield replies (client, bytes) as they arrive.

        Ends once every client has replied or failed, or after `seconds`, whichever is first. A
        client that cannot be reached, fails or is late yields nothing. A reply is yielded under the
        client that the transport authenticated, whatever its bytes say, and at most once.
        """
        ...
