"""Learning from a teacher: the rate of its scores, and a step beside one of GRPO.

A server scores responses of random tokens. The limit is the server's own prefill of the
same tokens without log-probs, in one request for all, after a flush of its cache like
each round. It has no logits but those of the last tokens, so there is a second limit,
the same request with log-probs. Then a student takes optimizer steps of these responses
with advantages alone, and with the teacher's scores, which are a part of the step's
time. Generation and weight update come on top of both, and are the same.

    python benchmarks/distillation.py 7b --student 0.5b --responses 64 --tokens 1024
    python benchmarks/distillation.py tiny --student tiny --device cpu --responses 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.modules.llm import TransformersWrapper

from loss import make_batch
from script import print_row, read_options
from torchrl_sglang import CorrectedGRPOLoss, Distillation, Learner, Teacher
from torchrl_sglang.cli.bench.models import start_engine
from torchrl_sglang.cli.bench.timing import Clock, median_seconds
from torchrl_sglang.errors import UnsupportedByServerError
from trained_model import make_trained_model

TIMEOUT = 1800.0
"""Seconds for one request."""

ESTIMATORS = {
    "sampled token": Distillation(estimator="sampled"),
    "k=8": Distillation(k=8),
    "k=64": Distillation(k=64),
}


def estimators(engine: Any) -> dict[str, Distillation]:
    """Returns the estimators that a server's version supports."""
    found = {}
    for name, settings in ESTIMATORS.items():
        try:
            Teacher(engine, settings)
        except UnsupportedByServerError as error:
            print(f"{name}: {error}", file=sys.stderr)
        else:
            found[name] = settings
    return found


def prefill(url: str, rows: list[list[int]], **options: Any) -> None:
    """Computes rows as prompts, in one request."""
    body = {"input_ids": rows, "sampling_params": {"max_new_tokens": 0}, **options}
    request = urllib.request.Request(
        f"{url}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        response.read()


def compare_scores(engine: Any, batch: TensorDictBase, repeats: int) -> None:
    """Prints tokens a second of the prefill and of each estimator's scores, in turn."""
    rows = [row["tokens", "full"].tolist() for row in batch.unbind(0)]
    logits = {"return_logprob": True, "logprob_start_len": 0}
    calls: dict[str, Callable[[], Any]] = {
        "raw prefill": lambda: prefill(engine.server_url, rows),
        "raw, log-probs": lambda: prefill(engine.server_url, rows, **logits),
    }
    for name, settings in estimators(engine).items():
        teacher = Teacher(engine, settings)
        calls[name] = lambda teacher=teacher: teacher(batch.copy())
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            engine.flush_cache()
            clock = Clock()
            call()
            seconds[name].append(clock.stop(1).seconds)
    count, limit = sum(map(len, rows)), 0.0
    print_row("scores", "tokens/s", "ratio", "seconds")
    for name, values in seconds.items():
        median = statistics.median(values[1:])
        limit = limit or median
        print_row(name, round(count / median), limit / median, median)


def make_learner(
    model: Any, tokenizer: Any, engine: Any, settings: Distillation | None
) -> Learner:
    """Returns a learner of a student, with a teacher or with advantages alone."""
    actor = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False
    )
    teacher = None if settings is None else Teacher(engine, settings)
    return Learner(
        CorrectedGRPOLoss(actor, entropy_bonus=False, distillation=settings),
        torch.optim.AdamW(model.parameters(), lr=1e-6),
        teacher=teacher,
        autocast=next(model.parameters()).is_cuda,
    )


def compare_steps(
    engine: Any, batch: TensorDictBase, given: argparse.Namespace
) -> None:
    """Prints seconds of an optimizer step of GRPO, and of each estimator."""
    limit = 0.0
    print_row("step", "seconds", "of GRPO's", "teacher's")
    for name, settings in {"GRPO": None, **estimators(engine)}.items():
        model = make_trained_model(given.student, given.device)
        learner = make_learner(model, engine.get_tokenizer(), engine, settings)

        def step(learner: Learner = learner) -> None:
            engine.flush_cache()
            learner.train(batch.copy())
            if given.device == "cuda":
                torch.cuda.synchronize()

        scored = 0.0
        if settings is not None:
            teacher = Teacher(engine, settings)

            def score(teacher: Teacher = teacher) -> None:
                engine.flush_cache()
                teacher(batch.copy())

            scored = median_seconds(score, given.repeats)
        seconds = median_seconds(step, given.repeats)
        limit = limit or seconds
        print_row(name, seconds, seconds / limit, scored)


def main() -> None:
    """Starts the teacher's server, and measures scores and steps."""
    given = read_options(
        __doc__,
        model="7b",
        student="0.5b",
        device="cuda|cpu",
        responses=64,
        tokens=1024,
        repeats=5,
        server_memory=0.4,
    )
    torch.manual_seed(0)
    options: dict[str, Any] = {"router_policy": None}
    if given.device == "cuda":
        options["gpu_memory_utilization"] = given.server_memory
    batch = make_batch(given.responses, given.tokens, "cpu")
    with start_engine(given.model, device=given.device, **options) as engine:
        compare_scores(engine, batch, given.repeats)
        compare_steps(engine, batch, given)


if __name__ == "__main__":
    main()
