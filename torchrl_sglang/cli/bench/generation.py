"""Throughput and latency of an engine, and of a raw client in the same run.

The raw client is the fastest use of SGLang's HTTP interface: a whole batch in one
request, and nothing made of the response. All clients do the same work on the same
server, in turns, so the ratio is what the engine costs.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from torchrl_sglang.errors import ConfigurationError, ServerUnavailableError

if TYPE_CHECKING:
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

__all__ = ["Load", "measure_latency", "measure_throughput", "percentile"]

REQUEST_SECONDS = 600.0
KEEPALIVE_SECONDS = 3.0
"""Less than the five seconds after which the server closes idle connections."""

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
    """Length of each prompt."""
    new_tokens: int = 64
    """Length of each response."""
    concurrency: int = 1
    """Concurrent callers."""
    repeats: int = 5
    """Rounds that count; one before them does not."""


def measure_throughput(
    engine: AsyncSGLang,
    load: Load,
    *,
    api_key: str | None = None,
    wrapper: bool = False,
) -> dict[str, float]:
    """Returns tokens per second of each client on whole batches, medians of all rounds.

    ``ratio`` is the engine's share of the raw client's; with ``wrapper``,
    ``wrapper_ratio`` is the share of an :class:`~torchrl_sglang.SGLangWrapper`.
    """
    _check_length(engine, load)

    async def work(client: Client, prompts: Prompts, _warmup: bool) -> list[float]:
        callers = min(load.concurrency, load.prompts)
        shares = [prompts[first::callers] for first in range(callers)]
        start = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(client, shares)))
        return [tokens / (time.perf_counter() - start)]

    speeds = asyncio.run(_run_rounds(engine, load, api_key, work, wrapper=wrapper))
    found = {name: statistics.median(values) for name, values in speeds.items()}
    found["ratio"] = found["engine"] / found["raw"]
    if wrapper:
        found["wrapper_ratio"] = found["wrapper"] / found["raw"]
    return found


def measure_latency(
    engine: AsyncSGLang, load: Load, *, api_key: str | None = None
) -> dict[str, Any]:
    """Returns percentiles of single requests in seconds, for each client.

    Each caller sends its next request when the previous one is answered. ``ratio`` is
    the raw client's median as a share of the engine's.
    """
    _check_length(engine, load)

    async def work(client: Client, prompts: Prompts, warmup: bool) -> list[float]:
        waiting = iter(prompts[: load.concurrency] if warmup else prompts)
        seconds: list[float] = []

        async def call() -> None:
            for prompt in waiting:
                start = time.perf_counter()
                await client([prompt])
                seconds.append(time.perf_counter() - start)

        await asyncio.gather(*(call() for _ in range(load.concurrency)))
        return seconds

    seconds = asyncio.run(_run_rounds(engine, load, api_key, work))
    found: dict[str, Any] = {
        name: {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
        for name, values in seconds.items()
    }
    found["requests"] = len(seconds["engine"])
    found["ratio"] = found["raw"]["p50"] / found["engine"]["p50"]
    return found


async def _run_rounds(
    engine: AsyncSGLang,
    load: Load,
    api_key: str | None,
    work: Callable[[Client, Prompts, bool], Awaitable[list[float]]],
    *,
    wrapper: bool = False,
) -> dict[str, list[float]]:
    """Runs all clients in turns; returns the values of the rounds that count."""
    source = random.Random(0)
    async with _raw_client(engine, load, api_key) as raw:
        clients = {"raw": raw, "engine": _engine_client(engine, load)}
        if wrapper:
            clients["wrapper"] = _wrapper_client(engine, load)
        found: dict[str, list[float]] = {name: [] for name in clients}
        for number in range(load.repeats + 1):
            for name, client in clients.items():
                # New prompts every time, so that no client finds a cached prefix.
                prompts = make_prompts(engine, load, source)
                values = await work(client, prompts, number == 0)
                found[name] += values if number else []
    return found


def _check_length(engine: AsyncSGLang, load: Load) -> None:
    """Refuses prompts and responses that are longer than the model's context."""
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
    """Returns the smallest value that so many percent do not exceed.

    Examples:
        >>> percentile([4.0, 1.0, 3.0, 2.0], 50), percentile([4.0, 1.0], 99)
        (2.0, 4.0)
    """
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


@asynccontextmanager
async def _raw_client(
    engine: AsyncSGLang, load: Load, api_key: str | None
) -> AsyncIterator[Client]:
    servers = list(engine.control.urls)
    # A router spreads requests over servers; without one, the client has to.
    targets = servers if engine.server_url in servers else [engine.server_url]
    turns = itertools.cycle(targets)
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"

    async def request(prompts: Prompts) -> int:
        url = f"{next(turns)}/generate"
        body = {
            "input_ids": prompts,
            "sampling_params": {"max_new_tokens": load.new_tokens, "ignore_eos": True},
            "return_logprob": True,
        }
        try:
            async with session.post(url, data=orjson.dumps(body)) as response:
                content = await response.read()
                response.raise_for_status()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerUnavailableError(
                f"The raw client's request to {url} failed: {error!r}."
            ) from error
        return sum(len(item["output_ids"]) for item in orjson.loads(content))

    async def client(prompts: Prompts) -> int:
        shares = [prompts[first :: len(targets)] for first in range(len(targets))]
        return sum(await asyncio.gather(*(request(share) for share in shares if share)))

    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
    ) as session:
        yield client


def _engine_client(engine: AsyncSGLang, load: Load) -> Client:
    sampling = {"max_new_tokens": load.new_tokens, "ignore_eos": True}

    async def client(prompts: Prompts) -> int:
        completions = await engine.agenerate(
            input_ids=prompts, sampling_params=sampling, return_logprobs=True
        )
        return sum(len(completion.token_ids) for completion in completions)

    return client


def _wrapper_client(engine: AsyncSGLang, load: Load) -> Client:
    import torch
    from tensordict import TensorDict, lazy_stack
    from torchrl.modules.llm.policies import Tokens

    from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper

    policy = SGLangWrapper(
        engine,
        input_mode="tokens",
        generate_kwargs={"max_new_tokens": load.new_tokens, "ignore_eos": True},
    )

    def generate(prompts: Prompts) -> int:
        rows = [TensorDict(tokens=Tokens(prompt=torch.tensor(p))) for p in prompts]
        result = policy(lazy_stack(rows))
        responses = result.get(("tokens", "response"), as_list=True)
        return sum(response.numel() for response in responses)

    async def client(prompts: Prompts) -> int:
        return await asyncio.to_thread(generate, prompts)

    return client
