"""A collector on a fake server, whose weights are updated as a sender would."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.collecting import length_reward, own_threads, tasks
from helpers.fake_server import FakeServer
from helpers.waiting import wait_until

from torchrl_sglang import AsyncLLMCollector, AsyncSGLang, SGLangWrapper
from torchrl_sglang.types import SyncReport


@pytest.fixture
def policy(fake_engine: AsyncSGLang) -> SGLangWrapper:
    return SGLangWrapper(fake_engine, generate_kwargs={"max_new_tokens": 6})


@pytest.fixture
def make(policy: SGLangWrapper) -> Iterator[Callable[..., AsyncLLMCollector]]:
    """Makes collectors, and checks that none of them leaves a thread."""
    made: list[AsyncLLMCollector] = []

    def make_collector(**kwargs: Any) -> AsyncLLMCollector:
        options = {
            "policy": policy,
            "prompts": tasks(100),
            "rewards": length_reward,
            "groups_per_batch": 2,
            **kwargs,
        }
        made.append(AsyncLLMCollector(**options))
        return made[-1]

    yield make_collector
    for collector in made:
        collector.shutdown()
    made.clear()
    gc.collect()
    wait_until(lambda: not own_threads())


@pytest.fixture
def update(fake: FakeServer) -> Callable[[AsyncLLMCollector], None]:
    """Updates the weights as the sender of a scheme does, to ever new versions."""
    versions = itertools.count(1)

    def send(collector: AsyncLLMCollector) -> None:
        fake.weight_version = str(next(versions))
        collector.last_sync_report = SyncReport(
            version=fake.weight_version,
            transport="none",
            num_tensors=0,
            num_bytes=0,
            num_buckets=0,
            seconds=0.0,
        )
        collector.increment_version()

    return send


@pytest.fixture
def gate(make: Any) -> Iterator[threading.Event]:
    """What hangs waits for it; it is set before collectors are checked for threads."""
    gate = threading.Event()
    yield gate
    gate.set()
