"""Serves the page of runs on this machine, and follows those that go on."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Sequence

from aiohttp import web

from torchrl_sglang.recording.reading import Recording
from torchrl_sglang.viewer.groups import conversations_of
from torchrl_sglang.viewer.page import (
    as_script,
    names_of,
    page_data,
    page_html,
    read_runs,
    title_of,
)
from torchrl_sglang.viewer.run import RunData, find_group

MOST_BUSY = 0.1
"""Share of its time that a viewer reads and puts pages together: what it follows runs
on the same machine."""

HOST = "127.0.0.1"
"""Pages hold prompts and responses: they are for users of this machine."""


class Viewer:
    """Answers with what recordings hold now.

    Args:
        recordings: of the runs, in the order of the page.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._recordings = recordings
        self._lock = threading.Lock()
        self._runs: list[RunData] = []
        self._page = page_html(title_of(names_of(recordings)), "")
        self._data = self._tag = ""
        self._made_at = 0.0
        self._next_at = 0.0

    def page(self) -> str:
        """Returns the page, which a browser reads while its data is put together."""
        return self._page

    def data(self) -> tuple[str, str]:
        """Returns the data of the page as JSON, and a tag of its content."""
        with self._lock:
            self._refresh()
            return self._data, self._tag

    def group(self, run: int, name: str) -> str | None:
        """Returns the conversations of a group as JSON; ``None``: there are none."""
        with self._lock:
            if not self._runs:
                self._refresh()
            if not 0 <= run < len(self._runs):
                return None
            group = find_group(self._runs[run].groups, name)
            if group is None:
                return None
            found = conversations_of(self._recordings[run], group)
            return None if found is None else as_script(found)

    def _refresh(self) -> None:
        """Reads what was added; a run that ends looks different, too."""
        began = time.monotonic()
        if self._data and began < self._next_at:
            return
        changed = [each.refresh() for each in self._recordings]
        was_live = any(run.is_live(self._made_at) for run in self._runs)
        now = time.time()
        ends = was_live and not any(run.is_live(now) for run in self._runs)
        if not self._data or any(changed) or ends:
            self._make(now)
            took = time.monotonic() - began
            self._next_at = began + took / MOST_BUSY

    def _make(self, now: float) -> None:
        self._runs = read_runs(self._recordings)
        self._made_at = now
        data = page_data(self._runs, now=now)
        text = as_script(data)
        self._tag = f'"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"'
        self._data = f"{text[:-1]},{as_script({'tag': self._tag})[1:]}"


def make_app(viewer: Viewer) -> web.Application:
    """Returns the routes."""

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=viewer.page(), content_type="text/html")

    async def data(request: web.Request) -> web.Response:
        text, tag = await asyncio.to_thread(viewer.data)
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304)
        return web.Response(text=text, content_type="application/json")

    async def group(request: web.Request) -> web.Response:
        run, name = request.match_info["run"], request.match_info["name"]
        text = await asyncio.to_thread(viewer.group, int(run), name)
        if text is None:
            return web.Response(
                status=404,
                text=f"The conversations of group {name} were not recorded, or have "
                f"made room for newer ones.",
            )
        return web.Response(text=text, content_type="application/json")

    app = web.Application(middlewares=[_only_here])
    app.router.add_get("/", page)
    app.router.add_get("/data.json", data)
    app.router.add_get(r"/group/{run:\d+}/{name}", group)
    return app


@web.middleware
async def _only_here(
    request: web.Request, handler: Callable[[web.Request], object]
) -> web.StreamResponse:
    """Refuses a page of another site whose name leads here."""
    host = request.url.host
    if host not in (HOST, "localhost", "::1"):
        return web.Response(status=403, text=f"This viewer is not at {host}.")
    return await handler(request)  # type: ignore[misc, no-any-return]


async def serve(
    viewer: Viewer, port: int, *, ready: Callable[[str], None]
) -> None:  # pragma: no cover - Until it is cancelled.
    """Serves until it is cancelled; ``ready`` is called with the address."""
    runner = web.AppRunner(make_app(viewer), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        await site.start()
        # The browser is not there yet; what fails is told when it asks.
        first = asyncio.ensure_future(asyncio.to_thread(viewer.data))
        first.add_done_callback(lambda done: done.cancelled() or done.exception())
        ready(f"http://{HOST}:{runner.addresses[0][1]}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
