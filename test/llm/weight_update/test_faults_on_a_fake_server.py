"""Every fault at every step of an update, against a server that computes nothing.

``test_faults.py`` runs a diagonal of this on a real server, and all of it among the
slow tests. Here the version that the server reports stands for its weights.
"""

from __future__ import annotations

import pytest
import requests
from helpers.fake_server import FakeServer

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import WeightSyncError, WeightSyncStateError
from torchrl_sglang.testing.faults import FaultyProxy
from torchrl_sglang.testing.tiny_model import make_tiny_model

FAULTS = ("refuse", "fail", "stall", "late", "cut", "lose")
HANGS = ("stall", "late")
TIMEOUT = 4.0
"""Seconds that a call may take where one hangs, which takes them all."""
SILENCE = 0.3
"""Seconds without an answer that show that a server is paused."""

ASK = "/model_info"
PAUSE = "/pause_generation"
FLUSH = "/flush_cache"
BEGIN = "/begin_weight_update"
SEND = "/update_weights_from_tensor"
END = "/end_weight_update"
RESUME = "/continue_generation"


class Trainer:
    """A trainer whose engine is reached through a proxy."""

    def __init__(self, server, model):
        self.server = server
        self.model = model
        self.proxy = FaultyProxy(server.url)
        self.engine = AsyncSGLang.connect(self.proxy.url, max_attempts=1)
        self.schemes = {
            timeout: SGLangWeightSyncScheme(
                self.engine,
                transport="cuda_ipc",
                bucket_bytes=100_000,
                send_timeout=timeout,
                control_timeout=timeout,
            )
            for timeout in (TIMEOUT, 60.0)
        }
        self.senders = {b: s.create_sender() for b, s in self.schemes.items()}
        self.sender = self.senders[60.0]
        self.version = self.sender.update_weights(model).version

    def fails(self, *injections) -> WeightSyncError:
        """An update meets faults; returns its error, which says what to do."""
        hangs = any(injection.fault in HANGS for injection in injections)
        with pytest.raises(WeightSyncError) as caught:
            self.senders[TIMEOUT if hangs else 60.0].update_weights(self.model)
        assert all(each.happened.is_set() for each in injections)
        self.proxy.clear()
        message = str(caught.value)
        assert self.proxy.url in message
        assert "send the weights again" in message.lower() or "tried again" in message
        return caught.value

    def check_untouched(self) -> None:
        assert self.server.weight_version == self.version
        assert self.engine.generate(input_ids=[5], timeout=60)
        assert not self.is_silent()

    def check_refuses(self) -> None:
        with pytest.raises(WeightSyncStateError, match="send the weights again"):
            self.engine.generate(input_ids=[5])
        assert self.is_silent()

    def check_heals(self) -> None:
        self.version = self.sender.update_weights(self.model).version
        self.check_untouched()
        ended = requests.post(self.server.url + END, json={}, timeout=60)
        assert ended.status_code == 400, "No session is open."

    def is_silent(self) -> bool:
        """Whether the server gives nobody a token."""
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
        url = f"{self.server.url}/generate"
        try:
            requests.post(url, json=body, timeout=SILENCE if self.paused else 60)
        except requests.exceptions.ReadTimeout:
            return True
        return False

    @property
    def paused(self) -> bool:
        """Whether the last of pauses and resumes that the server saw was a pause."""
        seen = [path for _, path, _ in self.server.requests if path in (PAUSE, RESUME)]
        return seen[-1] == PAUSE


def matrix(*steps):
    """Every fault at every step; each second one of those that hang is slow."""
    return [
        pytest.param(
            *step,
            fault,
            marks=[pytest.mark.slow] if fault == HANGS[row % 2] else [],
        )
        for row, step in enumerate(steps)
        for fault in FAULTS
    ]


@pytest.fixture(scope="module")
def trainer(tiny_model_path, tokenizer):
    with FakeServer(tiny_model_path) as server:
        server.silent_while_paused = True
        trainer = Trainer(server, make_tiny_model(tokenizer))
        yield trainer
        for scheme in trainer.schemes.values():
            scheme.shutdown()
        trainer.engine.shutdown()
        trainer.proxy.close()


@pytest.mark.parametrize(
    ("path", "fault"), matrix((ASK,), (PAUSE,), (FLUSH,), (BEGIN,))
)
def test_before_the_first_byte(trainer, path, fault):
    # A broken connection that has been used before is tried again for a question.
    injection = trainer.proxy.inject(path, fault, times=20 if path == ASK else 1)
    if (path, fault) == (FLUSH, "refuse"):
        # A cache that cannot be flushed is no reason not to go on.
        trainer.check_heals()
        assert injection.happened.is_set()
        return
    error = trainer.fails(injection)
    if path == BEGIN and fault in ("late", "lose"):
        # A session is open, and nobody knows whose it was.
        trainer.check_refuses()
    else:
        assert error.untouched
        trainer.check_untouched()
    trainer.check_heals()


@pytest.mark.parametrize(
    ("path", "number", "fault"), matrix((SEND, 1), (SEND, 2), (END, 1))
)
def test_after_the_first_byte(trainer, path, number, fault):
    injection = trainer.proxy.inject(path, fault, first=number)
    error = trainer.fails(injection)
    if error.untouched:
        # A request that the server cannot have carried out.
        assert (path, number) == (SEND, 1)
        assert fault not in ("late", "lose")
        trainer.check_untouched()
    else:
        trainer.check_refuses()
    trainer.check_heals()


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in HANGS])
def test_resuming(trainer, fault):
    """Asked twice, the server generates; that the first answer was lost is no harm."""
    injection = trainer.proxy.inject(RESUME, fault)
    trainer.check_heals()
    assert injection.happened.is_set()
    trainer.fails(trainer.proxy.inject(RESUME, fault, times=2))
    with pytest.raises(WeightSyncStateError, match="send the weights again"):
        trainer.engine.generate(input_ids=[5])
    trainer.check_heals()
