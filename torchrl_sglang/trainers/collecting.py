"""Collectors of a run, as its arguments ask for them: of training and of evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from torchrl_sglang.chat.messages import Message, check_last_message
from torchrl_sglang.collectors.async_llm_collector import AsyncLLMCollector
from torchrl_sglang.collectors.groups.agents import COLUMNS as AGENT_COLUMNS
from torchrl_sglang.collectors.groups.conversations import first_messages
from torchrl_sglang.collectors.groups.filter import make_filter
from torchrl_sglang.collectors.groups.reward_functions import RewardFunction
from torchrl_sglang.collectors.groups.rows import (
    POLICY_COLUMNS,
    ROW_COLUMNS,
    TURN_COLUMNS,
)
from torchrl_sglang.collectors.options import check_options
from torchrl_sglang.collectors.scheduling.prompts import (
    Passes,
    is_read_by_index,
    to_task,
)
from torchrl_sglang.objectives.advantages import (
    TrajectoryReturn,
    conversation_returns,
)
from torchrl_sglang.recording.recorder import RunRecorder
from torchrl_sglang.support.checks import check_keywords
from torchrl_sglang.trainers.arguments import (
    NOT_OF_A_FUNCTION,
    check_collector,
    check_functions,
    check_groups,
    check_made,
)
from torchrl_sglang.trainers.samples import plain
from torchrl_sglang.trainers.serving import Served
from torchrl_sglang.trainers.tasks import as_list, check_prompts

GREEDY: Mapping[str, Any] = {"temperature": 0.0, "top_p": 1.0}
"""Sampling parameters of evaluation that differ from a run's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collecting:
    """What a run collects, and how. The arguments are those of ``GRPO``."""

    prompts: Any
    eval_prompts: Any
    functions: Mapping[str, Any]
    """Rewards, tools and others that make conversations, as the collector has them."""
    agent: Any
    env: Callable[[], Any] | None
    query_key: str
    group_size: int
    groups_per_batch: int
    groups: int | None
    """Groups in all; ``None`` if only reading the prompts tells."""
    epochs: int
    max_staleness: int
    on_stale: str
    keep_group: Callable[..., bool] | None
    collector: Any
    seed: int
    deterministic: bool

    def __post_init__(self) -> None:
        whole = {"agent": self.agent, "env": self.env}
        options = {name: getattr(self, name) for name in NOT_OF_A_FUNCTION}
        check_collector(self.collector, {**self.functions, **whole}, options)
        rewards: dict[tuple[str, str], RewardFunction] = {}
        if not callable(self.collector):
            if not any(whole.values()):
                rewards = check_functions(self.functions, self.query_key)
            self._check_prompts("prompts", self.prompts, rewards)
        check_options({"on_stale": self.on_stale})
        if self.eval_prompts is not None:
            # Read at every evaluation.
            tasks = as_list("eval_prompts", self.eval_prompts)
            object.__setattr__(self, "eval_prompts", tasks)
            if not callable(self.collector):
                self._check_prompts("eval_prompts", tasks, rewards)
        make_filter(self.keep_group, of_agents=self.agent is not None)
        if isinstance(self.collector, Mapping):
            check_keywords("collector", self.collector, AsyncLLMCollector)
            check_options({**self.functions, **whole, **self.collector})

    def _check_prompts(
        self,
        name: str,
        prompts: Any,
        rewards: Mapping[tuple[str, str], RewardFunction],
    ) -> None:
        """Checks tasks that can be seen, as :func:`.check_prompts` does."""
        # What an agent or an environment reads is its own.
        query_key = None if self.agent or self.env else self.query_key
        taken = ROW_COLUMNS | POLICY_COLUMNS
        if self.agent is not None:
            taken = AGENT_COLUMNS
        elif self.env is None:
            taken |= TURN_COLUMNS | {n for _, n in rewards if not n.isdigit()}
        check_prompts(name, prompts, query_key, taken, list(rewards.values()))

    @property
    def steps(self) -> int | None:
        """Batches in all; the last one may be smaller."""
        groups, size = self.groups, self.groups_per_batch
        return None if groups is None else math.ceil(groups / size)

    def opening(self) -> list[Message]:
        """Returns the messages of the first prompt; none if they are not known.

        Raises:
            ConfigurationError: if they are no prompt.
        """
        if callable(self.collector) or self.agent is not None or self.env is not None:
            return []
        task: Mapping[str, Any] = {self.query_key: "?"}
        if is_read_by_index(self.prompts):
            task = to_task(self.prompts[0], self.query_key)
        system_prompt = self.functions["system_prompt"]
        messages = first_messages(task, self.query_key, system_prompt)
        check_last_message(messages, "The first prompt")
        return messages

    @property
    def trajectory_return(self) -> TrajectoryReturn:
        """How the rewards of a conversation's rows are put together."""
        return "sum" if self.agent is None else "mean"

    @property
    def takes_turns(self) -> bool:
        """Whether nothing is generated while the trainer trains, as far as is known."""
        return self.max_staleness == 0 and not callable(self.collector)

    def make(self, served: Served, recorder: RunRecorder | None = None) -> Any:
        """Returns the collector of what is trained on."""
        total, prompts = -1, Passes(self.prompts, self.epochs)
        if self.groups is not None:
            total, prompts = self.groups, self.prompts
        return self._make(
            served,
            served.policy,
            prompts=prompts,
            group_size=self.group_size,
            groups_per_batch=self.groups_per_batch,
            total_groups=total,
            max_staleness=self.max_staleness,
            on_stale=self.on_stale,
            on_other_sender="raise",
            keep_group=self.keep_group,
            shuffle=is_read_by_index(self.prompts),
            seed=self.seed,
            deterministic=self.deterministic,
            recorder=recorder,
        )

    def make_held_out(self, served: Served, sampling: Mapping[str, Any]) -> Any:
        """Returns the collector of one batch, a greedy answer to each held-out prompt.

        One that cannot be collected has none, and no other takes its place.

        An agent's sampling parameters are its own.
        """
        policy, prompts = served.policy, self.eval_prompts
        assert policy is not None
        if self.agent is None:
            policy = policy.get_new_version(
                generate_kwargs={**sampling, **GREEDY}, logprobs_mode="model"
            )
        return self._make(
            served,
            policy,
            prompts=Passes(prompts, 1),
            group_size=1,
            groups_per_batch=len(prompts),
            total_groups=len(prompts),
        )

    def check_batch(self, batch: TensorDictBase) -> None:
        """Checks the groups of a collector of the user's own, where prompts tell."""
        if not callable(self.collector) or self.query_key not in batch.keys():
            return
        _, conversations = conversation_returns(batch)
        queries: dict[int, str] = {}
        for number, row in zip(conversations.tolist(), batch.unbind(0), strict=True):
            # Of its first turn.
            queries.setdefault(number, str(plain(row.get(self.query_key))))
        check_groups(list(queries.values()), self.group_size)

    def _make(self, served: Served, policy: Any, **arguments: Any) -> Any:
        given = self.collector
        if callable(given):
            made = given(policy)
            check_made(made, self.group_size)
            return made
        common: dict[str, Any] = {"query_key": self.query_key}
        if self.agent is not None:
            common |= {"agent": self.agent, "gateway": served.gateway}
        elif self.env is not None:
            common["env"] = self.env
        else:
            common |= self.functions
        return AsyncLLMCollector(
            policy=policy, **{**common, **arguments, **(given or {})}
        )
