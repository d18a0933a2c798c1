"""Sessions of weight updates on servers that several senders use."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
import torch
from helpers.fake_server import FakeServer

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.backends import session
from torchrl_sglang.errors import RequestRefusedError, WeightTransferError
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.weight_update.weights import Weights

BEGIN, PAUSE, FLUSH = "/begin_weight_update", "/pause_generation", "/flush_cache"


class Nothing(session.Transfer):
    """A transport that carries nothing, in a session."""

    name, in_session = "nothing", True

    def send(self, weights: Weights, *, version: str) -> int:
        return 1


@pytest.fixture
def servers(tiny_model_path):
    with ExitStack() as stack:
        yield [stack.enter_context(FakeServer(tiny_model_path)) for _ in range(2)]


@pytest.fixture
def senders(servers):
    """Two engine objects of the same servers."""
    with ExitStack() as stack:
        urls = [server.url for server in servers]
        yield [stack.enter_context(AsyncSGLang.connect(urls=urls)) for _ in range(2)]


def update(engine, **options):
    weights = Weights(
        specs=(), read=lambda: iter(()), device=torch.device("cpu"), stable=True
    )
    return session.update_weights(
        engine,
        Nothing(),
        weights,
        version="1",
        pause_mode="retract",
        control_timeout=5,
        **options,
    )


@pytest.mark.parametrize("path", [PAUSE, FLUSH])
def test_an_update_that_fails_closes_no_session_of_another_sender(
    servers, senders, path
):
    mine, other = senders
    run_sync(other.control.begin_weight_update())
    with servers[1].misbehaving("error_500", path), pytest.raises(WeightTransferError):
        update(mine)
    # It would be refused if it were closed.
    run_sync(other.control.end_weight_update())


def test_an_update_that_fails_closes_its_own_sessions(servers, senders):
    mine, other = senders
    with servers[1].misbehaving("hang_up", BEGIN), pytest.raises(WeightTransferError):
        update(mine)
    with pytest.raises(RequestRefusedError, match="no weight-update session is open"):
        run_sync(other.control.end_weight_update())


def test_a_session_of_another_sender_is_waited_for(servers, senders):
    """That sender lets generation go on at its end, and may have had the same version.

    So servers are paused again, their caches, which it has filled, are emptied, and a
    version is chosen that it has not had.
    """
    mine, other = senders
    run_sync(other.control.begin_weight_update(urls=[servers[0].url]))

    def end() -> None:
        servers[0].wait_for(BEGIN, 3)
        run_sync(other.control.end_weight_update(urls=[servers[0].url]))
        run_sync(other.control.resume())

    thread = threading.Thread(target=end)
    thread.start()
    assert update(mine, choose_again=lambda: "2").version == mine.weight_version == "2"
    thread.join()
    paths = [path for _, path, _ in servers[0].requests]
    after = paths[len(paths) - 1 - paths[::-1].index(PAUSE) :]
    assert BEGIN not in after
    assert FLUSH in after
    # The other server was told once.
    assert len(servers[1].payloads(BEGIN)) == 1
