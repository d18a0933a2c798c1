"""Servers with ``rollout_dtype="fp8"`` beside those in bfloat16, on a GPU.

Printed are tokens a second of both at several numbers of responses at a time, seconds
and bytes of a weight update, and how far log-probs of FP8 are from those of bfloat16.

    python benchmarks/fp8.py 7b
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from script import read_options
from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.cli.bench.measure import save_model, start_engine

RUNNING = (32, 256, 1024)
"""Responses at a time."""

LENGTH = 64
"""Tokens of a response whose log-probs are compared."""


def make_prompts(count: int) -> list[list[int]]:
    """Returns prompts of 64 tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 90, (count, 64), generator=generator).tolist()


def rate(engine: AsyncSGLang, count: int, tokens: int, repeats: int) -> float:
    """Returns the median of tokens a second."""
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        engine.generate(
            input_ids=make_prompts(count),
            sampling_params={"max_new_tokens": tokens, "ignore_eos": True},
            return_logprobs=True,
        )
        seconds.append(time.perf_counter() - begin)
    return count * tokens / statistics.median(seconds[1:])


def say(engine: AsyncSGLang) -> list[list[int]]:
    """Returns prompts with responses of 64 tokens."""
    prompts = make_prompts(16)
    found = engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": LENGTH, "ignore_eos": True},
    )
    return [p + list(f.token_ids) for p, f in zip(prompts, found, strict=True)]


def score(engine: AsyncSGLang, texts: list[list[int]]) -> torch.Tensor:
    """Returns log-probs of the responses."""
    found = engine.generate(
        input_ids=texts,
        sampling_params={"max_new_tokens": 1},
        return_logprobs=True,
        return_prompt_logprobs=True,
    )
    return torch.tensor([list(each.prompt_log_probs)[-LENGTH:] for each in found])


def update(name: str, scheme: SGLangWeightSyncScheme) -> None:
    """Sends the weights twice, and prints what the second time took."""
    sender = scheme.create_sender()
    sender.update_weights()
    report = sender.update_weights()
    print(
        f"{name}: an update of {report.num_bytes / 1e9:.2f} GB by "
        f"{report.transport!r} in {report.seconds:.2f} s"
    )


def main() -> None:
    """Runs the comparison."""
    given = read_options(__doc__, model="0.5b|3b|7b", tokens=256, repeats=3)
    rates: dict[str, list[float]] = {}
    log_probs: dict[str, torch.Tensor] = {}
    texts: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        path, dummy = save_model(given.model, folder)
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(path), dtype=torch.bfloat16
            )
        for name, options in {
            "bfloat16": dummy,
            "fp8": {"rollout_dtype": "fp8"},
        }.items():
            with start_engine(
                path,
                device="cuda",
                max_running_requests=max(RUNNING),
                mem_fraction_static=0.6,
                **options,
            ) as engine:
                scheme = SGLangWeightSyncScheme(engine, model)
                update(name, scheme)
                rates[name] = [
                    rate(engine, count, given.tokens, given.repeats)
                    for count in RUNNING
                ]
                texts = texts or say(engine)
                log_probs[name] = score(engine, texts)
                scheme.shutdown()
    for count, one, other in zip(RUNNING, rates["bfloat16"], rates["fp8"], strict=True):
        print(
            f"{given.model}, {count} responses at a time: {one:,.0f} tokens/s in "
            f"bfloat16, {other:,.0f} in FP8 ({other / one:.3f})"
        )
    gap = log_probs["fp8"] - log_probs["bfloat16"]
    kl = (gap.exp() - 1 - gap).mean().item()
    print(
        f"log-probs of FP8: mean |difference| {gap.abs().mean():.4f}, largest "
        f"{gap.abs().max():.3f}, KL {kl:.2e}"
    )


if __name__ == "__main__":
    main()
