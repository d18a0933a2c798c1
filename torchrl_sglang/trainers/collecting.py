"""Collectors of a run, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase

from torchrl_sglang.chat.messages import Message, check_last_message
from torchrl_sglang.collectors.async_llm_collector import (
    COLLECTOR_ARGUMENTS,
    AsyncLLMCollector,
)
from torchrl_sglang.collectors.groups.conversations import first_messages
from torchrl_sglang.collectors.groups.filter import GroupFilter
from torchrl_sglang.collectors.groups.make import GROUP_ARGUMENTS, choose_groups
from torchrl_sglang.collectors.groups.reward_functions import RewardFunction
from torchrl_sglang.collectors.options import check_options
from torchrl_sglang.collectors.runtime.columns import (
    POLICY_COLUMNS,
    ROW_COLUMNS,
    TURN_COLUMNS,
)
from torchrl_sglang.collectors.scheduling.prompts import (
    Passes,
    is_read_by_index,
    to_task,
)
from torchrl_sglang.gateway.agent_groups import COLUMNS as AGENT_COLUMNS
from torchrl_sglang.objectives.advantages import TrajectoryReturn, conversation_returns
from torchrl_sglang.recording.recorder import RunRecorder, held_out
from torchrl_sglang.support.checks import check_names
from torchrl_sglang.trainers.arguments import RunArguments
from torchrl_sglang.trainers.collector_checks import (
    FUNCTIONS,
    check_collector,
    check_groups,
    check_made,
    read_rewards,
)
from torchrl_sglang.trainers.samples import plain
from torchrl_sglang.trainers.serving import Served
from torchrl_sglang.trainers.tasks import as_list, check_prompts

GREEDY: Mapping[str, Any] = {"temperature": 0.0, "top_p": 1.0}
"""Sampling parameters of evaluation that differ from a run's."""


class Collecting:
    """Checks a run's prompts and functions, and makes its collectors."""

    def __init__(self, arguments: RunArguments) -> None:
        self.arguments = arguments
        self.functions = {name: getattr(arguments, name) for name in FUNCTIONS}
        check_collector(arguments)
        rewards: dict[tuple[str, str], RewardFunction] = {}
        makes_collector = callable(arguments.collector)
        if not makes_collector:
            if arguments.agent is None and arguments.env is None:
                rewards = read_rewards(arguments)
            self._check_prompts("prompts", arguments.prompts, rewards)
        check_options({"on_stale": arguments.on_stale})
        self.eval_prompts: list[Any] | None = None
        """Held-out tasks, read at every evaluation."""
        if arguments.eval_prompts is not None:
            self.eval_prompts = as_list("eval_prompts", arguments.eval_prompts)
            self._check_prompts("eval_prompts", self.eval_prompts, rewards)
        if arguments.keep_group is not None:
            GroupFilter(arguments.keep_group, of_agents=arguments.agent is not None)
        if isinstance(arguments.collector, Mapping):
            check_names("collector", arguments.collector, COLLECTOR_ARGUMENTS)
            check_options(arguments.collector)
            of_groups = GROUP_ARGUMENTS.intersection(arguments.collector)
            choose_groups(None, {name: arguments.collector[name] for name in of_groups})

    def _check_prompts(
        self, name: str, prompts: Any, rewards: Mapping[tuple[str, str], RewardFunction]
    ) -> None:
        """Checks tasks that can be seen, as :func:`.check_prompts` does."""
        agent, env = self.arguments.agent, self.arguments.env
        # An agent or an environment reads any task.
        query_key = None if agent or env else self.arguments.query_key
        columns = ROW_COLUMNS | POLICY_COLUMNS
        if agent is not None:
            columns = AGENT_COLUMNS
        elif env is None:
            columns |= TURN_COLUMNS | {n for _, n in rewards if not n.isdigit()}
        check_prompts(name, prompts, query_key, columns, list(rewards.values()))

    def opening(self) -> list[Message]:
        """Returns the messages of the first prompt; none if they are not known."""
        arguments = self.arguments
        is_plain = arguments.agent is None and arguments.env is None
        if callable(arguments.collector) or not is_plain:
            return []
        query_key = arguments.query_key
        task: Mapping[str, Any] = {query_key: "?"}
        if is_read_by_index(arguments.prompts):
            task = to_task(arguments.prompts[0], query_key)
        messages = first_messages(task, query_key, arguments.system_prompt)
        check_last_message(messages, "The first prompt")
        return messages

    @property
    def trajectory_return(self) -> TrajectoryReturn:
        """Aggregation of the rewards of a conversation's rows."""
        return "sum" if self.arguments.agent is None else "mean"

    @property
    def takes_turns(self) -> bool:
        """Whether nothing is generated while the trainer trains, as far as is known."""
        arguments = self.arguments
        return arguments.max_staleness == 0 and not callable(arguments.collector)

    def make(
        self, served: Served, recorder: RunRecorder | None = None, score: Any = None
    ) -> Any:
        """Returns the collector of batches to train on, whose groups are scored."""
        arguments = self.arguments
        total, prompts = -1, Passes(arguments.prompts, arguments.epochs)
        if arguments.groups is not None:
            total, prompts = arguments.groups, arguments.prompts
        names = (
            *("group_size", "groups_per_batch", "max_staleness", "on_stale"),
            *("keep_group", "seed", "deterministic"),
        )
        return self._make(
            served,
            served.policy,
            prompts=prompts,
            total_groups=total,
            on_other_sender="raise",
            shuffle=is_read_by_index(arguments.prompts),
            recorder=recorder,
            score=score,
            **{name: getattr(arguments, name) for name in names},
        )

    def make_held_out(
        self,
        served: Served,
        sampling: Mapping[str, Any],
        recorder: RunRecorder | None = None,
    ) -> Any:
        """Returns the collector of one greedy response to each held-out prompt.

        A prompt that cannot be collected is left out. An agent's requests have their
        own sampling parameters.
        """
        policy, prompts = served.policy, self.eval_prompts
        assert policy is not None
        assert prompts is not None
        if self.arguments.agent is None:
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
            recorder=None if recorder is None else held_out(recorder),
        )

    def check_batch(self, batch: TensorDictBase) -> None:
        """Checks that each group of a user's own collector has one prompt."""
        query_key = self.arguments.query_key
        if not callable(self.arguments.collector) or query_key not in batch.keys():
            return
        _, conversations = conversation_returns(batch)
        queries: dict[int, str] = {}
        for number, row in zip(conversations.tolist(), batch.unbind(0), strict=True):
            # The first row of a conversation is its first turn.
            queries.setdefault(number, str(plain(row.get(query_key))))
        check_groups(list(queries.values()), self.arguments.group_size)

    def _make(self, served: Served, policy: Any, **options: Any) -> Any:
        arguments, collector = self.arguments, self.arguments.collector
        if callable(collector):
            made = collector(policy)
            check_made(made, arguments.group_size)
            return made
        common: dict[str, Any] = {"query_key": arguments.query_key}
        if arguments.agent is not None:
            common |= {"agent": arguments.agent, "gateway": served.gateway}
        elif arguments.env is not None:
            common["env"] = arguments.env
        else:
            common |= self.functions
        return AsyncLLMCollector(
            policy=policy, **{**common, **options, **(collector or {})}
        )
