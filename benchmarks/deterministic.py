"""What deterministic mode costs: tokens a second with and without it, on a GPU.

The same prompts are answered in turn by a server in deterministic mode and by another
one with the same arguments. It also prints how many responses of two rounds of the
first server differ, the second of which asks in another order and a quarter of the
prompts at a time: none may.

    python benchmarks/deterministic.py 3b
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
import transformers.models.qwen2  # noqa: F401 - its first import is not for two threads

from script import read_options
from torchrl_sglang import AsyncSGLang
from torchrl_sglang.cli.bench.measure import start_engine


def ask(engine: AsyncSGLang, places: list[int], tokens: int) -> dict[int, Any]:
    """Returns tokens and log-probs by the number of their prompt."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 90, (max(places) + 1, 64), generator=generator).tolist()
    seeded = engine.capabilities.uses_seeds
    completions = engine.generate(
        input_ids=[prompts[place] for place in places],
        sampling_params=[
            {"max_new_tokens": tokens, "ignore_eos": True}
            | ({"sampling_seed": place} if seeded else {})
            for place in places
        ],
        return_logprobs=True,
    )
    return {
        place: (list(each.token_ids), list(each.log_probs))
        for place, each in zip(places, completions, strict=True)
    }


def main() -> None:
    """Runs the comparison."""
    given = read_options(
        __doc__, model="0.5b|3b|7b|tiny", prompts=128, tokens=256, repeats=15
    )
    places = list(range(given.prompts))
    # A round is asked for at once. Both servers share the GPU, and start at once.
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
        for number in range(given.repeats + 1):
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
    cost = 1 - rates[True] / rates[False]
    print(
        f"{given.model}, {given.prompts} x {given.tokens} tokens: "
        f"{rates[False]:,.0f} tokens/s, deterministic {rates[True]:,.0f} tokens/s "
        f"({cost:.0%} less); {differ} of {given.prompts} responses differ between two "
        f"rounds in another order"
    )


if __name__ == "__main__":
    main()
