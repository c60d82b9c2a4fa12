"""Chromium without a window, spoken to over loopback by its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium")
PATIENCE = 60.0  # seconds until a browser that does not answer is given up


class Tab:
    """One page: commands go out, and events that come meanwhile are kept."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's answer."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            told = json.loads(self._socket.recv(timeout=PATIENCE))
            if told.get("id") == number:
                assert "error" not in told, told
                return dict(told["result"])
            self.events.append(told)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; an exception there is one here."""
        found = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, page: Path) -> None:
        """Load a page and wait until all its charts are drawn."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.send("Page.navigate", url=page.resolve().as_uri())
        self.until("document.documentElement?.dataset.ready === 'all'")

    def until(self, condition: str) -> None:
        """Wait for something to become true in the page."""
        end = time.monotonic() + PATIENCE
        while not self.run(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.05)

    def window(self, width: int, height: int, phone: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip

    def prefer(self, scheme: str) -> None:
        """What the system asks for: light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path, **clip: float) -> None:
        more = {"clip": {**clip, "scale": 1}} if clip else {}
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True, **more)
        path.write_bytes(base64.b64decode(found["data"]))

    def printed(self) -> bytes:
        """The page as PDF."""
        found = self.send("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        return base64.b64decode(found["data"])

    def complaints(self) -> list[dict[str, Any]]:
        """Errors, warnings, and requests for anything but the page itself."""
        return [event for event in self.events if _complains(event)]


def _complains(event: dict[str, Any]) -> bool:
    match event:
        case {"method": "Runtime.exceptionThrown"}:
            return True
        case {"method": "Runtime.consoleAPICalled", "params": {"type": kind}}:
            return kind in ("error", "warning", "assert")
        case {"method": "Log.entryAdded", "params": {"entry": {"level": level}}}:
            return level in ("error", "warning")
        case {"method": "Network.requestWillBeSent", "params": {"request": {"url": url}}}:
            return not url.startswith(("file://", "data:", "blob:"))
        case _:
            return False


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A tab of a browser of its own, ended afterwards."""
    from websockets.sync.client import connect

    assert PROGRAM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
             "--no-first-run", "--disable-background-networking", "--disable-sync",
             "--disable-component-update", "--disable-dev-shm-usage",
             f"--user-data-dir={profile}", "about:blank"]  # fmt: skip
    process = subprocess.Popen(
        [PROGRAM, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with connect(_address(profile, process), max_size=None, proxy=None) as socket:
            yield Tab(socket)
            socket.send(json.dumps({"id": 0, "method": "Browser.close"}))
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the tab can be spoken to, once the browser has written down its port."""
    file = profile / "DevToolsActivePort"
    end = time.monotonic() + PATIENCE
    while not (file.is_file() and "\n" in file.read_text()):
        assert process.poll() is None, "the browser ended"
        assert time.monotonic() < end, "the browser did not start"
        time.sleep(0.05)
    port = file.read_text().split("\n")[0]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as answer:
        tabs = json.load(answer)
    return str(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
