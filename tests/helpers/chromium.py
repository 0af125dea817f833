import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
    "--window-size=1440,1000",
)
REWIRE = "import os, sys; r, w, *a = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4); os.execv(a[0], a)"


class Browser:
    """Headless Chromium over its debugging pipe: real key and mouse events, and every console message."""

    def __init__(self, profile):
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # The browser reads descriptor 3 and writes descriptor 4; from 10 on, neither hides the other.
        read, write = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser))
        self._process = subprocess.Popen(
            [sys.executable, "-c", REWIRE, str(read), str(write), CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_browser, from_browser, read, write):
            os.close(end)
        self._buffer, self._id, self._session = b"", 0, ""
        self._last: str | None = None
        self.problems: list[dict] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._id:
                assert "error" not in reply, reply
                return reply["result"]

    def _receive(self):
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 20)
            assert part, "the browser is gone"
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        event = json.loads(line)
        if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.problems.append(event["params"])
        self._last = event.get("method")
        return event

    def open(self, path, scheme="light"):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._last = None
        while self._last != "Page.loadEventFired":
            self._receive()

    def js(self, expression):
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def click(self, selector):
        x, y = self.js(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def choose(self, select, text):
        self.js(
            f"(() => {{ const s = document.querySelector({select!r});"
            f"s.value = [...s.options].find((o) => o.text.includes({text!r})).value;"
            "s.dispatchEvent(new Event('change')); })()"
        )

    def screenshot(self, path, full=True):
        data = self.call("Page.captureScreenshot", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self):
        with contextlib.suppress(OSError, AssertionError):
            self._session = ""
            self.call("Browser.close")
        self._process.wait(timeout=20)
        os.close(self._out)
        os.close(self._in)
