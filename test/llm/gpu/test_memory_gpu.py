"""Sleep and wake-up on a GPU: the memory is freed, and the weights after are exact.

The server needs ``torch_memory_saver``.
"""

from __future__ import annotations

import pytest
import torch
from helpers.gpu import (
    GPUS,
    LARGE_CACHE_TOKENS,
    LARGE_MODEL,
    NEEDS_GPU,
    difference,
    new_model,
)
from helpers.log_probs import PROMPT

from torchrl_sglang import SGLangWeightSyncScheme
from torchrl_sglang.errors import ConfigurationError, WeightSyncStateError
from torchrl_sglang.trainers.ranks import TrainerRanks
from torchrl_sglang.trainers.released_memory import ReleasedMemory, gpu_memory

pytestmark = NEEDS_GPU

TOLERANCE = 0.1
"""For half precision's rounding; two models of these shapes differ by about 1."""

TOKEN_BYTES = (
    # Key and value, two bytes each, of the heads of each layer.
    4 * 128 * LARGE_MODEL["num_layers"] * LARGE_MODEL["num_kv_heads"]
)
FREED = 0.8
"""Of a server's weights and cache, that the device must have back."""


def free_bytes() -> int:
    """Free memory of the server's GPU, which no other test uses meanwhile."""
    torch.cuda.synchronize(GPUS - 1)
    return torch.cuda.mem_get_info(GPUS - 1)[0]


def test_a_step_of_a_trainer_on_the_same_gpu(sleeping_engine):
    engine = sleeping_engine
    old = new_model(0, shape=LARGE_MODEL)
    new = new_model(3, shape=LARGE_MODEL)
    weights = sum(p.numel() * p.element_size() for p in old.parameters())
    cache = LARGE_CACHE_TOKENS * TOKEN_BYTES
    assert difference(engine, old) < TOLERANCE
    assert difference(engine, new) > 2 * TOLERANCE
    # Through shared memory on one GPU, NCCL from another one.
    scheme = SGLangWeightSyncScheme(engine)
    sender = scheme.create_sender()
    # The sender's buffers are made once, and are not the server's.
    sender.update_weights(old)
    awake = free_bytes()

    engine.sleep()
    asleep = free_bytes()
    assert asleep - awake > FREED * (cache + weights)
    with pytest.raises(WeightSyncStateError, match="wake_up"):
        engine.generate(input_ids=PROMPT)
    with pytest.raises(WeightSyncStateError, match="wake_up"):
        sender.update_weights(new)

    engine.wake_up("weights")
    half = free_bytes()
    assert asleep - half > FREED * weights
    assert half - awake > FREED * cache
    with pytest.raises(WeightSyncStateError, match="wake_up"):
        engine.generate(input_ids=PROMPT)
    sender.update_weights(new)

    engine.wake_up("kv_cache")
    assert difference(engine, new) < TOLERANCE

    # A cache alone comes back without an update.
    engine.sleep("kv_cache")
    assert free_bytes() > awake
    engine.wake_up()
    assert difference(engine, new) < TOLERANCE
    scheme.shutdown()


@pytest.mark.skipif(GPUS > 1, reason="the trainer reads its own GPU's memory")
def test_a_server_is_not_woken_up_without_its_memory(sleeping_engine):
    engine, ranks = sleeping_engine, TrainerRanks()
    memory = ReleasedMemory(ranks, gpu_memory(torch.device("cuda:0")))
    model = new_model(3, shape=LARGE_MODEL)
    sender = SGLangWeightSyncScheme(engine).create_sender()

    def step(keep: int) -> None:
        with memory.counting():
            engine.sleep()
        kept.append(torch.empty(keep, dtype=torch.uint8, device="cuda:0"))
        with memory.counting():
            engine.wake_up("weights")
        sender.update_weights(model)

    kept: list[torch.Tensor] = []
    step(0)
    memory.check(0.85)
    engine.wake_up()
    cache = LARGE_CACHE_TOKENS * TOKEN_BYTES
    step(free_bytes() + cache // 2)
    with pytest.raises(ConfigurationError, match="released .* GB for its cache"):
        memory.check(0.85)
    kept.clear()
    torch.cuda.empty_cache()
    # Nothing was lost: with the memory the server goes on.
    engine.wake_up()
    assert difference(engine, model) < TOLERANCE
