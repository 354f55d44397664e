"""A headless Chromium, driven by the DevTools protocol over two pipes: opens pages, clicks, asks."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A page of a running Chromium. Messages are JSON that a zero byte ends."""

    def __init__(self, to: int, come: int) -> None:
        self._to, self._come, self._rest, self._count, self._session = to, come, b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol. Raises RuntimeError where it fails."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            come = os.read(self._come, 1 << 20)
            if not come:
                raise RuntimeError("Chromium has ended")
            self._rest += come
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        options = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        found = self.call("Runtime.evaluate", **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, path: Path, width: int, height: int) -> None:
        """Opens a file at this size of the window, and waits until it is complete."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **sizes)
        self.call("Page.navigate", url=path.as_uri())
        self.wait(f"location.href === {json.dumps(path.as_uri())} && document.readyState === 'complete'")

    def wait(self, condition: str) -> None:
        """Waits until the expression holds. Raises an AssertionError after 30 s."""
        waits = f"""(async () => {{ for (let n = 0; n < 600; n++) {{ if ({condition}) return true;
            await new Promise((done) => setTimeout(done, 50)); }} return false; }})()"""
        assert self.ask(waits), condition

    def click(self, selector: str, number: int = 0) -> None:
        """Clicks in the middle of an element that is in sight, of several the one of this number."""
        x, y = self.ask(
            f"""(() => {{ const box = document.querySelectorAll({json.dumps(selector)})[{number}]
            .getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Types into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """Saves what is seen as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A Chromium with this folder for its profile; it ends with the block."""
    (its_in, to), (come, its_out) = os.pipe(), os.pipe()
    options = [
        *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--autoplay-policy=no-user-gesture-required", "--mute-audio", "--disable-dev-shm-usage"),
        f"--user-data-dir={profile}",
    ]
    # The protocol's descriptors are 3 and 4. A shell may know none above 9.
    move = (
        f"import os, sys; os.dup2({its_in}, 3); os.dup2({its_out}, 4); os.execvp(sys.argv[1], sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", move, CHROMIUM or "chromium", *options],
        pass_fds=(its_in, its_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_in)
    os.close(its_out)
    try:
        yield Browser(to, come)
    finally:
        process.terminate()
        process.wait(30)
        os.close(to)
        os.close(come)
