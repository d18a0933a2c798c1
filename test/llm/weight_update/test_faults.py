"""Whatever fails at whichever step of an update: old weights, new ones, or silence.

A proxy in front of the real server breaks one call. Afterwards the engine generates
with exactly the old weights, or with exactly the new ones, or it refuses and the server
is silent; never with a mix. The next update heals in every case.
"""

from __future__ import annotations

import os
import threading
import time
from functools import partial

import pytest
import requests
import torch
import torch.distributed as dist
from helpers import log_probs
from helpers.log_probs import PROMPT, TOLERANCE
from helpers.waiting import wait_until
from torch.distributed import distributed_c10d
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import (
    SGLangError,
    WeightSyncError,
    WeightSyncStateError,
)
from torchrl_sglang.testing.faults import FaultyProxy
from torchrl_sglang.testing.tiny_model import make_tiny_model

difference = partial(log_probs.difference, timeout=30)
TIMEOUT = 3.0
"""Seconds that a call may take here; a flush takes up to half of one on CPU."""
SOON = 60.0
"""Seconds within which a failed update must be over: it tidies up after its timeout."""
SILENCE = 0.5
"""Seconds without an answer that show that a server is paused: it needs 0.05."""

PAUSE = "/pause_generation"
FLUSH = "/flush_cache"
BEGIN = "/begin_weight_update"
JOIN = "/init_weights_update_group"
SEND = "/update_weights_from_distributed"
END = "/end_weight_update"
RESUME = "/continue_generation"
ASK = "/model_info"
DISK = "/update_weights_from_disk"
TENSOR = "/update_weights_from_tensor"

FAULTS = ("refuse", "fail", "stall", "late", "cut", "lose")


def is_silent(url: str, seconds: float = SILENCE) -> bool:
    """Whether a server gives no token within some time."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    try:
        requests.post(f"{url}/generate", json=body, timeout=seconds)
    except requests.exceptions.ReadTimeout:
        return True
    return False


class Trainer:
    """A trainer whose engine is reached through a proxy, and what it sent last."""

    def __init__(self, server, tokenizer, model, tmp_path):
        self.server = server
        self.proxy = FaultyProxy(server.server_url)
        self.engine = AsyncSGLang.connect(self.proxy.url, max_attempts=1)
        self.tokenizer = tokenizer
        self.model = model
        self.seed = 100
        self.senders = {}
        self.directory = tmp_path

    def new_model(self):
        self.seed += 1
        return make_tiny_model(self.tokenizer, seed=self.seed)

    def sender(self, transport, **arguments):
        name = (transport, *arguments.items())
        if name not in self.senders:
            if transport == "broadcast":
                arguments = {"connect_timeout": TIMEOUT, **arguments}
            if transport == "disk":
                arguments = {"directory": str(self.directory), **arguments}
            self.senders[name] = SGLangWeightSyncScheme(
                self.engine,
                transport=transport,
                bucket_bytes=100_000,
                send_timeout=TIMEOUT,
                control_timeout=TIMEOUT,
                **arguments,
            ).create_sender()
        return self.senders[name]

    def close(self):
        self.proxy.clear()
        for sender in self.senders.values():
            sender.shutdown()
        self.engine.shutdown()
        self.proxy.close()


@pytest.fixture(scope="module")
def trainer(session_engine, tiny_model_path, tmp_path_factory):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    directory = tmp_path_factory.mktemp("published")
    trainer = Trainer(session_engine, tokenizer, model, directory)
    trainer.sender("broadcast").update_weights(model)
    yield trainer
    trainer.close()
    sender = SGLangWeightSyncScheme(session_engine).create_sender()
    sender.update_weights(model)
    sender.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left(trainer):
    """No process group, thread or open file stays behind."""
    groups, files = len(distributed_c10d._world.pg_map), open_files()
    yield
    trainer.proxy.clear()
    # The transport of a sender keeps the group that works.
    wait_until(lambda: len(distributed_c10d._world.pg_map) <= max(groups, 1))
    wait_until(lambda: not waiting_threads()), waiting_threads()
    wait_until(lambda: open_files() <= files + 40), (files, open_files())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def waiting_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "torchrl_sglang-group"]


def fails(trainer, sender, model, *injections) -> WeightSyncError:
    """An update meets a fault; returns its error, which must be a good one."""
    start = time.monotonic()
    with pytest.raises(SGLangError) as caught:
        sender.update_weights(model)
    assert time.monotonic() - start < SOON
    assert all(each.happened.is_set() for each in injections)
    trainer.proxy.clear()
    message = str(caught.value)
    assert isinstance(caught.value, WeightSyncError)
    assert trainer.proxy.url in message
    assert "send the weights again" in message.lower() or "tried again" in message
    return caught.value


def check_untouched(trainer) -> None:
    assert difference(trainer.engine, trainer.model) < TOLERANCE
    assert not is_silent(trainer.server.server_url, 60.0)


def check_inconsistent(trainer) -> None:
    start = time.monotonic()
    with pytest.raises(WeightSyncStateError, match="send the weights again"):
        difference(trainer.engine, trainer.model)
    assert time.monotonic() - start < 60
    assert is_silent(trainer.server.server_url)


def check_heals(trainer, sender) -> None:
    trainer.model = trainer.new_model()
    report = sender.update_weights(trainer.model)
    assert difference(trainer.engine, trainer.model) < TOLERANCE
    answer = requests.get(f"{trainer.server.server_url}/model_info", timeout=10)
    assert answer.json()["weight_version"] == report.version
    # No session is open.
    ended = requests.post(f"{trainer.server.server_url}{END}", json={}, timeout=10)
    assert ended.status_code == 400


BEFORE = [(FLUSH, 1), (BEGIN, 1), (ASK, 1), (PAUSE, 1)]
"""Steps before the first byte, and which call for this path it is."""

AFTER = [(SEND, 1), (SEND, 4), (END, 1)]


def matrix(*steps):
    """Every fault at every step; what is off a diagonal of it is slow.

    A row of the diagonal has one fault, and six rows have all. `make test` has them all
    at each step of a fake server.
    """
    return [
        pytest.param(
            *step,
            fault,
            id="-".join(str(value).strip("/") for value in (*step, fault)),
            marks=[pytest.mark.slow] if (column + row) % 6 else [],
        )
        for row, step in enumerate(steps)
        for column, fault in enumerate(FAULTS)
    ]


@pytest.mark.parametrize(("path", "number", "fault"), matrix(*BEFORE))
def test_before_the_first_byte(trainer, path, number, fault):
    sender = trainer.sender("broadcast")
    # A broken connection that has been used before is tried again for a question.
    fault_at = trainer.proxy.inject(
        path, fault, first=number, times=20 if path == ASK else 1
    )
    if (path, fault) == (FLUSH, "refuse"):
        # A cache that cannot be flushed is no reason not to go on.
        trainer.model = trainer.new_model()
        sender.update_weights(trainer.model)
        assert fault_at.happened.is_set()
        check_untouched(trainer)
        return
    error = fails(trainer, sender, trainer.new_model(), fault_at)
    if path == BEGIN and fault in ("late", "lose"):
        # A session is open, and nobody knows whose it was.
        check_inconsistent(trainer)
    else:
        assert error.untouched
        check_untouched(trainer)
    check_heals(trainer, sender)


@pytest.mark.parametrize("fault", matrix(()))
def test_joining(trainer, fault):
    sender = trainer.sender("broadcast")
    # As after a restart of the trainer's torch.distributed.
    if sender.transport.connected:
        dist.destroy_process_group(sender.transport.group)
    fault_at = trainer.proxy.inject(JOIN, fault)
    error = fails(trainer, sender, trainer.new_model(), fault_at)
    assert error.untouched
    check_untouched(trainer)
    check_heals(trainer, sender)


@pytest.mark.parametrize(("path", "number", "fault"), matrix(*AFTER))
def test_after_the_first_byte(trainer, path, number, fault):
    sender = trainer.sender("broadcast")
    fault_at = trainer.proxy.inject(path, fault, first=number)
    error = fails(trainer, sender, trainer.new_model(), fault_at)
    if error.untouched:
        # A refusal says so, and a lost answer never does.
        assert (path, number, fault) == (SEND, 1, "refuse")
        check_untouched(trainer)
    else:
        check_inconsistent(trainer)
    check_heals(trainer, sender)


@pytest.mark.parametrize("fault", matrix(()))
def test_resuming(trainer, fault):
    """Asked twice, the server generates; that the first answer was lost is no harm."""
    sender = trainer.sender("broadcast")
    fault_at = trainer.proxy.inject(RESUME, fault)
    trainer.model = trainer.new_model()
    sender.update_weights(trainer.model)
    assert fault_at.happened.is_set()
    check_untouched(trainer)
    fault_at = trainer.proxy.inject(RESUME, fault, times=2)
    fails(trainer, sender, trainer.new_model(), fault_at)
    check_inconsistent(trainer)
    check_heals(trainer, sender)


@pytest.mark.parametrize("fault", ["refuse", "lose"])
def test_resuming_after_an_update_that_sent_nothing(trainer, fault):
    sender = trainer.sender("broadcast")
    begin = trainer.proxy.inject(BEGIN, "cut")
    trainer.proxy.inject(RESUME, fault)
    error = fails(trainer, sender, trainer.new_model(), begin)
    assert error.untouched
    check_untouched(trainer)
    begin = trainer.proxy.inject(BEGIN, "cut")
    resume = trainer.proxy.inject(RESUME, fault, times=2)
    fails(trainer, sender, trainer.new_model(), begin, resume)
    check_inconsistent(trainer)
    check_heals(trainer, sender)


@pytest.mark.parametrize(
    ("transport", "path", "fault"), matrix(("disk", DISK), ("cuda_ipc", TENSOR))
)
def test_other_transports(trainer, transport, path, fault):
    sender = trainer.sender(transport)
    fault_at = trainer.proxy.inject(path, fault)
    error = fails(trainer, sender, trainer.new_model(), fault_at)
    if error.untouched:
        assert fault not in ("late", "lose")
        check_untouched(trainer)
    else:
        check_inconsistent(trainer)
    check_heals(trainer, sender)


@pytest.mark.parametrize("path", [SEND, END])
def test_nobody_generates_from_a_mix_without_a_pause_either(trainer, path):
    """Other users of the server do not know that the weights are inconsistent."""
    sender = trainer.sender("broadcast", pause_mode="none")
    fault_at = trainer.proxy.inject(path, "lose", first=2 if path == SEND else 1)
    fails(trainer, sender, trainer.new_model(), fault_at)
    check_inconsistent(trainer)
    check_heals(trainer, sender)
    sender.shutdown()


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        (PAUSE, "cut"),
        pytest.param(FLUSH, "fail", marks=pytest.mark.slow),
        pytest.param(BEGIN, "cut", marks=pytest.mark.slow),
        pytest.param(END, "cut", marks=pytest.mark.slow),
    ],
)
def test_a_session_of_another_trainer_is_not_trusted(trainer, path, fault):
    """A fault before the first byte resumes no server that somebody else half updated.

    This engine object knows nothing: it connects to a server that looks well.
    """
    url = trainer.server.server_url
    for step, body in ((PAUSE, {"mode": "retract"}), (BEGIN, {})):
        assert requests.post(url + step, json=body, timeout=10).ok
    fault_at = trainer.proxy.inject(path, fault)
    sender = trainer.sender("broadcast")
    fails(trainer, sender, trainer.new_model(), fault_at)
    check_inconsistent(trainer)
    check_heals(trainer, sender)
