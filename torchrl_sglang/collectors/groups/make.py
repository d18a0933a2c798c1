"""Which groups a collector makes: of an agent, of environments or of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrl.envs import EnvBase

from torchrl_sglang.collectors.groups.agents import AgentGroups
from torchrl_sglang.collectors.groups.conversations import Conversations
from torchrl_sglang.collectors.groups.environments import EnvironmentGroups
from torchrl_sglang.collectors.groups.functions import FunctionGroups
from torchrl_sglang.collectors.groups.rewards import Rewards
from torchrl_sglang.collectors.groups.rows import GroupWriter
from torchrl_sglang.collectors.groups.versions import PolicyVersions
from torchrl_sglang.collectors.runtime.contract import Groups
from torchrl_sglang.collectors.scheduling.priority import PriorityOf
from torchrl_sglang.collectors.timeouts import CollectorTimeouts
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.gateway import Gateway
from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper
from torchrl_sglang.policies.turns import TurnCodec
from torchrl_sglang.requests.seeds import SampleSeeds
from torchrl_sglang.support.blocking import BlockingCalls
from torchrl_sglang.support.log import torchrl_logger


def make_groups(
    env: Callable[[], EnvBase] | None,
    policy: SGLangWrapper,
    versions: PolicyVersions,
    *,
    group_size: int,
    timeouts: CollectorTimeouts,
    blocking: BlockingCalls,
    seeds: SampleSeeds | None,
    priority_of: PriorityOf,
    agent: Any,
    gateway: Any,
    **functions: Any,
) -> Groups:
    """Returns the maker of groups: of environments, of agents or of plain functions.

    Args:
        env: makes an environment of TorchRL.
        policy: what generates.
        versions: of the weights.
        group_size: conversations of a group.
        timeouts: of the collector.
        blocking: threads of the user's functions.
        seeds: of samples; None: the engine's own randomness.
        priority_of: the priority of a group's requests.
        agent: writes a whole conversation.
        gateway: an agent's endpoint.
        functions: arguments of :class:`.Conversations`, and both kinds of rewards.

    Raises:
        ConfigurationError: if there is more than one way to make a conversation, or an
            agent has no gateway of this policy's engine.
    """
    given = [
        name
        for name, value in functions.items()
        if value is not None and name != "query_key"
    ]
    if agent is not None:
        if given or env is not None:
            raise ConfigurationError(
                f"{' and '.join(given) or 'env'} cannot be given with agent, which is "
                f"the whole conversation."
            )
        return AgentGroups(
            agent,
            _check_gateway(gateway, policy),
            versions,
            size=group_size,
            seconds=timeouts.agent,
            blocking=blocking,
            priority_of=priority_of,
        )
    if gateway is not None:
        raise ConfigurationError("gateway is for agents; give an agent, too.")
    options: dict[str, Any] = {
        "timeouts": timeouts,
        "blocking": blocking,
        "seeds": seeds,
        "priority_of": priority_of,
    }
    if env is None:
        return _of_functions(policy, versions, group_size, **options, **functions)
    if given:
        raise ConfigurationError(
            f"{' and '.join(given)} cannot be given with env, whose transforms say "
            f"what a conversation is."
        )
    return EnvironmentGroups(env, policy, versions, size=group_size, **options)


def _of_functions(
    policy: SGLangWrapper,
    versions: PolicyVersions,
    size: int,
    *,
    rewards: Any,
    group_rewards: Any,
    timeouts: CollectorTimeouts,
    blocking: BlockingCalls,
    seeds: SampleSeeds | None,
    priority_of: PriorityOf,
    **functions: Any,
) -> Groups:
    rewarded = Rewards(
        rewards,
        group_rewards,
        seconds=timeouts.reward,
        blocking=blocking,
        query_key=functions["query_key"],
    )
    tools = functions["tools"]
    codec = TurnCodec(policy, () if tools is None else tools.schemas)
    if tools is not None and not codec.tells_of_tools():
        torchrl_logger.warning(
            "The chat template says nothing of tools, so that the policy does not know "
            "that it can call some. Tell it in system_prompt or in the prompts, or "
            "give the policy another chat_template."
        )
    if not rewarded and functions["step"] is None:
        torchrl_logger.warning(
            "There are neither rewards nor group_rewards, nor a step that could set "
            "rewards: all rewards will be 0."
        )
    return FunctionGroups(
        Conversations(codec, timeouts=timeouts, blocking=blocking, **functions),
        rewarded,
        GroupWriter(codec, versions),
        versions,
        size=size,
        blocking=blocking,
        seeds=seeds,
        priority_of=priority_of,
    )


def _check_gateway(gateway: Any, policy: SGLangWrapper) -> Gateway:
    if not isinstance(gateway, Gateway):
        raise ConfigurationError(
            f"An agent needs a gateway, got {gateway!r}; give gateway=Gateway(engine)."
        )
    if gateway.engine is not policy.model:
        raise ConfigurationError(
            "The gateway and the policy have different engines; make the gateway with "
            "policy.model."
        )
    return gateway
