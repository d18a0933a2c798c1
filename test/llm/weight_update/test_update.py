"""Weights really reach the servers: log-probs equal the new model's afterwards."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import torch
import torch.distributed as dist
from helpers import log_probs
from helpers.in_flight import TRIES, InFlight
from helpers.log_probs import TOLERANCE, response_difference
from helpers.waiting import wait_until
from torchrl.modules.llm import TransformersWrapper

from torchrl_sglang import (
    AsyncSGLang,
    SGLangWeightSyncScheme,
    SGLangWrapper,
    get_model_metadata,
)
from torchrl_sglang.backends import session
from torchrl_sglang.errors import (
    ConfigurationError,
    ServerUnavailableError,
    WeightMismatchError,
    WeightSyncStateError,
    WeightTransferError,
)
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.testing.tiny_model import make_tiny_model

PROMPT = "the prefix of this prompt is cached"


@pytest.fixture
def new_model(tokenizer):
    return make_tiny_model(tokenizer, seed=int.from_bytes(os.urandom(3), "big"))


@pytest.fixture
def sender(restored_engine):
    sender = SGLangWeightSyncScheme(restored_engine).create_sender()
    yield sender
    sender.shutdown()


def difference(engine, model, tokenizer) -> float:
    """Greatest difference of the engine's log-probs from a model's, prefix cached."""
    return log_probs.difference(engine, model, tokenizer.encode(PROMPT))


def test_stale_prefixes_are_out_of_reach_without_a_flush(
    restored_engine, new_model, tokenizer
):
    """The weight version is part of the cache's key; no flush is needed."""
    engine = restored_engine
    difference(engine, new_model, tokenizer)
    ids = tokenizer.encode(PROMPT)
    (again,) = engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})
    assert again.cached_tokens > 0
    version = engine.weight_version + "0"
    reply = requests.post(
        f"{engine.server_url}/update_weight_version",
        json={"new_version": version, "abort_all_requests": False},
        timeout=10,
    )
    assert reply.ok
    with engine.weight_update() as update:
        update.commit(version)
    (other,) = engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})
    assert other.cached_tokens == 0


def test_versions_of_tokens(sender, restored_engine, new_model, tokenizer):
    report = sender.update_weights(new_model)
    (answer,) = restored_engine.generate(
        input_ids=tokenizer.encode("x"), sampling_params={"max_new_tokens": 3}
    )
    assert [span.version for span in answer.versions] == [report.version]
    assert answer.versions[-1].end == len(answer.token_ids)


def test_update_while_requests_run(sender, restored_engine, new_model, tokenizer):
    """Requests in flight are not lost, and end with tokens of the new weights."""
    prompts = [tokenizer.encode(text) for text in ("a", "bb", "ccc")]
    params = {"max_new_tokens": 200, "ignore_eos": True}

    def generate():
        return restored_engine.generate(
            input_ids=prompts, sampling_params=params, return_logprobs=True
        )

    for _ in range(TRIES):
        flying = InFlight(restored_engine, generate, least=len(prompts))
        report = sender.update_weights(new_model)
        answers = flying.wait()
        if all(len(answer.versions) == 2 for answer in answers):
            break
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == len(answer.log_probs) == 200
        assert len(answer.versions) == 2
        assert answer.versions[-1].version == report.version
        # What came after the update follows the new model exactly, prefix included.
        start = answer.versions[-1].start
        assert response_difference(answer, prompt, new_model, start) < TOLERANCE


def test_mismatch_is_found_before_anything_is_sent(
    sender, restored_engine, hf_model, tokenizer
):
    before = restored_engine.weight_version
    for weights, words in [
        ({"nope": torch.zeros(2)}, "unexpected: nope"),
        (
            {**hf_model.state_dict(), "model.norm.weight": torch.zeros(3)},
            r"model.norm.weight: \(3,\), served \(64,\)",
        ),
    ]:
        with pytest.raises(WeightMismatchError, match=words):
            sender.update_weights(weights)
    assert restored_engine.weight_version == before
    assert difference(restored_engine, hf_model, tokenizer) < TOLERANCE
    metadata = get_model_metadata(hf_model)
    metadata["model.norm.weight"] = (torch.float32, torch.Size([3]))
    with pytest.raises(WeightMismatchError):
        sender.init_all_workers_group(metadata)


def test_half_an_update_stops_generation_until_it_is_healed(
    restored_engine, new_model, tokenizer
):
    engine = restored_engine
    scheme = SGLangWeightSyncScheme(engine, bucket_bytes=20_000)
    sender = scheme.create_sender()
    sender.register_model(new_model)
    sender.init_all_workers_group()
    group = sender.transport.group_name
    passes = []

    def cut_off():
        """The server leaves the group half way, as one does whose process ends."""
        passes.append(0)
        for name, tensor in new_model.named_parameters():
            yield name, tensor
            passes[-1] += tensor.numel() * 4
            # The first pass only finds out what there is.
            if len(passes) == 2 and passes[-1] > 60_000:
                run_sync(engine.control.destroy_weights_update_group(group))
                passes[-1] = -(1 << 40)

    start = time.monotonic()
    with pytest.raises(WeightTransferError, match="mix of old and new") as caught:
        sender.update_weights(cut_off)
    assert time.monotonic() - start < 60
    assert not caught.value.untouched
    assert "inconsistent" in repr(engine)
    with pytest.raises(WeightSyncStateError, match="send the weights again"):
        engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 1})

    # A further update that fails before its first byte makes nothing whole.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = SGLangWeightSyncScheme(engine, master_port=taken.getsockname()[1])
        with pytest.raises(WeightTransferError, match="master_port"):
            other.create_sender().update_weights(new_model)
    assert "inconsistent" in repr(engine)

    sender.update_weights()
    assert difference(engine, new_model, tokenizer) < TOLERANCE
    scheme.shutdown()


def test_another_engine_object_learns_the_version(
    sender, restored_engine, new_model, tokenizer
):
    """A copy in a collector's process never uses what older weights have cached."""
    copy = pickle.loads(pickle.dumps(restored_engine))
    difference(copy, new_model, tokenizer)
    report = sender.update_weights(new_model)
    assert copy.weight_version != report.version
    assert difference(copy, new_model, tokenizer) < TOLERANCE
    assert copy.weight_version == report.version
    # And versions go on from the servers', whoever updates.
    other = SGLangWeightSyncScheme(copy).create_sender()
    assert int(other.update_weights(new_model).version) == int(report.version) + 1
    assert int(sender.update_weights(new_model).version) == int(report.version) + 2
    other.shutdown()


def test_a_group_that_was_destroyed_heals(
    sender, restored_engine, new_model, tokenizer
):
    """A trainer that tears down torch.distributed takes this group with it."""
    sender.update_weights(new_model)
    dist.destroy_process_group(sender.transport.group)
    assert not sender.transport.connected
    sender.update_weights(new_model)
    assert difference(restored_engine, new_model, tokenizer) < TOLERANCE


def test_second_updater_is_refused(sender, restored_engine, new_model):
    with (
        restored_engine.weight_update(),
        pytest.raises(WeightSyncStateError, match="in progress"),
    ):
        sender.update_weights(new_model)
    sender.update_weights(new_model)


def test_recovery_leaves_an_update_alone(sender, restored_engine, new_model):
    sender.update_weights(new_model)
    transport = sender.transport
    with (
        restored_engine.weight_update(),
        pytest.raises(WeightSyncStateError, match="in progress"),
    ):
        sender.recover()
    assert sender.transport is transport
    assert transport.connected


class Told:
    """A collector that remembers what it was told."""

    policy_version = 0

    def __init__(self):
        self.calls = []
        self.last_sync_report = None

    def _served_next(self, version):
        self.calls.append(("announced", version))

    def _update_failed(self, generated):
        self.calls.append(("failed", generated))

    def increment_version(self):
        self.calls.append(("counted", self.last_sync_report.version))


def test_an_announced_version_that_another_trainer_took(
    sender, restored_engine, new_model, hf_model, tokenizer, monkeypatch
):
    """It is withdrawn: responses with it are the other trainer's."""
    collector, waits = Told(), threading.Event()
    sender.register_collector(collector)
    refused = session._is_open

    def is_open(error):
        if refused(error):
            waits.set()
        return refused(error)

    monkeypatch.setattr(session, "_is_open", is_open)

    def weights():
        if engine.control.paused:
            # In the other trainer's session: this one waits for its end meanwhile.
            assert waits.wait(20)
        yield from hf_model.named_parameters()

    with (
        AsyncSGLang.connect(restored_engine.server_url) as engine,
        ThreadPoolExecutor(1) as pool,
    ):
        scheme = SGLangWeightSyncScheme(engine)
        other = pool.submit(scheme.create_sender().update_weights, weights)
        wait_until(lambda: engine.control.paused)
        ours = sender.update_weights(new_model).version
        theirs = other.result().version
        scheme.shutdown()
    assert int(ours) == int(theirs) + 1
    assert collector.calls == [
        ("announced", theirs),
        ("failed", False),
        ("announced", ours),
        ("counted", ours),
    ]
    assert difference(restored_engine, new_model, tokenizer) < TOLERANCE


def test_an_engine_that_was_shut_down_takes_nothing(restored_engine, new_model):
    with AsyncSGLang.connect(restored_engine.server_url) as engine:
        sender = SGLangWeightSyncScheme(engine).create_sender()
        version = sender.update_weights(new_model).version
    with pytest.raises(ServerUnavailableError, match="shut down"):
        sender.update_weights(new_model)
    reported = SGLangWeightSyncScheme(restored_engine).create_receiver()
    assert reported.weight_versions() == [version]


def test_meeting_point_that_is_taken(restored_engine, hf_model, tokenizer):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        scheme = SGLangWeightSyncScheme(
            restored_engine, master_port=taken.getsockname()[1], connect_timeout=3.0
        )
        start = time.monotonic()
        with pytest.raises(WeightTransferError, match="master_port") as caught:
            scheme.create_sender().update_weights(hf_model)
    assert time.monotonic() - start < 60
    assert caught.value.untouched
    assert difference(restored_engine, hf_model, tokenizer) < TOLERANCE


def test_nothing_to_send(sender):
    with pytest.raises(WeightSyncStateError, match="give the model that is trained"):
        sender.update_weights()


def test_a_wrapper_is_read_through(sender, restored_engine, new_model, tokenizer):
    wrapper = TransformersWrapper(new_model, tokenizer=tokenizer, generate=False)
    sender.register_model(wrapper)
    sender.init_all_workers_group(
        get_model_metadata(wrapper), vllm_engine=restored_engine
    )
    sender.update_weights()
    assert difference(restored_engine, new_model, tokenizer) < TOLERANCE
    with pytest.raises(ConfigurationError, match="policy.s engine"):
        sender.init_all_workers_group(vllm_engine=object())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pause_mode": "stop"}, "pause_mode"),
        *(({"bucket_bytes": n}, "bucket_bytes must be") for n in (0, True, 1.5, "1")),
        *(({"connect_timeout": t}, "connect_timeout .*seconds") for t in (-1, "3")),
        ({"send_timeout": 0}, "send_timeout must be a positive, finite .*, got 0"),
        ({"control_timeout": float("nan")}, "control_timeout .*got nan"),
        ({"control_timeout": float("inf")}, "control_timeout .*finite .*got inf"),
        *(({"master_port": n}, "master_port .*65535") for n in (0, -3, 70000, "80")),
        ({"verify": "yes"}, "verify must be a bool, got 'yes'.*True or False"),
        ({"flush_cache": 1}, "flush_cache .*got 1"),
        ({"pin_adapter": None}, "pin_adapter .*got None"),
        *(({"directory": d}, "must be a folder") for d in ("", " ", 5, b"x")),
        *(({"device": d}, "device must be 'cpu'") for d in ("meta", "xpu0", True, 1.5)),
        *(({"adapter": a}, "name of a LoRA adapter") for a in ("", "a b", 3)),
        ({"transport": "lora", "encoding": "fp8"}, "encoding='fp8'.* adapter alone"),
        ({"transport": "lora", "draft": "update"}, "draft='update'.* adapter alone"),
        (
            {"directory": "somewhere", "weight_loader": "traced"},
            "transport='disk' does not use it",
        ),
    ],
)
def test_wrong_arguments(engine, arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        SGLangWeightSyncScheme(engine, **arguments)


@pytest.mark.parametrize(
    ("engine", "words"),
    [(5, "must be .* got 5"), ("not a url", "address of a server"), ("", "address")],
)
def test_values_that_are_no_engine_are_refused(engine, words):
    with pytest.raises(ConfigurationError, match=words):
        SGLangWeightSyncScheme(engine)


def test_whether_to_verify(sender, hf_model):
    with pytest.raises(ConfigurationError, match="verify must be a bool, got 'no'"):
        sender.update_weights(hf_model, verify="no")


def test_an_inference_wrapper_is_not_what_is_trained(engine, tokenizer):
    sender = SGLangWeightSyncScheme(engine).create_sender()
    wrapper = SGLangWrapper(engine, tokenizer=tokenizer)
    words = (
        "SGLangWrapper .*inference wrapper around a AsyncSGLang.*model that is trained"
    )
    with pytest.raises(ConfigurationError, match=words):
        sender.update_weights(wrapper)
    with pytest.raises(
        ConfigurationError, match=r"is the engine.*model that is trained"
    ):
        sender.update_weights(engine)


def test_the_model_is_given_with_the_scheme(restored_engine, tokenizer):
    model = make_tiny_model(tokenizer, seed=77)
    scheme = SGLangWeightSyncScheme(restored_engine, model)
    report = scheme.create_sender().update_weights()
    assert report.version == restored_engine.weight_version
    assert difference(restored_engine, model, tokenizer) < TOLERANCE
    # It belongs to this process.
    copy = pickle.loads(pickle.dumps(scheme)).create_sender()
    with pytest.raises(WeightSyncStateError, match="no weights to send"):
        copy.update_weights()
    scheme.shutdown()


def test_an_address_in_the_models_place():
    """As TorchRL's schemes have it."""
    url = "http://127.0.0.1:1"
    scheme = SGLangWeightSyncScheme(url, "127.0.0.1", 29500)
    assert (scheme.master_address, scheme.master_port) == ("127.0.0.1", 29500)
    with pytest.raises(ConfigurationError, match="Give master_address once"):
        SGLangWeightSyncScheme(url, "127.0.0.1", master_address="127.0.0.2")
