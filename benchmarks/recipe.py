r"""A GRPO run: seconds of each phase, and memory.

Colocated, each rank has a GPU with a server on it; apart, the ranks have the first GPUs
and a server the next one. A built-in model has random weights, and its responses end at
random, so that their lengths are long-tailed; those of a model in a folder end where it
ends them. Afterwards, generation and training of such batches are measured alone: no
loop of these two is faster than the slower one, and one that does them in turn no
faster than both. What training could be at best is measured by `training.py`, which
runs under torchrun, too. A teacher scores the sampled tokens, on a GPU of its own or on
the servers' GPU, where it sleeps meanwhile.

    torchrun --nproc-per-node 2 benchmarks/recipe.py 0.5b --arrangement colocated
    python benchmarks/recipe.py 3b --arrangement apart
    python benchmarks/recipe.py 0.5b --teacher 7b --teacher-gpu 1
    torchrun --nproc-per-node 2 benchmarks/recipe.py tiny --device cpu \
        --arrangement apart --groups 2 --new-tokens 64 --steps 3
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import set_list_to_stack
from transformers import AutoConfig, AutoModelForCausalLM

from script import print_row, read_options
from torchrl_sglang import GRPO
from torchrl_sglang.cli.bench.models import BUILT_IN, save_model, server_arguments
from torchrl_sglang.trainers.ranks import find_trainer_ranks

PHASES = ("collect", "score", "train", "update", "sleep")
TIMES = {f"time/{name}" for name in PHASES}
FIRST_STOP = 200
"""Tokens from here on end a response; the tokenizer knows none of them."""


def queries() -> list[str]:
    """Returns the prompts: new ones in each batch."""
    return [f"Tell me a story about the number {number:06}." for number in range(4096)]


def make_model(name: str, folder: str) -> str:
    """Saves a built-in model there; returns the folder of the model."""
    if name not in BUILT_IN:
        return name
    path, needed = save_model(name, folder)
    if needed:
        # A configuration alone.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(device):
            config = AutoConfig.from_pretrained(path)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(path)
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
    return path


def remainder(conversation: Any, task: Any) -> float:
    """Differs within groups, and leaves the lengths of responses as they are."""
    return len(conversation.turns[-1].token_ids) % 8 / 8


def make_run(
    path: str, options: argparse.Namespace, folder: str, teacher: str | None = None
) -> GRPO:
    """Returns the run, whose servers are where the arrangement has them."""
    sampling: dict[str, Any] = {"max_new_tokens": options.new_tokens}
    if options.model in BUILT_IN:
        vocabulary = AutoConfig.from_pretrained(path).vocab_size
        stops = max(vocabulary // options.mean_tokens, 1)
        first = FIRST_STOP
        if options.device == "cpu":
            first = min(FIRST_STOP, vocabulary - stops)
        sampling["stop_token_ids"] = [*range(first, first + stops)]
    # Without SGLang's router, which has a process of its own.
    engine: dict[str, Any] = {
        "max_model_len": options.new_tokens + 512,
        "router_policy": None,
    }
    if options.rollout_dtype != "auto":
        engine["rollout_dtype"] = options.rollout_dtype
    if options.device == "cpu":
        engine |= {"device": "cpu", "dtype": "float32"}
    else:
        engine |= {"dtype": "bfloat16"}
        engine |= {"gpu_memory_utilization": options.server_memory}
        engine |= server_arguments()
    distil: dict[str, Any] = {}
    if teacher is not None:
        settings = {"estimator": "sampled", "weight": 0.1}
        server = {**engine, "model": teacher}
        if options.teacher_gpu >= 0:
            server |= {"cuda_devices": [options.teacher_gpu]}
        distil = {"teacher": server, "distillation": settings}
    return GRPO(
        path,
        **distil,
        prompts=[{"query": query} for query in queries()],
        rewards=remainder,
        generate_kwargs=sampling,
        group_size=options.group_size,
        groups_per_batch=options.groups,
        steps=options.steps,
        max_tokens_per_pass=options.max_tokens_per_pass,
        max_staleness=options.max_staleness,
        colocated=options.arrangement == "colocated",
        engine=engine,
        output=folder,
        logger=None,
        show_samples=None,
    )


def take_steps(run: GRPO) -> tuple[list[dict[str, float]], Any]:
    """Takes the run's steps; returns their metrics, and the last batch."""
    found, batch = [], None
    for batch in run.batches():
        run.step += 1
        with run.memory_for_training():
            metrics = run.learner.train(batch, run.collector.policy_version)
        run.clock.done("train")
        run.update_weights()
        run.clock.done("update")
        run.report(metrics)
        found.append(dict(run.metrics))
        if len(found) == run.steps:
            break
    return found, batch


def seconds_of(work: Callable[[], Any], repeats: int) -> list[float]:
    """Returns how long something takes, after a first time."""
    found = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return found[1:]


def measure_alone(run: GRPO, batch: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measures generation and training, each by itself; all ranks call it."""
    repeats = options.alone

    def train() -> None:
        run.learner.train(batch, run.collector.policy_version)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        run.ranks.barrier()

    with run.memory_for_training():
        trained = seconds_of(train, repeats)
    run.update_weights()
    tokens: list[int] = []

    def generate() -> None:
        assert run.engine is not None
        tokenizer = run.engine.get_tokenizer()
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": query}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
            for query in queries()[-options.groups :]
        ]
        found = run.engine.generate(
            input_ids=[each for each in prompts for _ in range(options.group_size)],
            sampling_params={**run.sampling, "seed": None},
            return_logprobs=True,
        )
        tokens.append(sum(len(each.token_ids) for each in found))

    generated = run.ranks.first(lambda: seconds_of(generate, repeats))
    return {
        "train": statistics.median(trained),
        # Nothing on the other ranks, which have no engine.
        "generate": statistics.median(generated or [0.0]),
        "generated_tokens": statistics.median(tokens or [0]),
    }


def summarize(
    steps: list[dict[str, float]], alone: dict[str, float], warmup: int
) -> dict[str, Any]:
    """Returns the medians of the steps after the first ones."""
    steps = steps[warmup:]
    found: dict[str, Any] = {"steps": len(steps), "alone": alone}
    for name in ("batch/tokens", "batch/response_tokens", "batch/truncated"):
        values = [step[name] for step in steps if name in step]
        if values:
            found[name] = statistics.median(values)
    for name in PHASES:
        seconds = [step.get(f"time/{name}", 0.0) for step in steps]
        found[name] = [statistics.median(seconds), min(seconds), max(seconds)]
    whole = [sum(v for k, v in each.items() if k in TIMES) for each in steps]
    found["step"] = [statistics.median(whole), min(whole), max(whole)]
    return found


def show(found: dict[str, Any], warmup: int) -> None:
    """Prints what was measured."""
    print_row("steps that count", found["steps"], f"after {warmup}")
    for name in ("batch/tokens", "batch/response_tokens", "batch/truncated"):
        if name in found:
            print_row(name, found[name])
    print_row("", "median s", "least", "most")
    for name in (*PHASES, "step"):
        print_row(name, *found[name])
    for name in ("generate", "train"):
        print_row(f"{name} alone", found["alone"][name])
    print_row("peak of a rank", found["trainer_peak"] / 1e9, "GB")


def main() -> None:
    """Prints the phases of a step, and memory."""
    options = read_options(
        __doc__,
        model="0.5b",
        device="cuda|cpu",
        arrangement="colocated|apart",
        groups=32,
        group_size=8,
        new_tokens=2048,
        mean_tokens=512,
        max_tokens_per_pass=16_384,
        server_memory=0.5,
        max_staleness=0,
        rollout_dtype="auto|fp8",
        teacher="",
        teacher_gpu=-1,
        steps=6,
        warmup=2,
        alone=3,
        json="",
    )
    set_list_to_stack(True).set()
    torch.set_float32_matmul_precision("high")
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    ranks = find_trainer_ranks()
    prefix = "torchrl_sglang_recipe_"
    scratch = Path(ranks.first(lambda: tempfile.mkdtemp(prefix=prefix)))
    try:
        path = ranks.first(lambda: make_model(options.model, str(scratch / "model")))
        teacher = None
        if options.teacher:
            folder = str(scratch / "teacher")
            teacher = ranks.first(lambda: make_model(options.teacher, folder))
        with make_run(path, options, str(scratch / "run"), teacher) as run:
            run.begin()
            steps, batch = take_steps(run)
            peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            peaks = ranks.gather(peak)
            alone = measure_alone(run, batch, options)
        if ranks.is_first:
            found = summarize(steps, alone, options.warmup)
            found |= {"trainer_peak": max(peaks), "ranks": ranks.size}
            number = options.groups * options.group_size
            found["responses"] = number * found["batch/response_tokens"]
            print(f"{options.model}, {options.arrangement}, {ranks.size} ranks")
            show(found, options.warmup)
            if options.json:
                Path(options.json).write_text(json.dumps(found))
    finally:
        ranks.barrier()
        if ranks.is_first:
            shutil.rmtree(scratch, ignore_errors=True)
        ranks.end()


if __name__ == "__main__":
    main()
