"""The ClientApp: it passes each request to the resident agent of its node and returns the reply.

It holds no data and no keys, and imports neither fedveil nor torch. The agent decides what leaves
the node. Failures leave it as fixed words: Flower sends the text of an exception to the server.
"""

from __future__ import annotations

import time

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from .envelope import opened, sealed
from .frames import FrameError, call

SOCKET = "agent-socket"  # in the node's configuration
PATIENCE = 600.0  # seconds for one request, at most
CODE = 100  # of an error reply; Flower's own codes are smaller
app = ClientApp()


@app.query()
def carry(message: Message, context: Context) -> Message:
    """The agent's reply to the bytes of a message, or one fixed word."""
    try:
        return Message(sealed(_asked(message, context)), reply_to=message)
    except FrameError as problem:
        return Message(Error(CODE, problem.word), reply_to=message)
    except Exception:
        return Message(Error(CODE, "failed"), reply_to=message)


def _asked(message: Message, context: Context) -> bytes:
    request, path = opened(message.content), context.node_config.get(SOCKET)
    if request is None:
        raise FrameError("malformed")
    if not isinstance(path, str):
        raise FrameError("unreachable")
    return call(path, request, min(_left(message), PATIENCE))


def _left(message: Message) -> float:
    """Seconds until the message expires."""
    return float(message.metadata.created_at + message.metadata.ttl - time.time())
