"""What is exported is what was computed, by which weights, whatever clients do.

Agents hold conversations with tool calls, branches, sub-agents, retries and hang-ups,
while the weights change. Each row is scored by Hugging Face with the weights of each
token's version, and each prompt is looked up in what the server was sent.
"""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise

import msgspec
import openai
import pytest
import torch
from helpers.log_probs import TOLERANCE
from helpers.log_probs import score as score_with
from helpers.tool_template import CALL, TOOL_TEMPLATE, TOOLS

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.gateway.gateway import Gateway
from torchrl_sglang.testing.faults import FaultyProxy
from torchrl_sglang.testing.tiny_model import make_tiny_model

HANG_UP_SECONDS = 0.05
"""Much less than a response of ``LONG`` tokens takes."""
LONG, SHORT = 400, 24


class RecordingProxy(FaultyProxy):
    """Keeps the prompts that a server is sent."""

    def __init__(self, target):
        self.prompts = set()
        super().__init__(target)

    async def _forward(self, request, body):
        if request.path == "/generate":
            sent = msgspec.json.decode(body)["input_ids"]
            for ids in sent if isinstance(sent[0], list) else [sent]:
                self.prompts.add(tuple(ids))
        return await super()._forward(request, body)


class ScriptedAgent:
    """Talks to a gateway; what it does in a turn follows from its number.

    Args:
        client: asynchronous client of its session.
        number: of the agent.
        answered: responses of all agents so far.
    """

    def __init__(self, client, number, answered):
        self._client = client
        self._number = number
        self._answered = answered
        self._messages = [{"role": "user", "content": f"Agent {number}, begin."}]
        self.roots = 0
        """Responses to conversations that go on from none of the session."""

    async def run(self, turns):
        kinds = (
            *(self._plain, self._tool, self._regenerate, self._edit, self._hang_up),
            *(self._retry, self._sub_agent),
        )
        for turn in range(turns):
            await kinds[(self._number + turn) % len(kinds)]()

    async def _ask(self, messages, **arguments):
        answer = await self._client.chat.completions.create(
            model="policy",
            messages=messages,
            tools=TOOLS,
            **{"max_tokens": SHORT, **arguments},
        )
        return answer.choices[0].message

    async def _answer(self, messages, **arguments):
        """Asks for a response that counts as a turn."""
        said = await self._ask(messages, **arguments)
        self._answered.append(self._number)
        self.roots += (
            messages[-1] is messages[0] or messages[0] is not self._messages[0]
        )
        return said.to_dict()

    def _go_on(self, said, content="Go on."):
        self._messages += [said, {"role": "user", "content": content}]

    async def _plain(self):
        self._go_on(await self._answer(self._messages))

    async def _tool(self):
        said = await self._answer(
            self._messages, extra_body={"regex": CALL}, max_tokens=100
        )
        (call,) = said["tool_calls"]
        result = {"role": "tool", "content": "7", "tool_call_id": call["id"]}
        self._messages += [said, result]

    async def _regenerate(self):
        said = [await self._answer(self._messages) for _ in range(2)]
        self._go_on(said[self._number % 2])

    async def _edit(self):
        first = {"role": "user", "content": f"It is {len(self._messages)} o'clock."}
        await self._answer([first, *self._messages[1:]])
        self._go_on(await self._answer(self._messages))

    async def _hang_up(self):
        ask = asyncio.ensure_future(
            self._ask(self._messages, max_tokens=LONG, extra_body={"ignore_eos": True})
        )
        await asyncio.sleep(HANG_UP_SECONDS)
        ask.cancel()
        await asyncio.wait([ask])
        await self._plain()

    async def _retry(self):
        named = {"Idempotency-Key": f"{self._number}-{len(self._messages)}"}
        said = await self._answer(self._messages, extra_headers=named)
        again = await self._ask(self._messages, extra_headers=named)
        assert again.to_dict() == said
        self._go_on(said)

    async def _sub_agent(self):
        messages = [
            {"role": "system", "content": f"You help in {len(self._messages)}."},
            {"role": "user", "content": "Do a part of it."},
        ]
        said = await self._answer(messages)
        await self._answer([*messages, said, {"role": "user", "content": "More."}])
        self.roots -= 1
        self._go_on(await self._answer(self._messages), "It is done.")


async def run_all(sessions, turns, updates, update):
    """Runs an agent in each session, and calls ``update`` that often meanwhile."""
    answered: list[int] = []
    async with openai.AsyncOpenAI(base_url="http://none", api_key="none") as client:
        agents = [
            ScriptedAgent(
                client.with_options(base_url=session.base_url, api_key=session.key),
                number,
                answered,
            )
            for number, session in enumerate(sessions)
        ]
        running = asyncio.gather(*(agent.run(turns) for agent in agents))
        total = len(sessions) * turns
        for number in range(1, updates + 1):
            while len(answered) < total * number // (updates + 1):
                if running.done():
                    running.result()
                await asyncio.sleep(0.01)
            await asyncio.to_thread(update)
        await running
    return agents, len(answered)


def not_hung_up(turn):
    """Whether the agent waited for its end.

    A slow machine may reach the end of a response before the agent has hung up.
    """
    return len(turn.completion.token_ids) < LONG


def check_rows(rows, sessions, models):
    """Compares log-probs; returns the greatest difference and what was compared."""
    trained = compared = 0
    worst = 0.0
    for row in rows:
        ids = row["tokens", "full"]
        prompt = len(row["tokens", "prompt"])
        mask = row["masks", "all_assistant_mask"]
        found = row["log_probs", "full"]
        versions = torch.full((len(ids),), -2)
        versions[prompt:] = row["generation_info", "weight_version"]
        assert not found[~mask].isfinite().any()
        trained += int(mask.sum())
        for version in set(versions[mask].tolist()):
            place = mask & (versions == version) & found.isfinite()
            expected = score_with(models[version], ids)
            compared += int(place.sum())
            if place.any():
                worst = max(worst, float((expected - found)[place].abs().max()))
    generated = sum(session.num_tokens for session in sessions)
    assert trained == generated
    return worst, compared, trained


def check_turns(sessions, prompts):
    """Every prompt was sent as it was recorded; branches share what they should."""
    for session in sessions:
        for turn in session.turns:
            assert tuple(turn.prompt.token_ids) in prompts
            # Log-probs under a grammar are computed afterwards; those of tokens whose
            # weights are gone by then are unknown. All others are known.
            known = all(map(math.isfinite, turn.completion.log_probs))
            assert known or "tool_calls" in turn.reply
        shown = [
            turn.number
            for trajectory in session.trajectories()
            for turn, trained in zip(trajectory.turns, trajectory.trained, strict=True)
            if trained
        ]
        assert sorted(shown) == list(range(len(session.turns)))
        for trajectory in session.trajectories():
            for one, following in pairwise(trajectory.turns):
                known = one.token_ids
                assert following.prompt.token_ids[: len(known)] == known


@pytest.mark.parametrize(
    ("count", "turns", "updates"),
    [
        (7, 4, 2),
        pytest.param(64, 8, 5, marks=pytest.mark.slow),
    ],
)
def test_exported_rows_are_the_computed_ones(
    grammar_engine, hf_model, tokenizer, count, turns, updates
):
    models = {}
    seeds = iter(range(7000, 8000))
    with (
        RecordingProxy(grammar_engine.server_url) as proxy,
        AsyncSGLang.connect(proxy.url) as engine,
    ):
        scheme = SGLangWeightSyncScheme(engine)
        sender = scheme.create_sender()

        def update(model=None):
            model = model or make_tiny_model(tokenizer, seed=next(seeds))
            models[int(sender.update_weights(model).version)] = model

        update(hf_model)
        with Gateway(
            engine,
            chat_template=TOOL_TEMPLATE,
            tool_call_parser="qwen25",
        ) as gateway:
            sessions = [gateway.session() for _ in range(count)]
            agents, answered = asyncio.run(run_all(sessions, turns, updates, update))
            rows = gateway.to_tensordict(sessions)
        update(hf_model)
        scheme.shutdown()
    in_time = [list(filter(not_hung_up, session.turns)) for session in sessions]
    assert sum(map(len, in_time)) == answered
    for agent, kept in zip(agents, in_time, strict=True):
        parents = [turn.prompt.parent for turn in kept]
        assert parents.count(None) == agent.roots
    check_turns(sessions, proxy.prompts)
    worst, compared, trained = check_rows(rows, sessions, models)
    assert worst < TOLERANCE
    # How many are unknown depends on how many were on their way at each update.
    assert compared == sum(
        math.isfinite(value)
        for session in sessions
        for turn in session.turns
        for value in turn.completion.log_probs
    )
    assert compared > 0.5 * trained
    versions = {
        span.version
        for session in sessions
        for turn in session.turns
        for span in turn.completion.versions
    }
    assert len(versions) == updates + 1
