"""Sleep and wake-up on a GPU: the memory is freed, and the weights after are exact.

The server needs ``torch_memory_saver``.
"""

from __future__ import annotations

import pytest
import torch
from helpers.gpu import GPUS, NEEDS_GPU, difference, new_model, start
from helpers.log_probs import PROMPT

from torchrl_sglang import SGLangWeightSyncScheme
from torchrl_sglang.errors import WeightSyncStateError
from torchrl_sglang.testing.tiny_model import save_tiny_model

pytestmark = NEEDS_GPU

# Weights of about half a GB: enough to be seen beside a CUDA context. SGLang's kernels
# take half precision only, whose rounding the tolerance allows for: two models of these
# shapes differ by about 1.
MODEL = {
    "hidden_size": 2048,
    "num_layers": 4,
    "num_heads": 16,
    "num_kv_heads": 8,
    "initializer_range": 0.02,
    "dtype": torch.bfloat16,
}
TOLERANCE = 0.1
SHARE = 0.2
"""Of the GPU's memory, for the server's weights and cache."""
FREED = 0.8
"""Of them, that the device must have back."""


def free_bytes(device: int) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def test_a_step_of_a_trainer_on_the_same_gpu(tmp_path):
    device = GPUS - 1
    path = save_tiny_model(tmp_path / "model", **MODEL)
    old, new = new_model(0, shape=MODEL), new_model(3, shape=MODEL)
    weights = sum(p.numel() * p.element_size() for p in old.parameters())
    before = free_bytes(device)
    with start(
        path,
        cuda_devices=[device],
        gpu_memory_utilization=SHARE,
        enable_memory_saver=True,
    ) as engine:
        assert difference(engine, old) < TOLERANCE
        assert difference(engine, new) > 2 * TOLERANCE
        # Through shared memory on one GPU, NCCL from another one.
        scheme = SGLangWeightSyncScheme(engine)
        sender = scheme.create_sender()
        # The sender's buffers are made once, and are not the server's.
        sender.update_weights(old)
        awake = free_bytes(device)

        engine.sleep()
        asleep = free_bytes(device)
        assert asleep - awake > FREED * (before - awake)
        with pytest.raises(WeightSyncStateError, match="wake_up"):
            engine.generate(input_ids=PROMPT)
        with pytest.raises(WeightSyncStateError, match="wake_up"):
            sender.update_weights(new)

        engine.wake_up("weights")
        half = free_bytes(device)
        assert asleep - half > FREED * weights
        assert half - awake > FREED * (before - awake - 2 * weights)
        with pytest.raises(WeightSyncStateError, match="wake_up"):
            engine.generate(input_ids=PROMPT)
        sender.update_weights(new)

        engine.wake_up("kv_cache")
        assert difference(engine, new) < TOLERANCE

        # A cache alone comes back without an update.
        engine.sleep("kv_cache")
        assert free_bytes(device) > awake
        engine.wake_up()
        assert difference(engine, new) < TOLERANCE
        scheme.shutdown()
