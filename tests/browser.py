"""A headless browser, controlled by the DevTools protocol over two pipes."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT = 60.0
"""Seconds to wait for the browser."""


def find_chromium() -> str | None:
    """The path of an installed Chromium, if any."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with one tab.

    ``events``: all events that the browser has sent.
    """

    def __init__(self, command: str, folder: Path) -> None:
        mine, theirs = os.pipe(), os.pipe()
        ends = (mine[0], theirs[1])
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "bash", command, "--headless",
             "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe",
             f"--user-data-dir={folder}", "about:blank"],
            pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in ends:
            os.close(end)
        self._to, self._from = mine[1], theirs[0]
        self._rest, self._number, self._tab = b"", 0, {}
        self.events: list[dict[str, Any]] = []
        pages = [x for x in self.send("Target.getTargets")["targetInfos"] if x["type"] == "page"]
        tab = self.send("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._tab = {"sessionId": tab["sessionId"]}
        self.send("Runtime.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, EOFError, AssertionError):
            self.send("Browser.close")
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._tab}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (reply := self._next()).get("id") != self._number:
            self.events.append(reply)
        assert "result" in reply, reply
        return reply["result"]

    def run(self, code: str) -> Any:
        """Evaluate a JavaScript expression, and return its JSON value."""
        result = self.send(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, code: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + TIMEOUT
        while self.run(f"!!({code})") is not True:
            assert time.monotonic() < end, f"never true: {code}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Type a text at the cursor, and press Enter."""
        self.send("Input.insertText", text=text)
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self.send("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.send("Input.dispatchKeyEvent", type="keyUp", **key)

    def click(self, selector: str) -> None:
        """Click in the middle of an element."""
        box_code = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        box = self.run(f"{box_code}.toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._from], [], [], TIMEOUT)[0], "the browser does not answer"
            part = os.read(self._from, 1 << 16)
            if not part:
                raise EOFError("the browser has exited")
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)
