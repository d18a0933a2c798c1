"""Throughput and latency of an engine, and of a raw client beside it.

The raw client is the fastest form that SGLang's HTTP interface has: a whole batch in
one request, and nothing made of the answer. Both do the same work on the same server,
in turns, in the same run, so their ratio is what the engine costs.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import orjson

from torchrl_sglang.errors import ConfigurationError, ServerUnavailableError

if TYPE_CHECKING:
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

__all__ = [
    "Latency",
    "Load",
    "Percentiles",
    "Throughput",
    "measure_latency",
    "measure_throughput",
    "percentile",
]

REQUEST_SECONDS = 600.0
"""Budget for one request of the raw client."""

KEEPALIVE_SECONDS = 3.0
"""The server closes idle connections after five."""

FIRST_TOKEN = 5
"""Smaller ids are special in the built-in models."""

Prompts = list[list[int]]
Client = Callable[[Prompts], Awaitable[int]]
"""Generates for some prompts, and returns how many tokens came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is generated."""

    prompts: int = 64
    """Prompts of one round."""
    prompt_tokens: int = 64
    """Length of each."""
    new_tokens: int = 64
    """Length of each response."""
    concurrency: int = 1
    """Callers at a time."""
    repeats: int = 5
    """Rounds that count; one before them does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Tokens per second: medians over all rounds."""

    raw: float
    """The raw client's."""
    engine: float
    """The engine's."""

    @property
    def ratio(self) -> float:
        """The engine's share of what the raw client reaches."""
        return self.engine / self.raw


@dataclass(frozen=True, kw_only=True, slots=True)
class Percentiles:
    """How long a request took, in seconds."""

    p50: float
    """Half of them took no longer."""
    p90: float
    """Nine in ten took no longer."""
    p99: float
    """All but one in a hundred took no longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Durations of single requests."""

    raw: Percentiles
    """The raw client's."""
    engine: Percentiles
    """The engine's."""
    requests: int
    """How many of each there were."""

    @property
    def ratio(self) -> float:
        """The raw client's median as a share of the engine's."""
        return self.raw.p50 / self.engine.p50


def measure_throughput(
    engine: AsyncSGLang, load: Load, *, api_key: str | None = None
) -> Throughput:
    """Measures whole batches, shared out among the callers."""
    check_fits(engine, load)

    async def work() -> Throughput:
        speeds: dict[str, list[float]] = {"raw": [], "engine": []}
        async with _session(api_key) as session:
            clients = _clients(engine, session, load)
            source = random.Random(0)
            for round_number in range(load.repeats + 1):
                for name, client in clients.items():
                    # New ones every time, so that no prefix is cached for either.
                    prompts = make_prompts(engine, load, source)
                    shares = [
                        prompts[first :: load.concurrency]
                        for first in range(min(load.concurrency, load.prompts))
                    ]
                    start = time.perf_counter()
                    tokens = sum(await asyncio.gather(*map(client, shares)))
                    if round_number > 0:
                        speeds[name].append(tokens / (time.perf_counter() - start))
        return Throughput(
            raw=statistics.median(speeds["raw"]),
            engine=statistics.median(speeds["engine"]),
        )

    return asyncio.run(work())


def measure_latency(
    engine: AsyncSGLang, load: Load, *, api_key: str | None = None
) -> Latency:
    """Measures single requests; each caller sends its next when one is answered."""
    check_fits(engine, load)

    async def work() -> Latency:
        seconds: dict[str, list[float]] = {"raw": [], "engine": []}
        async with _session(api_key) as session:
            clients = _clients(engine, session, load)
            source = random.Random(1)
            for round_number in range(load.repeats + 1):
                for name, client in clients.items():
                    prompts = make_prompts(engine, load, source)
                    if round_number == 0:
                        del prompts[load.concurrency :]
                    took = await _one_by_one(client, prompts, load.concurrency)
                    if round_number > 0:
                        seconds[name] += took
        return Latency(
            raw=_percentiles(seconds["raw"]),
            engine=_percentiles(seconds["engine"]),
            requests=len(seconds["engine"]),
        )

    return asyncio.run(work())


def check_fits(engine: AsyncSGLang, load: Load) -> None:
    """Refuses what the served model cannot do.

    Raises:
        ConfigurationError: if prompt and response are too long together.
    """
    most = engine.capabilities.max_context
    if load.prompt_tokens + load.new_tokens > most or (
        load.prompt_tokens > engine.capabilities.max_prompt
    ):
        raise ConfigurationError(
            f"Prompts of {load.prompt_tokens} tokens and responses of "
            f"{load.new_tokens} do not fit into the {most} tokens of the served "
            f"model's context; give less --prompt-tokens or --new-tokens."
        )


def make_prompts(engine: AsyncSGLang, load: Load, source: random.Random) -> Prompts:
    """Returns random prompts."""
    last = engine.capabilities.vocab_size - 1
    return [
        [source.randint(FIRST_TOKEN, last) for _ in range(load.prompt_tokens)]
        for _ in range(load.prompts)
    ]


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that so many percent do not exceed. Pure.

    Examples:
        >>> percentile([4.0, 1.0, 3.0, 2.0], 50), percentile([4.0, 1.0], 99)
        (2.0, 4.0)
    """
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def _percentiles(values: Sequence[float]) -> Percentiles:
    p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
    return Percentiles(p50=p50, p90=p90, p99=p99)


async def _one_by_one(client: Client, prompts: Prompts, callers: int) -> list[float]:
    waiting = iter(prompts)
    seconds: list[float] = []

    async def call() -> None:
        for prompt in waiting:
            start = time.perf_counter()
            await client([prompt])
            seconds.append(time.perf_counter() - start)

    await asyncio.gather(*(call() for _ in range(callers)))
    return seconds


def _session(api_key: str | None) -> aiohttp.ClientSession:
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
    )


def _clients(
    engine: AsyncSGLang, session: aiohttp.ClientSession, load: Load
) -> dict[str, Client]:
    sampling = {"max_new_tokens": load.new_tokens, "ignore_eos": True}
    servers = list(engine.control.urls)
    # A router shares work out among servers; without one, the clients have to.
    targets = servers if engine.server_url in servers else [engine.server_url]
    turns = itertools.cycle(targets)

    async def raw(prompts: Prompts) -> int:
        shares = (prompts[first :: len(targets)] for first in range(len(targets)))
        calls = [raw_request(share) for share in shares if share]
        return sum(await asyncio.gather(*calls))

    async def raw_request(prompts: Prompts) -> int:
        url = f"{next(turns)}/generate"
        body = {
            "input_ids": prompts,
            "sampling_params": sampling,
            "return_logprob": True,
        }
        try:
            async with session.post(url, data=orjson.dumps(body)) as answer:
                content = await answer.read()
                answer.raise_for_status()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerUnavailableError(
                f"The raw client's request to {url} failed: {error!r}."
            ) from error
        return sum(len(item["output_ids"]) for item in orjson.loads(content))

    async def ours(prompts: Prompts) -> int:
        answers = await engine.agenerate(
            input_ids=prompts, sampling_params=sampling, return_logprobs=True
        )
        return sum(len(answer.token_ids) for answer in answers)

    return {"raw": raw, "engine": ours}
