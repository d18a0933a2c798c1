"""Every fault at every step of an update by every transport, on a fake server.

``test_faults.py`` runs a diagonal of this on a real server, and all of it among the
slow tests; it has the broadcast, for which a server computes with the trainer. Here the
version that the server reports stands for its weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import requests
from helpers.fake_server import FakeServer
from helpers.loading_server import FusedModel, LoadingServer
from helpers.waiting import wait_until

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import WeightSyncError, WeightSyncStateError
from torchrl_sglang.testing.faults import FaultyProxy
from torchrl_sglang.testing.tiny_model import make_tiny_model
from torchrl_sglang.weight_update.transports.registry import TRANSPORTS

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
END = "/end_weight_update"
RESUME = "/continue_generation"


@dataclass(frozen=True)
class Steps:
    """The calls of a transport."""

    send: str
    """Path of the call that the server loads weights by."""
    calls: tuple[int, ...] = (1,)
    """Which of these calls meet a fault."""
    in_session: bool = True
    """There are begin and end calls around them."""


WHOLE = {
    "cuda_ipc": Steps("/update_weights_from_tensor", calls=(1, 2)),
    "delta": Steps("/update_weights_from_tensor", calls=(1, 2)),
    "disk": Steps("/update_weights_from_disk", in_session=False),
}
"""Transports of whole weights -> their calls."""

ON_A_REAL_SERVER = {"broadcast"}
PUBLISH = "/load_lora_adapter_from_tensors"


def test_every_transport_is_here():
    assert {*WHOLE, *ON_A_REAL_SERVER, "lora"} == {*TRANSPORTS}


class Trainer:
    """A trainer whose engine is reached through a proxy."""

    def __init__(self, server, model, transport="cuda_ipc", **options):
        self.server = server
        self.model = model
        self.transport = transport
        self.proxy = FaultyProxy(server.url)
        self.engine = AsyncSGLang.connect(self.proxy.url, max_attempts=1)
        self.schemes = {
            timeout: SGLangWeightSyncScheme(
                self.engine,
                transport=transport,
                bucket_bytes=100_000,
                send_timeout=timeout,
                control_timeout=timeout,
                **options,
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
        advice = ("end the weights again", "tried again", "still use the weights from")
        assert any(words in message for words in advice)
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
        self.check_no_session()

    def check_no_session(self) -> None:
        ended = requests.post(self.server.url + END, json={}, timeout=60)
        assert ended.status_code == 400, "No session is open."

    def close(self) -> None:
        for scheme in self.schemes.values():
            scheme.shutdown()
        self.engine.shutdown()
        self.proxy.close()

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
        return seen[-1:] == [PAUSE]


def matrix(*steps):
    """Every fault at every step; those that hang are slow, but at every second step."""
    last = len(steps) - 1
    quick = {
        (row, HANGS[row // 2]) for row in range(last + 1) if row % 2 or row == last
    }
    return [
        pytest.param(
            *step,
            fault,
            marks=[pytest.mark.slow]
            if fault in HANGS and (row, fault) not in quick
            else [],
        )
        for row, step in enumerate(steps)
        for fault in FAULTS
    ]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.slow if name == "cuda_ipc" else ())
        for name in sorted(WHOLE)
    ],
)
def trainer(request, tiny_model_path, tokenizer, tmp_path_factory):
    options = {}
    if request.param == "disk":
        options["directory"] = tmp_path_factory.mktemp("weights")
    model = make_tiny_model(tokenizer)
    if request.param == "delta":
        loads = FusedModel(dict(model.named_parameters()))
        fake = LoadingServer(tiny_model_path, loads)
    else:
        fake = FakeServer(tiny_model_path)
    with fake as server:
        server.silent_while_paused = True
        trainer = Trainer(server, model, request.param, **options)
        yield trainer
        trainer.close()


@pytest.fixture
def steps(trainer) -> Steps:
    return WHOLE[trainer.transport]


@pytest.mark.parametrize(
    ("path", "fault"), matrix((ASK,), (PAUSE,), (FLUSH,), (BEGIN,))
)
def test_before_the_first_byte(trainer, steps, path, fault):
    if path == BEGIN and not steps.in_session:
        pytest.skip("this transport has no session")
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
    ("step", "number", "fault"), matrix(("send", 1), ("send", 2), ("end", 1))
)
def test_after_the_first_byte(trainer, steps, step, number, fault):
    if number not in steps.calls or (step == "end" and not steps.in_session):
        pytest.skip("this transport has no such call")
    path = steps.send if step == "send" else END
    injection = trainer.proxy.inject(path, fault, first=number)
    error = trainer.fails(injection)
    if error.untouched:
        # A request that the server cannot have carried out.
        assert (step, number) == ("send", 1)
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


@pytest.fixture(scope="module")
def lora_trainer(tiny_model_path, peft_models):
    with FakeServer(tiny_model_path, enable_lora=True) as server:
        trainer = Trainer(server, peft_models.make(1), "lora")
        yield trainer
        trainer.close()


@pytest.mark.parametrize("fault", matrix(()))
def test_publishing_an_adapter(lora_trainer, fault):
    """Requests carry the adapter from before, or none, until one is published."""
    trainer = lora_trainer
    before = trainer.engine.weight_version
    error = trainer.fails(trainer.proxy.inject(PUBLISH, fault, times=20))
    assert error.untouched
    (answer,) = trainer.engine.generate(input_ids=[5], timeout=60)
    assert trainer.engine.weight_version == answer.adapter_version == before
    assert not trainer.is_silent()
    trainer.version = trainer.sender.update_weights(trainer.model).version
    (answer,) = trainer.engine.generate(input_ids=[5], timeout=60)
    assert answer.adapter_version == trainer.version != before


@pytest.fixture
def pair(tiny_model_path, hf_model, tmp_path):
    """Two servers that nobody starts again, their engine, and a sender."""
    with (
        FakeServer(tiny_model_path) as one,
        FakeServer(tiny_model_path) as other,
        AsyncSGLang.connect(urls=[one.url, other.url]) as engine,
    ):
        scheme = SGLangWeightSyncScheme(
            engine, hf_model, transport="disk", directory=tmp_path
        )
        sender = scheme.create_sender()
        sender.update_weights()
        yield one, other, engine, sender
        scheme.shutdown()


def test_a_server_that_dies_in_an_update_is_left_out_of_the_next_one(pair):
    one, dying, engine, sender = pair
    with dying.misbehaving("hang_up", WHOLE["disk"].send):
        with pytest.raises(WeightSyncError):
            sender.update_weights()
        dying.die()
    report = sender.update_weights()
    assert one.weight_version == report.version
    assert [each.state for each in engine.stats().servers] == ["serving", "down"]
    assert engine.generate(input_ids=[[5]], sampling_params={"max_new_tokens": 1})


def test_a_server_that_comes_back_with_a_failed_update(pair):
    """Its version is not that of the next update, which it has not had."""
    one, away, engine, sender = pair
    with (
        one.misbehaving("hang_up", WHOLE["disk"].send),
        pytest.raises(WeightSyncError),
    ):
        sender.update_weights()
    taken = away.weight_version
    away.die()
    report = sender.update_weights()
    assert report.version == one.weight_version != taken
    away.dead = False
    wait_until(lambda: engine.stats().servers[1].state == "stale")
