r"""Python time of the wrapper, a collector and the gateway.

The engine ``instant`` responds at once, so that all time is the package's own:

* ``wrapper``: milliseconds of a sample between a TensorDict and the engine's
  ``generate`` and back: templates, tokenization, containers.
* ``collector``: milliseconds of processor time of a turn between a task and a batch:
  plain ``functions``; ``environments``, a ``ChatEnv`` with a reward; and ``shared``,
  such a ``ChatEnv`` for each group.
* ``gateway``: conversations, all at once, of agents in another process; then the engine
  alone is sent the very prompts that the gateway has recorded, turn by turn.
  *Processor* is the time of the thread of the gateway and the engine for a turn, of
  which *rendering* is the chat template and the tokenizer, measured afterwards by
  themselves. With another
  model than ``instant`` its engine generates, and the ratio means something.

    python benchmarks/overhead.py wrapper
    python benchmarks/overhead.py collector
    python benchmarks/overhead.py gateway [instant | tiny | 0.5b | FOLDER]
        [--device cuda] [--sessions 256] [--turns 4] [--new-tokens 128]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import torch
from tensordict import TensorDict, lazy_stack, set_list_to_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens

from script import print_row, read_options
from torchrl_sglang import AsyncLLMCollector, AsyncSGLang, SGLangWrapper
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.cli.bench.collectors import GROUP_SIZE, make_env, reward
from torchrl_sglang.cli.bench.generation import exact_length
from torchrl_sglang.cli.bench.models import start_engine
from torchrl_sglang.cli.bench.timing import Clock, median_seconds
from torchrl_sglang.gateway.gateway import Gateway
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer, save_tiny_model
from torchrl_sglang.types import Completion, ServerCapabilities

AGENTS = "agents"
"""The argument of the process that the agents are in."""

WRAPPER_TOKENS, COLLECTOR_TOKENS = 128, 256
"""Lengths of responses."""

PROMPT_CHARACTERS = 96
THREAD = "torchrl_sglang-loop"


class InstantEngine(AsyncSGLang):
    """An engine whose responses are known before they are requested."""

    def __init__(self, length: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = str(save_tiny_model(self._folder.name))
        super().__init__(
            Fleet(replicas=[Replica(url="http://127.0.0.1:1")], weight_version="0"),
            ServerCapabilities(
                version="none",
                model_path=path,
                tokenizer_path=path,
                vocab_size=len(make_tiny_tokenizer()),
                max_context=2048,
                max_prompt=2047,
                dtype=torch.float32,
                tp_size=1,
                pp_size=1,
                dp_size=1,
                needs_update_session=False,
                load_route="/v1/loads",
                has_tokenizer=True,
                has_grammar=False,
                weight_version="0",
            ),
        )
        self._length = length

    def generate_requests(
        self, requests: Sequence[Any], **options: Any
    ) -> list[Completion]:
        """Returns responses of slightly different lengths."""
        return [
            Completion(
                token_ids=[5] * (self._length - index % 16),
                log_probs=[-1.0] * (self._length - index % 16),
                finish_reason="length",
            )
            for index, _ in enumerate(requests)
        ]

    async def agenerate_requests(
        self, requests: Sequence[Any], **options: Any
    ) -> list[Completion]:
        """The same, for a collector."""
        return self.generate_requests(requests)


def make_input(mode: str, size: int, tokenizer: Any) -> TensorDict:
    texts = ["x" * (PROMPT_CHARACTERS - index % 32) for index in range(size)]
    if mode == "history":
        chats = History.from_chats([[{"role": "user", "content": t}] for t in texts])
        return TensorDict(history=ChatHistory(prompt=chats), batch_size=(size,))
    if mode == "text":
        return TensorDict(
            text=Text(prompt=texts, batch_size=(size,)), batch_size=(size,)
        )
    return lazy_stack(
        [
            TensorDict(tokens=Tokens(prompt=torch.tensor(tokenizer.encode(text))))
            for text in texts
        ]
    )


def measure_wrapper(size: int, repeats: int) -> None:
    """Prints the wrapper's milliseconds a sample."""
    engine = InstantEngine(WRAPPER_TOKENS)
    tokenizer = engine.get_tokenizer()
    print(f"batch of {size}, {WRAPPER_TOKENS} response tokens, milliseconds a sample")
    for mode in ("history", "text", "tokens"):
        wrapper = SGLangWrapper(engine, input_mode=mode)
        inputs = [make_input(mode, size, tokenizer) for _ in range(repeats + 1)]
        seconds = median_seconds(lambda: wrapper(inputs.pop()), repeats)  # noqa: B023
        print_row(mode, 1e3 * seconds / size)


async def step(conversation: Any, task: Any) -> None:
    """Ends a conversation after its first turn."""


def make_collector(kind: str, policy: SGLangWrapper, groups: int) -> AsyncLLMCollector:
    """Returns a collector of this kind, of endless batches."""
    way: dict[str, Any] = {"rewards": reward, "step": step}
    if kind != "functions":
        size = GROUP_SIZE if kind == "shared" else 1
        way = {"env": lambda: make_env(policy.tokenizer, size)}
    queries = ["x" * (PROMPT_CHARACTERS - number % 32) for number in range(groups)]
    return AsyncLLMCollector(
        policy=policy,
        prompts=[{"query": query} for query in queries],
        group_size=GROUP_SIZE,
        groups_per_batch=groups,
        max_staleness=0,
        **way,
    )


def measure_collector(groups: int, repeats: int) -> None:
    """Prints a collector's milliseconds of processor time a turn."""
    policy = SGLangWrapper(InstantEngine(COLLECTOR_TOKENS))
    print("milliseconds of processor time for each turn")
    print_row("collector", "median", "mean")
    for kind in ("functions", "environments", "shared"):
        with make_collector(kind, policy, groups) as collector:
            batches, times = iter(collector), []
            next(batches)
            for _ in range(repeats):
                clock = Clock()
                cost = clock.stop(next(batches).numel())
                times.append(1e3 * cost.processor_seconds / cost.requests)
        print_row(kind, statistics.median(times), statistics.mean(times))


async def talk(client: aiohttp.ClientSession, url: str, load: dict[str, Any]) -> None:
    """Holds one conversation."""
    user = {"role": "user", "content": load["text"]}
    messages: list[Any] = [user]
    options = {"max_tokens": load["new_tokens"], "ignore_eos": True}
    for _ in range(load["turns"]):
        async with client.post(url, json={"messages": messages, **options}) as answer:
            answer.raise_for_status()
            said = (await answer.json())["choices"][0]["message"]
        messages += [said, user]


async def talk_all(load: dict[str, Any]) -> float:
    """Returns the seconds that all conversations of agents took."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        start = time.perf_counter()
        await asyncio.gather(*(talk(client, url, load) for url in load["urls"]))
        return time.perf_counter() - start


def thread_seconds() -> float:
    """Returns the processor time of the background loop's thread."""
    (thread,) = (each for each in threading.enumerate() if each.name == THREAD)
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def through_gateway(
    gateway: Gateway, arguments: argparse.Namespace
) -> tuple[float, float, list[Session]]:
    """Returns seconds, seconds of the background loop's thread, and the sessions."""
    sessions = [gateway.session() for _ in range(arguments.sessions)]
    load = {
        "urls": [f"{session.base_url}/chat/completions" for session in sessions],
        "turns": arguments.turns,
        "new_tokens": arguments.new_tokens,
        "text": "x" * PROMPT_CHARACTERS,
    }
    before = thread_seconds()
    run = subprocess.run(
        [sys.executable, __file__, AGENTS],
        input=json.dumps(load),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(run.stdout), thread_seconds() - before, sessions


async def engine_alone(engine: AsyncSGLang, sessions: list[Session]) -> float:
    """Returns the seconds that the same turns take without the gateway."""

    async def talk(session: Session) -> None:
        for turn in session.turns:
            length = len(turn.completion.token_ids)
            request = GenerateRequest(
                input_ids=turn.prompt.token_ids,
                sampling_params=exact_length(length),
                return_logprobs=True,
            )
            await engine.agenerate_requests([request], timeout=600)

    start = time.perf_counter()
    await asyncio.gather(*(talk(session) for session in sessions))
    return time.perf_counter() - start


def rendering_seconds(tokenizer: Any, sessions: list[Session]) -> float:
    """Returns the seconds of rendering and tokenizing each turn's new text once."""
    template = ChatTemplate(tokenizer)
    seconds = 0.0
    for session in sessions:
        for turn in session.turns:
            known = 0
            if turn.prompt.parent is not None:
                known = len(session.turns[turn.prompt.parent].token_ids)
            text = template.decode(turn.prompt.token_ids[known:])
            start = time.thread_time()
            template.render(turn.prompt.messages, turn.prompt.setting)
            template.encode(text)
            seconds += time.thread_time() - start
    return seconds


def measure_gateway(arguments: argparse.Namespace, repeats: int) -> None:
    """Prints turns a second, their ratio to the engine's, and the gateway's time."""
    ratios = []
    with contextlib.ExitStack() as stack:
        if arguments.model == "instant":
            engine: AsyncSGLang = InstantEngine(arguments.new_tokens)
        else:
            started = start_engine(arguments.model, device=arguments.device)
            engine = stack.enter_context(started)
        gateway = stack.enter_context(Gateway(engine))
        tokenizer = engine.get_tokenizer()
        print_row("", "turns/s", "ratio", "processor", "rendering")
        for _ in range(repeats + 1):
            seconds, processor, sessions = through_gateway(gateway, arguments)
            turns = sum(len(session.turns) for session in sessions)
            alone = asyncio.run(engine_alone(engine, sessions))
            rendering = rendering_seconds(tokenizer, sessions)
            ratios.append(alone / seconds)
            spent = (1e3 * processor / turns, 1e3 * rendering / turns)
            print_row("ms a turn", turns / seconds, ratios[-1], *spent)
            for session in sessions:
                gateway.drop(session)
    # The first run warms up.
    print_row("median ratio", statistics.median(ratios[1:]))


def main() -> None:
    arguments = read_options(
        __doc__,
        measurement="wrapper|collector|gateway",
        model="instant",
        batch_size=256,
        groups=32,
        device="cpu|cuda",
        sessions=256,
        turns=4,
        new_tokens=128,
        repeats=int,
    )
    repeats = arguments.repeats
    if arguments.measurement == "gateway":
        measure_gateway(arguments, repeats or 3)
        return
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    if arguments.measurement == "wrapper":
        measure_wrapper(arguments.batch_size, repeats or 5)
    else:
        measure_collector(arguments.groups, repeats or 9)


if __name__ == "__main__":
    if sys.argv[1:] == [AGENTS]:
        print(asyncio.run(talk_all(json.load(sys.stdin))))
    else:
        main()
