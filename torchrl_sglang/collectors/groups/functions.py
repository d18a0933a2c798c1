"""Groups of conversations of plain functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from torchrl_sglang.collectors.groups.conversations import Conversation, Conversations
from torchrl_sglang.collectors.groups.recorded import record_conversations
from torchrl_sglang.collectors.groups.rewards import Rewards
from torchrl_sglang.collectors.groups.rows import (
    GroupWriter,
    check_names,
    check_task,
    oldest_version,
)
from torchrl_sglang.collectors.groups.versions import PolicyVersions
from torchrl_sglang.collectors.runtime.contract import TokenSpan
from torchrl_sglang.collectors.scheduling.priority import (
    PriorityOf,
    no_priority,
)
from torchrl_sglang.observer import ResponseRecord
from torchrl_sglang.requests.seeds import SampleSeeds, seeds_at
from torchrl_sglang.support.blocking import BlockingCalls
from torchrl_sglang.support.tracing import span
from torchrl_sglang.support.user_code import together


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionGroup:
    """Complete conversations about a task."""

    conversations: Sequence[Conversation]
    task: Mapping[str, Any]
    """Columns of the dataset element."""


class FunctionGroups:
    """Runs groups of conversations, and writes them.

    Args:
        conversations: runs one.
        rewards: of a complete group.
        writer: writes it.
        versions: of the policy.
        size: conversations of a group.
        blocking: threads of their functions, which end with them.
        seeds: of their responses; ``None``: the policy's.
        priority_of: the priority of a group's requests.
    """

    def __init__(
        self,
        conversations: Conversations,
        rewards: Rewards,
        writer: GroupWriter,
        versions: PolicyVersions,
        *,
        size: int,
        blocking: BlockingCalls,
        seeds: SampleSeeds | None = None,
        priority_of: PriorityOf = no_priority,
    ) -> None:
        self.size = size
        self.generating = conversations.generating
        self._blocking = blocking
        self._conversations = conversations
        self._rewards = rewards
        self._writer = writer
        self._versions = versions
        self._seeds = seeds
        self._priority_of = priority_of
        check_names(rewards.names, writer.columns, "a reward")
        self._columns = writer.columns | frozenset(rewards.names)

    def check_columns(self, names: Iterable[str]) -> None:
        """Checks the names of a dataset's columns; see :func:`.check_names`.

        Raises:
            ConfigurationError: also if a reward function needs another column.
        """
        known = list(names)
        check_names(known, self._columns, "a column of prompts")
        self._rewards.check_columns(known)

    async def run(
        self,
        position: int,
        task: Mapping[str, Any],
        policy_version: Callable[[], int],
        turn: Callable[[], Any],
    ) -> FunctionGroup:
        """Returns the complete conversations about a task."""
        columns = check_task(task, self._columns)
        group = self._conversations.begin(task, self.size)

        async def one(conversation: Conversation) -> None:
            async with turn():
                with span("conversation", sample=conversation.sample):
                    await self._conversations.run(
                        conversation,
                        session_id=f"group-{position}",
                        policy_version=policy_version,
                        seed_of=seeds_at(self._seeds, position, conversation.sample),
                        priority=self._priority_of(position),
                    )

        try:
            await together(one(conversation) for conversation in group)
            with span("rewards"):
                await self._rewards.add(group)
        finally:
            await self._conversations.end(group)
        return FunctionGroup(conversations=group, task=columns)

    def oldest(self, group: FunctionGroup) -> int:
        """Returns the policy version of a group's oldest token."""
        return oldest_version(group.conversations, self._versions)

    def spans(self, group: FunctionGroup) -> Iterator[TokenSpan]:
        """Yields policy version and number of tokens of each part of the responses."""
        for conversation in group.conversations:
            for turn in conversation.turns:
                yield from self._versions.spans(
                    turn.response.completion, turn.policy_version
                )

    def foreign(self, group: FunctionGroup) -> str | None:
        """Returns a weight version of the responses that another sender has sent."""
        return self._versions.foreign(
            turn.response.completion
            for conversation in group.conversations
            for turn in conversation.turns
        )

    def write(self, group: FunctionGroup) -> list[TensorDictBase]:
        """Returns a group in TorchRL's layout; see :class:`.GroupWriter`."""
        return list(self._writer.write(group.conversations, group.task))

    def record(self, group: FunctionGroup) -> list[ResponseRecord]:
        """Returns the responses of a group for :class:`.GroupEnded`."""
        return record_conversations(group.conversations, self._versions)

    def close(self) -> None:
        """Ends the threads of functions."""
        self._blocking.close()
