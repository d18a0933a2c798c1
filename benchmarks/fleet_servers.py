"""Simulated SGLang servers for ``fleet_scale.py``: many in one process.

Each has an address of its own in 127.0.0.0/8. They are those of
``test/helpers/fake_server.py`` and refuse what SGLang refuses; the times and the sizes
of their answers are recorded ones. ``http://127.0.0.1:PORT/figures`` tells what they
were sent.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

import msgspec
from aiohttp import web

sys.path.append(str(Path(__file__).parents[1] / "test"))
from helpers.fake_server import FakeServer

SECONDS = {"/server_info": 0.005, "/update_weights_from_disk": 0.02}
"""Time of an answer where it is not the usual one."""

USUAL_SECONDS = 0.001
"""Five control calls of an update took an SGLang server on an H200 5.1 ms."""

TOKEN_SECONDS = 0.004
"""Time of a token with 256 requests at once, on the same machine, 0.5B parameters."""

DESCRIPTION_BYTES = 229_000
"""Size of ``/openapi.json`` of SGLang 0.5.23."""

ARGUMENTS = 1100
"""Number of short arguments that make up the 37 kB of its ``/server_info``."""

SAMPLE_SECONDS = 0.005


def address(index: int) -> str:
    """Returns the address of a server."""
    return f"127.1.{index >> 7}.{1 + (index & 127)}"


class Servers:
    """Simulated servers that listen at one port of many addresses."""

    def __init__(self, model: str, indices: range) -> None:
        self._servers = {address(index): FakeServer(model) for index in indices}
        self._seen: Counter[str] = Counter()
        self._most_open = 0
        self._description = b""
        for server in self._servers.values():
            _enlarge(server)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers as the server whose address was asked."""
        assert request.transport is not None
        path = request.path
        if path == "/figures":
            return web.json_response(self._figures())
        host = request.transport.get_extra_info("sockname")[0]
        server = self._servers[host]
        self._seen[path] += 1
        if path == "/generate":
            tokens = (await request.json())["sampling_params"]["max_new_tokens"]
            await asyncio.sleep(TOKEN_SECONDS * tokens)
        else:
            await asyncio.sleep(SECONDS.get(path, USUAL_SECONDS))
        if request.transport is None:
            # The client has hung up.
            return web.Response()
        if path == "/openapi.json" and self._description:
            return web.Response(body=self._description)
        answer = await server.answer(request)
        if path == "/openapi.json":
            assert isinstance(answer, web.Response)
            described = msgspec.json.decode(answer.body)
            described["padding"] = "x" * DESCRIPTION_BYTES
            self._description = msgspec.json.encode(described)
        # They are kept for tests.
        server.requests.clear()
        return answer

    def _figures(self) -> dict[str, object]:
        """Returns the requests and the most connections since the last call."""
        found = {"requests": dict(self._seen), "open": self._most_open}
        self._seen.clear()
        self._most_open = 0
        return found

    async def serve(self, port: int, admin: int) -> None:
        """Listens until this process is ended."""
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        server = runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        await loop.create_server(server, list(self._servers), port, backlog=1024)
        await loop.create_server(server, "127.0.0.1", admin)
        print("ready", flush=True)
        while True:
            self._most_open = max(self._most_open, len(server.connections))
            await asyncio.sleep(SAMPLE_SECONDS)


def _enlarge(server: FakeServer) -> None:
    """Makes answers as large as those of a real server."""
    describe = server.routes["/server_info"]
    more = {f"argument_{index}": None for index in range(ARGUMENTS)}

    def with_arguments(content: object) -> web.StreamResponse:
        answer = describe(content)
        assert isinstance(answer, web.Response)
        known = msgspec.json.decode(answer.body)
        return web.Response(body=msgspec.json.encode(more | known))

    server.routes["/server_info"] = with_arguments


def main() -> None:
    model, first, last, port, admin = sys.argv[1:]
    servers = Servers(model, range(int(first), int(last)))
    asyncio.run(servers.serve(int(port), int(admin)))


if __name__ == "__main__":
    main()
