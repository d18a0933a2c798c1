"""Groups of agents that talk to a gateway, a session for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_sglang.collectors.groups.rows import (
    ROW_COLUMNS,
    check_names,
    check_task,
)
from torchrl_sglang.collectors.groups.user_functions import check_call, name_of, naming
from torchrl_sglang.collectors.groups.versions import PolicyVersions
from torchrl_sglang.collectors.runtime.contract import TokenSpan
from torchrl_sglang.collectors.runtime.stats import Meter
from torchrl_sglang.collectors.scheduling.priority import PriorityOf, no_priority
from torchrl_sglang.errors import CollectionError
from torchrl_sglang.gateway.agents import Agent, run_agent
from torchrl_sglang.gateway.export import CONTAINERS, to_rows
from torchrl_sglang.gateway.gateway import Gateway
from torchrl_sglang.gateway.recorded import record_session
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.trajectories import Trajectory
from torchrl_sglang.gateway.turns import Turn
from torchrl_sglang.objectives.columns import POLICY_VERSIONS
from torchrl_sglang.observer import ResponseRecord
from torchrl_sglang.support.blocking import BlockingCalls
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.tracing import remember, span
from torchrl_sglang.support.user_code import together


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentRun:
    """One call of an agent: its session and its task."""

    session: Session
    """Turns and reward of the agent when it ended."""
    task: Mapping[str, Any]
    """Columns of the dataset element that the agent was given."""
    policy_version: int
    """Policy version when the agent began."""


AgentGroup = Sequence[AgentRun]

COLUMNS = ROW_COLUMNS | CONTAINERS
"""Names that a row of an agent uses itself."""


class AgentGroups:
    """Runs groups of agents, and writes their trajectories.

    Args:
        agent: as for :meth:`.Gateway.run_agents`.
        gateway: that they talk to.
        versions: of the policy.
        size: agents of a group.
        seconds: timeout of an agent.
        blocking: threads, which end with the collector.
        priority_of: the priority of a group's requests.

    Attributes:
        columns (frozenset of str): names that a row uses itself.
    """

    def __init__(
        self,
        agent: Agent,
        gateway: Gateway,
        versions: PolicyVersions,
        *,
        size: int,
        seconds: float,
        blocking: BlockingCalls,
        priority_of: PriorityOf = no_priority,
    ) -> None:
        self.size = size
        self.columns = COLUMNS | {column.name for column in gateway.token_columns}
        self.generating = Meter()
        self._agent = agent
        self._gateway = gateway
        self._versions = versions
        self._seconds = seconds
        self._blocking = blocking
        self._priority_of = priority_of
        self._role = f"The agent {name_of(agent)!r}"
        self._told = False
        check_call(self._role, agent, "task", base_url="", api_key="")

    def check_columns(self, names: Iterable[str]) -> None:
        """Checks the names of a dataset's columns; see :func:`.check_names`."""
        check_names(names, self.columns, "a column of prompts")

    async def run(
        self,
        position: int,
        task: Mapping[str, Any],
        policy_version: Callable[[], int],
        turn: Callable[[], Any],
    ) -> AgentGroup:
        """Returns a complete group of agents with the same task."""
        columns = check_task(task, self.columns)

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
        session.priority = self._priority_of(position)
        self.generating.add(1)
        try:
            with naming(self._role), span("agent", session=session.name):
                remember(session)
                reward = await run_agent(
                    self._agent,
                    task,
                    session,
                    blocking=self._blocking,
                    seconds=self._seconds,
                )
        finally:
            self.generating.add(-1)
            # The group keeps what it said.
            self._gateway.drop(session)
        if reward is not None:
            session.set_reward(reward)
        if not session.turns:
            raise CollectionError(
                "An agent ended without a request to its session that was answered; "
                "its client has to use the base_url and the api_key that it is called "
                "with, and to wait for the answer."
            )
        # The agent's client may still have requests in flight: hence a snapshot.
        ended = session.snapshot()
        if not any(map(ended.is_trained, ended.turns)):
            models = sorted({repr(turn.model) for turn in ended.turns})
            raise CollectionError(
                f"An agent ended without a turn that the gateway's rule trained=... "
                f"selects; its requests name the models {', '.join(models)}."
            )
        if not (self._told or ended.has_reward):
            self._told = True
            torchrl_logger.warning(
                f"{self._role} returned no reward, and none was set: 0 is trained on. "
                f"Return one, or set it with set_reward() before the agent ends. This "
                f"is said once."
            )
        return AgentRun(session=ended, task=columns, policy_version=policy_version)

    def oldest(self, group: AgentGroup) -> int:
        """Returns the policy version of a group's oldest token."""
        return self._versions.oldest(
            (turn.completion, run.policy_version) for run, turn in _turns(group)
        )

    def spans(self, group: AgentGroup) -> Iterator[TokenSpan]:
        """Yields policy version and number of tokens of each part of the responses."""
        for run, turn in _turns(group):
            yield from self._versions.spans(turn.completion, run.policy_version)

    def foreign(self, group: AgentGroup) -> str | None:
        """Returns a weight version of the responses that another sender has sent."""
        return self._versions.foreign(turn.completion for _, turn in _turns(group))

    def write(self, group: AgentGroup) -> list[TensorDictBase]:
        """Returns a TensorDict for each trajectory, in the layout of the gateway."""
        rows: list[TensorDictBase] = []
        for run in group:
            oldest = self._versions.oldest(
                (turn.completion, run.policy_version) for _, turn in _turns([run])
            )
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
        """Returns versions of what follows the first prompt; -1 for others' tokens."""
        versions = torch.full((len(path.token_ids),), -1)
        for turn, _, start, end in path.spans():
            versions[start:end] = self._versions.of_tokens(turn.completion, sent)
        return versions[len(path.turns[0].prompt.token_ids) :]

    def close(self) -> None:
        """Ends the threads."""
        self._blocking.close()


def _turns(group: AgentGroup) -> Iterator[tuple[AgentRun, Turn]]:
    """Yields the turns that are trained."""
    for run in group:
        for turn in filter(run.session.is_trained, run.session.turns):
            yield run, turn
