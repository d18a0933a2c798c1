"""Updates by traced copies on a GPU: bitwise those of the model's own loader."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers.gpu import GPUS, NEEDS_GPU, TOLERANCE, difference, new_model, start

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import WeightSyncError
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.weight_update.transports.traced import QUESTION

pytestmark = NEEDS_GPU

SMALL = 100_000

OTHER_TRAINER = """
import sys
from helpers.gpu import new_model
from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import WeightSyncError
engine = AsyncSGLang.connect(sys.argv[1])
scheme = SGLangWeightSyncScheme(engine, transport="cuda_ipc")
scheme.create_sender().update_weights(new_model(3))
print("sent", flush=True)
sys.stdin.read()
"""


def log_probs(engine: AsyncSGLang) -> list[list[float]]:
    size = engine.capabilities.vocab_size
    prompts = [torch.arange(size).roll(step).tolist()[:96] for step in (0, 40)]
    key = str(time.monotonic_ns())
    (found,) = run_sync(engine.control.prompt_log_probs(prompts, cache_key=key))
    return found


def answer(engine: AsyncSGLang) -> list[float]:
    """Number of the update, its requests, failed, traced, keeps memory open."""
    (facts,) = run_sync(engine.control.get_weights_by_name(QUESTION, 1))
    return list(facts[:5])


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def shared(gpu_model_path, request):
    """A server on the trainer's GPU, and on a second one."""
    if request.param > GPUS:
        pytest.skip("tensor parallelism needs two GPUs")
    with start(
        gpu_model_path,
        cuda_devices=list(range(request.param)),
        tensor_parallel_size=request.param,
        weight_loader="traced",
        environment={"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"},
    ) as engine:
        yield engine


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bucket_bytes", [2 << 30, SMALL])
def test_memory_that_is_shared(shared, dtype, bucket_bytes):
    models = [new_model(seed, torch.bfloat16).to(dtype) for seed in (3, 4)]
    expected = []
    for loader in ("sglang", "traced", "traced"):
        scheme = SGLangWeightSyncScheme(
            shared,
            transport="cuda_ipc",
            weight_loader=loader,
            bucket_bytes=bucket_bytes,
        )
        sender = scheme.create_sender()
        for model in models:
            sender.update_weights(model)
            found = log_probs(shared)
            if loader == "sglang":
                assert difference(shared, model.to(torch.bfloat16)) < TOLERANCE
                expected.append(found)
            else:
                assert found == expected[models.index(model)]
        scheme.shutdown()
    assert answer(shared)[2:] == [0.0, 1.0, 0.0]


def test_the_memory_stays_open_and_new_values_arrive(shared):
    """Later updates send no handles; a parameter in other memory is opened anew."""
    model = new_model(3)
    scheme = SGLangWeightSyncScheme(shared, transport="cuda_ipc")
    sender = scheme.create_sender()
    sender.update_weights(model)
    assert answer(shared)[4] == 1
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-0.9)
        sender.update_weights(model)
        assert difference(shared, model) < TOLERANCE
    with torch.no_grad():
        model.lm_head.weight.data = 0.5 * model.lm_head.weight
    sender.update_weights(model)
    assert difference(shared, model) < TOLERANCE
    scheme.shutdown()
    assert answer(shared)[4] == 0


def test_shared_memory_can_be_freed(shared):
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = new_model(6)
    scheme = SGLangWeightSyncScheme(shared, transport="cuda_ipc")
    sender = scheme.create_sender()
    for _ in range(5):
        sender.update_weights(model)
    scheme.shutdown()
    del model, sender, scheme
    gc.collect()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() <= before


def test_memory_of_a_trainer_that_was_killed_is_closed(shared, request):
    """The server would keep it from being freed."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_TRAINER, shared.server_url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["test", *sys.path])},
        cwd=request.config.rootpath,
    ) as trainer:
        # Beside it are lines of the log.
        assert "sent\n" in trainer.stdout
        assert answer(shared)[4] == 1
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(60)
    deadline = time.monotonic() + 30
    while answer(shared)[4]:
        assert time.monotonic() < deadline
    model = new_model(4)
    scheme = SGLangWeightSyncScheme(shared)
    scheme.create_sender().update_weights(model)
    assert difference(shared, model) < TOLERANCE
    scheme.shutdown()


@pytest.mark.skipif(GPUS < 2, reason="weights travel from one GPU to another")
@pytest.mark.parametrize("bucket_bytes", [2 << 30, SMALL])
def test_nccl(gpu_model_path, bucket_bytes):
    models = [new_model(seed) for seed in (3, 4)]
    with start(
        gpu_model_path, cuda_devices=[GPUS - 1], weight_loader="traced"
    ) as engine:
        expected = []
        for loader in ("sglang", "traced", "traced"):
            scheme = SGLangWeightSyncScheme(
                engine,
                transport="broadcast",
                weight_loader=loader,
                bucket_bytes=bucket_bytes,
            )
            sender = scheme.create_sender()
            for index, model in enumerate(models):
                sender.update_weights(model)
                found = log_probs(engine)
                if loader == "sglang":
                    assert difference(engine, model) < TOLERANCE
                    expected.append(found)
                else:
                    assert found == expected[index]
            scheme.shutdown()
        assert answer(engine)[2:4] == [0.0, 1.0]


@pytest.mark.skipif(GPUS < 2, reason="weights travel from one GPU to another")
def test_a_trainer_that_fails_between_buckets_is_given_up(gpu_model_path, monkeypatch):
    """The server has queued on its GPU what it is to receive, and waits there."""
    model = new_model(3)
    with start(
        gpu_model_path, cuda_devices=[GPUS - 1], weight_loader="traced"
    ) as engine:
        scheme = SGLangWeightSyncScheme(
            engine, transport="broadcast", bucket_bytes=SMALL, send_timeout=20
        )
        sender = scheme.create_sender()
        sender.update_weights(model)
        transport = sender.transport
        make, made = transport._make_flight, []

        def make_some(*given):
            if len(made) == 2:
                raise torch.OutOfMemoryError("there is no memory")
            made.append(make(*given))
            return made[-1]

        monkeypatch.setattr(transport, "_make_flight", make_some)
        with pytest.raises(WeightSyncError, match="there is no memory"):
            sender.update_weights(model)
        monkeypatch.undo()
        sender.update_weights(model)
        assert difference(engine, model) < TOLERANCE
        scheme.shutdown()
