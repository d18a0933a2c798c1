"""GroupKind and GroupMaker: the interface between a collector and its groups."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from tensordict import TensorDictBase

from torchrl_sglang.collectors.runtime.columns import check_names
from torchrl_sglang.collectors.runtime.stats import Meter
from torchrl_sglang.collectors.runtime.versions import PolicyVersions
from torchrl_sglang.collectors.timeouts import CollectorTimeouts
from torchrl_sglang.observer import ResponseRecord
from torchrl_sglang.requests.seeds import SampleSeeds, SeedOf, seeds_at
from torchrl_sglang.support.blocking import BlockingCalls
from torchrl_sglang.types import Completion

TokenSpan: TypeAlias = tuple[int, int]
"""Policy version and number of tokens."""

KeepsGroup: TypeAlias = Callable[
    [list[TensorDictBase], BlockingCalls, float], Awaitable[bool]
]
"""Decides on a group, from its rows; with threads and a timeout in seconds."""

ScoresGroup: TypeAlias = Callable[[TensorDictBase], TensorDictBase]
"""Returns the rows of a group, a stack, with further columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSetting:
    """The part of a collector that its groups use."""

    policy: Any
    """Continues conversations: an :class:`.SGLangWrapper`."""
    versions: PolicyVersions
    """Versions of its weights."""
    size: int
    """Conversations of a group."""
    query_key: str
    """Key of a task's prompt."""
    timeouts: CollectorTimeouts
    seeds: SampleSeeds | None
    """Seeds of responses; ``None`` for the policy's."""
    oldest_first: bool
    """Whether servers begin requests of groups that started earlier first."""

    def priority_of(self, position: int) -> int | None:
        """Returns the priority of a group's requests, by the position of its prompt."""
        return -position if self.oldest_first else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationSetting:
    """Settings of a conversation's requests."""

    session_id: str
    """Session of a router, the same for all conversations of a group."""
    policy_version: Callable[[], int]
    """Returns the number of weight updates so far."""
    seed_of: SeedOf | None = None
    """Returns the seed of a response; ``None`` for the policy's."""
    priority: int | None = None
    """Priority in a server's queue."""


class GroupKind(abc.ABC):
    """A kind of conversations, for ``AsyncLLMCollector(groups=...)``.

    Attributes:
        of_agents (bool): rows are a gateway's trajectories, each with the reward of its
            whole conversation. Defaults to False.
    """

    __slots__ = ()
    of_agents: ClassVar[bool] = False

    @abc.abstractmethod
    def maker(self, setting: GroupSetting) -> GroupMaker:
        """Returns a maker of groups, for one collector.

        Raises:
            ConfigurationError: if the collector's policy does not fit.
        """


class GroupMaker(abc.ABC):
    """Makes the groups of one collector.

    Args:
        setting: of the collector.
        columns: names that a row uses itself.
        num_threads: most threads for functions of the user.

    Attributes:
        size (int): conversations of a group.
        generating (Meter): conversations that wait for the engine.
    """

    def __init__(
        self, setting: GroupSetting, columns: frozenset[str], num_threads: int
    ) -> None:
        self.size = setting.size
        self.generating = Meter()
        self._setting = setting
        self._versions = setting.versions
        self._columns = columns
        self._blocking = BlockingCalls("torchrl_sglang-functions", num_threads)

    @abc.abstractmethod
    async def run(
        self,
        position: int,
        task: Mapping[str, Any],
        policy_version: Callable[[], int],
        turn: Callable[[], Any],
    ) -> Any:
        """Returns a complete group; each conversation runs inside ``turn()``.

        Args:
            position: of its prompt.
            task: element of the prompts.
            policy_version: returns the number of weight updates so far.
            turn: makes an async context manager.
        """

    def conversation_setting(
        self, position: int, sample: int, policy_version: Callable[[], int]
    ) -> ConversationSetting:
        """Returns the settings of a conversation's requests."""
        return ConversationSetting(
            session_id=f"group-{position}",
            policy_version=policy_version,
            seed_of=seeds_at(self._setting.seeds, position, sample),
            priority=self._setting.priority_of(position),
        )

    @abc.abstractmethod
    def turns(self, group: Any) -> Iterable[tuple[Completion, int]]:
        """Returns the trained responses of a group, and the policy version of each.

        The version is the policy's when the prompt was sent.
        """

    @abc.abstractmethod
    def write(self, group: Any) -> list[TensorDictBase]:
        """Returns a TensorDict for each turn, or each trajectory of an agent."""

    @abc.abstractmethod
    def record(self, group: Any) -> list[ResponseRecord]:
        """Returns the responses of a group for :class:`.GroupEnded`, in any thread."""

    def oldest(self, group: Any) -> int:
        """Returns the policy version of a group's oldest token."""
        return self._versions.oldest(self.turns(group))

    def spans(self, group: Any) -> Iterator[TokenSpan]:
        """Yields policy version and number of tokens of each part of the responses."""
        for completion, version in self.turns(group):
            yield from self._versions.spans(completion, version)

    def foreign(self, group: Any) -> str | None:
        """Returns a weight version of the responses that another sender has sent."""
        return self._versions.foreign(completion for completion, _ in self.turns(group))

    def check_columns(self, names: Iterable[str]) -> None:
        """Checks the names of a dataset's columns.

        Raises:
            ConfigurationError: if one is the name of a column of a batch.
        """
        check_names(names, self._columns, "a column of prompts")

    def close(self) -> None:
        """Frees the resources with which groups are made."""
        self._blocking.close()
