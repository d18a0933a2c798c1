"""A server or a trainer is killed at a step of an update, and the next one heals.

A proxy tells when the step has come. The server is a real one each time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import requests
import torch
from helpers import log_probs
from helpers.engines import fleet_of
from helpers.forked_starts import forked_process, trainer_python
from helpers.log_probs import TOLERANCE
from helpers.waiting import wait_until

from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    SGLangWeightSyncScheme,
    SGLangWrapper,
)
from torchrl_sglang.errors import SGLangError, WeightSyncError, WeightSyncStateError
from torchrl_sglang.testing.faults import FaultyProxy
from torchrl_sglang.testing.tiny_model import make_tiny_model

difference = partial(log_probs.difference, timeout=30)
SOON = 60.0

PAUSE = "/pause_generation"
SEND = "/update_weights_from_distributed"
END = "/end_weight_update"
RESUME = "/continue_generation"

STEPS = [
    pytest.param(path, number, id=f"{path[1:]}-{number}", marks=marks)
    for path, number, marks in (
        (PAUSE, 1, pytest.mark.slow),
        (SEND, 1, pytest.mark.slow),
        (SEND, 4, ()),
        (END, 1, pytest.mark.slow),
        (RESUME, 1, pytest.mark.slow),
    )
]
"""Before, in the middle of, and after what changes a server's weights."""


def reach(engine, url: str) -> None:
    """Lets an engine reach its server at another address."""
    fleet = fleet_of(engine)
    there = replace(fleet.replicas[0], url=url)
    fleet.change(lambda state: state.with_replicas(there))


@pytest.fixture(scope="module")
def owned(tiny_model_path):
    """An engine that reaches the server that it owns through a proxy."""
    with AsyncSGLang.from_pretrained(
        tiny_model_path, device="cpu", max_restarts=10
    ) as engine:
        with FaultyProxy(engine.server_url) as proxy:
            address = engine.server_url
            reach(engine, proxy.url)
            yield engine, proxy, address


def kill(pid, address) -> None:
    """Ends a server; returns when it answers nobody any more."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(requests.ConnectionError):
        while True:
            requests.get(f"{address}/health", timeout=5)


@pytest.mark.parametrize(("path", "number"), STEPS)
def test_a_server_that_is_killed(owned, tokenizer, path, number):
    engine, proxy, address = owned
    # A restarted server is asked where it is.
    reach(engine, proxy.url)
    scheme = SGLangWeightSyncScheme(engine, bucket_bytes=100_000, restart_timeout=0)
    sender = scheme.create_sender()
    model = make_tiny_model(tokenizer, seed=51)
    sender.update_weights(model)
    (server,) = engine.servers
    fault = proxy.inject(path, lambda: kill(server.pid, address), first=number)
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match=proxy.url):
        sender.update_weights(make_tiny_model(tokenizer, seed=52))
    assert time.monotonic() - start < SOON
    assert fault.happened.is_set()
    proxy.clear()
    start = time.monotonic()
    with pytest.raises(SGLangError):
        difference(engine, model)
    assert time.monotonic() - start < 60
    # Started again, it holds the checkpoint's weights, and waits.
    wait_until(lambda: engine.stats().servers[0].state == "stale", report=engine.stats)
    with pytest.raises(WeightSyncStateError, match=r"send the\s+weights"):
        difference(engine, model)
    model = make_tiny_model(tokenizer, seed=53)
    for _ in range(2):
        sender.update_weights(model)
        assert difference(engine, model) < TOLERANCE
    scheme.shutdown()


@pytest.mark.parametrize(("path", "number"), STEPS)
def test_an_update_waits_for_a_server_that_is_killed(owned, tokenizer, path, number):
    """The trainer notices nothing but the time; other weights are never served."""
    engine, proxy, address = owned
    reach(engine, proxy.url)
    scheme = SGLangWeightSyncScheme(engine, bucket_bytes=100_000)
    sender = scheme.create_sender()
    sender.update_weights(make_tiny_model(tokenizer, seed=54))
    (server,) = engine.servers
    fault = proxy.inject(path, lambda: kill(server.pid, address), first=number)
    model = make_tiny_model(tokenizer, seed=55)
    report = sender.update_weights(model)
    assert fault.happened.is_set()
    proxy.clear()
    assert report.version == engine.weight_version
    assert difference(engine, model) < TOLERANCE
    scheme.shutdown()


@pytest.mark.slow
def test_the_documented_loop_survives_ten_kills(tiny_model_path, tokenizer):
    """Its only server is killed again and again, at any moment of it."""
    random = Random(0)
    model = make_tiny_model(tokenizer, seed=56)
    with AsyncSGLang.from_pretrained(
        tiny_model_path, device="cpu", max_restarts=20
    ) as engine:
        scheme = SGLangWeightSyncScheme(engine)
        scheme.create_sender().register_model(model)
        collector = AsyncLLMCollector(
            policy=SGLangWrapper(engine, generate_kwargs={"max_new_tokens": 64}),
            prompts=[f"Question {n}" for n in range(1000)],
            rewards=lambda conversation, task: 1.0,
            group_size=2,
            groups_per_batch=4,
            total_groups=400,
            weight_sync_schemes={"policy": scheme},
        )
        kills = 0
        done = threading.Event()

        def kill_again() -> None:
            nonlocal kills
            while kills < 10 and not done.wait(random.uniform(0.2, 4.0)):
                (server,) = engine.servers
                if engine.stats().servers[0].state in ("serving", "stale"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(server.pid, signal.SIGKILL)
                        kills += 1

        killer = threading.Thread(target=kill_again)
        killer.start()
        updates = 0
        for batch in collector:
            assert len(batch) == 8
            with torch.no_grad():
                model.lm_head.weight.mul_(1.001)
            collector.update_policy_weights_()
            updates += 1
            if kills >= 10 and updates >= 20:
                break
        done.set()
        killer.join()
        assert kills == 10
        assert difference(engine, model) < TOLERANCE
        assert collector.policy_version == updates
        collector.shutdown()
        scheme.shutdown()


TRAINER = """
import sys
from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.testing.tiny_model import make_tiny_model, make_tiny_tokenizer

scheme = SGLangWeightSyncScheme(AsyncSGLang.connect(sys.argv[1]), bucket_bytes=100_000)
scheme.create_sender().update_weights(make_tiny_model(make_tiny_tokenizer(), seed=61))
"""


@pytest.mark.parametrize(("path", "number"), STEPS)
def test_a_trainer_that_is_killed(restored_engine, tokenizer, path, number):
    """Somebody else's server: another process takes it over."""
    url = restored_engine.server_url
    with FaultyProxy(url) as proxy:
        started: Future[int] = Future()
        fault = proxy.inject(
            path,
            lambda: os.kill(forked_process(started.result(SOON)), signal.SIGKILL),
            first=number,
        )
        trainer = subprocess.Popen([trainer_python(), "-c", TRAINER, proxy.url])
        started.set_result(trainer.pid)
        assert trainer.wait(120) == -signal.SIGKILL
        assert fault.happened.is_set()
    with AsyncSGLang.connect(url) as engine:
        # A session that is open gets as long to end as a call may take, at the most.
        scheme = SGLangWeightSyncScheme(engine, control_timeout=3.0)
        sender = scheme.create_sender()
        for seed in (62, 63):
            model = make_tiny_model(tokenizer, seed=seed)
            sender.update_weights(model)
            assert difference(engine, model) < TOLERANCE
        scheme.shutdown()
