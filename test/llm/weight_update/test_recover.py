"""Servers get back to whole weights, whatever became of the trainer in an update."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import textwrap
from functools import partial

import pytest
import torch
from helpers import log_probs
from helpers.engines import with_capabilities
from helpers.forked_starts import forked_process, processes_below, trainer_python
from helpers.log_probs import TOLERANCE
from helpers.weights import open_weights

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.backends import session
from torchrl_sglang.errors import (
    RequestRefusedError,
    ServerUnavailableError,
    UnsupportedByServerError,
    WeightSyncStateError,
    WeightTransferError,
)
from torchrl_sglang.testing.tiny_model import make_tiny_model
from torchrl_sglang.weight_update.transports.broadcast import (
    BroadcastOptions,
    BroadcastTransport,
)

difference = partial(log_probs.difference, timeout=30)


@pytest.fixture
def new_model(tokenizer):
    return make_tiny_model(tokenizer, seed=31)


def update_half(engine, model) -> None:
    """Fails after the third bucket has arrived."""
    weights = open_weights(model, engine.get_model_metadata())

    def read():
        sent = 0
        for name, tensor in weights.read():
            yield name, tensor
            sent += tensor.numel() * 4
            if sent > 60_000:
                raise OSError("The trainer's disk is gone.")

    transport = BroadcastTransport(
        engine, BroadcastOptions(bucket_bytes=20_000), device=torch.device("cpu")
    )
    with pytest.raises(WeightTransferError, match="mix of old and new"):
        session.update_weights(
            engine,
            transport,
            dataclasses.replace(weights, read=read),
            version="1000",
            pause_mode="retract",
        )
    transport.close()


def test_a_trainer_that_gives_up(any_engine, hf_model, new_model):
    scheme = SGLangWeightSyncScheme(any_engine)
    sender = scheme.create_sender()
    first = sender.update_weights(new_model)
    update_half(any_engine, hf_model)
    with pytest.raises(WeightSyncStateError, match="inconsistent"):
        difference(any_engine, hf_model)
    report = sender.recover()
    assert report.transport == "checkpoint"
    assert report.num_tensors == len(list(hf_model.parameters()))
    assert int(report.version) > int(first.version)
    assert report.version == any_engine.weight_version
    assert scheme.create_receiver().weight_versions() == [report.version]
    assert sender.last_report is report
    assert difference(any_engine, hf_model) < TOLERANCE
    # Nothing is left over that the next update would trip over.
    sender.update_weights(new_model)
    assert difference(any_engine, new_model) < TOLERANCE
    # Nor does anything have to be broken.
    sender.recover()
    assert difference(any_engine, hf_model) < TOLERANCE
    scheme.shutdown()


SLOW = pytest.mark.slow

TRAINER = """
import dataclasses, sys, threading, time
import torch
from torchrl_sglang import AsyncSGLang
from torchrl_sglang.support.event_loop import submit
from torchrl_sglang.testing.tiny_model import make_tiny_model, make_tiny_tokenizer
from torchrl_sglang.backends import session
from torchrl_sglang.weight_update.sources.resolve import find_source
from torchrl_sglang.weight_update.sources.served import ServedTensors, open_weights
from torchrl_sglang.weight_update.transports.broadcast import (
    BroadcastOptions,
    BroadcastTransport,
)

url, place = sys.argv[1:]
engine = AsyncSGLang.connect(url)
model = make_tiny_model(make_tiny_tokenizer(), seed=77)
served = ServedTensors(metadata=engine.get_model_metadata())
weights = open_weights(find_source(model), served)
options = BroadcastOptions(bucket_bytes=20_000)
transport = BroadcastTransport(engine, options, device=torch.device("cpu"))

def stop():
    if place == "in a broadcast":
        # The server is told of a bucket that nobody sends.
        spec = weights.specs[-1]
        submit(engine.control.update_weights_from(
            "distributed", names=[spec.name], dtypes=["float32"],
            shapes=[list(spec.shape)], group_name=transport.group_name,
            weight_version=None, timeout=1000,
        ))
        while not engine.health():
            pass
    print("stopped", flush=True)
    threading.Event().wait()

def read():
    sent = 0
    for name, tensor in weights.read():
        yield name, tensor
        sent += tensor.numel() * 4
        if sent > 60_000:
            stop()

session.update_weights(
    engine, transport, dataclasses.replace(weights, read=read), version="2000",
    pause_mode="retract",
)
"""


def kill_a_trainer(url: str, place: str) -> None:
    """A process updates half of a server's weights, and is killed."""
    trainer = subprocess.Popen(
        [trainer_python(), "-c", textwrap.dedent(TRAINER), url, place],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert trainer.stdout is not None
        assert any(line == "stopped\n" for line in trainer.stdout)
    finally:
        os.kill(forked_process(trainer.pid), signal.SIGKILL)
        trainer.wait()
        trainer.stdout.close()


@pytest.mark.parametrize(
    ("any_engine", "way", "place"),
    [
        ("sessions", "update", "in a broadcast"),
        pytest.param("no sessions", "recover", "between buckets", marks=SLOW),
        pytest.param("sessions", "update", "between buckets", marks=SLOW),
        pytest.param("sessions", "recover", "in a broadcast", marks=SLOW),
        pytest.param("sessions", "recover", "between buckets", marks=SLOW),
        pytest.param("no sessions", "update", "in a broadcast", marks=SLOW),
        pytest.param("no sessions", "update", "between buckets", marks=SLOW),
        pytest.param("no sessions", "recover", "in a broadcast", marks=SLOW),
    ],
    indirect=["any_engine"],
)
def test_a_trainer_that_was_killed(any_engine, hf_model, new_model, way, place):
    """Another process, which knows nothing, takes over the server."""
    kill_a_trainer(any_engine.server_url, place)
    with AsyncSGLang.connect(any_engine.server_url) as engine:
        assert not engine.servers
        # A session that is open gets as long to end as a call may take, at the most.
        scheme = SGLangWeightSyncScheme(engine, control_timeout=3.0)
        sender = scheme.create_sender()
        if way == "recover":
            sender.recover()
            assert difference(engine, hf_model) < TOLERANCE
        sender.update_weights(new_model)
        assert difference(engine, new_model) < TOLERANCE
        scheme.shutdown()


def test_an_open_session_is_no_reason_to_trust(restored_engine, new_model):
    """A failure before the first byte resumes nothing that a killed trainer paused."""
    kill_a_trainer(restored_engine.server_url, "between buckets")
    with AsyncSGLang.connect(restored_engine.server_url) as engine:
        weights = open_weights(new_model, engine.get_model_metadata())

        def read():
            raise OSError("The trainer's disk is gone.")
            yield

        transport = BroadcastTransport(engine, device=torch.device("cpu"))
        with pytest.raises(WeightTransferError, match="mix of old and new"):
            session.update_weights(
                engine,
                transport,
                dataclasses.replace(weights, read=read),
                version="3000",
                pause_mode="retract",
                control_timeout=3.0,
            )
        transport.close()
        assert "inconsistent" in repr(engine)
        SGLangWeightSyncScheme(engine).create_sender().recover()


def copy_with(engine, **server_args):
    """Another engine object for the same servers, which were started otherwise."""
    return with_capabilities(
        engine, server_args={**engine.capabilities.server_args, **server_args}
    )


def test_servers_without_a_checkpoint_stay_inconsistent(restored_engine, new_model):
    engine = copy_with(restored_engine, load_format="dummy")
    scheme = SGLangWeightSyncScheme(engine)
    sender = scheme.create_sender()
    update_half(engine, new_model)
    with pytest.raises(UnsupportedByServerError, match="send them weights"):
        sender.recover()
    assert "inconsistent" in repr(engine)
    sender.update_weights(new_model)
    assert difference(engine, new_model) < TOLERANCE
    scheme.shutdown()


def test_a_checkpoint_that_is_gone_leaves_inconsistency(restored_engine, new_model):
    engine = copy_with(restored_engine, model_path="/nowhere/at/all")
    scheme = SGLangWeightSyncScheme(engine)
    sender = scheme.create_sender()
    # Nothing is known to be broken, and nothing is known to be whole.
    with pytest.raises(WeightTransferError, match="/nowhere/at/all"):
        sender.recover()
    assert "inconsistent" in repr(engine)
    sender.update_weights(new_model)
    assert difference(engine, new_model) < TOLERANCE
    scheme.shutdown()


def test_a_server_that_ends_meanwhile(restored_engine, hf_model, monkeypatch):
    """It answered before its checkpoint was loaded: there is a second try, and one."""
    update, errors = session.update_weights, []

    def fail(*args, **kwargs):
        if errors:
            raise WeightTransferError("It did not arrive.") from errors.pop()
        return update(*args, **kwargs)

    monkeypatch.setattr(session, "update_weights", fail)
    scheme = SGLangWeightSyncScheme(restored_engine)
    sender = scheme.create_sender()
    gone = ServerUnavailableError("The server is gone.")
    errors += [gone]
    assert sender.recover().transport == "checkpoint"
    assert difference(restored_engine, hf_model) < TOLERANCE
    for failures in ([gone, gone], [RequestRefusedError("There is no such folder.")]):
        errors[:] = failures
        with pytest.raises(WeightTransferError, match="did not arrive"):
            sender.recover()
        assert not errors
    scheme.shutdown()


@SLOW
def test_a_server_that_hangs_is_started_again(tiny_model_path, hf_model, new_model):
    with AsyncSGLang.from_pretrained(tiny_model_path, device="cpu") as engine:
        scheme = SGLangWeightSyncScheme(engine)
        sender = scheme.create_sender()
        sender.update_weights(new_model)
        update_half(engine, hf_model)
        before = engine.servers[0].pid
        # An engine that does not own it cannot start it again.
        other = AsyncSGLang.connect(engine.server_url)
        for pid in processes_below(before):
            os.kill(pid, signal.SIGSTOP)
        report = sender.recover()
        assert engine.servers[0].pid != before
        assert int(report.version) > 1
        assert difference(engine, hf_model) < TOLERANCE
        # And one that has ended.
        os.kill(engine.servers[0].pid, signal.SIGKILL)
        sender.recover()
        assert difference(engine, hf_model) < TOLERANCE
        for pid in processes_below(engine.servers[0].pid):
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError, match="does not own"):
            other.revive()
        other.shutdown()
        scheme.shutdown()
