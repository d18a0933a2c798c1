"""Sleep and wake-up on a GPU: memory that the device has back, and exact weights after.

Run with ``pytest -m gpu`` where a Python with CUDA has sglang, with torch_memory_saver,
and this package.
"""

from __future__ import annotations

import pytest
import torch

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import WeightSyncStateError
from torchrl_sglang.testing.gpu import server_arguments
from torchrl_sglang.testing.tiny_model import (
    make_tiny_model,
    make_tiny_tokenizer,
    save_tiny_model,
)

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(GPUS == 0, reason="there is no CUDA device"),
]

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
PROMPT = [5, 6, 7, 8]


def new_model(seed: int) -> torch.nn.Module:
    model = make_tiny_model(make_tiny_tokenizer(), seed=seed, **MODEL)
    return model.to("cuda:0")


@torch.no_grad()
def difference(engine: AsyncSGLang, model: torch.nn.Module) -> float:
    """Greatest difference of a response's log-probs from a model's."""
    (answer,) = engine.generate(
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 16, "ignore_eos": True},
        return_logprobs=True,
    )
    ids = torch.tensor([*PROMPT, *answer.token_ids], device="cuda:0")
    reference = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
    reference = reference.gather(-1, ids[1:, None])[len(PROMPT) - 1 :, 0].cpu()
    return float((torch.tensor(answer.log_probs) - reference).abs().max())


def free_bytes(device: int) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def test_a_step_of_a_trainer_on_the_same_gpu(tmp_path):
    device = GPUS - 1
    path = save_tiny_model(tmp_path / "model", **MODEL)
    old, new = new_model(0), new_model(3)
    weights = sum(p.numel() * p.element_size() for p in old.parameters())
    before = free_bytes(device)
    with AsyncSGLang.from_pretrained(
        path,
        device="cuda",
        cuda_devices=[device],
        dtype=torch.bfloat16,
        gpu_memory_utilization=SHARE,
        enforce_eager=True,
        enable_memory_saver=True,
        start_timeout=300,
        **server_arguments(),
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
