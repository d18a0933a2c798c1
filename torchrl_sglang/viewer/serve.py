"""Serves the page of runs on this machine, and follows live runs."""

from __future__ import annotations

import hashlib
import re
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from urllib.parse import unquote, urlsplit

from torchrl_sglang.recording.reading import Recording
from torchrl_sglang.viewer.groups import conversations_of, search
from torchrl_sglang.viewer.page import (
    as_script,
    names_of,
    page_data,
    page_html,
    read_runs,
)
from torchrl_sglang.viewer.run import RunData, find_group

MOST_BUSY = 0.1
"""Largest share of a viewer's time for reading and building pages: the run uses the
same machine."""

HOST = "127.0.0.1"
"""Pages contain prompts and responses: they are for users of this machine."""


class Viewer:
    """Provides the current content of recordings, in the order of the page."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._recordings = recordings
        self._lock = threading.Lock()
        self._runs: list[RunData] = []
        self._page = page_html(" and ".join(names_of(recordings)), "")
        self._data = self._tag = ""
        self._made_at = 0.0
        self._next_at = 0.0

    def page(self) -> str:
        """Returns the page, which a browser parses while its data is built."""
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
            conversations = conversations_of(self._recordings[run], group)
            return None if conversations is None else as_script(conversations)

    def search(self, run: int, text: str) -> str | None:
        """Returns the groups with a text as JSON; ``None``: there is no such run."""
        with self._lock:
            if not self._runs:
                self._refresh()
            if not 0 <= run < len(self._runs):
                return None
            groups = list(self._runs[run].groups)
        return as_script(search(self._recordings[run], groups, text))

    def _refresh(self) -> None:
        """Reads new lines; the end of a run changes the page, too."""
        start = time.monotonic()
        if self._data and start < self._next_at:
            return
        changed = [recording.refresh() for recording in self._recordings]
        was_live = any(run.is_live(self._made_at) for run in self._runs)
        now = time.time()
        ends = was_live and not any(run.is_live(now) for run in self._runs)
        if not self._data or any(changed) or ends:
            self._make(now)
            took = time.monotonic() - start
            self._next_at = start + took / MOST_BUSY

    def _make(self, now: float) -> None:
        self._runs = read_runs(self._recordings)
        self._made_at = now
        data = page_data(self._runs, now=now)
        text = as_script(data)
        self._tag = f'"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"'
        self._data = f"{text[:-1]},{as_script({'tag': self._tag})[1:]}"


class ViewerServer(ThreadingHTTPServer):
    """Serves a page on this machine, with a thread for each connection.

    Based on the standard library, as the import of a larger server takes as long as
    reading a run of ten thousand responses.
    """

    daemon_threads = True

    def __init__(self, viewer: Viewer, port: int) -> None:
        super().__init__((HOST, port), _PageHandler)
        self.viewer = viewer

    def server_bind(self) -> None:
        """Listens, without a network lookup of this machine's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.server_port}/"


_GROUP = re.compile(r"/group/(\d+)/([^/]+)")
_SEARCH = re.compile(r"/search/(\d+)/([^/]+)")


class _PageHandler(BaseHTTPRequestHandler):
    server: ViewerServer
    protocol_version = "HTTP/1.1"
    # Each connection has a thread.
    timeout = 60.0
    # Data after a header is sent at once.
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Does not log requests."""

    def do_GET(self) -> None:
        # A closed or redirected browser does not receive the response.
        with suppress(ConnectionError):
            try:
                self._answer()
            except ConnectionError:
                raise
            except Exception:  # noqa: BLE001 - The page shows it.
                traceback.print_exc()
                text = "The viewer failed; its terminal says why."
                self._send(text, status=HTTPStatus.INTERNAL_SERVER_ERROR)

    def _answer(self) -> None:
        viewer = self.server.viewer
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        path = urlsplit(self.path).path
        if host not in (HOST, "localhost", "::1"):
            # A page of another site whose name resolves to this machine.
            text = f"This viewer is not at {host}."
            self._send(text, status=HTTPStatus.FORBIDDEN)
        elif path == "/":
            self._send(viewer.page(), "text/html")
        elif path == "/data.json":
            text, tag = viewer.data()
            if self.headers.get("If-None-Match") == tag:
                self._send("", status=HTTPStatus.NOT_MODIFIED)
            else:
                self._send(text, "application/json")
        elif match := _GROUP.fullmatch(path):
            self._send_group(int(match[1]), unquote(match[2]))
        elif match := _SEARCH.fullmatch(path):
            self._send_matches(int(match[1]), unquote(match[2]))
        else:
            self._send("There is no such page.", status=HTTPStatus.NOT_FOUND)

    def _send_group(self, run: int, name: str) -> None:
        text = self.server.viewer.group(run, name)
        if text is None:
            text = (
                f"The conversations of group {name} were not recorded, or have made "
                f"room for newer ones."
            )
            self._send(text, status=HTTPStatus.NOT_FOUND)
        else:
            self._send(text, "application/json")

    def _send_matches(self, run: int, text: str) -> None:
        matches = self.server.viewer.search(run, text)
        if matches is None:
            self._send("There is no such run.", status=HTTPStatus.NOT_FOUND)
        else:
            self._send(matches, "application/json")

    def _send(
        self, text: str, kind: str = "text/plain", status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        body = text.encode()
        self.send_response(status)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(viewer: Viewer, port: int, *, ready: Callable[[str], None]) -> None:
    """Serves until an exception ends it; ``ready`` is called with the address."""
    with ViewerServer(viewer, port) as server:
        # The browser is not there yet.
        threading.Thread(target=_read, args=(viewer,), daemon=True).start()
        ready(server.url)
        server.serve_forever()


def _read(viewer: Viewer) -> None:
    # Errors appear at the browser's request.
    with suppress(Exception):
        viewer.data()
