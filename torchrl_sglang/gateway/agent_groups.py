"""Groups of agents that talk to a gateway, a session for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase

from torchrl_sglang.collectors.groups.user_functions import check_call, name_of, naming
from torchrl_sglang.collectors.runtime.columns import (
    ROW_COLUMNS,
    check_task,
)
from torchrl_sglang.collectors.runtime.contract import (
    GroupKind,
    GroupMaker,
    GroupSetting,
)
from torchrl_sglang.errors import CollectionError, ConfigurationError
from torchrl_sglang.gateway.agents import Agent, run_agent
from torchrl_sglang.gateway.export import CONTAINERS, to_rows
from torchrl_sglang.gateway.recorded import record_session
from torchrl_sglang.gateway.responder import Responder
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.trajectories import Trajectory
from torchrl_sglang.observer import ResponseRecord
from torchrl_sglang.requests.token_columns import POLICY_VERSIONS
from torchrl_sglang.support.checks import check_count
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.tracing import remember, span
from torchrl_sglang.support.user_code import together
from torchrl_sglang.types import Completion


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentRun:
    """One call of an agent: its session and its task."""

    session: Session
    """Snapshot of the session at the end of the agent."""
    task: Mapping[str, Any]
    """Columns of the dataset element that the agent was given."""
    policy_version: int
    """Policy version when the agent began."""


AgentGroup = Sequence[AgentRun]

COLUMNS = ROW_COLUMNS | CONTAINERS
"""Names that a row of an agent uses itself."""


@dataclass(frozen=True, slots=True)
class AgentGroups(GroupKind):
    """Conversations of agents, programs that talk to a gateway.

    A batch has a row for each trajectory, in the layout of
    :meth:`.Gateway.to_tensordict`.

    Args:
        gateway (Gateway): its sampling parameters and template are used, and the engine
            is the policy's. It must have been started.
        agent: ``async def agent(task, *, base_url, api_key)`` with a client of OpenAI's
            or Anthropic's protocol. It returns a reward, or an :class:`.AgentResult`.
        num_threads (int): most threads for agents that are not coroutine functions.
            Defaults to 16.

    Raises:
        ConfigurationError: if an argument is wrong.

    Examples:
        >>> with Gateway(engine) as gateway:  # doctest: +SKIP
        ...     groups = AgentGroups(gateway, agent)
        ...     collector = AsyncLLMCollector(groups, policy=policy, prompts=tasks)
    """

    of_agents: ClassVar[bool] = True

    gateway: Responder
    agent: Agent
    num_threads: int = field(default=16, kw_only=True)

    def __post_init__(self) -> None:
        check_count("num_threads", self.num_threads)
        if not isinstance(self.gateway, Responder):
            raise ConfigurationError(
                f"An agent needs a gateway, got {self.gateway!r}; give "
                f"gateway=Gateway(engine)."
            )

    def maker(self, setting: GroupSetting) -> AgentGroupMaker:
        """Returns a maker of groups, for one collector.

        Raises:
            ConfigurationError: if the gateway has another engine than the policy, or
                the agent takes other arguments.
        """
        if self.gateway.engine is not setting.policy.model:
            raise ConfigurationError(
                "The gateway and the policy have different engines; make the gateway "
                "with policy.model."
            )
        return AgentGroupMaker(self, setting)


class AgentGroupMaker(GroupMaker):
    """Runs groups of agents, and writes their trajectories."""

    def __init__(self, groups: AgentGroups, setting: GroupSetting) -> None:
        self._agent, self._gateway = groups.agent, groups.gateway
        columns = {column.name for column in self._gateway.token_columns}
        super().__init__(setting, COLUMNS | columns, groups.num_threads)
        self._role = f"The agent {name_of(self._agent)!r}"
        self._told = False
        check_call(self._role, self._agent, "task", base_url="", api_key="")

    async def run(
        self,
        position: int,
        task: Mapping[str, Any],
        policy_version: Callable[[], int],
        turn: Callable[[], Any],
    ) -> AgentGroup:
        """Returns a complete group of agents with the same task."""
        columns = check_task(task, self._columns)

        async def one() -> AgentRun:
            async with turn():
                return await self._run(position, dict(task), columns, policy_version())

        return await together(one() for _ in range(self.size))

    async def _run(
        self,
        position: int,
        task: dict[str, Any],
        columns: Mapping[str, Any],
        policy_version: int,
    ) -> AgentRun:
        session = self._gateway.session(group=f"group-{position}")
        session.priority = self._setting.priority_of(position)
        self.generating.add(1)
        try:
            with naming(self._role), span("agent", session=session.name):
                remember(session)
                result = await run_agent(
                    self._agent,
                    task,
                    session,
                    blocking=self._blocking,
                    seconds=self._setting.timeouts.agent,
                )
        finally:
            self.generating.add(-1)
            # The group keeps what it said.
            self._gateway.drop(session)
        session.set_metrics(result.metrics)
        if result.reward is not None:
            session.set_reward(result.reward)
        if not session.turns:
            raise CollectionError(
                "An agent ended without a request to its session that was answered; "
                "its client has to use the base_url and the api_key that it is called "
                "with, and to wait for the answer."
            )
        # The agent's client may still have requests in flight: hence a snapshot.
        snapshot = session.snapshot()
        if not any(map(snapshot.is_trained, snapshot.turns)):
            models = sorted({repr(turn.model) for turn in snapshot.turns})
            raise CollectionError(
                f"An agent ended without a turn that the gateway's rule trained=... "
                f"selects; its requests name the models {', '.join(models)}."
            )
        if not (self._told or snapshot.has_reward):
            self._told = True
            torchrl_logger.warning(
                f"{self._role} returned no reward, and none was set: 0 is trained on. "
                f"Return one, or set it with set_reward() before the agent ends. This "
                f"is said once."
            )
        return AgentRun(session=snapshot, task=columns, policy_version=policy_version)

    def turns(self, group: AgentGroup) -> Iterator[tuple[Completion, int]]:
        """Yields the trained responses of a group, and the policy version of each."""
        for run in group:
            for turn in filter(run.session.is_trained, run.session.turns):
                yield turn.completion, run.policy_version

    def write(self, group: AgentGroup) -> list[TensorDictBase]:
        """Returns a TensorDict for each trajectory, in the layout of the gateway."""
        rows: list[TensorDictBase] = []
        for run in group:
            oldest = self.oldest([run])
            trajectories = run.session.trajectories()
            for row, path in zip(to_rows([run.session]), trajectories, strict=True):
                row.set("policy_version", torch.full((), oldest))
                row.set(POLICY_VERSIONS, self._of_tokens(path, run.policy_version))
                for name, value in run.task.items():
                    row.set(name, value)
                rows.append(row)
        return rows

    def record(self, group: AgentGroup) -> list[ResponseRecord]:
        """Returns the responses of a group for :class:`.GroupEnded`."""
        return [
            record_session(
                run.session,
                partial(self._versions.spans, sent=run.policy_version),
            )
            for run in group
        ]

    def _of_tokens(self, path: Trajectory, sent: int) -> torch.Tensor:
        """Returns versions of the tokens after the first prompt; -1 for others'."""
        versions = torch.full((len(path.token_ids),), -1)
        for turn, _, start, end in path.spans():
            versions[start:end] = self._versions.of_tokens(turn.completion, sent)
        return versions[len(path.turns[0].prompt.token_ids) :]
