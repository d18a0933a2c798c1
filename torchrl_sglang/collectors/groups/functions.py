"""Groups of conversations that plain functions continue and score."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from torchrl_sglang.collectors.groups.conversations import (
    Conversation,
    Conversations,
    Step,
    check_step,
)
from torchrl_sglang.collectors.groups.mcp_tools import McpServers, without_servers
from torchrl_sglang.collectors.groups.recorded import record_conversation
from torchrl_sglang.collectors.groups.reward_functions import RewardFunctions
from torchrl_sglang.collectors.groups.rewards import Rewards
from torchrl_sglang.collectors.groups.rows import GroupWriter
from torchrl_sglang.collectors.groups.tools import (
    ToolFunctions,
    Tools,
    parse_tool_calls,
)
from torchrl_sglang.collectors.runtime.columns import check_names, check_task
from torchrl_sglang.collectors.runtime.contract import (
    GroupKind,
    GroupMaker,
    GroupSetting,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.observer import ResponseRecord
from torchrl_sglang.policies.turns import TurnCodec
from torchrl_sglang.support.checks import check_count
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.tracing import span
from torchrl_sglang.support.user_code import together
from torchrl_sglang.types import Completion


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionGroup:
    """Complete conversations about a task."""

    conversations: Sequence[Conversation]
    task: Mapping[str, Any]
    """Columns of the dataset element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionGroups(GroupKind):
    """Conversations that plain functions continue and score, the fastest kind.

    A conversation begins with the prompt of a task; the policy responds; ``tools`` that
    it called and ``step`` give the next messages; reward functions score the end.

    Keyword Args:
        rewards: a function ``(conversation, task) -> float``, a list of them, or a
            mapping of names to them, or to ``(function, weight)``. Values are finite
            numbers; their weighted sum is in ``("next", "reward")`` of the last turn,
            and each named value is, without weight, under ``("next", name)``. Coroutine
            functions run on the collector's event loop, others in threads. Functions
            with TRL's (``prompts, completions, **columns``) or verl's signature
            (``data_source, solution_str, ground_truth, extra_info``) are called like
            there.
        group_rewards: likewise functions ``(conversations, task) -> list of float`` of
            a whole group.
        step: a function or coroutine function ``(conversation, task)`` that is called
            after each response and returns the next message: a text of the user, a
            message, a list of messages, or ``None`` to end the conversation. It can
            set ``conversation.turns[-1].reward``.
        tools: functions that the policy can call, or a mapping of names to them. The
            chat template describes them to the policy: by their type hints and
            docstrings, as ``transformers.utils.get_json_schema`` reads them, or by a
            schema in place of these, with ``{name: (function, schema)}``. The URL of an
            MCP server, or an :class:`.McpServer`, stands for all of its tools; in a
            mapping, they are named ``NAME_tool``. They are read once, at the start. A
            parameter
            ``conversation`` is not the policy's: the tool gets the
            :class:`.Conversation`, with its task and its state. Their results are
            messages of the role ``"tool"`` with ``tool_call_id`` and ``name``; while a
            response calls tools, ``step`` is not called. A call that cannot be read, of
            a missing tool, or that fails or takes too long has an error as its result.
            The chat template has to take such messages.
        tool_parser: finds the calls in a response without its reasoning; a parser for
            TorchRL's ``ExecuteToolsInOrder``, such as ``XMLBlockParser()``. Defaults to
            Qwen's and Hermes's format.
        max_turns (int, optional): most responses of a conversation, which is truncated
            then. Defaults to as many as fit into the context.
        system_prompt (str, optional): a message before the prompt. A prompt with a
            system message of its own is refused then.
        num_threads (int): most threads for functions that are not coroutines. Defaults
            to 16.

    Raises:
        ConfigurationError: if an argument is wrong.

    Examples:
        >>> groups = FunctionGroups(
        ...     rewards=lambda conversation, task: float("2" in conversation.response),
        ...     max_turns=1,
        ... )
        >>> groups.num_threads
        16
    """

    rewards: RewardFunctions | None = None
    group_rewards: RewardFunctions | None = None
    step: Step | None = None
    tools: ToolFunctions | None = None
    tool_parser: Callable[[str], Any] = parse_tool_calls
    max_turns: int | None = None
    system_prompt: str | None = None
    num_threads: int = 16

    def __post_init__(self) -> None:
        check_count("num_threads", self.num_threads)
        if self.max_turns is not None:
            check_count("max_turns", self.max_turns)
        if self.step is not None:
            check_step(self.step)
        if not callable(self.tool_parser):
            raise ConfigurationError(
                f"tool_parser must be a function, got {self.tool_parser!r}."
            )
        if self.tools is not None:
            Tools(without_servers(self.tools))
        prompt = self.system_prompt
        if prompt is not None and not isinstance(prompt, str):
            raise ConfigurationError(f"system_prompt must be a text, got {prompt!r}.")

    def maker(self, setting: GroupSetting) -> FunctionGroupMaker:
        """Returns a maker of groups, for one collector.

        Raises:
            ConfigurationError: if a function or a tool is wrong, or the policy's chat
                template does not take tools.
        """
        return FunctionGroupMaker(self, setting)


class FunctionGroupMaker(GroupMaker):
    """Runs groups of conversations, and writes them."""

    def __init__(self, groups: FunctionGroups, setting: GroupSetting) -> None:
        self._servers = McpServers(groups.tools)
        try:
            self._set_up(groups, setting)
        except BaseException:
            self._servers.close()
            raise

    def _set_up(self, groups: FunctionGroups, setting: GroupSetting) -> None:
        functions = self._servers.tools
        tools = None if functions is None else Tools(functions, groups.tool_parser)
        codec = TurnCodec(setting.policy, () if tools is None else tools.schemas)
        self._writer = GroupWriter(codec, setting.versions)
        super().__init__(setting, self._writer.columns, groups.num_threads)
        self._rewards = Rewards(
            groups.rewards,
            groups.group_rewards,
            seconds=setting.timeouts.reward,
            blocking=self._blocking,
            query_key=setting.query_key,
        )
        check_names(self._rewards.names, self._columns, "a reward")
        self._columns |= frozenset(self._rewards.names)
        if tools is not None and not codec.renders_tools():
            torchrl_logger.warning(
                "The chat template says nothing of tools, so that the policy does not "
                "know that it can call some. Tell it in system_prompt or in the "
                "prompts, or give the policy another chat_template."
            )
        if not self._rewards and groups.step is None:
            torchrl_logger.warning(
                "There are neither rewards nor group_rewards, nor a step that could "
                "set rewards: all rewards will be 0."
            )
        self._conversations = Conversations(
            codec,
            query_key=setting.query_key,
            system_prompt=groups.system_prompt,
            step=groups.step,
            tools=tools,
            max_turns=groups.max_turns,
            timeouts=setting.timeouts,
            blocking=self._blocking,
        )
        self.generating = self._conversations.generating

    def check_columns(self, names: Iterable[str]) -> None:
        """Checks the names of a dataset's columns."""
        columns = list(names)
        super().check_columns(columns)
        self._rewards.check_columns(columns)

    def close(self) -> None:
        """Frees threads and connections to MCP servers."""
        super().close()
        self._servers.close()

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
                    setting = self.conversation_setting(
                        position, conversation.sample, policy_version
                    )
                    await self._conversations.run(conversation, setting)

        try:
            await together(one(conversation) for conversation in group)
            with span("rewards"):
                await self._rewards.add(group)
        finally:
            await self._conversations.end(group)
        return FunctionGroup(conversations=group, task=columns)

    def turns(self, group: FunctionGroup) -> Iterator[tuple[Completion, int]]:
        """Yields the responses of a group, and the policy version of each."""
        for conversation in group.conversations:
            for turn in conversation.turns:
                yield turn.completion, turn.policy_version

    def write(self, group: FunctionGroup) -> list[TensorDictBase]:
        """Returns a group in TorchRL's layout; see :class:`.GroupWriter`."""
        return list(self._writer.write(group.conversations, group.task))

    def record(self, group: FunctionGroup) -> list[ResponseRecord]:
        """Returns the responses of a group for :class:`.GroupEnded`."""
        return [
            record_conversation(conversation, self._versions)
            for conversation in group.conversations
        ]
