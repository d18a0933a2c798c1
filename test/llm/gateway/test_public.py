"""Agents on other machines: addresses by name, and keys that expire."""

from __future__ import annotations

import http.client
import resource
import select
import socket
import time
from contextlib import ExitStack, closing
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import requests
from helpers.agent_clients import Relay
from helpers.gateway_client import HELLO, openai_client, post

from torchrl_sglang import Gateway
from torchrl_sglang.errors import ConfigurationError, GatewayError
from torchrl_sglang.gateway.connections import ClientTimeouts
from torchrl_sglang.gateway.session import Session

PUBLIC = "https://gateway.example.org/agents"


@pytest.fixture
def path(tmp_path: Any) -> str:
    return str(tmp_path / "sessions.sqlite")


def test_sessions_have_the_public_address(fake_engine: Any, path: str) -> None:
    options = {"public_url": f"{PUBLIC}/", "api_key": "sk-own", "path": path}
    with Gateway(fake_engine, **options) as gateway:
        session = gateway.session("mine")
        assert session.url == f"{PUBLIC}/sessions/mine"
        assert session.base_url == f"{PUBLIC}/sessions/mine/v1"
        made = requests.post(
            f"{gateway.url}/sessions",
            json={"name": "theirs"},
            headers={"Authorization": "Bearer sk-own"},
            timeout=60,
        ).json()
        assert made["url"] == gateway.find(name="theirs").url
        assert made["url"] == f"{PUBLIC}/sessions/theirs"
        assert made["expires"] is None
        # A proxy of this machine asks for everybody.
        local = f"{gateway.url}/sessions/mine"
        assert post(local).status_code == 401
        assert post(local, key=made["key"]).status_code == 403
        assert post(local, key=session.key).status_code == 200
    with Gateway(fake_engine, **options) as gateway:
        assert gateway.find(name="mine").url == f"{PUBLIC}/sessions/mine"


@pytest.mark.parametrize(
    "wrong",
    [
        *("gateway.example.org", "ftp://a", "https://", "https://a b", "", 5),
        *(
            "https://user:secret@a",
            "https://a/?b=c",
            "http://0.0.0.0:80",
            "http://[::]",
        ),
    ],
)
def test_invalid_public_addresses_are_refused(fake_engine: Any, wrong: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Gateway(fake_engine, public_url=wrong, api_key="sk-own")
    assert "secret" not in str(caught.value)


def test_a_public_address_needs_a_key(fake_engine: Any) -> None:
    with pytest.raises(ConfigurationError, match="api_key"):
        Gateway(fake_engine, public_url=PUBLIC)


def test_a_key_expires_and_says_so(fake_engine: Any, path: str) -> None:
    options = {"path": path, "api_key": "sk-own"}
    with Gateway(fake_engine, key_seconds=3600, **options) as gateway:
        session = gateway.session("mine")
        assert session.expires == session.created + 3600
        assert post(gateway.url, key=session.key).status_code == 200
    # The session is older than that by now.
    with Gateway(fake_engine, key_seconds=1e-6, **options) as gateway:
        session = gateway.find(name="mine")
        for url in (gateway.url, session.url):
            answer = post(url, key=session.key)
            error = answer.json()["error"]
            assert answer.status_code == 401
            assert error["code"] == "key_expired"
            assert "'mine' expired at 20" in error["message"]
            assert "key_seconds" in error["message"]
        with (
            openai_client(session) as client,
            pytest.raises(openai.AuthenticationError, match="expired"),
        ):
            client.chat.completions.create(model="policy", messages=HELLO)
        about = requests.get(
            session.url, headers={"x-api-key": session.key}, timeout=60
        )
        assert about.status_code == 401
        with pytest.raises(GatewayError, match="expired") as caught:
            gateway.find(key=session.key)
        assert caught.value.code == "key_expired"
        # What was recorded stays the trainer's.
        assert post(session.url, key="sk-own").status_code == 200
        gateway.set_reward(session, 1.0)
        assert len(gateway.find(name="mine").turns) == 2
    with Gateway(fake_engine, **options) as gateway:
        assert post(gateway.url, key=gateway.find(name="mine").key).status_code == 200


@pytest.mark.parametrize("wrong", [0, -1, "1", float("nan")])
def test_a_time_that_is_none_is_refused(fake_engine: Any, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="key_seconds"):
        Gateway(fake_engine, key_seconds=wrong)


def test_a_proxy_hands_requests_on(fake_engine: Any) -> None:
    """Its clients see its address only, also in a stream."""
    relay = Relay()
    options = {"public_url": relay.url, "api_key": "sk-own"}
    with closing(relay), Gateway(fake_engine, **options) as gateway:
        relay.point_at(gateway.url)
        session = gateway.session()
        assert session.base_url.startswith(relay.url)
        with openai_client(session) as client:
            parts = list(
                client.chat.completions.create(
                    model="policy", messages=HELLO, stream=True, max_tokens=2
                )
            )
        assert len(session.turns) == 1
    assert parts[-1].choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize("name", [".", "..", "...", "a.", "", "a/b", "%2e%2e", "a\n"])
def test_names_that_a_url_does_not_have_as_they_are(fake_engine: Any, name: str):
    """Clients take the URL of a session ``..`` for another one."""
    with Gateway(fake_engine, api_key="sk-own") as gateway:
        with pytest.raises(ConfigurationError, match="is not a name of a session"):
            gateway.session(name)
        headers = {"Authorization": "Bearer sk-own"}
        answer = requests.post(
            f"{gateway.url}/sessions", json={"name": name}, headers=headers, timeout=60
        )
        assert answer.status_code == 400
        gateway.session(".a..b-c_")
        # The owner's requests make sessions by their path.
        path = name.replace("%", "%25").replace(".", "%2e").replace("\n", "%0a")
        place = urlsplit(gateway.url)
        client = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
        client.request("GET", f"/sessions/{path}/v1/models", headers=headers)
        assert client.getresponse().status in (400, 404)
        client.close()
        assert len(gateway.sessions) == 1


@pytest.mark.parametrize("step", [-1e6, 1e6])
def test_a_clock_that_is_set_ends_no_session(
    fake_engine: Any, path: str, monkeypatch: Any, step: float
):
    options = {"key_seconds": 3600, "session_seconds": 3600, "path": path}
    real = time.time
    with Gateway(fake_engine, **options) as gateway:
        session = gateway.session("a")
        monkeypatch.setattr(time, "time", lambda: real() + step)
        assert post(session.url, key=session.key).status_code == 200
    monkeypatch.setattr(time, "time", lambda: real() + 7200)
    with Gateway(fake_engine, **options) as gateway:
        # It was begun two hours before this one was made.
        assert post(gateway.session("a").url, key=session.key).status_code == 401
        assert gateway.session("a").age >= 7200
    born = Session("b")
    born.began(real() + 1e6)
    assert 0 <= born.age < 60


def is_open(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(0):
        return True
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except ConnectionResetError:
        # The server had not read all of its bytes.
        return False


@pytest.fixture
def few_files():
    """This process may have so few open files that a quarter of them are few."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    yield 256
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def half(gateway: Gateway) -> socket.socket:
    place = urlsplit(gateway.url)
    found = socket.create_connection((place.hostname, place.port))
    found.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX: ")
    return found


def test_connections_without_a_key_are_bounded(fake_engine: Any, few_files: int):
    """The oldest ones make room; a client with a key keeps its connection."""
    with Gateway(fake_engine) as gateway, ExitStack() as stack:
        session = gateway.session()
        known = stack.enter_context(requests.Session())
        about = {"headers": {"x-api-key": session.key}, "timeout": 60}
        known.get(f"{session.base_url}/models", **about).raise_for_status()
        halves = [stack.enter_context(half(gateway)) for _ in range(few_files + 40)]
        # Each of them was accepted before this one.
        post(session, key=session.key).raise_for_status()
        states = [is_open(each) for each in halves]
        assert sum(states) <= few_files
        assert all(states[41:])
        pools = known.get_adapter("http://").poolmanager.pools
        (pool,) = (pools.get(key) for key in pools.keys())
        known.get(f"{session.base_url}/models", **about).raise_for_status()
        assert pool.num_connections == 1


def test_agents_that_begin_at_once_keep_their_connections(fake_engine: Any) -> None:
    """All of them are connected before the first request comes."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2048), before[1]))
    request = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with Gateway(fake_engine, sessionless=True) as gateway, ExitStack() as stack:
        place = urlsplit(gateway.url)
        address = place.hostname, place.port
        clients = [
            stack.enter_context(socket.create_connection(address, timeout=60))
            for _ in range(400)
        ]
        for client in clients:
            client.sendall(request)
        assert {client.recv(12) for client in clients} == {b"HTTP/1.1 200"}
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_connection_without_a_key_has_a_deadline(fake_engine: Any):
    gateway = Gateway(fake_engine)
    gateway.client_timeouts = ClientTimeouts(headers=0.2)
    with gateway, ExitStack() as stack:
        silent = stack.enter_context(half(gateway))
        silent.settimeout(60)
        assert silent.recv(1) == b""


def test_a_body_has_a_deadline(fake_engine: Any):
    gateway = Gateway(fake_engine)
    gateway.client_timeouts = ClientTimeouts(body=0.2)
    with gateway:
        session, place = gateway.session(), urlsplit(gateway.url)
        client = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
        client.putrequest("POST", f"{urlsplit(session.base_url).path}/chat/completions")
        client.putheader("x-api-key", session.key)
        client.putheader("Content-Length", "1000")
        client.endheaders(b"{")
        answer = client.getresponse()
        assert answer.status == 408
        assert b"within 0.2 seconds" in answer.read()
        client.close()
