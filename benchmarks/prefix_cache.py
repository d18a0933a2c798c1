"""Prefix-cache hits of groups of samples through the router, over the ideal.

Ideally, each prompt is computed once, wherever its samples go: of ``G`` groups of ``S``
samples, all but the first of each group find their whole prompt cached.

    python benchmarks/prefix_cache.py [--groups 16] [--samples 8] [--prompt-tokens 256]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time

from torchrl_sglang import AsyncSGLang
from torchrl_sglang.testing.tiny_model import save_tiny_model


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
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_tiny_model(folder))
        with AsyncSGLang.from_pretrained(
            path, device="cpu", num_replicas=arguments.replicas
        ) as engine:
            ratios, seconds = [], []
            for _ in range(arguments.repeats):
                groups = [
                    [random.randrange(3, 99) for _ in range(length)]
                    for _ in range(arguments.groups)
                ]
                batch = [prompt for prompt in groups for _ in range(arguments.samples)]
                start = time.perf_counter()
                answers = engine.generate(input_ids=batch, sampling_params=params)
                seconds.append(time.perf_counter() - start)
                # One computation of each prompt is made ahead of its samples, and is
                # no miss of theirs.
                hits = sum(answer.cached_tokens for answer in answers)
                ratios.append((hits - arguments.groups * (length - 1)) / ideal)
    print(
        f"{arguments.groups} groups of {arguments.samples} samples, {length} prompt "
        f"tokens, {arguments.replicas} servers: {statistics.median(ratios):.3f} of the "
        f"ideal hits (least {min(ratios):.3f}), {statistics.median(seconds):.2f} s"
    )


if __name__ == "__main__":
    main()
