"""A headless Chromium, driven over its DevTools pipe: no driver, no port, nothing to install beside the browser."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FOUND = next((path for name in NAMES if (path := shutil.which(name))), None)
MISSING = "needs a Chromium (Debian: apt-get install chromium)"
_PATIENCE = 60.0  # seconds for an answer: two cores may be busy with other tests
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--hide-scrollbars",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip


class Chromium:
    """One page.  ``requests`` are the addresses that it asked for, ``complaints`` what its console and log say."""

    def __init__(self, profile: Path) -> None:
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()

        def pipes() -> None:  # Chromium reads descriptor 3 and writes 4
            # Either may lie where the other belongs, so both are moved out of the way first.
            reading, writing = (fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (to_read, to_write))
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self._process = subprocess.Popen(
            [FOUND, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=pipes, pass_fds=(3, 4, to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number = b"", 0
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._events: list[str] = []
        targets = self._send("Target.getTargets")["targetInfos"]
        target = next(each for each in targets if each["type"] == "page")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol to the page, and its answer."""
        return self._send(method, self._session, **parameters)

    def open(self, address: str) -> None:
        """Load a page and wait for its load event."""
        self._events.clear()
        self.ask("Page.navigate", url=address)
        deadline = time.monotonic() + _PATIENCE
        while "Page.loadEventFired" not in self._events:
            self._receive(deadline)

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """Make the window that large, in CSS pixels, and prefer one colour scheme."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, waited for; an exception in it is an AssertionError."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """A key, down and up; ``code`` is its Windows virtual key code."""
        text = {"Enter": "\r"}.get(key)
        more = {"text": text} if text else {}
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """What can be seen, or the whole page, as PNG."""
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def print(self) -> bytes:
        """The page as PDF on A4."""
        answer = self.ask("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True)
        return base64.b64decode(answer["data"])

    def _send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _PATIENCE
        while (answer := self._receive(deadline)).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            received = os.read(self._in, 2**20)
            assert received, "Chromium has ended"
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, facts: dict[str, Any]) -> None:
        self._events.append(event)
        if event == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif event == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(facts["args"]))
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(facts["exceptionDetails"]))
        elif event == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.complaints.append(facts["entry"]["text"])
