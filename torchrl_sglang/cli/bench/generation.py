"""Throughput, latency and overhead of an engine, and of raw clients in the same run.

Raw clients are the fastest uses of SGLang's HTTP interface, and discard the responses.
All clients do the same work on the same server, in turns, so the ratio is the cost of
the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import msgspec

from torchrl_sglang.cli.bench.models import Load
from torchrl_sglang.cli.bench.timing import Clock, Cost, percentile, speed, summarize
from torchrl_sglang.errors import ConfigurationError, ServerUnavailableError

if TYPE_CHECKING:
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

FIRST_TOKEN = 5
"""Smaller ids are special in the built-in models."""

TAIL = 64
"""Ratio of the longest to the shortest response of :func:`long_tailed`."""

BATCHES = 4
"""Number of synchronous batches in a round of :func:`measure_overhead`."""

S = TypeVar("S")
T = TypeVar("T")
Requests = list[tuple[list[int], int]]
"""Prompts, and the number of tokens of each response."""
Client = Callable[[Requests], Awaitable[int]]
"""Generates for some requests, and returns the number of tokens."""


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
    names = ("raw", "engine", *(["wrapper"] if wrapper else []))
    rounds = asyncio.run(_run_rounds(engine, load, names, _time_batches, api_key))
    speeds = {name: speed(costs) for name, costs in rounds.items()}
    speeds["ratio"] = speeds["engine"] / speeds["raw"]
    if wrapper:
        speeds["wrapper_ratio"] = speeds["wrapper"] / speeds["raw"]
    return speeds


def measure_overhead(
    engine: AsyncSGLang, load: Load, *, api_key: str | None = None
) -> dict[str, Any]:
    """Returns the cost of each way of generation on responses of different lengths.

    The ways are a raw client with one HTTP request for each prompt (``raw_each``) or
    for all (``raw``), ``agenerate`` for each prompt (``each``) or for all (``engine``),
    and synchronous batches (``batches``); lengths are :func:`long_tailed`. Of each
    client: ``tokens_per_second``, its ``ratio`` to the best raw client, and
    ``processor_ms``, this process's processor time for a request in milliseconds;
    medians of all rounds.
    """
    names = [*raw_names(engine), "each", "engine", "batches"]
    lengths = long_tailed(load)
    rounds = asyncio.run(
        _run_rounds(engine, load, names, _time_batches, api_key, lengths)
    )
    return {
        "clients": summarize(rounds),
        "tokens": sum(lengths),
        "shortest": min(lengths),
    }


def measure_latency(
    engine: AsyncSGLang, load: Load, *, api_key: str | None = None
) -> dict[str, Any]:
    """Returns percentiles of single requests in seconds, for each client.

    Each caller sends its next request after the previous response. ``ratio`` is the raw
    client's median as a share of the engine's.
    """
    rounds = asyncio.run(
        _run_rounds(engine, load, ("raw", "engine"), _time_requests, api_key)
    )
    report: dict[str, Any] = {
        name: {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
        for name, values in rounds.items()
    }
    report["requests"] = len(rounds["engine"])
    report["ratio"] = report["raw"]["p50"] / report["engine"]["p50"]
    return report


async def _time_batches(
    client: Client, requests: Requests, load: Load, _warmup: bool
) -> list[Cost]:
    """Returns the cost of all requests."""
    callers = min(load.concurrency, load.prompts)
    shares = [requests[first::callers] for first in range(callers)]
    clock = Clock()
    tokens = sum(await asyncio.gather(*map(client, shares)))
    return [clock.stop(len(requests), tokens)]


async def _time_requests(
    client: Client, requests: Requests, load: Load, warmup: bool
) -> list[float]:
    """Returns the seconds of each request."""
    waiting = iter(requests[: load.concurrency] if warmup else requests)
    seconds: list[float] = []

    async def call() -> None:
        for request in waiting:
            clock = Clock()
            await client([request])
            seconds.append(clock.stop(1).seconds)

    await asyncio.gather(*(call() for _ in range(load.concurrency)))
    return seconds


async def _run_rounds(
    engine: AsyncSGLang,
    load: Load,
    names: Sequence[str],
    work: Callable[[Client, Requests, Load, bool], Awaitable[list[T]]],
    api_key: str | None,
    lengths: Sequence[int] | None = None,
) -> dict[str, list[T]]:
    """Runs all clients in turns; returns the values of the measured rounds."""
    check_length(engine, load)
    source = random.Random(0)
    async with raw_clients(engine, api_key) as raw:
        clients = {**raw, **_engine_clients(engine)}
        if "wrapper" in names:
            clients["wrapper"] = _wrapper_client(engine, load)
        by_client: dict[str, list[T]] = {name: [] for name in names}
        for number, name in itertools.product(range(load.repeats + 1), names):
            # New prompts every time, without cached prefixes.
            prompts = make_prompts(engine, load, source)
            sizes = lengths or [load.new_tokens] * len(prompts)
            requests = list(zip(prompts, sizes, strict=True))
            values = await work(clients[name], requests, load, number == 0)
            by_client[name] += values if number else []
    return by_client


def check_length(engine: AsyncSGLang, load: Load) -> None:
    """Refuses prompts and responses beyond the model's context."""
    context = engine.capabilities.max_context
    if load.prompt_tokens + load.new_tokens > context or (
        load.prompt_tokens > engine.capabilities.max_prompt
    ):
        raise ConfigurationError(
            f"Prompts of {load.prompt_tokens} tokens and responses of "
            f"{load.new_tokens} do not fit into the {context} tokens of the served "
            f"model's context; give less --prompt-tokens or --new-tokens."
        )


def make_prompts(
    engine: AsyncSGLang, load: Load, source: random.Random
) -> list[list[int]]:
    """Returns random prompts."""
    largest = engine.capabilities.vocab_size - 1
    return [
        [source.randint(FIRST_TOKEN, largest) for _ in range(load.prompt_tokens)]
        for _ in range(load.prompts)
    ]


def long_tailed(load: Load) -> list[int]:
    """Returns lengths of responses, log-normal, from 1/64 of the longest on."""
    source = random.Random(0)
    longest, shortest = load.new_tokens, max(load.new_tokens // TAIL, 1)
    middle, spread = math.log(longest * shortest) / 2, math.log(longest / shortest) / 4
    drawn = (source.lognormvariate(middle, spread) for _ in range(load.prompts))
    return [round(min(max(length, shortest), longest)) for length in drawn]


def raw_names(engine: AsyncSGLang) -> list[str]:
    """Returns the raw clients for responses of different lengths."""
    # A router takes a common set of parameters for a batch.
    direct = engine.server_url in engine.control.urls
    return ["raw_each", "raw"] if direct else ["raw_each"]


@asynccontextmanager
async def raw_clients(
    engine: AsyncSGLang, api_key: str | None
) -> AsyncIterator[dict[str, Client]]:
    """Opens clients with an HTTP request for each prompt, or for all."""
    servers = list(engine.control.urls)
    # A router spreads requests over servers; without one, the client has to.
    targets = servers if engine.server_url in servers else [engine.server_url]
    urls = itertools.cycle([f"{target}/generate" for target in targets])
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"

    async def post(prompts: Any, params: Any) -> Any:
        body = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
        url = next(urls)
        try:
            async with session.post(url, data=msgspec.json.encode(body)) as response:
                content = await response.read()
                response.raise_for_status()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerUnavailableError(
                f"The raw client's request to {url} failed: {error!r}."
            ) from error
        return msgspec.json.decode(content)

    async def each(requests: Requests) -> int:
        calls = (post(prompt, exact_length(length)) for prompt, length in requests)
        return sum(len(item["output_ids"]) for item in await asyncio.gather(*calls))

    async def batch(requests: Requests) -> int:
        shares = [requests[first :: len(targets)] for first in range(len(targets))]
        calls = []
        for share in filter(None, shares):
            params: Any = [exact_length(length) for _, length in share]
            if len({length for _, length in share}) == 1:
                params = params[0]
            calls.append(post([prompt for prompt, _ in share], params))
        batches = await asyncio.gather(*calls)
        return sum(len(item["output_ids"]) for items in batches for item in items)

    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
        timeout=aiohttp.ClientTimeout(total=3600.0),
    ) as session:
        yield {"raw": batch, "raw_each": each}


def exact_length(length: int) -> dict[str, Any]:
    """Returns sampling parameters of a response of this length."""
    return {"max_new_tokens": length, "ignore_eos": True}


def _engine_clients(engine: AsyncSGLang) -> dict[str, Client]:
    async def batch(requests: Requests) -> int:
        completions = await engine.agenerate(
            input_ids=[prompt for prompt, _ in requests],
            sampling_params=[exact_length(length) for _, length in requests],
            return_logprobs=True,
        )
        return sum(len(completion.token_ids) for completion in completions)

    async def each(requests: Requests) -> int:
        return sum(await asyncio.gather(*(batch([request]) for request in requests)))

    async def batches(requests: Requests) -> int:
        size = -(-len(requests) // BATCHES)
        firsts = range(0, len(requests), size)
        return sum([await batch(requests[first : first + size]) for first in firsts])

    return {"engine": batch, "each": each, "batches": batches}


def _wrapper_client(engine: AsyncSGLang, load: Load) -> Client:
    import torch
    from tensordict import TensorDict, lazy_stack
    from torchrl.modules.llm.policies import Tokens

    from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper

    policy = SGLangWrapper(
        engine, input_mode="tokens", generate_kwargs=exact_length(load.new_tokens)
    )

    def generate(requests: Requests) -> int:
        rows = [
            TensorDict(tokens=Tokens(prompt=torch.tensor(prompt)))
            for prompt, _ in requests
        ]
        result = policy(lazy_stack(rows))
        responses = result.get(("tokens", "response"), as_list=True)
        return sum(response.numel() for response in responses)

    return in_thread(generate)


def in_thread(function: Callable[[S], T]) -> Callable[[S], Awaitable[T]]:
    """Returns a coroutine function for a blocking function, run in a thread."""

    async def client(work: S) -> T:
        return await asyncio.to_thread(function, work)

    return client


def batch_collector(
    engine: AsyncSGLang, size: int, length: int
) -> Callable[[Sequence[str]], Any]:
    """Returns a function to collect a batch of turns of ``size`` queries.

    It is an :class:`~torchrl_sglang.SGLangLLMCollector` with TorchRL's ``ChatEnv``.
    """
    from tensordict import TensorDict
    from torchrl.envs.llm import ChatEnv

    from torchrl_sglang.collectors.llm_collector import SGLangLLMCollector
    from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper

    # The environment looks at a batch when it is made.
    queries = [TensorDict(query=["Hi"] * size, batch_size=(size,))]
    loader = (queries[0] for _ in itertools.count())
    env = ChatEnv.from_dataloader(
        loader, tokenizer=engine.get_tokenizer(), batch_size=(size,)
    )
    policy = SGLangWrapper(engine, generate_kwargs=exact_length(length))
    with warnings.catch_warnings():
        # The environment lacks a transform needed only by TorchRL's own wrappers.
        warnings.simplefilter("ignore", FutureWarning)
        collector = SGLangLLMCollector(
            env,
            policy=policy,
            dialog_turns_per_batch=size,
            reset_at_each_iter=True,
            flatten_data=True,
        )
    batches = iter(collector)

    def collect(texts: Sequence[str]) -> Any:
        queries[0] = TensorDict(query=list(texts), batch_size=(size,))
        return next(batches)

    return collect
