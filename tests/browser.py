"""A browser without a window, by the DevTools protocol over two pipes."""

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
SECONDS = 60.0
"""Longer than anything takes that is asked of a browser here."""


def found() -> str | None:
    """A Chromium that is installed, None without one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A tab of a browser's own.

    ``events``: what it told without being asked, all of it.
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
        pages = [x for x in self.ask("Target.getTargets")["targetInfos"] if x["type"] == "page"]
        tab = self.ask("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._tab = {"sessionId": tab["sessionId"]}
        self.ask("Runtime.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, EOFError, AssertionError):
            self.ask("Browser.close")
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Its answer to a command of the protocol."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters, **self._tab}
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while (told := self._next()).get("id") != self._number:
            self.events.append(told)
        assert "result" in told, told
        return told["result"]

    def run(self, code: str) -> Any:
        """The value of an expression of JavaScript, as JSON has it."""
        answer = self.ask(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, code: str) -> None:
        """Wait until an expression holds."""
        end = time.monotonic() + SECONDS
        while self.run(f"!!({code})") is not True:
            assert time.monotonic() < end, f"it never holds: {code}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Write where the cursor is, and press Enter."""
        self.ask("Input.insertText", text=text)
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self.ask("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **key)

    def click(self, selector: str) -> None:
        """Press what a selector finds, in its middle."""
        of = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        box = self.run(f"{of}.toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._from], [], [], SECONDS)[0], "the browser says nothing"
            part = os.read(self._from, 1 << 16)
            if not part:
                raise EOFError("the browser has gone")
            self._rest += part
        told, self._rest = self._rest.split(b"\0", 1)
        return json.loads(told)
