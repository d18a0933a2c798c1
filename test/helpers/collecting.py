"""Tasks, rewards, agents and environments for tests of collectors."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import torch
from tensordict import NestedKey, lazy_stack
from torchrl.data import Unbounded
from torchrl.data.llm import History
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import ChatEnv

from torchrl_sglang import AsyncLLMCollector

OWN_THREADS = (
    "torchrl_sglang-collector",
    "torchrl_sglang-functions",
    "torchrl_sglang-layout",
    "torchrl_sglang-prompts",
    "torchrl_sglang-writer",
)


def length_reward(conversation: Any, task: Any) -> float:
    return float(len(conversation.response))


def tasks(count: int) -> list[dict[str, str]]:
    return [{"query": f"question {n}", "answer": str(n)} for n in range(count)]


def own_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in OWN_THREADS]


def collection_of(collector: AsyncLLMCollector) -> Any:
    """Returns the running collection of a collector."""
    return collector._collection


def versions_of(collector: AsyncLLMCollector) -> Any:
    """Returns the weight versions that a collector counts."""
    return collector._versions


def begin(collector: AsyncLLMCollector) -> None:
    """Begins to collect, like the request for the first batch."""
    collection_of(collector).start()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def ask_gateway(
    base_url: str, api_key: str, messages: Sequence[Mapping[str, Any]], **body: Any
) -> dict[str, Any]:
    """Sends a chat request as an agent does, and returns the reply's message."""
    headers = {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers) as client:
        url, body = f"{base_url}/chat/completions", {"messages": messages, **body}
        async with client.post(url, json=body) as response:
            response.raise_for_status()
            return (await response.json())["choices"][0]["message"]


async def talk(
    base_url: str, api_key: str, question: str, turns: int, **body: Any
) -> None:
    """Holds a conversation of several turns as an agent does."""
    messages = [user(question)]
    for _ in range(turns):
        reply = await ask_gateway(base_url, api_key, messages, **body)
        messages += [reply, user("Go on.")]


def with_lengths(prompts: Any) -> Any:
    """Returns conversations with the length of their last message from a user."""
    replies = [f"length {len(prompt.content[-1])}" for prompt in prompts.unbind(0)]
    return lazy_stack(
        [
            prompt.append(History(role="user", content=text), inplace=False, dim=-1)
            for prompt, text in zip(prompts.unbind(0), replies, strict=True)
        ]
    )


class LengthReply(Transform):
    """Answers every message of the assistant with its length, as a user."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        history = next_tensordict["history"]
        history.prompt = with_lengths(history.prompt)
        return next_tensordict


class Declare(Transform):
    """Declares the log-probs that RetrieveLogProb writes and does not declare."""

    def __init__(self, *keys: NestedKey) -> None:
        super().__init__()
        self.declared = keys

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        for key in self.declared:
            observation_spec[key] = Unbounded(shape=(*observation_spec.shape, -1))
        return observation_spec


class OneReward(Transform):
    """Rewards each step with 1."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        shape = (*next_tensordict.batch_size, 1, 1)
        return next_tensordict.set("reward", torch.ones(shape))


def one_turn_env(*transforms: Transform, size: int = 1) -> ChatEnv:
    """Returns an environment whose conversations end after one turn."""
    env = ChatEnv(batch_size=(size,))
    for transform in (StepCounter(max_steps=1), *transforms):
        env = env.append_transform(transform)
    return env
