from __future__ import annotations

import asyncio
import copy
import inspect
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends.client.http import (
    ERROR_BODY_CHARACTERS,
    OPEN_ROUTES,
    STREAMED_BODY_BYTES,
    HttpClient,
    HttpResponse,
)
from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.errors import (
    ConfigurationError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
)
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.support.urls import normalize_url


@pytest.fixture
def client() -> Iterator[HttpClient]:
    client = HttpClient()
    yield client
    run_sync(client.close())


def get(client: HttpClient, url: str, timeout: float = 10.0) -> HttpResponse:
    return run_sync(client.request("GET", url, timeout=timeout))


@contextmanager
def listener(reply: bytes | None, backlog: int = 5) -> Iterator[str]:
    """Answers every connection with these bytes and hangs up; None never answers."""
    held = []

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            if reply is None:
                held.append(connection)
                continue
            with connection:
                connection.recv(65536)
                connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        # Wakes accept(), which close() alone does not.
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in held:
        connection.close()


def http_reply(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("http://127.0.0.1:30000/", "http://127.0.0.1:30000"),
        ("127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("localhost:30000//", "http://localhost:30000"),
        ("https://host.example/sglang/", "https://host.example/sglang"),
        ("http://[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_normal_urls(url, normal):
    assert normalize_url(url) == normal


@pytest.mark.parametrize("url", ["", "http://", "http:///", "ftp://host", "grpc://h:1"])
def test_addresses_that_are_none(url):
    with pytest.raises(
        ConfigurationError, match="like 'http://127.0.0.1:30000'"
    ) as got:
        normalize_url(url)
    assert repr(url) in str(got.value)


@pytest.mark.parametrize("url", [None, 30000, b"http://host"])
def test_addresses_of_another_type(url):
    with pytest.raises(ConfigurationError, match=type(url).__name__):
        normalize_url(url)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "unknown field `x`"}', "unknown field `x`"),
        (b'{"object": "error", "message": "bad type", "code": 400}', "bad type"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"success": false, "message": "no session"}', "no session"),
        (b'{"detail": [{"loc": ["body"]}]}', "[{'loc': ['body']}]"),
        (b"Internal Server Error", "Internal Server Error"),
        (b'{"other": 1}', '{"other": 1}'),
        (b"[1]", "[1]"),
        (b"\xff", "�"),
        (b"[" * 3000, "[" * 2000),
        (b"", ""),
    ],
)
def test_error_text(body, text):
    assert HttpResponse(url="u", status=400, body=body).error_text() == text


@pytest.mark.parametrize(
    "form",
    ["%s", '{"error": "%s"}', '{"error": {"message": "%s"}}', '{"detail": "%s"}'],
)
def test_an_error_text_has_an_end(form):
    """SGLang's validation errors quote the whole request."""
    answer = HttpResponse(url="u", status=400, body=(form % ("x" * 10**6)).encode())
    assert len(answer.error_text()) <= ERROR_BODY_CHARACTERS


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (200, None),
        (299, None),
        (300, ServerUnavailableError),
        (400, RequestRefusedError),
        (401, ConfigurationError),
        (403, ConfigurationError),
        (404, RequestRefusedError),
        (499, RequestRefusedError),
        (500, ServerUnavailableError),
        (503, ServerUnavailableError),
    ],
)
def test_statuses(status, error):
    answer = HttpResponse(
        url="http://one:1/x", status=status, body=b'{"detail": "why"}'
    )
    assert answer.ok == (error is None)
    if error is None:
        assert answer.raise_for_status() is answer
        return
    with pytest.raises(error, match=f"http://one:1/x .*{status}.* why") as caught:
        answer.raise_for_status()
    if error is RequestRefusedError:
        assert caught.value.status == status


@pytest.mark.parametrize(
    ("body", "shown"), [(b"<html>", "'<html>'"), (b"[" * 10_000, "'\\[{200}'")]
)
def test_a_body_that_is_not_json(body, shown):
    with pytest.raises(ServerUnavailableError, match=f"not JSON: b{shown}.*SGLang"):
        HttpResponse(url="http://one:1", status=200, body=body).json()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"", "ServerDisconnected"),
        (b"garbage\r\n\r\n", "Expected HTTP|BadStatusLine|Bad status line"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort", "ClientPayloadError"),
        (http_reply(b"not gzip", "Content-Encoding: gzip"), "ClientPayloadError"),
        (http_reply(b"", "X: " + "y" * 100_000), "8190"),
        (b"HTTP/1.1 302 Found\r\nLocation: /again\r\n\r\n", "TooManyRedirects"),
    ],
)
def test_broken_answers(client, reply, words):
    with listener(reply) as url, pytest.raises(ServerUnavailableError) as caught:
        get(client, f"{url}/x")
    assert any(word in str(caught.value) for word in words.split("|"))
    assert f"GET {url}/x" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1",  # nobody listens
        "http://no-such-host.invalid:1",
        "http://127.0.0.1:99999",
        "http://host:port",
        "http://[::1",
        "http://a..b:1",
        "http://" + "a" * 300 + ":1",
        "http://?",
    ],
)
def test_addresses_where_nobody_is(client, url):
    start = time.monotonic()
    with pytest.raises(
        ServerUnavailableError, match="Check that the server is running"
    ):
        get(client, url)
    assert time.monotonic() - start < 60


def test_https_to_an_http_server(client, fake):
    with pytest.raises(ServerUnavailableError, match="SSL"):
        get(client, fake.url.replace("http", "https"))


def test_a_budget_that_is_used_up(client):
    start = time.monotonic()
    with (
        listener(None) as url,
        pytest.raises(ServerTimeoutError, match=f"GET {url}/x had no .* 0.2 s"),
    ):
        get(client, f"{url}/x", timeout=0.2)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
def test_a_budget_that_is_none(client, timeout):
    """Aiohttp takes zero for no limit at all, and chokes on infinity."""
    with pytest.raises(ConfigurationError, match=f"timeout must be .* got {timeout}"):
        get(client, "http://127.0.0.1:1", timeout=timeout)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({"a": "\ud800"}, "half of a character"),
        ({"a": {(1, 2): 3}}, "cannot be encoded as JSON"),
        (object(), "cannot be encoded as JSON"),
    ],
)
def test_a_payload_that_json_cannot_encode(client, fake, payload, words):
    call = client.request("POST", f"{fake.url}/x", payload, timeout=10)
    with pytest.raises(ConfigurationError, match=words):
        run_sync(call)
    assert fake.requests == []


class _Raises:
    closed = False

    def __init__(self, error: Exception) -> None:
        self.error = error

    def request(self, *arguments: object, **options: object) -> object:
        raise self.error

    async def close(self) -> None:
        pass


AIOHTTP_ERRORS = [
    value
    for value in vars(aiohttp.client_exceptions).values()
    if inspect.isclass(value)
    and issubclass(value, Exception)
    and value.__module__ == "aiohttp.client_exceptions"
    and not issubclass(value, aiohttp.WSMessageTypeError)
]


@pytest.mark.parametrize("error", AIOHTTP_ERRORS)
def test_every_error_of_aiohttp_is_translated(client, error):
    class Instance(error):
        def __init__(self) -> None:
            pass

        def __str__(self) -> str:
            return "as aiohttp says it"

    client._session, client._session_pid = _Raises(Instance()), os.getpid()
    timed_out = issubclass(error, TimeoutError)
    connected = not issubclass(error, aiohttp.ConnectionTimeoutError)
    expected = ServerTimeoutError if timed_out and connected else ServerUnavailableError
    with pytest.raises(SGLangError) as caught:
        get(client, "http://one:1/x")
    assert type(caught.value) is expected
    assert "http://one:1/x" in str(caught.value)
    assert caught.value.__suppress_context__


def test_errors_of_aiohttp_were_found():
    assert {"ClientOSError", "ServerDisconnectedError", "InvalidURL"} <= {
        error.__name__ for error in AIOHTTP_ERRORS
    }


def test_connections_are_kept(client, fake):
    for _ in range(20):
        assert get(client, f"{fake.url}/health").ok
    assert fake.num_connections == 1

    async def at_once() -> None:
        calls = (client.request("GET", fake.url, timeout=10) for _ in range(8))
        await asyncio.gather(*calls)

    run_sync(at_once())
    run_sync(at_once())
    assert fake.num_connections == 8


def test_streams_keep_their_connection(client, fake):
    payload = {"input_ids": [5, 6], "stream": True}
    for _ in range(20):
        assert read_events(client, f"{fake.url}/generate", 60, payload)
    assert fake.num_connections == 1


def test_closing_lets_go_and_the_next_request_opens_again(client, fake):
    get(client, f"{fake.url}/health")
    run_sync(client.close())
    run_sync(client.close())
    assert get(client, f"{fake.url}/health").ok
    assert fake.num_connections == 2


def test_a_client_that_is_forgotten_closes_its_connections(fake):
    client = HttpClient()
    get(client, f"{fake.url}/health")
    session = client._session
    del client
    wait_until(lambda: session.closed)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
def test_a_client_pickles_to_its_settings(fake, clone):
    client = HttpClient("sesame")
    get(client, f"{fake.url}/health")
    other = clone(client)
    assert get(other, f"{fake.url}/health").ok
    assert fake.num_connections == 2
    assert other.api_key == "sesame"
    run_sync(client.close())
    run_sync(other.close())


FORK = """
import os, sys
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.backends.client.http import HttpClient

client = HttpClient()
def ask():
    return run_sync(client.request("GET", sys.argv[1] + "/health", timeout=10)).status

assert ask() == 200
child = os.fork()
if child == 0:
    os._exit(0 if ask() == 200 else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
# The child has not touched this connection.
assert ask() == 200
print("both")
"""


def test_a_forked_child_opens_connections_of_its_own(fake):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK, fake.url],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("both\n", "")
    assert fake.num_connections == 2


CONTROL_CALLS = {
    "abort": lambda engine: engine.abort(),
    "abort of one": lambda engine: engine.abort(["mine"]),
    "flush": lambda engine: engine.flush_cache(),
    "pause": lambda engine: run_sync(engine.control.pause("abort")),
    "values": lambda engine: run_sync(engine.control.loader_states("x", timeout=9)),
    "profile": lambda engine: engine.start_profile(),
    "adapter": lambda engine: engine.unload_adapter("mine"),
}


@pytest.mark.parametrize("keys", [("user", "admin"), (None, "admin"), ("user", None)])
@pytest.mark.parametrize("clone", [lambda it: it, copy.deepcopy], ids=["self", "copy"])
def test_control_calls_carry_the_admin_key(tiny_model_path, keys, clone):
    from helpers.fake_server import FakeServer

    user, admin = keys
    with FakeServer(tiny_model_path, api_key=user, admin_api_key=admin) as fake:
        for path in ("/start_profile", "/get_weights_by_name"):
            fake.routes[path] = lambda content: web.json_response([])
        options = {} if admin is None else {"admin_api_key": admin}
        engine = AsyncSGLang.connect(fake.url, api_key=user, **options)
        with engine, clone(engine) as used:
            used.generate(input_ids=[5], max_new_tokens=1)
            used.stats()
            assert used.flush_cache()
            for name in ("abort", "pause", "values", "profile"):
                CONTROL_CALLS[name](used)
        for path in ("/abort_request", "/flush_cache", "/pause_generation"):
            sent = fake.headers[path]["Authorization"]
            assert sent == f"Bearer {admin or user}"
        shown = f"{used!r} {vars(used)} {[*map(repr, vars(used).values())]}"
        assert not [text for text in ("Bearer", "'admin'") if text in shown]


@pytest.mark.parametrize(
    "name", sorted(CONTROL_CALLS.keys() - {"abort of one", "adapter"})
)
@pytest.mark.parametrize("admin", [None, "wrong"])
def test_a_control_call_without_its_key_is_an_error(tiny_model_path, name, admin):
    from helpers.fake_server import FakeServer

    with (
        FakeServer(tiny_model_path, api_key="user", admin_api_key="admin") as fake,
        AsyncSGLang.connect(fake.url, api_key="user", admin_api_key=admin) as engine,
    ):
        assert engine.generate(input_ids=[5], max_new_tokens=1)
        with pytest.raises(ConfigurationError, match="admin_api_key") as caught:
            CONTROL_CALLS[name](engine)
        assert fake.url in str(caught.value)


def routes_by_key(package: Path) -> tuple[set[str], set[str]]:
    """Returns the routes of an SGLang that take its key, and its admin key."""
    source = (package / "srt" / "entrypoints" / "http_server.py").read_text()
    user, admin = set(), set()
    for block in source.split("\n\n\n"):
        found = re.findall(
            r'@app\.(?:api_route|get|post|put|delete)\(\s*"([^"]+)"', block
        )
        (admin if "@auth_level(" in block else user).update(found)
    return user, admin


@pytest.mark.parametrize("version", cpu.VERSIONS)
def test_open_routes_are_those_of_sglang(version):
    prefix = Path(sys.prefix, "sglang-cpu")
    overlay = prefix / f"sglang-{version}"
    (folder,) = (
        [overlay] if overlay.is_dir() else prefix.glob("lib/python*/site-packages")
    )
    user, admin = routes_by_key(folder / "sglang")
    assert {"/abort_request", "/flush_cache"} <= admin
    assert not {path.removeprefix("/") for path in admin} & OPEN_ROUTES
    ours = {path.removeprefix("/") for path in user} & OPEN_ROUTES
    assert {"generate", "model_info", "server_info", "parse_function_call"} <= ours


def test_a_large_body_arrives_whole_and_typed(client):
    """Weights by value make bodies over 1 MB; aiohttp warns when they are bytes."""

    async def echo(request: web.Request) -> web.Response:
        body = await request.read()
        return web.json_response(
            {
                "type": request.content_type,
                "length": request.content_length,
                "same": msgspec.json.decode(body) == payload,
            }
        )

    async def post() -> HttpResponse:
        app = web.Application(client_max_size=8 * STREAMED_BODY_BYTES)
        app.router.add_post("/", echo)
        async with TestServer(app) as server:
            url = str(server.make_url("/"))
            return await client.request("POST", url, payload, timeout=60)

    payload = {"weights": "x" * (4 * STREAMED_BODY_BYTES)}
    assert run_sync(post()).json() == {
        "type": "application/json",
        "length": len(msgspec.json.encode(payload)),
        "same": True,
    }


def read_events(
    client: HttpClient, url: str, timeout: float, payload: Any = None
) -> list[bytes]:
    found: list[bytes] = []
    keep = client.stream(
        url, payload or {}, lambda event: found.append(event.body), timeout=timeout
    )
    run_sync(keep)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_events_arrive_in_pieces(client, size):
    body = b'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\n'

    async def write(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(body), size):
            await response.write(body[start : start + size])
            await asyncio.sleep(0.001)
        return response

    async def start() -> TestServer:
        app = web.Application()
        app.router.add_post("/", write)
        server = TestServer(app)
        await server.start_server()
        return server

    server = run_sync(start())
    try:
        events = read_events(client, str(server.make_url("/")), timeout=60)
    finally:
        run_sync(server.close())
    assert events == [b'{"a":1}', b'{"b":2}']


def test_an_event_of_any_length_is_read_in_linear_time(client):
    """The log-probs of 20 tokens at each of 32,000 positions are 20 MB."""
    body = b"data: " + b"x" * 32_000_000 + b"\n\ndata: [DONE]\n\n"
    with listener(http_reply(body)) as url:
        (event,) = read_events(client, url, timeout=5)
    assert len(event) == 32_000_000


def sockets_to(url: str) -> Iterator[socket.socket]:
    port = int(url.rpartition(":")[2])
    for name in os.listdir("/proc/self/fd"):
        try:
            own = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with own:
            try:
                connected = own.getpeername()[1:2] == (port,)
            except OSError:
                continue
            if connected:
                yield own


def test_a_connection_to_a_machine_that_is_gone_breaks(fake_engine, fake):
    """A machine that has lost its power closes nothing; the kernel asks for it."""
    fake_engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 2})
    names = ("TCP_KEEPIDLE", "TCP_KEEPCNT", "TCP_KEEPINTVL")
    found = [
        (
            own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            *(own.getsockopt(socket.IPPROTO_TCP, getattr(socket, n)) for n in names),
        )
        for own in sockets_to(fake.url)
    ]
    assert found
    for enabled, idle, probes, interval in found:
        assert enabled
        assert 10 <= idle + probes * interval <= 30


def test_requests_to_a_server_that_is_given_up(fake):
    http = HttpClient()

    async def run() -> list[object]:
        with fake.misbehaving("hang", "/generate"):
            ask = http.request("POST", f"{fake.url}/generate", {"a": 1}, timeout=60)
            old = asyncio.ensure_future(ask)
            await asyncio.to_thread(fake.wait_for, "/generate")
            http.give_up(f"{fake.url}0")
            http.give_up(fake.url, before=0.0)
            await asyncio.sleep(0)
            assert not old.done()
            http.give_up(fake.url)
            http.give_up(fake.url)
            outcomes = await asyncio.gather(old, return_exceptions=True)
        answer = await http.request("GET", f"{fake.url}/health", timeout=10)
        await http.close()
        return [*outcomes, answer.status]

    error, status = run_sync(run())
    assert isinstance(error, ServerUnavailableError)
    assert error.transient
    assert "is gone" in str(error)
    assert status == 200
