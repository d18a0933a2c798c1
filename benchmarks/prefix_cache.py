"""Prefix-cache hits of groups of samples through the router, over the ideal.

Ideally, each prompt is computed once, wherever its samples go: of ``G`` groups of ``S``
samples, all but the first of each group find their whole prompt cached.

    python benchmarks/prefix_cache.py [--groups 16] [--samples 8] [--prompt-tokens 256]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from torchrl_sglang.cli.bench.models import start_engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    length = arguments.prompt_tokens
    # A server computes the last token of a prompt in any case.
    ideal = arguments.groups * (arguments.samples - 1) * (length - 1)
    params = {"max_new_tokens": 16, "temperature": 1.0, "ignore_eos": True}
    ratios, seconds = [], []
    replicas = arguments.replicas
    with start_engine("tiny", device="cpu", num_replicas=replicas) as engine:
        for _ in range(arguments.repeats):
            groups = [
                [random.randrange(3, 99) for _ in range(length)]
                for _ in range(arguments.groups)
            ]
            batch = [prompt for prompt in groups for _ in range(arguments.samples)]
            start = time.perf_counter()
            completions = engine.generate(input_ids=batch, sampling_params=params)
            seconds.append(time.perf_counter() - start)
            # Each prompt is computed once before its samples, which is not their miss.
            hits = sum(completion.cached_tokens for completion in completions)
            ratios.append((hits - arguments.groups * (length - 1)) / ideal)
    print(
        f"{arguments.groups} groups of {arguments.samples} samples, {length} prompt "
        f"tokens, {replicas} servers: {statistics.median(ratios):.3f} of the "
        f"ideal hits (least {min(ratios):.3f}), {statistics.median(seconds):.2f} s"
    )


if __name__ == "__main__":
    main()
