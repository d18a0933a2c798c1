"""What the tests of the engine share: a server that misbehaves, and capabilities."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from helpers.fake_server import FakeServer

from torchrl_sglang.types import ServerCapabilities


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, also where pytest runs in the background and ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def start_fakes(tiny_model_path: str) -> Iterator[Callable[..., list[FakeServer]]]:
    with ExitStack() as stack:

        def start(count: int, **arguments: object) -> list[FakeServer]:
            servers = [FakeServer(tiny_model_path, **arguments) for _ in range(count)]
            return [stack.enter_context(server) for server in servers]

        yield start


@pytest.fixture
def capabilities() -> ServerCapabilities:
    return ServerCapabilities(
        version="0.5.23",
        model_path="/models/small",
        tokenizer_path="/models/small",
        vocab_size=300,
        max_context=64,
        max_prompt=57,
        dtype=None,
        tp_size=1,
        pp_size=1,
        dp_size=1,
        needs_update_session=True,
        load_route="/v1/loads",
        has_tokenizer=True,
        has_grammar=False,
        weight_version="default",
    )
