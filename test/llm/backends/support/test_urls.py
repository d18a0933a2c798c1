from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from helpers.engines import Process, fleet_of
from helpers.fake_server import FakeServer
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.backends.launch.router import make_sglang_router
from torchrl_sglang.errors import ConfigurationError, ServerUnavailableError
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.support.passwords import hide_passwords
from torchrl_sglang.support.urls import (
    address_facing,
    interface_of,
    is_loopback,
    is_this_machine,
    split_credentials,
    url_of,
)

ELSEWHERE = "http://198.51.100.7:30000"
"""An address that is kept for documentation: no machine has it."""

NO_NAME = "x" * 64
"""It is too long for a name, so that nobody is asked for it."""


@pytest.fixture
def own_address() -> str:
    try:
        return address_facing([ELSEWHERE])
    except ConfigurationError as error:
        pytest.skip(f"This machine has no network: {error}")


# --- from here to the servers


@pytest.mark.parametrize(
    "urls",
    [
        [],
        ["http://127.0.0.1:1"],
        ["http://localhost:1", "http://127.0.0.2:1"],
        ["http://[::1]:1"],
    ],
)
def test_servers_on_loopback_meet_the_sender_there(urls):
    assert address_facing(urls) == "127.0.0.1"


def test_a_server_elsewhere_meets_it_at_the_address_that_leads_there(own_address):
    assert not is_loopback(own_address)
    assert is_this_machine(url_of(own_address, 1))
    # One server elsewhere is enough: those here reach that address, too.
    assert address_facing(["http://127.0.0.1:1", ELSEWHERE]) == own_address
    # A server of this machine that is not on loopback.
    assert address_facing([url_of(own_address, 1)]) == own_address


def test_a_server_that_cannot_be_found():
    with pytest.raises(
        ConfigurationError, match="no route to http://xxx.*master_address"
    ):
        address_facing([f"http://{NO_NAME}:1"])


def test_which_servers_run_on_this_machine(own_address):
    here = ["127.0.0.1", "127.0.0.2", "localhost", "::1", own_address]
    there = ["198.51.100.7", "2001:db8::7", NO_NAME]
    assert [is_this_machine(url_of(host, 1)) for host in here] == [True] * 5
    assert [is_this_machine(url_of(host, 1)) for host in there] == [False] * 3


def test_the_interface_of_an_address(own_address):
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of(own_address) not in ("lo", None)
    assert interface_of("198.51.100.7") is None


@pytest.mark.parametrize("owned", [False, True])
def test_a_server_is_local_by_its_address_whoever_started_it(
    capabilities, own_address, owned
):
    def engine(*urls: str, **server_args: object) -> AsyncSGLang:
        process = Process() if owned else None
        replicas = [Replica(url=url, handle=process) for url in urls]
        return AsyncSGLang(
            Fleet(replicas=replicas, weight_version="default"),
            replace(capabilities, server_args=server_args),
        )

    here, own = "http://127.0.0.1:1", url_of(own_address, 1)
    with engine(here, own, ELSEWHERE) as spread:
        assert [place.local for place in spread.placements] == [True, True, False]
        assert spread.get_master_address() == own_address
    with engine(here) as alone:
        assert alone.get_master_address() == "127.0.0.1"
    # Its ranks are on two machines.
    with engine(here, nnodes=2) as wide:
        assert [place.local for place in wide.placements] == [False]


# --- passwords


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("http://me:secret@host:80/x", "http://***@host:80/x"),
        ("['http://me:se%2Fcret@h', 'https://secret@h']", None),
        ("me:secret@host is none", "***@host is none"),
        ("no http://host:80/a@b:c in it", "no http://host:80/a@b:c in it"),
        ("http://me:p@secret@host", "http://***@host"),
        (None, "None"),
    ],
)
def test_passwords_are_hidden_in_any_text(text, hidden):
    found = hide_passwords(text)
    assert "secret" not in found
    assert hidden is None or found == hidden


def test_credentials_are_split_from_an_address():
    assert split_credentials("http://host:80/") == ("http://host:80", None)
    url, header = split_credentials("https://me:p%40ss@[::1]:80/prefix/")
    assert (url, header) == ("https://[::1]:80/prefix", "Basic bWU6cEBzcw==")
    with pytest.raises(ConfigurationError, match="is not the address") as got:
        split_credentials("ftp://me:secret@host")
    assert "secret" not in str(got.value)


@contextmanager
def recorder() -> Iterator[tuple[str, list[str | None]]]:
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Logs nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


def test_credentials_go_to_their_own_server_alone():
    with recorder() as (one, to_one), recorder() as (two, to_two):
        url, header = split_credentials(one.replace("http://", "http://me:a%20b@"))
        client = pickle.loads(pickle.dumps(HttpClient("key", {url: header})))
        assert "bWU6YSBi" not in repr(client)

        async def ask() -> None:
            for server in (one, two, one):
                await client.request("GET", f"{server}/health", timeout=10)
            await client.close()

        run_sync(ask())
    assert to_one == ["Basic bWU6YSBi"] * 2
    assert to_two == ["Bearer key"]


def test_a_password_is_shown_nowhere(tiny_model_path, caplog):
    with FakeServer(tiny_model_path) as server:
        address = server.url.replace("http://", "http://me:sesame@")
        shown = []
        torchrl_logger.addHandler(caplog.handler)
        level = torchrl_logger.level
        torchrl_logger.setLevel(logging.DEBUG)
        try:
            engine = AsyncSGLang.connect(address, max_attempts=2)
            copy = pickle.loads(pickle.dumps(engine))
            scheme = SGLangWeightSyncScheme(server_url=address)
            shown.append(scheme.server_url)
            scheme.use_engine(engine)
            shown += [
                *(engine, copy, fleet_of(engine), engine.stats(), engine.placements),
                *(engine.server_url, scheme, engine.control.urls),
            ]
            with server.misbehaving("hang_up"):
                with pytest.raises(ServerUnavailableError) as broken:
                    engine.generate(input_ids=[5])
            assert copy.generate(input_ids=[5])
            engine.shutdown()
            copy.shutdown()
        finally:
            torchrl_logger.setLevel(level)
            torchrl_logger.removeHandler(caplog.handler)
    wrong: list[BaseException] = [broken.value]
    for arguments in (
        {"url": address, "urls": [address]},
        {"urls": address},
        {"urls": [address, address]},
        {"url": address, "api_key": "key"},
        {"url": address.replace("http:", "ftp:")},
        {"router_url": address},
    ):
        with pytest.raises((ConfigurationError, ServerUnavailableError)) as got:
            AsyncSGLang.connect(**arguments)
        wrong.append(got.value)
    with pytest.raises(ConfigurationError) as got:
        SGLangWeightSyncScheme(copy, server_url=address)
    wrong.append(got.value)
    text = "\n".join(
        [*map(repr, shown), *map(str, wrong), *map(repr, wrong), caplog.text]
    )
    assert server.url in text
    assert "sesame" not in text


def test_a_router_sends_no_password():
    with pytest.raises(ConfigurationError, match="api_key") as got:
        make_sglang_router(["http://me:sesame@127.0.0.1:9"])
    assert "sesame" not in str(got.value)
