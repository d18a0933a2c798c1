"""Starts and ends of a gateway's processes, also such as nobody wants."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from helpers.collecting import wait_until
from helpers.fake_server import FakeServer
from yarl import URL

from torchrl_sglang import AsyncSGLang, Gateway
from torchrl_sglang.errors import ConfigurationError, ServerStartError
from torchrl_sglang.gateway.session import Session

HELLO = [{"role": "user", "content": "hello"}]

SCRIPT = """
import json, os, sys, time
from torchrl_sglang import AsyncSGLang, Gateway
from torchrl_sglang.gateway.dialects.openai import Completions

print("begins", flush=True)

class Ours(Completions):
    def error(self, failure):
        return {**super().error(failure), "ours": True}

gateway = Gateway(
    AsyncSGLang.connect(sys.argv[1]),
    num_processes=2,
    dialects=[Ours()],
    path=sys.argv[2],
)
gateway.start()
session = gateway.session("a")
# A child of a fork has what its parent has open, such as its connections.
child = os.fork()
if not child:
    time.sleep(600)
pids = [worker.process.pid for worker in gateway._pool._workers]
print(json.dumps({"url": session.url, "pids": pids, "child": child}), flush=True)
time.sleep(600)
"""


def is_answered(session: Session, url: str, **body: Any) -> bool:
    """Asks at an address where a process may only just have started."""
    try:
        return ask(session, url, **body).status_code == 200
    except requests.ConnectionError:
        return False


def ask(session: Session, url: str = "", **body: Any) -> requests.Response:
    return requests.post(
        f"{url or session.url}/v1/chat/completions",
        json={"model": "m", "max_tokens": 4, "messages": HELLO, **body},
        timeout=60,
    )


def going_on(answer: requests.Response) -> list[Any]:
    said = answer.json()["choices"][0]["message"]
    return [*HELLO, said, {"role": "user", "content": "more"}]


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    # What nobody has waited for has ended, too.
    return state != "Z"


def kill(worker: Any) -> None:
    worker.process.send_signal(signal.SIGKILL)
    wait_until(lambda: not worker.is_serving and worker.process.returncode)


@contextmanager
def unread(session: Session) -> Iterator[None]:
    """During the block, a client does not read the answer to its request."""
    body = {"model": "m", "n": 16, "max_tokens": 400, "logprobs": True}
    body |= {"messages": HELLO, "top_logprobs": 20}
    content, address = json.dumps(body).encode(), URL(session.url)
    head = f"POST {address.path}/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.host, address.port))
        client.sendall(head.encode() + content)
        wait_until(lambda: len(session.turns) >= 16)
        yield


def numbered(gateway: Gateway, number: int) -> Any:
    """The process of this number that serves now, or is being started."""
    assert gateway._pool is not None
    (found,) = (each for each in gateway._pool._workers if each.number == number)
    return found


def test_processes_that_are_killed(
    fake: FakeServer, fake_engine: AsyncSGLang, caplog: pytest.LogCaptureFixture
) -> None:
    with Gateway(fake_engine, num_processes=2) as gateway:
        first, second = numbered(gateway, 1), numbered(gateway, 2)
        sessions = [gateway.session() for _ in range(2)]
        one, other = sorted(sessions, key=lambda each: each.key in second.sessions)
        said = going_on(ask(one))
        left = one.url
        with (
            unread(one),
            fake.misbehaving("hang"),
            ThreadPoolExecutor(1) as pool,
        ):
            count = len(fake.payloads())
            asked = pool.submit(ask, one)
            fake.wait_for("/generate", count + 1)
            kill(first)
            with pytest.raises(requests.ConnectionError):
                asked.result()
            # What it had asked for is aborted.
            fake.wait_for("/abort_request")
            wait_until(lambda: gateway.stats()["generating"] == 0)
            fake.recover()
        # What no client has received is not kept, and what one has is.
        wait_until(lambda: one.url != left)
        assert [turn.number for turn in one.turns] == [0]
        # It goes on where it was, also at the address that its client knows.
        assert URL(one.url).port == second.port
        wait_until(lambda: is_answered(one, f"{left}", messages=said))
        assert ask(one, messages=said).status_code == 200
        assert [turn.prompt.parent for turn in one.turns] == [None, 0, 0]
        assert ask(other).status_code == 200
        errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
        assert "Process 1 of the gateway ended with -9. Its 1 sessions" in errors[0]
        # It is started again at its address, and has new sessions.
        wait_until(lambda: numbered(gateway, 1).is_serving, seconds=150)
        again = numbered(gateway, 1)
        assert again.process.pid != first.process.pid
        new = gateway.session()
        assert new.url.startswith(left.rpartition(":")[0])
        assert URL(new.url).port == URL(left).port == again.port
        assert ask(new).status_code == 200
        assert ask(one, left, messages=said).status_code == 200
        assert len(one.turns) == 4
    assert gateway.to_tensordict([one, new]).shape == (4,)


@pytest.mark.slow
def test_a_process_that_ends_soon_again_stays_ended(fake_engine: AsyncSGLang) -> None:
    with Gateway(fake_engine, num_processes=2) as gateway:
        one = gateway.session()
        left = {one.url}
        for number in (1, 2):
            kill(numbered(gateway, number))
        for number in (1, 2):
            wait_until(lambda n=number: numbered(gateway, n).is_serving, seconds=150)
        assert ask(one).status_code == 200
        for number in (1, 2):
            one = gateway.session()
            left.add(one.url)
            kill(numbered(gateway, number))
        # The gateway's own process serves when no other one does.
        wait_until(lambda: URL(one.url).port == URL(gateway.url).port)
        for url in (*left, one.url):
            wait_until(lambda url=url: ask(one, url).status_code == 200)
        assert ask(gateway.session()).status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_process_that_hangs(fake_engine: AsyncSGLang) -> None:
    with Gateway(fake_engine, num_processes=2) as gateway:
        one = gateway.session()
        hung = next(w for w in gateway._pool._workers if one.key in w.sessions)
        said = going_on(ask(one))
        # Until the process has told that the client has the turn.
        wait_until(lambda: not gateway._pool._owner.unreceived.get(one))
        hung.process.send_signal(signal.SIGSTOP)
        left = one.url
        wait_until(lambda: one.url != left, seconds=150)
        wait_until(lambda: ask(one, messages=said).status_code == 200)
        wait_until(lambda: numbered(gateway, hung.number).is_serving, seconds=150)
        assert [turn.prompt.parent for turn in one.turns] == [None, 0]


@pytest.mark.slow
def test_a_plain_script_whose_process_is_killed(
    fake: FakeServer, fake_engine: AsyncSGLang, tmp_path: Path
) -> None:
    """It has no guard of ``__main__``, and runs once."""
    script, path = tmp_path / "script.py", tmp_path / "s"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), fake.url, str(path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        about = json.loads(process.stdout.readline())
        session = Session("a")
        session.url = about["url"]
        assert ask(session).status_code == 200
        # A class of the script serves in the other process.
        assert ask(session, messages=0).json()["ours"] is True
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    assert runs(about["child"])
    wait_until(lambda: not any(map(runs, about["pids"])))
    os.kill(about["child"], signal.SIGKILL)
    with Gateway(fake_engine, path=path) as gateway:
        assert len(gateway.session("a").turns) == 1


@pytest.mark.slow
def test_a_port_that_is_taken(fake_engine: AsyncSGLang) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        gateway = Gateway(fake_engine, num_processes=2, port=port - 1)
        try:
            with pytest.raises(ServerStartError, match=r"Process 1 .*address already"):
                gateway.start()
        except ConfigurationError:
            pytest.skip("The port before it is taken, too.")
    assert gateway._pool is not None
    assert [each.process.poll() is not None for each in gateway._pool._workers] == [
        True,
        True,
    ]
    start = time.monotonic()
    gateway.shutdown()
    assert time.monotonic() - start < 1
    with pytest.raises(ConfigurationError, match="can be once"):
        gateway.start()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, which workers of pytest ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("killed", ["the gateway's start", "a process"])
def test_a_start_that_does_not_end(fake_engine: AsyncSGLang, killed: str) -> None:
    """Ctrl-C, and a process that is killed while it imports what it needs."""
    gateway = Gateway(fake_engine, num_processes=2)
    pool = gateway._pool
    assert pool is not None

    def kill_soon() -> None:
        wait_until(lambda: len(pool._workers) == 2)
        if killed == "a process":
            os.kill(pool._workers[1].process.pid, signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        killing = threads.submit(kill_soon)
        error: type[BaseException] = KeyboardInterrupt
        if killed == "a process":
            error = ServerStartError
        start = time.monotonic()
        with pytest.raises(error) as raised:
            gateway.start()
        killing.result()
    assert time.monotonic() - start < 30
    if killed == "a process":
        assert "Process 2 of the gateway does not start: it ended with -9" in str(
            raised.value
        )
    assert all(each.process.poll() is not None for each in pool._workers)
    assert repr(gateway) == "Gateway(not started, sessions=0)"
    # Sessions can be made, as before a start.
    assert gateway.session().url == ""
