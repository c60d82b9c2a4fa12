"""The resident agent: one request at a time, whatever connects to it."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedveil.errors import UserError
from fedveil.federation.flower.agent import Agent, call, listen
from fedveil.federation.flower.app.frames import REPLY, REQUEST, FrameError
from fedveil.federation.flower.app.frames import call as call_frames
from fedveil.federation.transport import Handler

Start = Callable[..., Path]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[tuple[Agent, threading.Thread]] = []

    def started(handler: Handler = bytes.upper, **options: float) -> Path:
        path = tmp_path / f"agent{len(running)}.sock"
        agent = Agent(path, handler, **options)  # type: ignore[arg-type]
        thread = threading.Thread(target=agent.serve)
        thread.start()
        running.append((agent, thread))
        return path

    yield started
    for agent, thread in running:
        agent.stop()
        thread.join(5)
        assert not thread.is_alive()
        agent.close()


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(5)
    connection.connect(str(path))
    return connection


@pytest.mark.parametrize("request_", [b"", b"request", os.urandom(3_000_000)])
def test_a_request_is_answered(start: Start, request_: bytes) -> None:
    assert call(start(bytes), request_) == request_


def test_the_agent_survives_a_handler_that_raises_and_does_not_tell_why(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(request: bytes) -> bytes:
        if request == b"bad":
            raise ValueError("a secret of the client")
        return request

    path = start(handler)
    with pytest.raises(UserError, match=r"did not answer \(failed\)"):
        call(path, b"bad")
    assert call(path, b"good") == b"good"
    assert "a secret of the client" in caplog.text  # in the owner's log


@pytest.mark.parametrize(
    "sent",
    [b"", b"\0\0", REQUEST.pack(10) + b"half", REQUEST.pack(2**63), b"GET / HTTP/1.1\r\n\r\n"],
)
def test_a_broken_client_ends_its_own_connection_only(start: Start, sent: bytes) -> None:
    path = start()
    with connect(path) as broken:
        broken.sendall(sent)
    assert call(path, b"next") == b"NEXT"


def test_a_client_that_does_not_read_its_reply_costs_only_its_own_time(start: Start) -> None:
    path = start(lambda request: bytes(5_000_000), seconds=0.2)
    with connect(path) as deaf:
        deaf.sendall(REQUEST.pack(0))
        assert len(call(path, b"", 5)) == 5_000_000


def test_a_slow_client_is_cut_off(start: Start) -> None:
    path = start(seconds=0.2)
    with connect(path) as slow:
        slow.sendall(REQUEST.pack(1000) + b"a bit")
        assert call(path, b"next", 5) == b"NEXT"


def test_a_large_request_is_refused_before_it_is_read(start: Start) -> None:
    path = start(limit=100)
    with connect(path) as large:
        large.sendall(REQUEST.pack(101))
        assert large.recv(100) == b""  # closed, with nothing read
    with pytest.raises(FrameError, match="too-large"):
        call_frames(path, bytes(101), 5, limit=100)


def test_a_large_reply_is_refused(start: Start) -> None:
    with pytest.raises(FrameError, match="too-large"):
        call_frames(start(lambda _: bytes(101)), b"", 5, limit=100)


def test_a_late_reply_is_given_up(start: Start) -> None:
    done = threading.Event()
    path = start(lambda request: request if done.wait(5) else b"")
    with pytest.raises(FrameError, match="late"):
        call_frames(path, b"", 0.1)
    done.set()


def test_an_agent_that_closes_in_the_middle_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "half.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def half() -> None:
            connection, _ = server.accept()
            connection.recv(100)
            connection.sendall(REPLY.pack(0, 100) + b"half")
            connection.close()

        thread = threading.Thread(target=half)
        thread.start()
        with pytest.raises(FrameError, match="broken"):
            call_frames(path, b"", 5)
        thread.join()


def test_no_agent_is_said_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unreachable.*Start it"):
        call(tmp_path / "none.sock", b"")


def test_requests_are_answered_one_at_a_time(start: Start) -> None:
    at_once, most = 0, 0

    def handler(request: bytes) -> bytes:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.02)
        at_once -= 1
        return request

    path = start(handler)
    threads = [threading.Thread(target=call, args=(path, b"")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_only_the_owner_may_connect(start: Start) -> None:
    assert stat.S_IMODE(start().stat().st_mode) == 0o600


def test_a_group_may_connect_if_asked_for(tmp_path: Path) -> None:
    import grp

    path = tmp_path / "group.sock"
    agent = Agent(path, bytes, group=grp.getgrgid(os.getgid()).gr_name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    agent.close()
    with pytest.raises(UserError, match="Cannot listen"):
        Agent(path, bytes, group="no-such-group-of-this-test")


def test_a_second_agent_is_refused_and_the_first_goes_on(start: Start) -> None:
    path = start()
    with pytest.raises(UserError, match="in use by process"):
        Agent(path, bytes)
    assert call(path, b"still here") == b"STILL HERE"


def test_a_socket_of_another_program_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "taken.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(UserError, match="Another process listens"):
            Agent(path, bytes)
    Agent(path, bytes).close()  # the program has ended, and its socket is left behind
    assert not path.exists()


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("data")
    with pytest.raises(UserError, match="is not a socket"):
        Agent(path, bytes)
    assert path.read_text() == "data"


def test_a_path_that_is_too_long_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="longer than 107 bytes"):
        Agent(tmp_path / ("x" * 108), bytes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_agent_after_the_current_request(
    tmp_path: Path, number: signal.Signals
) -> None:
    path, replies = tmp_path / "agent.sock", []
    before = signal.getsignal(number)

    def handler(request: bytes) -> bytes:
        os.kill(os.getpid(), number)
        return request

    def client() -> None:
        while not path.exists():
            time.sleep(0.01)
        replies.append(call(path, b"last", 5))

    thread = threading.Thread(target=client)
    thread.start()
    listen(path, handler)
    thread.join()
    assert replies == [b"last"]
    assert not path.exists()
    assert signal.getsignal(number) == before
