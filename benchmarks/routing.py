"""Routing of engine and trainer: how often it differs, and what replay changes.

A mixture of experts with random weights generates. A trainer in bfloat16 computes the
log-probs of the same tokens, with routing of its own and with the engine's. Printed are
the share of (token, layer) whose set of experts differs, the KL divergence between
engine and trainer, mean of ``r - 1 - log r`` over the sampled tokens, and tokens a
second of the engine with and without the column.

    python benchmarks/routing.py tiny --device cpu
    python benchmarks/routing.py 30b-shapes
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from script import read_options
from torchrl_sglang import AsyncSGLang, replay_routing
from torchrl_sglang.cli.bench.measure import start_engine
from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
    },
    # Widths, experts and heads of Qwen3-30B-A3B, in a twelfth of its layers.
    "30b-shapes": {
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}
"""Name -> sizes of a Qwen3-MoE."""


def save(name: str, folder: str, dtype: torch.dtype) -> None:
    """Writes a model with random weights."""
    tokenizer = make_tiny_tokenizer()
    # Of a standard deviation that lets hidden states of any width vary alike.
    width = SHAPES[name]["hidden_size"]
    config = Qwen3MoeConfig(
        **SHAPES[name],
        intermediate_size=4 * width,
        vocab_size=len(tokenizer),
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=2.0 * width**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def generate(engine: AsyncSGLang, count: int, tokens: int, columns: list[str]) -> Any:
    """Returns completions, and tokens a second."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 90, (count, 32), generator=generator).tolist()
    begin = time.perf_counter()
    completions = engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": tokens, "ignore_eos": True},
        return_logprobs=True,
        token_columns=columns,
    )
    seconds = time.perf_counter() - begin
    return prompts, completions, count * tokens / seconds


def to_batch(prompts: list[list[int]], completions: list[Any]) -> LazyStackedTensorDict:
    """Returns the tokens with their experts and the engine's log-probs."""
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        parts = completion.prompt_columns, completion.columns
        experts = [torch.from_numpy(each["routed_experts"].values) for each in parts]
        rows.append(
            TensorDict(
                tokens={"full": torch.tensor([*prompt, *completion.token_ids])},
                routed_experts={"full": torch.cat(experts)},
                log_probs={"response": torch.tensor(completion.log_probs)},
            )
        )
    return LazyStackedTensorDict(*rows)


@torch.no_grad()
def compare(model: Any, batch: LazyStackedTensorDict, *, replays: bool) -> None:
    """Prints how far the trainer is from the engine."""
    gaps = []
    with replay_routing(model) as replay:
        for row in batch.unbind(0):
            tokens = row["tokens", "full"].to(model.device)
            experts = row["routed_experts", "full"].to(model.device)
            sampled = row["log_probs", "response"]
            with replay.using(experts[None]):
                logits = model(tokens[None]).logits[0]
            if not replays:
                logits = model(tokens[None]).logits[0]
            found = logits.float().log_softmax(-1)[:-1].gather(-1, tokens[1:, None])
            gaps.append(found[-len(sampled) :, 0].cpu() - sampled)
        flipped = replay.flipped
    gap = torch.cat(gaps)
    kl = (gap.exp() - 1 - gap).mean().item()
    print(
        f"{'replay' if replays else 'own routing'}: mismatch KL {kl:.3e}, mean |log "
        f"r| {gap.abs().mean():.3e}, largest {gap.abs().max():.3f}; "
        f"{flipped:.2%} of choices differ"
    )


def main() -> None:
    """Runs the comparison."""
    given = read_options(
        __doc__, model="|".join(SHAPES), device="cuda|cpu", sequences=16, tokens=128
    )
    # On a CPU the engine computes in float32: another type than the trainer's.
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        save(given.model, folder, dtype)
        options = {"mem_fraction_static": 0.4} if given.device == "cuda" else {}
        with start_engine(
            folder, device=given.device, enable_return_routed_experts=True, **options
        ) as engine:
            size = (given.sequences, given.tokens)
            generate(engine, *size, [])
            rates = {}
            for columns in ([], ["routed_experts"], [], ["routed_experts"]):
                prompts, completions, rate = generate(engine, *size, columns)
                name = "with" if columns else "without"
                rates[name] = max(rate, rates.get(name, 0.0))
            print(
                f"{given.model}, {given.sequences} x {given.tokens} tokens: "
                + ", ".join(f"{rate:,.0f} tokens/s {n}" for n, rate in rates.items())
                + " the column"
            )
            batch = to_batch(prompts, completions)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.to(given.device).eval()
        for replays in (False, True):
            compare(model, batch, replays=replays)


if __name__ == "__main__":
    main()
