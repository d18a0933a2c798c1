"""Rate of an engine's tokens in a replay buffer, through each collector.

A round is a fixed set of groups, from its start until the last token is in the buffer.
All clients generate the same numbers of tokens from the same prompts, in turns, so the
ratio to a raw client is the cost of a collector.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import set_list_to_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import EnvBase, StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.envs.transforms import Transform

from torchrl_sglang.cli.bench import generation
from torchrl_sglang.cli.bench.models import Load
from torchrl_sglang.cli.bench.timing import Clock, Cost, speed, summarize
from torchrl_sglang.collectors.async_llm_collector import AsyncLLMCollector
from torchrl_sglang.errors import CollectionTimeoutError
from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper
from torchrl_sglang.policies.turns import TurnCodec
from torchrl_sglang.recording.recorder import RunRecorder
from torchrl_sglang.support.garbage import old_objects_frozen
from torchrl_sglang.types import Completion, PauseMode
from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme

if TYPE_CHECKING:
    from torchrl_sglang.backends.async_sglang import AsyncSGLang
    from torchrl_sglang.requests.request import GenerateRequest

GROUP_SIZE = 8
"""Responses to a prompt."""

IN_FLIGHT = 256
"""Default minimum of concurrent conversations."""

MAX_STALENESS = 1

ROUND_SECONDS = 3600.0
"""Timeout of a round of a collector."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Prompts and responses of a client's round."""

    queries: list[str]
    """User's message for each group."""
    requests: generation.Requests
    """Prompt and length of each response, group by group."""


Client = Callable[[Work], Awaitable[Cost]]


class OwnLengths:
    """An engine for responses of given lengths, in turn."""

    def __init__(self, engine: AsyncSGLang, lengths: Sequence[int]) -> None:
        self._engine = engine
        self._lengths = itertools.cycle(lengths)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def agenerate_requests(
        self, requests: Sequence[GenerateRequest], **options: Any
    ) -> list[Completion]:
        """Generates with other sampling parameters."""
        params = [generation.exact_length(next(self._lengths)) for _ in requests]
        changed = [
            replace(request, sampling_params=sampling)
            for request, sampling in zip(requests, params, strict=True)
        ]
        return await self._engine.agenerate_requests(changed, **options)


class Reward(Transform):  # type: ignore[misc] # TorchRL has no types.
    """Rewards every response alike."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        shape = (*next_tensordict.batch_size, 1, 1)
        return next_tensordict.set("reward", torch.ones(shape))


async def reward(conversation: Any, task: Any) -> float:
    """Rewards the same for environments as for plain functions."""
    return 1.0


def make_env(tokenizer: Any, size: int = 1) -> EnvBase:
    """Returns an environment of single-turn conversations, with a reward."""
    env = ChatEnv(batch_size=(size,), tokenizer=tokenizer)
    # Each call makes another environment.
    return env.append_transform(StepCounter(max_steps=1)).append_transform(Reward())


def measure_collectors(
    engine: AsyncSGLang,
    load: Load,
    *,
    api_key: str | None = None,
    in_flight: int | None = None,
    update_every: float | None = None,
    pause_mode: PauseMode = "continue",
) -> dict[str, Any]:
    """Returns the tokens per second in a buffer, and ratios to raw clients.

    ``clients``, on responses with lengths of :func:`.long_tailed`: raw clients with one
    HTTP request for each prompt (``raw_each``) or for all (``raw``), and
    :class:`~torchrl_sglang.AsyncLLMCollector` with plain ``functions``, the same with a
    :class:`.RunRecorder` (``recorded``), or a factory of ``environments``
    (``ChatEnv``). ``equal``, on responses of equal length: raw clients, and
    :class:`~torchrl_sglang.SGLangLLMCollector` with ``ChatEnv``. After its first round
    only the best raw client continues. With ``update_every``, in seconds, weights are
    updated in this mode during collection, and ``equal`` is omitted. ``in_flight``
    conversations run at once; by default the servers' ``max_running_requests``, as for
    the raw clients, and at least 256.
    """
    in_flight = in_flight or default_in_flight(engine)
    load = replace(load, prompts=_whole_groups(load.prompts))
    lengths = generation.long_tailed(load)
    report: dict[str, Any] = {
        "turns": len(lengths),
        "tokens": sum(lengths),
        "shortest": min(lengths),
        "in_flight": in_flight,
        "update_every": update_every,
        "pause_mode": pause_mode,
    }
    # As GRPO does, and as the reference recommends.
    with set_list_to_stack(True), old_objects_frozen():
        bench = _Bench(engine, load, api_key, pause_mode)
        try:
            clients = bench.async_clients(in_flight, update_every)
            report["clients"] = asyncio.run(bench.run(clients, lengths))
            if update_every is None:
                size = min(len(lengths), _whole_groups(in_flight))
                length = round(statistics.mean(lengths))
                equal = bench.run(bench.sync_clients(size, length), [length] * size)
                report["equal"] = {"turns": size, "length": length}
                report["equal"]["clients"] = asyncio.run(equal)
        finally:
            bench.close()
    return report


def default_in_flight(engine: AsyncSGLang) -> int:
    """Returns the number of conversations for servers as busy as with raw clients."""
    per_server = engine.capabilities.server_args.get("max_running_requests") or 0
    return max(int(per_server) * len(engine.control.urls), IN_FLIGHT)


def _whole_groups(number: int) -> int:
    return -(-number // GROUP_SIZE) * GROUP_SIZE


class _Bench:
    """Runs rounds of all clients."""

    def __init__(
        self,
        engine: AsyncSGLang,
        load: Load,
        api_key: str | None,
        pause_mode: PauseMode,
    ) -> None:
        self._engine = engine
        self._load = load
        self._api_key = api_key
        self._pause_mode = pause_mode
        self._source = random.Random(0)
        self._codec = TurnCodec(SGLangWrapper(engine))
        self._scheme: SGLangWeightSyncScheme | None = None
        generation.check_length(engine, load)

    def close(self) -> None:
        """Shuts down the weight-sync scheme."""
        if self._scheme is not None:
            self._scheme.shutdown()

    async def run(
        self, clients: dict[str, Client], lengths: Sequence[int]
    ) -> dict[str, dict[str, float]]:
        """Runs all clients in turns; returns the medians of the measured rounds."""
        costs: dict[str, list[Cost]] = {}
        async with generation.raw_clients(self._engine, self._api_key) as raw:
            names = generation.raw_names(self._engine)
            running = {name: _raw_client(raw[name]) for name in names} | clients
            # The first round warms up, where the length of responses does not matter.
            short = [min(lengths)] * len(lengths)
            for number in range(self._load.repeats + 1):
                for name, client in running.items():
                    cost = await client(self._make_work(lengths if number else short))
                    if number:
                        costs.setdefault(name, []).append(cost)
                if number == 1:
                    best = max(names, key=lambda name: speed(costs[name]))
                    running = {best: running[best]} | clients
        return _summarize(costs)

    def async_clients(
        self, in_flight: int, update_every: float | None
    ) -> dict[str, Client]:
        """Returns asynchronous collectors of plain functions and of environments."""
        make = partial(self._async_client, in_flight, update_every)
        return {
            "functions": make(),
            "recorded": make(recorded=True),
            "environments": make(environments=True),
        }

    def sync_clients(self, size: int, length: int) -> dict[str, Client]:
        """Returns a synchronous collector of batches of this size."""
        rollout = generation.batch_collector(self._engine, size, length)

        def collect(work: Work) -> Cost:
            queries = [query for query in work.queries for _ in range(GROUP_SIZE)]
            buffer = _make_buffer(size)
            clock = Clock()
            buffer.extend(rollout(queries))
            cost = clock.stop(size)
            return replace(cost, tokens=_count_tokens(buffer))

        return {"collector": generation.in_thread(collect)}

    def _async_client(
        self,
        in_flight: int,
        update_every: float | None,
        *,
        environments: bool = False,
        recorded: bool = False,
    ) -> Client:
        schemes = None if update_every is None else {"policy": self._get_scheme()}

        def collect(work: Work) -> Cost:
            policy = SGLangWrapper(self._engine)
            engine: Any = OwnLengths(self._engine, [size for _, size in work.requests])
            policy.model = engine
            turns = len(work.requests)
            buffer = _make_buffer(turns)
            way: dict[str, Any] = {"rewards": reward}
            if environments:
                make = partial(make_env, self._engine.get_tokenizer())
                # Made once per run, outside of its rounds.
                envs = [make() for _ in range(min(in_flight, turns) + 1)]
                way = {"env": lambda: envs.pop() if envs else make()}
            with ExitStack() as stack:
                recorder = None
                if recorded:
                    folder = tempfile.TemporaryDirectory(prefix="torchrl_sglang_bench_")
                    recorder = RunRecorder(f"{stack.enter_context(folder)}/run")
                    stack.enter_context(recorder)
                collector = AsyncLLMCollector(
                    **way,
                    policy=policy,
                    prompts=[{"query": query} for query in work.queries],
                    group_size=GROUP_SIZE,
                    groups_per_batch=len(work.queries),
                    total_groups=len(work.queries),
                    max_staleness=MAX_STALENESS,
                    # Everything arrives, despite weight updates.
                    on_stale="mask",
                    max_in_flight=in_flight,
                    replay_buffer=buffer,
                    weight_sync_schemes=schemes,
                    recorder=recorder,
                )
                stack.enter_context(collector)
                clock = Clock()
                collector.start()
                _fill(collector, buffer, turns, update_every)
                cost = clock.stop(turns)
                ages = collector.stats()["age"]
            return replace(
                cost,
                tokens=_count_tokens(buffer),
                updates=collector.policy_version,
                stale=sum(n for age, n in ages.items() if age > MAX_STALENESS)
                / sum(ages.values()),
            )

        return generation.in_thread(collect)

    def _make_work(self, lengths: Sequence[int]) -> Work:
        """Returns new prompts, without cached prefixes."""
        queries = [self._make_query() for _ in range(len(lengths) // GROUP_SIZE)]
        prompts = [
            self._codec.encode([{"role": "user", "content": query}]).token_ids
            for query in queries
        ]
        real = replace(self._load, prompt_tokens=max(map(len, prompts)))
        generation.check_length(self._engine, real)
        requests = [
            (prompts[index // GROUP_SIZE], length)
            for index, length in enumerate(lengths)
        ]
        return Work(queries=queries, requests=requests)

    def _make_query(self) -> str:
        tokenizer = self._engine.get_tokenizer()
        largest = min(len(tokenizer), self._engine.capabilities.vocab_size) - 1
        ids = [
            self._source.randint(generation.FIRST_TOKEN, largest)
            for _ in range(self._load.prompt_tokens)
        ]
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _get_scheme(self) -> SGLangWeightSyncScheme:
        """Returns a scheme for random weights of the served shapes."""
        if self._scheme is None:
            from transformers import AutoConfig, AutoModelForCausalLM

            served = self._engine.capabilities
            on_cpu = served.args.device == "cpu"
            config = AutoConfig.from_pretrained(self._engine.model_path)
            with torch.device("cpu" if on_cpu else "cuda:0"):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=served.dtype or config.dtype
                )
            self._scheme = SGLangWeightSyncScheme(
                self._engine, pause_mode=self._pause_mode
            )
            self._scheme.create_sender().register_model(model)
        return self._scheme


def _fill(
    collector: AsyncLLMCollector,
    buffer: ReplayBuffer,
    turns: int,
    update_every: float | None,
) -> None:
    """Updates weights until a buffer has all turns."""
    start = time.monotonic()
    next_update = start + (update_every or math.inf)
    while len(buffer) < turns:
        if not collector.is_running():
            # Raises its final error.
            collector.start()
        if time.monotonic() > start + ROUND_SECONDS:
            raise CollectionTimeoutError(
                f"{len(buffer)} of {turns} turns arrived within {ROUND_SECONDS:g} s."
            )
        if update_every is not None and time.monotonic() > next_update:
            collector.update_policy_weights_()
            next_update = max(next_update + update_every, time.monotonic())
        time.sleep(0.01)


def _make_buffer(size: int) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyStackStorage(size), batch_size=GROUP_SIZE)


def _count_tokens(buffer: ReplayBuffer) -> int:
    responses = buffer[:].get(("tokens", "response"), as_list=True)
    return sum(response.numel() for response in responses)


def _raw_client(client: generation.Client) -> Client:
    async def timed(work: Work) -> Cost:
        clock = Clock()
        tokens = await client(work.requests)
        return clock.stop(len(work.requests), tokens)

    return timed


def _summarize(costs: dict[str, list[Cost]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "tokens": costs[name][-1].tokens,
            **values,
            "updates": statistics.median(cost.updates for cost in costs[name]),
            "stale": statistics.median(cost.stale for cost in costs[name]),
        }
        for name, values in summarize(costs).items()
    }
