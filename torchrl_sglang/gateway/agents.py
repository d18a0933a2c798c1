"""Runs agents: programs in dialogue with a gateway, each in its own session."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torchrl_sglang.errors import ConfigurationError, GatewayError
from torchrl_sglang.gateway.responder import Responder
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.support.blocking import BlockingCalls
from torchrl_sglang.support.checks import as_reward
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.user_code import (
    CallTimeoutError,
    describe,
    together,
)

Agent: TypeAlias = Callable[..., Any]
"""``async def agent(task, *, base_url, api_key)``; it returns a reward, an
:class:`AgentResult`, or ``None`` if it sets rewards itself. A plain function runs in a
thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentResult:
    """The reward of an agent with further numbers for logs.

    Examples:
        >>> async def agent(task, *, base_url, api_key):
        ...     return AgentResult(reward=1.0, metrics={"tool_calls": 3})
    """

    reward: float | None
    """Reward of the session; ``None``: it is set elsewhere."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Name -> finite number. The mean over sessions is ``metrics/NAME`` in the logs of
    a run, and ``("next", "metrics", NAME)`` of the session's rows has the number."""


async def run_agents(
    gateway: Responder,
    agent: Agent,
    tasks: Sequence[Any],
    *,
    group_size: int,
    max_concurrent: int,
    timeout: float,
) -> list[list[Session]]:
    """Returns the sessions of each task, without failed agents.

    If all agents fail, the first failure is the cause of the error.
    """
    free, prefix = asyncio.Semaphore(max_concurrent), secrets.token_hex(8)
    blocking = BlockingCalls("torchrl_sglang-agents", max_concurrent)
    failures: list[Exception] = []

    name = getattr(agent, "__name__", type(agent).__name__)

    async def one(index: int, task: Any, group: str) -> Session | None:
        async with free:
            try:
                return await _run_in_session(
                    gateway, agent, task, group, blocking, timeout
                )
            except Exception as error:  # noqa: BLE001 - An agent raises anything.
                failures.append(error)
                torchrl_logger.warning(
                    f"The agent {name!r} failed at task {index}, {task!r:.200}, and "
                    f"its session is dropped: {describe(error)}"
                )
                return None

    runs = [
        one(index, task, f"{prefix}-{index}")
        for index, task in enumerate(tasks)
        for _ in range(group_size)
    ]
    try:
        sessions = await together(runs)
    finally:
        blocking.close()
    if failures and len(failures) == len(runs):
        raise GatewayError(
            f"All {len(runs)} agents failed, the first run of {name!r} with "
            f"{describe(failures[0])}."
        ) from failures[0]
    groups = (sessions[i : i + group_size] for i in range(0, len(runs), group_size))
    return [[session for session in group if session is not None] for group in groups]


async def _run_in_session(
    gateway: Responder,
    agent: Agent,
    task: Any,
    group: str,
    blocking: BlockingCalls,
    timeout: float,
) -> Session:
    session = gateway.session(group=group)
    try:
        result = await run_agent(
            agent, task, session, blocking=blocking, seconds=timeout
        )
        gateway.set_metrics(session, result.metrics)
    except BaseException as error:
        gateway.drop(session)
        if isinstance(error, CallTimeoutError):
            raise TimeoutError(f"It took longer than timeout={timeout} s.") from error
        raise
    if result.reward is not None:
        gateway.set_reward(session, result.reward)
    return session


async def run_agent(
    agent: Agent,
    task: Any,
    session: Session,
    *,
    blocking: BlockingCalls,
    seconds: float,
) -> AgentResult:
    """Runs an agent in its session and returns its reward and metrics."""
    value = await blocking.call(
        agent, task, base_url=session.base_url, api_key=session.key, seconds=seconds
    )
    result = value if isinstance(value, AgentResult) else AgentResult(reward=value)
    try:
        reward = None if result.reward is None else as_reward(result.reward)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"agent returned {value!r}; it returns a reward, a finite number, an "
            f"AgentResult, or None."
        ) from error
    return replace(result, reward=reward)
