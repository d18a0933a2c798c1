"""Drives headless Chromium over its DevTools protocol, with aiohttp alone."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_SECONDS, ANSWER_SECONDS = 120.0, 120.0

KEYS = {
    "Tab": 9,
    "Enter": 13,
    "ArrowDown": 40,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowLeft": 37,
    "Home": 36,
    "End": 35,
}


def find_chromium() -> str:
    """Returns the program, or skips the test."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(
            "There is no Chromium on this machine; install it, as with apt-get install "
            "chromium."
        )
    return found


class Page:
    """A page in a browser. All calls wait for their answer.

    Attributes:
        errors (list of str): what its console and its scripts complain of.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: Any) -> None:
        self.errors: list[str] = []
        self.requested: list[str] = []
        self._loop, self._socket = loop, socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session = ""
        self._reader = loop.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
                continue
            method, params = found.get("method"), found.get("params", {})
            if method == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
            elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and params["type"] in (
                "error",
                "warning",
            ):
                self.errors.append(json.dumps(params["args"])[:2000])
            elif method == "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])

    async def _call(self, method: str, params: dict[str, Any]) -> Any:
        number = next(self._ids)
        answer = self._answers[number] = self._loop.create_future()
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        found = await asyncio.wait_for(answer, ANSWER_SECONDS)
        assert "error" not in found, found
        return found["result"]

    def call(self, method: str, **params: Any) -> Any:
        """Calls a method of the protocol."""
        return self._loop.run_until_complete(self._call(method, params))

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Sets the window's size and the system's colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Opens a page of the viewer, and waits until it is ready."""
        self.call("Page.navigate", url=url)
        self.wait("document.body?.dataset.ready === 'true'")

    def eval(self, script: str) -> Any:
        """Returns the value of an expression, or of its promise."""
        found = self.call(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until an expression holds; the page looks at each of its frames."""
        self.eval(
            f"""new Promise((resolve, reject) => {{
              const end = Date.now() + {1000 * ANSWER_SECONDS - 10_000};
              const look = () => {{
                let held = false;
                try {{ held = {condition}; }} catch (error) {{ held = false; }}
                if (held) resolve(true);
                else if (Date.now() > end) reject(new Error({json.dumps(condition)}));
                else setTimeout(look, 20);
              }};
              look();
            }})"""
        )

    def press(self, key: str) -> None:
        """Presses a key."""
        code = KEYS[key]
        for kind in ("rawKeyDown", "keyUp"):
            types = key == "Enter" and kind == "rawKeyDown"
            extra = {"text": "\r"} if types else {}
            self.call(
                "Input.dispatchKeyEvent",
                type="keyDown" if types else kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **extra,
            )

    def hover(self, selector: str) -> None:
        """Moves the mouse to the middle of an element."""
        self.eval(f"document.querySelector({selector!r}).scrollIntoView()")
        box = self.eval(
            f"""(() => {{
              const box = document.querySelector({selector!r}).getBoundingClientRect();
              return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        for x, y in ((box[0] - 1, box[1]), tuple(box)):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


@contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """Starts Chromium with a new profile; it ends with the block."""
    command = [
        find_chromium(),
        "--headless=new",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "--disable-gpu",
        "--no-first-run",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--force-color-profile=srgb",
        "about:blank",
    ]
    if os.geteuid() == 0:
        command.insert(1, "--no-sandbox")
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    watchdog = threading.Timer(START_SECONDS, process.kill)
    watchdog.start()
    loop = asyncio.new_event_loop()
    assert process.stderr is not None
    drain = threading.Thread(target=process.stderr.read, daemon=True)
    try:
        lines = iter(process.stderr.readline, "")
        matches = (re.search(r"listening on (ws://\S+)", line) for line in lines)
        found = next(filter(None, matches), None)
        watchdog.cancel()
        assert found is not None, "Chromium has not started."
        # What it says later must not fill the pipe.
        drain.start()
        yield from _page(loop, found[1])
    finally:
        watchdog.cancel()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()
        if drain.is_alive():
            drain.join(20)
        process.stderr.close()
        loop.close()


def _page(loop: asyncio.AbstractEventLoop, url: str) -> Iterator[Page]:
    client = None

    async def connect() -> Any:
        nonlocal client
        client = aiohttp.ClientSession()
        return await client.ws_connect(url, max_msg_size=0)

    socket = loop.run_until_complete(connect())
    page = Page(loop, socket)
    try:
        page.attach()
        yield page
    finally:

        async def close() -> None:
            page._reader.cancel()
            await socket.close()
            assert client is not None
            await client.close()

        loop.run_until_complete(close())
