"""The task: adding two two-digit numbers, asked and answered in a chat.

``47+35=`` is the user's turn, ``82`` the assistant's. The answer can be verified, so
the reward needs no model. Held-out problems share no pair of operands with the
training problems, in either order: they can be solved by adding, not by remembering.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch.utils.data import DataLoader
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Problem:
    """One addition."""

    left: int
    right: int

    @property
    def query(self) -> str:
        """What the user asks."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """What the assistant should reply."""
        return str(self.left + self.right)


def split_problems(
    held_out_fraction: float = 0.05, seed: int = 0
) -> tuple[list[Problem], list[Problem]]:
    """Split all additions of two-digit numbers into training and held-out problems.

    Args:
        held_out_fraction: Share of the operand pairs that is held out.
        seed: Seed of the shuffle.

    Returns:
        The training and the held-out problems. ``a+b`` and ``b+a`` are always in the
        same part.

    Example:
        >>> train, held_out = split_problems()
        >>> {p.query for p in train} & {f"{p.right}+{p.left}=" for p in held_out}
        set()
    """
    pairs = list(itertools.combinations_with_replacement(range(10, 100), 2))
    random.Random(seed).shuffle(pairs)
    num_held_out = int(len(pairs) * held_out_fraction)
    parts = []
    for part in (pairs[num_held_out:], pairs[:num_held_out]):
        ordered = sorted({(a, b) for a, b in part} | {(b, a) for a, b in part})
        parts.append([Problem(a, b) for a, b in ordered])
    return parts[0], parts[1]


class ExactMatchReward(Transform):
    """Reward 1 for the right answer followed by the end of turn, 0 for anything else.

    Args:
        end_token: Text of the token that ends the assistant's turn. It is part of the
            response and has to be earned: an answer that runs on is a wrong answer.
    """

    def __init__(self, end_token: str) -> None:
        super().__init__(in_keys=[("text", "response"), "answer"], out_keys=["reward"])
        self.end_token = end_token

    def _step(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase
    ) -> TensorDictBase:
        responses = tensordict["text", "response"]
        answers = tensordict["answer"]
        rewards = [
            float(response == answer + self.end_token)
            for response, answer in zip(responses, answers, strict=True)
        ]
        # One reward for the whole response: (batch, tokens=1, 1) in GRPOLoss's layout.
        reward = torch.tensor(rewards).view(*next_tensordict.batch_size, 1, 1)
        return next_tensordict.set("reward", reward)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Declare the reward."""
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


def make_env(
    problems: list[Problem],
    tokenizer: PreTrainedTokenizerBase,
    num_envs: int,
    *,
    repeats: int = 1,
    seed: int | None = None,
) -> EnvBase:
    """Build a batch of one-turn chats about the given problems.

    Args:
        problems: What is asked, endlessly.
        tokenizer: The policy's tokenizer.
        num_envs: How many chats run side by side.

    Keyword Args:
        repeats: How many consecutive chats are about the same problem, which makes
            them one GRPO group.
        seed: Seed of the order of the problems; ``None`` keeps the given order.

    Returns:
        A :class:`~torchrl.envs.llm.ChatEnv` with the reward attached.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    dataloader = DataLoader(
        [{"query": problem.query, "answer": problem.answer} for problem in problems],
        batch_size=num_envs // repeats,
        shuffle=seed is not None,
        generator=generator,
    )
    env = ChatEnv.from_dataloader(
        dataloader, repeats=repeats, batch_size=(num_envs,), tokenizer=tokenizer
    )
    env.append_transform(StepCounter(max_steps=1))
    env.append_transform(ExactMatchReward(tokenizer.eos_token))
    return env
