"""What a mode of the servers costs, on a GPU: tokens a second with it and without.

* ``fp8``: ``rollout_dtype="fp8"`` beside bfloat16, at several numbers of responses at a
  time; seconds and bytes of a weight update.
* ``deterministic``: the same prompts are answered in turn by a server in deterministic
  mode and by another one with the same arguments. It also prints how many responses of
  two rounds of the first server differ, the second of which asks in another order and
  a quarter of the prompts at a time: none may.

    python benchmarks/modes.py fp8 7b
    python benchmarks/modes.py deterministic 3b
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
import transformers.models.qwen2  # noqa: F401 - its first import is not for two threads
from transformers import AutoConfig, AutoModelForCausalLM

from script import read_options
from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.cli.bench.generation import exact_length
from torchrl_sglang.cli.bench.models import save_model, start_engine

RUNNING = (32, 256, 1024)
"""Responses at a time."""


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
            sampling_params=exact_length(tokens),
            return_logprobs=True,
        )
        seconds.append(time.perf_counter() - begin)
    return count * tokens / statistics.median(seconds[1:])


def compare_fp8(given: argparse.Namespace, repeats: int) -> None:
    """Runs servers in bfloat16 and in FP8, one after the other."""
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path, dummy = save_model(given.model, folder)
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(path), dtype=torch.bfloat16
            )
        kinds = {"bfloat16": dummy, "fp8": {"rollout_dtype": "fp8"}}
        for name, options in kinds.items():
            with start_engine(
                path,
                device="cuda",
                max_running_requests=max(RUNNING),
                mem_fraction_static=0.6,
                **options,
            ) as engine:
                scheme = SGLangWeightSyncScheme(engine, model)
                sender = scheme.create_sender()
                sender.update_weights()
                report = sender.update_weights()
                gigabytes = report.num_bytes / 1e9
                print(f"{name}: {gigabytes:.2f} GB in {report.seconds:.2f} s")
                rates[name] = [
                    rate(engine, count, given.tokens, repeats) for count in RUNNING
                ]
                scheme.shutdown()
    for count, one, other in zip(RUNNING, rates["bfloat16"], rates["fp8"], strict=True):
        print(
            f"{count} responses at a time: {one:,.0f} tokens/s, {other:,.0f} in FP8 "
            f"({other / one:.3f})"
        )


def ask(engine: AsyncSGLang, places: list[int], tokens: int) -> dict[int, Any]:
    """Returns tokens and log-probs by the number of their prompt."""
    prompts = make_prompts(max(places) + 1)
    seeded = engine.capabilities.uses_seeds
    completions = engine.generate(
        input_ids=[prompts[place] for place in places],
        sampling_params=[
            exact_length(tokens) | ({"sampling_seed": place} if seeded else {})
            for place in places
        ],
        return_logprobs=True,
    )
    return {
        place: (list(each.token_ids), list(each.log_probs))
        for place, each in zip(places, completions, strict=True)
    }


def compare_deterministic(given: argparse.Namespace, repeats: int) -> None:
    """Runs a server in deterministic mode beside another one."""
    places = list(range(given.prompts))
    # Both servers share the GPU, and start at once.
    room = given.prompts * (given.tokens + 256)
    shared = {"gpu_memory_utilization": 0.85, "max_total_tokens": room}
    with ExitStack() as stack, ThreadPoolExecutor() as pool:

        def start(deterministic: bool) -> AsyncSGLang:
            return stack.enter_context(
                start_engine(
                    given.model, device="cuda", deterministic=deterministic, **shared
                )
            )

        kinds = (False, True)
        engines = dict(zip(kinds, pool.map(start, kinds), strict=True))
        seconds: dict[bool, list[float]] = {kind: [] for kind in kinds}
        for number in range(repeats + 1):
            for kind, engine in engines.items():
                engine.flush_cache()
                begin = time.perf_counter()
                answers = ask(engine, places, given.tokens)
                if number > 0:
                    seconds[kind].append(time.perf_counter() - begin)
        # The last round was the deterministic server's.
        engines[True].flush_cache()
        others: dict[int, Any] = {}
        for part in range(4):
            others |= ask(engines[True], places[::-1][part::4], given.tokens)
        differ = sum(answers[place] != others[place] for place in places)
    rates = {
        kind: given.prompts * given.tokens / statistics.median(found)
        for kind, found in seconds.items()
    }
    print(
        f"{given.model}, {given.prompts} x {given.tokens} tokens: "
        f"{rates[False]:,.0f} tokens/s, deterministic {rates[True]:,.0f} tokens/s; "
        f"{differ} responses differ between two rounds in another order"
    )


def main() -> None:
    given = read_options(
        __doc__,
        measurement="fp8|deterministic",
        model="0.5b|3b|7b|tiny",
        prompts=128,
        tokens=256,
        repeats=int,
    )
    if given.measurement == "fp8":
        compare_fp8(given, given.repeats or 3)
    else:
        compare_deterministic(given, given.repeats or 15)


if __name__ == "__main__":
    main()
