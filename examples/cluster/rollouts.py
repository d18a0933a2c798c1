"""Starts servers on a Ray cluster, generates, sends weights, and generates again.

The smallest program that uses every part of a cluster: run it before a long one.

    python rollouts.py MODEL --num-replicas 4 --tp-size 2
    python rollouts.py MODEL --tp-size 16 --nnodes 2

Further options are those of SGLang's server, such as ``--mem-fraction-static 0.8``.
"""

from __future__ import annotations

import argparse
import time

import ray
import torch
from transformers import AutoModelForCausalLM

from torchrl_sglang import AsyncSGLang, RayLauncher, SGLangWeightSyncScheme
from torchrl_sglang.cli.options import engine_arguments


def main() -> None:
    """Runs the whole round once."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("model", help="folder that all nodes see, or a hub name")
    parser.add_argument("--num-replicas", type=int, default=1)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--strategy", default="PACK")
    parser.add_argument("--prompts", type=int, default=256)
    arguments, further = parser.parse_known_args()
    server_arguments = engine_arguments(further)
    ray.init(address="auto")
    with AsyncSGLang.from_pretrained(
        arguments.model,
        num_replicas=arguments.num_replicas,
        tp_size=arguments.tp_size,
        nnodes=arguments.nnodes,
        device=arguments.device,
        launcher=RayLauncher(strategy=arguments.strategy),
        **server_arguments,
    ) as engine:
        print(*(server.url for server in engine.servers), flush=True)
        generate(engine, arguments.prompts)
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=engine.capabilities.dtype
        ).to("cuda" if torch.cuda.is_available() else "cpu")
        sender = SGLangWeightSyncScheme(engine).create_sender()
        # The first update connects.
        for _ in range(2):
            print(sender.update_weights(model), flush=True)
        sender.shutdown()
        generate(engine, arguments.prompts)


def generate(engine: AsyncSGLang, count: int) -> None:
    """Prints how fast tokens come, and the version of the weights that made them."""
    start = time.perf_counter()
    responses = engine.generate(
        [f"{number} + 1 =" for number in range(count)],
        {"max_new_tokens": 64, "ignore_eos": True},
        return_logprobs=True,
    )
    seconds = time.perf_counter() - start
    tokens = sum(len(response.token_ids) for response in responses)
    versions = {response.weight_version for response in responses}
    print(f"{tokens / seconds:.0f} tokens/s, weights of version {versions}", flush=True)


if __name__ == "__main__":
    main()
