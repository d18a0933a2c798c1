r"""What the order of requests does to conversations of several turns, and to batches.

The same load with requests in the order of arrival and with those of the oldest groups
first, in turn on one server that runs fewer requests than the collector sends.
Conversations have one to eight turns of random lengths. A batch is trained on for so
many seconds, and an update follows.

    python benchmarks/request_order.py --seconds 60
    python benchmarks/request_order.py 0.5b --device cuda --running 256 --groups 128

With ``--synchronous``, batches of a synchronous collector in the order of arrival, with
those first that are expected to be longest, and with all lengths known before, which is
the limit. Lengths are log-normal; a prompt has its own mean, and ``--within`` is the
deviation of its samples' logarithms from that. Prompts are new in a collector's first
batch, and known in its second one. The mean number of running requests tells more than
seconds where a token takes longer the more requests run, as on a CPU.

    python benchmarks/request_order.py --synchronous --tokens 512
    python benchmarks/request_order.py 0.5b --synchronous --device cuda --running 256 \
        --groups 128 --group-size 8 --tokens 2048 --repeats 5
"""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensordict import TensorDict
from torchrl.envs.llm import ChatEnv

from script import print_row, read_options
from torchrl_sglang import (
    AsyncLLMCollector,
    SGLangLLMCollector,
    SGLangWeightSyncScheme,
    SGLangWrapper,
)
from torchrl_sglang.cli.bench.measure import (
    exact_length,
    random_weights,
    start_engine,
)

TURNS = 8
"""Most turns of a conversation."""

TAIL = 64
"""The longest response of a batch is so many times as long as the shortest."""

SAMPLE_SECONDS = 0.2


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


def lengths_of_batch(options: Any) -> list[tuple[str, int]]:
    """Returns a batch's prompts, group after group, with lengths of responses."""
    draw = random.Random(0)
    longest, shortest = options.tokens, max(options.tokens // TAIL, 1)
    middle, spread = math.log(longest * shortest) / 2, math.log(longest / shortest) / 4
    rows = []
    for number in range(options.groups):
        mean = draw.gauss(middle, spread)
        for _ in range(options.group_size):
            length = round(math.exp(mean + draw.gauss(0.0, options.within)))
            text = f"Count from {number} on."
            rows.append((text, min(max(length, shortest), longest)))
    return rows


class OwnLengths(SGLangWrapper):
    """A policy that gives the response of each row a length of its own."""

    lengths: Sequence[int] = ()

    def _to_requests(self, *args: Any) -> list[Any]:
        made = super()._to_requests(*args)
        return [
            replace(each, sampling_params=exact_length(length))
            for each, length in zip(made, self.lengths, strict=True)
        ]


def time_batches(
    engine: Any, rows: Sequence[tuple[str, int]], order: Any, count: int
) -> list[float]:
    """Returns the seconds of a new collector's first batches."""
    queries = TensorDict(query=[text for text, _ in rows], batch_size=len(rows))
    policy = OwnLengths(engine)
    policy.lengths = [length for _, length in rows]
    with warnings.catch_warnings():
        # The environment lacks a transform that only TorchRL's own wrappers need.
        warnings.simplefilter("ignore", FutureWarning)
        collector = SGLangLLMCollector(
            ChatEnv.from_dataloader(
                [queries], tokenizer=engine.get_tokenizer(), batch_size=(len(rows),)
            ),
            policy=policy,
            dialog_turns_per_batch=len(rows),
            reset_at_each_iter=True,
            request_order=order,
        )
    batches, spent = iter(collector), []
    for _ in range(count):
        before = time.perf_counter()
        next(batches)
        spent.append(time.perf_counter() - before)
    collector.shutdown()
    return spent


class Running:
    """Samples how many requests the servers run, in a thread."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._ended = threading.Event()
        self._seen: list[int] = []
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            servers = self._engine.stats().servers
            self._seen.append(sum(server.running or 0 for server in servers))

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def mean(self) -> float:
        return statistics.mean(self._seen or [0])


def compare_batches(engine: Any, options: Any) -> None:
    """Prints each order's seconds of a batch, medians of runs in turn."""
    rows = lengths_of_batch(options)
    known = sorted(rows, key=lambda row: -row[1])
    tokens = sum(length for _, length in rows)
    # The same number of batches of each, so that what comes before is alike.
    orders = {"arrival": rows, "longest": rows, "all lengths known": known}
    seconds, running = defaultdict(list), defaultdict(list)
    time_batches(engine, rows, "arrival", 1)
    for number in range(options.repeats):
        for name, of_batch in orders.items():
            order = "longest" if name == "longest" else "arrival"
            with Running(engine) as sampled:
                new, again = time_batches(engine, of_batch, order, 2)
            running[name].append(sampled.mean)
            if name == "longest":
                seconds["longest, new"].append(new)
                seconds["longest, known"].append(again)
            else:
                seconds[name] += [new, again]
        # What stands already, for a machine that is lent for a while.
        print(f"\nafter {number + 1} of {options.repeats}", flush=True)
        print_orders(seconds, running, tokens)


def print_orders(
    seconds: Mapping[str, list[float]], running: Mapping[str, list[float]], tokens: int
) -> None:
    """Prints medians of each order."""
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    print_row("", "seconds", "to first", "to limit", "tokens/s")
    for name, median in medians.items():
        of_first = medians["arrival"] / median
        of_limit = medians["all lengths known"] / median
        print_row(name, median, of_first, of_limit, tokens / median)
    print_row("", "running")
    for name, means in running.items():
        print_row(name, statistics.median(means))


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
        synchronous=False,
        within=0.4,
    )
    started = start_engine(
        options.model,
        device=options.device,
        max_running_requests=options.running,
        enable_priority_scheduling=True,
        disable_priority_preemption=True,
    )
    with started as engine:
        if options.synchronous:
            compare_batches(engine, options)
        else:
            compare_conversations(engine, options)


if __name__ == "__main__":
    main()
