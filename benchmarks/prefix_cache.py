"""Prefix-cache hits of groups of samples through the router, over the ideal.

Ideally, each prompt is computed once, wherever its samples go: of ``G`` groups of ``S``
samples, all but the first of each group find their whole prompt cached.

    python benchmarks/prefix_cache.py [--groups 16] [--samples 8] [--prompt-tokens 256]
"""

from __future__ import annotations

import random
import statistics

from script import read_options
from torchrl_sglang.cli.bench.measure import exact_length, start_engine


def main() -> None:
    arguments = read_options(
        __doc__, groups=16, samples=8, prompt_tokens=256, replicas=2, repeats=7
    )
    groups, samples = arguments.groups, arguments.samples
    length, replicas = arguments.prompt_tokens, arguments.replicas
    # A server computes the last token of a prompt in any case.
    ideal = groups * (samples - 1) * (length - 1)
    ratios = []
    with start_engine("tiny", device="cpu", num_replicas=replicas) as engine:
        for _ in range(arguments.repeats):
            prompts = [random.choices(range(3, 99), k=length) for _ in range(groups)]
            batch = [prompt for prompt in prompts for _ in range(samples)]
            found = engine.generate(input_ids=batch, sampling_params=exact_length(16))
            # Each prompt is computed once before its samples, which is not their miss.
            hits = sum(completion.cached_tokens for completion in found)
            ratios.append((hits - groups * (length - 1)) / ideal)
    print(
        f"{groups} groups of {samples} samples, {length} prompt tokens, {replicas} "
        f"servers: {statistics.median(ratios):.3f} of the ideal hits (least "
        f"{min(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
