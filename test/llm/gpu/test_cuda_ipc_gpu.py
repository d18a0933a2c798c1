"""Weights that a server reads from the trainer's memory, on the GPU that they share."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers.gpu import GPUS, NEEDS_GPU, TOLERANCE, difference, new_model, start
from helpers.log_probs import PROMPT

from torchrl_sglang import SGLangWeightSyncScheme
from torchrl_sglang.backends import session
from torchrl_sglang.errors import (
    UnsupportedByServerError,
    WeightSyncStateError,
    WeightTransferError,
)
from torchrl_sglang.weight_update.plan import make_transport
from torchrl_sglang.weight_update.weights import TensorSpec, Weights

pytestmark = NEEDS_GPU

SMALL = 100_000
"""Size of a bucket, so that the tiny model needs several."""


def test_auto_shares_the_memory(same_gpu):
    scheme = SGLangWeightSyncScheme(same_gpu)
    sender = scheme.create_sender()
    for seed in (3, 4):
        model = new_model(seed)
        assert difference(same_gpu, model) > 0.1
        report = sender.update_weights(model)
        assert report.transport == "cuda_ipc"
        assert "share the GPU of the weights, cuda:0" in report.reason
        assert difference(same_gpu, model) < TOLERANCE
        # Nothing was converted, so everything goes in one request.
        assert report.num_buckets == 1
    scheme.shutdown()


def test_float32_is_converted_a_bucket_at_a_time(same_gpu):
    scheme = SGLangWeightSyncScheme(same_gpu, bucket_bytes=SMALL)
    model = new_model(5, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    before = torch.cuda.memory_allocated()
    report = scheme.create_sender().update_weights(model)
    assert report.num_buckets > 1
    assert torch.cuda.memory_allocated() == before
    assert difference(same_gpu, model) < TOLERANCE
    scheme.shutdown()


def test_shared_memory_can_be_freed(same_gpu):
    """Many updates leave nothing with the parameters, and nothing of them behind."""
    scheme = SGLangWeightSyncScheme(same_gpu)
    sender = scheme.create_sender()
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = new_model(6)
    for _ in range(20):
        sender.update_weights(model)
    assert difference(same_gpu, model) < TOLERANCE
    scheme.shutdown()
    del model, sender, scheme
    gc.collect()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() <= before


def test_weights_on_the_cpu(same_gpu):
    model = new_model(7)
    sender = SGLangWeightSyncScheme(same_gpu, transport="cuda_ipc").create_sender()
    sender.update_weights({n: value.cpu() for n, value in model.named_parameters()})
    assert difference(same_gpu, model) < TOLERANCE
    sender.shutdown()


def test_a_source_that_fails_in_the_middle(same_gpu):
    """The next update heals, and no memory stays with what was given up."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    scheme = SGLangWeightSyncScheme(same_gpu, transport="cuda_ipc", bucket_bytes=SMALL)
    device = torch.device("cuda:0")
    transport = make_transport(scheme.options, scheme.engine, device)
    served = same_gpu.get_model_metadata()

    def read():
        for index, (_, shape) in enumerate(served.values()):
            if index == len(served) // 2:
                raise OSError("the exporter is gone")
            yield list(served)[index], torch.zeros(shape, device=device)

    weights = Weights(
        specs=tuple(
            TensorSpec(name=name, dtype=dtype, shape=shape)
            for name, (dtype, shape) in served.items()
        ),
        read=read,
        device=device,
        stable=False,
    )
    known = same_gpu.weight_version
    with pytest.raises(WeightTransferError, match="exporter is gone") as caught:
        session.update_weights(
            same_gpu,
            transport,
            weights,
            version=str(1 + (int(known) if known.isdigit() else 0)),
            pause_mode="retract",
        )
    assert not caught.value.untouched
    with pytest.raises(WeightSyncStateError):
        same_gpu.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 1})
    del caught
    transport.close()
    gc.collect()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() <= before
    model = new_model(9)
    scheme.create_sender().update_weights(model)
    assert difference(same_gpu, model) < TOLERANCE
    scheme.shutdown()


@pytest.mark.skipif(GPUS < 2, reason="a server on another GPU needs two")
def test_a_server_that_does_not_see_the_gpu_is_refused(gpu_model_path):
    """Told to open memory of a GPU that it does not see, a server would end."""
    with start(gpu_model_path, cuda_devices=[1]) as engine:
        scheme = SGLangWeightSyncScheme(engine, transport="cuda_ipc")
        with pytest.raises(UnsupportedByServerError, match=r"It sees the GPUs \d only"):
            scheme.create_sender().update_weights(new_model(3))
        assert engine.health()
        assert difference(engine, new_model(0)) < TOLERANCE


@pytest.fixture(scope="module", params=[False, True], ids=["", "sleeping"])
def two_ranks(gpu_model_path, request):
    """A server on two GPUs, on the first of which another one and the trainer are."""
    with start(
        gpu_model_path,
        cuda_devices=[0, 1],
        tensor_parallel_size=2,
        enable_sleep_mode=request.param,
        # It asks for GPUs that are used alike.
        environment={"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"},
    ) as engine:
        yield engine


@pytest.mark.skipif(GPUS < 2, reason="tensor parallelism needs two GPUs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensor_parallelism(two_ranks, dtype):
    """The second rank copies from the first GPU."""
    sender = SGLangWeightSyncScheme(two_ranks, bucket_bytes=SMALL).create_sender()
    for seed in (3, 4):
        if two_ranks.capabilities.can_sleep:
            two_ranks.sleep()
            two_ranks.wake_up("weights")
        model = new_model(seed, dtype)
        report = sender.update_weights(model)
        assert report.transport == "cuda_ipc"
        assert report.num_buckets > 1
        two_ranks.wake_up()
        assert difference(two_ranks, model.bfloat16()) < TOLERANCE
    sender.shutdown()


@pytest.mark.skipif(GPUS < 2, reason="the layers are on two GPUs")
def test_a_model_on_two_gpus(two_ranks):
    """Layers that are on the second GPU are copied to the first one."""
    sender = SGLangWeightSyncScheme(two_ranks).create_sender()
    model = new_model(5)
    weights = {
        name: value.detach().to("cuda:1" if ".layers.1." in name else "cuda:0")
        for name, value in model.named_parameters()
    }
    assert sender.update_weights(weights).transport == "cuda_ipc"
    assert difference(two_ranks, model) < TOLERANCE
    sender.shutdown()
