"""Headless Chromium, driven over DevTools pipes."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ANSWER_TIMEOUT_S = 30.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Disable the browser's own network requests.
FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-sync"),
    *("--no-default-browser-check", "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb"),
    *("--proxy-server=direct://", "--proxy-bypass-list=*", "--disable-extensions", "--mute-audio"),
)


class Browser:
    """One browser page, as a context manager.

    Attributes:
        urls: URLs requested by the page.
        complaints: console errors and warnings, and uncaught exceptions.
    """

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.urls: list[str] = []
        self.complaints: list[str] = []
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._arrived = threading.Condition()
        self._session = ""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, ours_out = _high_pipe()
        ours_in, theirs_out = _high_pipe()
        # The browser reads from 3 and writes to 4.
        self._process = subprocess.Popen(
            [
                *("bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", CHROMIUM, *FLAGS),
                *(f"--user-data-dir={self._profile.name}", "about:blank"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs_in, theirs_out),
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._to = os.fdopen(ours_out, "wb")
        self._from = os.fdopen(ours_in, "rb")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Browser":
        targets = self.ask("Target.getTargets", in_page=False)["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.ask("Target.attachToTarget", {"targetId": target, "flatten": True}, in_page=False)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(ANSWER_TIMEOUT_S)
        self._to.close()
        self._from.close()
        self._profile.cleanup()

    def ask(self, method: str, params: dict[str, Any] | None = None, *, in_page: bool = True) -> dict[str, Any]:
        """Raises RuntimeError on refusal, TimeoutError without an answer."""
        with self._arrived:
            self._number += 1
            number = self._number
        message = {"id": number, "method": method, "params": params or {}}
        if in_page:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        with self._arrived:
            if not self._arrived.wait_for(lambda: number in self._answers, ANSWER_TIMEOUT_S):
                raise TimeoutError(f"no answer to {method}")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression or promise."""
        result = self.ask("Runtime.evaluate", {"expression": script, "returnByValue": True, "awaitPromise": True})
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def until(self, script: str, timeout_s: float, accept: Callable[[Any], Any] = bool) -> Any:
        """Return the first accepted value. Retries evaluations that fail during navigation."""
        deadline = time.monotonic() + timeout_s
        while True:
            value: Any
            try:
                value = self.evaluate(script)
                if accept(value):
                    return value
            except RuntimeError as error:
                value = error
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {script}, now {value!r}"
            time.sleep(0.1)

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def open(self, url: str) -> None:
        self.ask("Page.navigate", {"url": url})
        self.until("document.readyState", ANSWER_TIMEOUT_S, lambda state: state == "complete")

    def resize(self, width: int, height: int, *, scale: float = 1.0, is_phone: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": is_phone}
        self.ask("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        self.ask("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def press(self, key: str, *, code: int = 0, shift: bool = False) -> None:
        """Args: code: Windows key code."""
        text = {"Enter": "\r"}.get(key, "")
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0, "text": text}
        self.ask("Input.dispatchKeyEvent", {**event, "type": "keyDown"})
        self.ask("Input.dispatchKeyEvent", {**event, "type": "keyUp"})

    def type(self, text: str) -> None:
        self.ask("Input.insertText", {"text": text})

    def click(self, selector: str) -> None:
        """Click as a user does, who alone may copy to the clipboard."""
        box = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{box}.scrollIntoView({{ block: 'center' }})")
        x, y = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({box}.getBoundingClientRect())"
        )
        event = {"x": x, "y": y, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", {**event, "type": kind})

    def screenshot(self, path: Path, *, whole_page: bool = False) -> None:
        taken = self.ask("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole_page})
        path.write_bytes(base64.b64decode(taken["data"]))

    def _read(self) -> None:
        rest = b""
        while chunk := os.read(self._from.fileno(), 2**16):
            *messages, rest = (rest + chunk).split(b"\0")
            for message in messages:
                self._receive(json.loads(message))

    def _receive(self, message: dict[str, Any]) -> None:
        if "id" in message:
            with self._arrived:
                self._answers[message["id"]] = message
                self._arrived.notify_all()
            return
        params = message.get("params", {})
        match message["method"]:
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(params["exceptionDetails"]["exception"].get("description", "an exception"))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


def _high_pipe() -> tuple[int, int]:
    """Return descriptors above 9: a shell can redirect only 0 to 9."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
