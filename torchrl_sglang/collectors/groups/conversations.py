"""Conversations of plain functions: no TensorDict until their group is complete.

A conversation begins with the messages of a task. The policy responds; the results of
its tool calls and the function ``step`` are the next messages, until there are none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torchrl_sglang.chat.messages import Message, from_row, read_messages
from torchrl_sglang.collectors.groups.endings import Endings, warn
from torchrl_sglang.collectors.groups.tools import Tools, wants_calls_in_message
from torchrl_sglang.collectors.groups.user_functions import check_call, name_of, naming
from torchrl_sglang.collectors.runtime.contract import ConversationSetting
from torchrl_sglang.collectors.runtime.stats import Meter
from torchrl_sglang.collectors.timeouts import CollectorTimeouts
from torchrl_sglang.errors import ConfigurationError, TaskError
from torchrl_sglang.policies.turns import ConversationTurn, EncodedPrompt, TurnCodec
from torchrl_sglang.support.blocking import BlockingCalls
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.texts import check_text
from torchrl_sglang.support.tracing import span
from torchrl_sglang.support.user_code import together

Task: TypeAlias = Mapping[str, Any]
"""An element of the prompts."""

_STEP = "The function step={!r}"


@dataclass(kw_only=True, eq=False, slots=True)
class Conversation:
    """A conversation between an environment and the policy.

    Reward functions and ``step`` get it, and tools that have a parameter
    ``conversation``. They may read everything, change the rewards of turns, and keep
    what they like in ``state``: a sandbox of this conversation, for example, which a
    function given to :meth:`at_end` closes.
    """

    task: Task
    """The element of the prompts that it is about: a dict of its own. What functions
    change in it is not written to the batch."""
    sample: int
    """Number of this conversation in its group."""
    messages: list[Message]
    """All messages so far."""
    turns: list[ConversationTurn] = field(default_factory=list)
    """The responses of the policy so far."""
    truncated: bool = False
    """Whether the number of turns or the context's length ended the conversation."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Values of the reward functions that have a name."""
    state: dict[str, Any] = field(default_factory=dict)
    """Values that the user's functions keep."""
    opening: EncodedPrompt
    """Prompt of the first turn; the same for all conversations of a group."""
    _endings: Endings = field(default_factory=Endings)

    def at_end(self, function: Callable[[], Any]) -> None:
        """Calls a function when the conversation has been scored, or has failed.

        The functions are called once each, the last one first, in threads of the
        collector or, if they are coroutine functions, on its event loop. One that is
        given after the end is called at once. What they raise is logged. A shutdown
        waits half of its timeout for them; what is left then is called in threads that
        end with the process.
        """
        self._endings.add(function)

    @property
    def response(self) -> str:
        """Text of the last response, without the end that the template writes."""
        return self.turns[-1].message


Step: TypeAlias = Callable[
    [Conversation, Task],
    "Awaitable[str | Message | Sequence[Message] | None]",
]
"""Returns the next message to the policy; ``None`` ends the conversation."""


class Conversations:
    """Runs conversations of plain functions.

    Attributes:
        generating (Meter): conversations that wait for the engine.
    """

    def __init__(
        self,
        codec: TurnCodec,
        *,
        query_key: str,
        system_prompt: str | None,
        step: Step | None,
        tools: Tools | None,
        max_turns: int | None,
        timeouts: CollectorTimeouts,
        blocking: BlockingCalls,
    ) -> None:
        self.generating = Meter()
        self._codec = codec
        self._query_key = query_key
        if system_prompt is not None:
            check_text("system_prompt", system_prompt)
        self._system_prompt = system_prompt
        self._step = step
        self._tools = tools
        self._max_turns = max_turns
        self._timeouts = timeouts
        self._blocking = blocking
        self._writes_calls = tools is not None and wants_calls_in_message(
            codec.encode, system_prompt
        )

    def begin(self, task: Task, size: int) -> list[Conversation]:
        """Returns the conversations of a group, before their first response."""
        try:
            messages = first_messages(task, self._query_key, self._system_prompt)
            opening = self._codec.encode(messages)
        except TaskError:
            raise
        except ConfigurationError as error:
            raise TaskError(str(error)) from error
        if not self._codec.fits(opening):
            raise TaskError(
                f"The prompt has {len(opening.token_ids)} tokens, and a response to it "
                f"needs room: a prompt has at most {self._codec.longest} tokens."
            )
        return [
            Conversation(
                task=dict(task), sample=sample, messages=list(messages), opening=opening
            )
            for sample in range(size)
        ]

    async def run(
        self, conversation: Conversation, setting: ConversationSetting
    ) -> None:
        """Runs a conversation to its end."""
        messages: list[Message] | None = []
        while messages is not None:
            conversation.messages.extend(messages)
            if not await self._respond(conversation, setting):
                conversation.truncated = True
                return
            messages = await self._reply(conversation)
            if messages is not None and len(conversation.turns) == self._max_turns:
                conversation.messages.extend(messages)
                conversation.truncated = True
                return

    async def end(self, conversations: Sequence[Conversation]) -> None:
        """Calls the clean-up that their functions asked for, side by side."""
        current = asyncio.current_task()
        ending = asyncio.ensure_future(together(map(self._end, conversations)))
        try:
            if current is None or not current.cancelling():
                await asyncio.shield(ending)
        finally:
            # At a shutdown. Otherwise they have been called.
            await asyncio.wait([ending], timeout=self._timeouts.shutdown / 2)
            if not ending.done():
                ending.cancel()
                was_called = [
                    conversation._endings.call_in_thread()
                    for conversation in conversations
                ]
                torchrl_logger.warning(
                    f"Functions that {len(was_called)} conversations left for their "
                    f"end took too long for the shutdown; those of {sum(was_called)} "
                    f"that were not called yet are called in threads."
                )

    async def _end(self, conversation: Conversation) -> None:
        for function in conversation._endings.take():
            try:
                await self._blocking.call(function, seconds=self._timeouts.step)
            except Exception as error:  # noqa: BLE001 - A user's function raises anything.
                warn(function, error)

    async def _respond(
        self, conversation: Conversation, setting: ConversationSetting
    ) -> bool:
        """Adds a response; returns False if the context has no room for one."""
        turns = conversation.turns
        prompt = conversation.opening
        if turns:
            prompt = self._codec.encode(conversation.messages, turns[-1])
            if not self._codec.fits(prompt):
                return False
        version, seed_of = setting.policy_version(), setting.seed_of
        self.generating.add(1)
        with span("turn", number=len(turns), policy_version=version):
            try:
                turn = await self._codec.respond(
                    prompt,
                    sample=conversation.sample,
                    seed=seed_of and seed_of(len(turns), prompt.token_ids),
                    session_id=setting.session_id,
                    priority=setting.priority,
                    policy_version=version,
                    timeout=self._timeouts.turn,
                )
            finally:
                self.generating.add(-1)
        turns.append(turn)
        conversation.messages.append({"role": "assistant", "content": turn.message})
        return True

    async def _reply(self, conversation: Conversation) -> list[Message] | None:
        """Returns the next message, or ``None`` at the end."""
        if self._tools is not None:
            answers = await self._tools.answer(
                conversation,
                self._blocking,
                self._timeouts.step,
                any_id=self._codec.takes_any_id,
            )
            if answers and self._writes_calls:
                calls = [answer.call_message for answer in answers]
                message = conversation.messages[-1]
                conversation.messages[-1] = {**message, "tool_calls": calls}
            if answers:
                return [answer.message for answer in answers]
        if self._step is None:
            return None
        with naming(_STEP.format(name_of(self._step))), span("step"):
            message = await self._blocking.call(
                self._step, conversation, conversation.task, seconds=self._timeouts.step
            )
        return None if message is None else read_messages(message, "step")


def first_messages(
    task: Task, query_key: str, system_prompt: str | None
) -> list[Message]:
    """Returns the messages before the first response to a task."""
    if query_key not in task:
        raise TaskError(
            f"A task has no {query_key!r}; it has {sorted(map(str, task))}. "
            f"Name the key of the prompt with query_key."
        )
    name = f"task[{query_key!r}]"
    messages = read_messages(from_row(task[query_key]), name)
    if system_prompt is None:
        return messages
    if any(message["role"] == "system" for message in messages):
        raise TaskError(
            f"{name} has a system message of its own, beside system_prompt; leave one "
            f"of them out."
        )
    system = {"role": "system", "content": system_prompt}
    return [*read_messages(system, "system_prompt"), *messages]


def check_step(step: Step) -> None:
    """Raises :class:`.ConfigurationError` if a step cannot be called as it will be."""
    if not callable(step):
        raise ConfigurationError(
            f"step={step!r} must be a function of a conversation and its task, which "
            f"returns what the user says next."
        )
    check_call(_STEP.format(name_of(step)), step, "conversation", "task")
