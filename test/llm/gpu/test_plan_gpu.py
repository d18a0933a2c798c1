"""Peaks that CUDA's allocator has seen, beside the formulas of ``plan``.

Several ranks are FSDP2 on the first of them: its collectives do nothing, and their
memory is real. ``-s`` prints the figures, for the tables of
``test/llm/cli/test_plan.py``.
"""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
import torch.distributed as dist
from helpers.gpu import NEEDS_GPU
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrl.modules.llm import TransformersWrapper
from transformers import AutoModelForCausalLM, Qwen2Config

from torchrl_sglang import CorrectedGRPOLoss
from torchrl_sglang.cli.plan.memory import GIB, Workload, trainer_memory
from torchrl_sglang.cli.plan.shapes import read_shape
from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer
from torchrl_sglang.trainers.models import load_model, shard
from torchrl_sglang.trainers.optimizers import optimizer_of
from torchrl_sglang.trainers.ranks import TrainerRanks

pytestmark = [*NEEDS_GPU, pytest.mark.filterwarnings("ignore")]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS, SEQUENCE = 8, 1024

CONFIGS = {
    "0.5b": (896, 4864, 24, 14, 2, True),
    "1.5b": (1536, 8960, 28, 12, 2, True),
}


def make_config(name):
    hidden, mlp, layers, heads, kv_heads, tied = CONFIGS[name]
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        vocab_size=151_936,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
    )


@contextlib.contextmanager
def several(ranks):
    """Makes this process the first of some that do not exist."""
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        if ranks > 1:
            dist.destroy_process_group()


def peak_of(call):
    """Returns what a call returns, and the most bytes of tensors meanwhile."""
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated()


def make_batch():
    from tensordict import TensorDict, lazy_stack
    from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

    response = torch.arange(SEQUENCE) >= 32
    rows = []
    for _ in range(ROWS):
        ids = torch.randint(3, 90, (SEQUENCE,))
        log_probs = torch.where(response, torch.rand(SEQUENCE).log(), torch.nan)
        rows.append(
            TensorDict(
                tokens=Tokens(
                    prompt=ids[:32], response=ids[32:], full=ids, padded=False
                ),
                masks=Masks(
                    all_attention_mask=torch.ones_like(response),
                    all_assistant_mask=response,
                    padded=False,
                ),
                log_probs=LogProbs(full=log_probs, padded=False),
                advantage=torch.randn(1, 1),
            )
        )
    return lazy_stack(rows).to("cuda")


@pytest.mark.parametrize("lora", [None, 16], ids=["full", "lora"])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_peaks(name, ranks, lora):
    if lora is not None and name == "1.5b":
        pytest.skip("one size is enough for an adapter")
    config = make_config(name)
    work = Workload(sequence=SEQUENCE, lora=lora)
    formula = trainer_memory(
        read_shape(config), work, ranks=ranks, tokens=ROWS * SEQUENCE
    )
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated()
    with several(ranks):
        found = measure(config, ranks, lora)
    found = {phase: size - before for phase, size in found.items()}
    for phase, size in found.items():
        expected = formula.peaks[phase]
        if phase == "training":
            # AdamW's moments come with the first step.
            expected -= formula.kept["optimizer"]
        print(  # noqa: T201
            f"\n{name} ranks={ranks} lora={lora} {phase}: {size / GIB:.3f} GiB, "
            f"formula {expected / GIB:.3f} ({expected / size - 1:+.1%})",
            end="",
        )
        assert expected == pytest.approx(size, rel=0.15), phase


def measure(config, ranks, lora):
    """Returns the most bytes of each phase."""
    with torch.device("cpu"):
        given = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def load():
        model = load_model(
            given,
            device=CPU if ranks > 1 else CUDA,
            lora=None if lora is None else {"r": lora},
            gradient_checkpointing=True,
        )
        return shard(model, TrainerRanks(size=ranks), CUDA) if ranks > 1 else model

    model, loading = peak_of(load)
    actor = TransformersWrapper(
        model, tokenizer=make_tiny_tokenizer(), input_mode="tokens", generate=False
    )
    loss = CorrectedGRPOLoss(actor, clip_epsilon=0.2, entropy_bonus=False)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = optimizer_of(None, 1e-6)(trained)
    batch = make_batch()

    def train():
        # Two passes of one step: gradients are there when the second one begins.
        with torch.autocast("cuda", torch.bfloat16, enabled=ranks == 1):
            loss.accumulate([batch, batch])

    _, training = peak_of(train)
    _, stepping = peak_of(optimizer.step)
    return {"loading": loading, "training": training, "stepping": stepping}
