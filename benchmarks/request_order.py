"""What the order of requests does to conversations of several turns.

The same load with requests in the order of arrival and with those of the oldest groups
first, in turn on one server that runs fewer requests than the collector sends.
Conversations have one to eight turns of random lengths. A batch is trained on for so
many seconds, and an update follows.

    python benchmarks/request_order.py --seconds 60
    python benchmarks/request_order.py 0.5b --device cuda --running 256 --groups 128
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from script import print_row, read_options
from torchrl_sglang import (
    AsyncLLMCollector,
    SGLangWeightSyncScheme,
    SGLangWrapper,
)
from torchrl_sglang.cli.bench.measure import (
    random_weights,
    start_engine,
)

TURNS = 8
"""Most turns of a conversation."""


def tasks(count: int) -> list[dict[str, Any]]:
    """Returns prompts, and how often each is answered: once for half of them."""
    draw = random.Random(0)
    counts = [min(1 + int(draw.expovariate(0.5)), TURNS) for _ in range(count)]
    return [
        {"query": f"Count from {number} on.", "turns": counts[number]}
        for number in range(count)
    ]


def step(conversation: Any, task: Any) -> str | None:
    """Asks for more until a task's number of turns."""
    return "Go on." if len(conversation.turns) < task["turns"] else None


def collect(
    collector: AsyncLLMCollector, model: Any, options: Any
) -> Iterator[dict[str, Any]]:
    """Trains for a while, and yields a batch's seconds of waiting."""
    begin = time.perf_counter()
    batches = iter(collector)
    while (before := time.perf_counter()) - begin < options.seconds:
        next(batches)
        waited = time.perf_counter() - before
        time.sleep(options.training)
        collector.update_policy_weights_(model)
        yield {"waited": waited}


def compare_conversations(engine: Any, options: Any) -> None:
    """Prints what the trainer gets of conversations, for both orders."""
    columns = "batches", "waited s", "group s", "p95", "age", "dropped", "tokens/s"
    print_row("", *columns)
    model = random_weights(engine, options.device)
    for order in ("arrival", "oldest") * options.repeats:
        scheme = SGLangWeightSyncScheme(engine, model)
        collector = AsyncLLMCollector(
            policy=SGLangWrapper(
                engine,
                generate_kwargs={"max_new_tokens": options.tokens},
            ),
            prompts=tasks(10_000),
            rewards=lambda conversation, task: float(len(conversation.response)),
            step=step,
            group_size=options.group_size,
            groups_per_batch=options.groups,
            max_staleness=options.max_staleness,
            request_order=order,
            weight_sync_schemes={"policy": scheme},
        )
        waits = [each["waited"] for each in collect(collector, model, options)]
        stats = collector.stats()
        collector.shutdown()
        ages, spent = stats["age"], stats["group_seconds"]
        total = sum(ages.values()) or 1
        print_row(
            order,
            len(waits),
            statistics.mean(waits),
            spent.mean,
            spent.quantile(0.95),
            sum(age * count for age, count in ages.items()) / total,
            stats["groups_stale"],
            stats["tokens_per_second"],
        )


def main() -> None:
    """Prints, for each order, what the trainer gets."""
    options = read_options(
        __doc__,
        model="tiny",
        device="cpu|cuda",
        running=8,
        groups=16,
        group_size=4,
        tokens=48,
        max_staleness=1,
        training=1.0,
        seconds=60.0,
        repeats=2,
    )
    started = start_engine(
        options.model,
        device=options.device,
        max_running_requests=options.running,
        enable_priority_scheduling=True,
        disable_priority_preemption=True,
    )
    with started as engine:
        compare_conversations(engine, options)


if __name__ == "__main__":
    main()
