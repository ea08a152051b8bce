"""Headless Chromium, driven over its own debugging pipe (the Chrome DevTools Protocol), for tests of HTML files."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def found() -> str | None:
    """The browser's path, where there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. What it says on its console, and what it asks for, is kept."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="grappe-chromium-")
        theirs, self._to = os.pipe()
        self._from, ours = os.pipe()
        # The pipe's ends are 3 and 4 by the protocol; a sandbox needs rights that containers do not give.
        redirect = f'exec "$0" "$@" 3<&{theirs} 4>&{ours}'
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run")
        profile = f"--user-data-dir={self._folder}"
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, program, *options, profile, "--disable-dev-shm-usage", "about:blank"],
            pass_fds=(theirs, ours),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(ours)
        self._stream = os.fdopen(self._from, "rb")
        self._rest = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.complaints: list[str] = []
        """Errors and warnings of the console, and exceptions."""
        self.requests: list[str] = []
        """The addresses that the page asked for."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self._call(f"{domain}.enable")

    def open(self, file: Path, width: int = 1200, height: int = 900, query: str = "") -> None:
        """Loads a file, with the `query` of its address, and waits until it is there."""
        self.complaints, self.requests = [], []
        self._size(width, height)
        self._call("Page.navigate", url=file.resolve().as_uri() + query)
        self.evaluate("new Promise(done => document.readyState === 'complete' ? done() : onload = () => done())")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression. Raises AssertionError where it throws."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, times: int = 1) -> None:
        """Presses a key, as from the keyboard."""
        code = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40, " ": 32}[key]
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                text = {"code": "Space" if key == " " else key}
                text |= {"text": " "} if key == " " and kind == "keyDown" else {}
                self._call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def prefer(self, scheme: str = "light", media: str = "screen") -> None:
        """Sets the preferred colours: "light" or "dark"; "print" selects the layout for paper."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media=media, features=features)

    def picture(self, file: Path) -> None:
        """A PNG of what is to be seen of the page."""
        answer = self._call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self) -> bytes:
        """The page as it prints."""
        return base64.b64decode(self._call("Page.printToPDF")["data"])

    def close(self) -> None:
        """Ends the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        self._stream.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _size(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._heard()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(told["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(told["exceptionDetails"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])

    def _heard(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._from, 1 << 20)
            if not piece:
                raise AssertionError("the browser has ended")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
