"""What deterministic mode costs: tokens a second with and without it, on a GPU.

The same prompts are answered by a server in deterministic mode and by another one with
the same arguments. It also prints how many responses of two rounds of the first server
differ, the second of which asks in another order and a quarter of the prompts at a
time: none may.

    python benchmarks/deterministic.py 3b
"""

from __future__ import annotations

import time
from typing import Any

import torch

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
        __doc__, model="0.5b|3b|7b|tiny", prompts=128, tokens=256, repeats=3
    )
    places = list(range(given.prompts))
    rates: dict[bool, float] = {}
    for deterministic in (False, True):
        with start_engine(
            given.model,
            device="cuda",
            deterministic=deterministic,
            gpu_memory_utilization=0.8,
        ) as engine:
            ask(engine, places, given.tokens)
            seconds = []
            for _ in range(given.repeats):
                engine.flush_cache()
                begin = time.perf_counter()
                first = ask(engine, places, given.tokens)
                seconds.append(time.perf_counter() - begin)
            rates[deterministic] = given.prompts * given.tokens / min(seconds)
            if deterministic:
                engine.flush_cache()
                second: dict[int, Any] = {}
                for part in range(4):
                    second |= ask(engine, places[::-1][part::4], given.tokens)
                differ = sum(first[place] != second[place] for place in places)
    cost = 1 - rates[True] / rates[False]
    print(
        f"{given.model}, {given.prompts} x {given.tokens} tokens: "
        f"{rates[False]:,.0f} tokens/s, deterministic {rates[True]:,.0f} tokens/s "
        f"({cost:.0%} less); {differ} of {given.prompts} responses differ between two "
        f"rounds in another order"
    )


if __name__ == "__main__":
    main()
