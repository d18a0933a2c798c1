"""Groups of conversations of TorchRL environments, stepped beside the event loop.

Each conversation has an environment of its own, of batch size 1, or conversations of a
single turn share one. It is used again when they have ended. Environments run in
threads; while the engine generates for one, others step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    lazy_stack,
    list_to_stack,
)
from torchrl.envs import EnvBase

from torchrl_sglang.collectors.copies import step
from torchrl_sglang.collectors.groups.recorded import record_episode
from torchrl_sglang.collectors.groups.rewards import check_rewards
from torchrl_sglang.collectors.groups.user_functions import naming
from torchrl_sglang.collectors.runtime.columns import (
    ROW_COLUMNS,
    check_task,
    to_values,
)
from torchrl_sglang.collectors.runtime.contract import (
    ConversationSetting,
    GroupKind,
    GroupMaker,
    GroupSetting,
)
from torchrl_sglang.errors import ChatTemplateError, ConfigurationError, TaskError
from torchrl_sglang.observer import ResponseRecord
from torchrl_sglang.policies.engine_call import SampleRequest, ask_async
from torchrl_sglang.policies.inputs import PromptBatch
from torchrl_sglang.requests.token_columns import POLICY_VERSIONS
from torchrl_sglang.support.checks import check_count
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.tracing import span
from torchrl_sglang.support.user_code import describe, refuse_coroutine, together
from torchrl_sglang.types import Completion


@dataclass(kw_only=True, slots=True)
class _EnvironmentStep:
    """A step of an environment."""

    row: TensorDictBase
    """Output of the environment's step for one conversation."""
    completion: Completion
    policy_version: int
    """Policy version when the prompt was sent."""


@dataclass(kw_only=True, slots=True)
class _Observation:
    """Observation of an environment, and the requests for responses to it."""

    td: TensorDictBase
    task: TensorDictBase
    """Columns of the dataset element, without a batch size."""
    prompts: PromptBatch
    requests: list[SampleRequest]


Episode = list[_EnvironmentStep]


@dataclass(eq=False, slots=True)
class _Environment:
    """An environment, which one thread uses at a time."""

    env: EnvBase
    lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Closes the environment, when a step that is under way has returned.

        TorchRL's environments of a single process say that they are closed from their
        beginning, so ``is_closed`` is not asked.
        """
        with self.lock:
            try:
                self.env.close(raise_if_closed=False)
            except Exception as error:  # noqa: BLE001 - Environments raise anything.
                torchrl_logger.warning(
                    f"An environment could not be closed: {describe(error)}"
                )


class _Environments:
    """All environments of a collector, and the idle ones among them."""

    def __init__(self, make: Callable[[], EnvBase], *, seconds: float) -> None:
        self._make = make
        self._seconds = seconds
        self._lock = threading.Lock()
        self._closed = False
        self._known: set[_Environment] = set()
        self._idle: list[_Environment] = []
        self.put(self.get())

    def get(self) -> _Environment:
        """Returns an environment that nobody uses."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        made = _Environment(self._make())
        with self._lock:
            self._known.add(made)
            closed = self._closed
        if closed:
            made.close()
            raise RuntimeError("The collector has ended.")
        return made

    def put(self, environment: _Environment) -> None:
        """Keeps an environment for the next conversation."""
        with self._lock:
            self._idle.append(environment)

    def discard(self, environment: _Environment) -> None:
        """Closes an environment whose conversation failed; does not wait for it."""
        with self._lock:
            self._known.discard(environment)
        _start_closing(environment)

    def close(self) -> None:
        """Closes all of them, side by side."""
        with self._lock:
            self._closed = True
            environments, self._known = self._known, set()
            self._idle.clear()
        threads = [_start_closing(environment) for environment in environments]
        deadline = time.monotonic() + self._seconds
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        num_open = sum(thread.is_alive() for thread in threads)
        if num_open:
            torchrl_logger.warning(
                f"{num_open} of {len(threads)} environments were not closed within "
                f"{self._seconds:g} s."
            )


def _start_closing(environment: _Environment) -> threading.Thread:
    thread = threading.Thread(
        target=environment.close, name="torchrl_sglang-environments", daemon=True
    )
    thread.start()
    return thread


@dataclass(frozen=True, slots=True)
class EnvironmentGroups(GroupKind):
    """Conversations in LLM environments of TorchRL, such as a ``ChatEnv``.

    Args:
        env: makes an environment of batch size ``(1,)``, with its transforms, for one
            conversation at a time. It is reset with a task of ``prompts``, not of a
            ``DataLoadingPrimer``, and stepped in a thread. With batch size ``(n,)``,
            where ``n`` divides the group size, ``n`` conversations of a group share it:
            in a third to a half of the time, for conversations of a single turn.
        num_threads (int): most threads for environments. Defaults to 16.

    Raises:
        ConfigurationError: if ``env`` is not a function.

    Examples:
        >>> from torchrl.envs.llm import ChatEnv
        >>> groups = EnvironmentGroups(lambda: ChatEnv(batch_size=(1,)))
    """

    env: Callable[[], EnvBase]
    num_threads: int = field(default=16, kw_only=True)

    def __post_init__(self) -> None:
        check_count("num_threads", self.num_threads)
        if isinstance(self.env, EnvBase) or not callable(self.env):
            raise ConfigurationError(
                f"env must be a function that makes an environment, because each "
                f"conversation has its own, got {self.env!r}."
            )
        refuse_coroutine("env", self.env, "it is called in a thread")

    def maker(self, setting: GroupSetting) -> EnvironmentGroupMaker:
        """Returns a maker of groups, for one collector.

        Raises:
            ConfigurationError: if ``env`` makes something else.
        """
        if not list_to_stack():
            raise ConfigurationError(
                "Environments need tensordict.set_list_to_stack(True).set() at the "
                "beginning of the program."
            )
        return EnvironmentGroupMaker(self, setting)


class EnvironmentGroupMaker(GroupMaker):
    """Runs groups of conversations, each in an environment of its own.

    Attributes:
        policy (SGLangWrapper): responds in them; TorchRL's ``RetrieveKL`` reads it.
    """

    def __init__(self, groups: EnvironmentGroups, setting: GroupSetting) -> None:
        self.policy = setting.policy
        columns = ROW_COLUMNS | frozenset(
            key if isinstance(key, str) else key[0] for key in self.policy.out_keys
        )
        super().__init__(setting, columns, groups.num_threads)
        self._make_env = groups.env
        self._batch_size = 0
        self._timeouts = setting.timeouts
        self._environments = _Environments(self._make, seconds=self._timeouts.shutdown)

    def _make(self) -> EnvBase:
        env = _check(self._make_env(), self.size)
        self._batch_size = self._batch_size or env.batch_size[0]
        if env.batch_size[0] != self._batch_size:
            raise ConfigurationError(
                f"env must make environments of one batch size, got "
                f"{env.batch_size[0]} after {self._batch_size}."
            )
        # RetrieveKL takes the policy of this object.
        env.register_collector(self)
        return env

    async def run(
        self,
        position: int,
        task: Mapping[str, Any],
        policy_version: Callable[[], int],
        turn: Callable[[], Any],
    ) -> list[Episode]:
        """Returns the complete conversations about a task."""
        check_task(task, self._columns)
        settings = [
            self.conversation_setting(position, sample, policy_version)
            for sample in range(self.size)
        ]
        if self._batch_size == 1:
            return await together(self._run_alone(task, s, turn) for s in settings)
        parts = await together(
            self._run_together(task, settings[first : first + self._batch_size], turn)
            for first in range(0, self.size, self._batch_size)
        )
        return [episode for part in parts for episode in part]

    async def _run_alone(
        self,
        task: Mapping[str, Any],
        setting: ConversationSetting,
        turn: Callable[[], Any],
    ) -> Episode:
        """Runs one conversation."""
        episode: Episode = []
        async with turn(), self._environment() as environment:
            prompt = await self._use(environment, "reset", self._reset, task)
            while prompt is not None:
                answer = await self._respond(prompt.requests, len(episode), setting)
                (step,), prompt = await self._use(
                    environment, "stepped", self._step, prompt, [answer]
                )
                episode.append(step)
        return episode

    async def _run_together(
        self,
        task: Mapping[str, Any],
        settings: Sequence[ConversationSetting],
        turn: Callable[[], Any],
    ) -> list[Episode]:
        """Runs conversations of a single turn in one environment."""
        async with self._environment() as environment:
            prompt = await self._use(environment, "reset", self._reset, task)

            async def respond(sample: int) -> tuple[Completion, int]:
                request = prompt.requests[sample]
                async with turn():
                    return await self._respond([request], 0, settings[sample])

            answers = await together(map(respond, range(len(settings))))
            steps, _ = await self._use(
                environment, "stepped", self._step, prompt, answers
            )
        return [[step] for step in steps]

    @asynccontextmanager
    async def _environment(self) -> AsyncIterator[_Environment]:
        """Yields an idle environment, which is not used again after an error."""
        environment = await self._get()
        try:
            yield environment
        except BaseException:
            self._environments.discard(environment)
            raise
        self._environments.put(environment)

    async def _get(self) -> _Environment:
        """Returns an environment; one that comes too late is the next one's."""
        future: Future[_Environment] = Future()

        def get() -> None:
            environment = self._environments.get()
            if future.set_running_or_notify_cancel():
                future.set_result(environment)
            else:
                self._environments.put(environment)

        try:
            await self._call(get, "made")
        except BaseException:
            if not future.cancel():
                self._environments.put(future.result())
            raise
        return future.result()

    async def _use(
        self,
        environment: _Environment,
        verb: str,
        function: Callable[..., Any],
        *given: Any,
    ) -> Any:
        """Calls a function with an environment that it has for itself."""

        def locked() -> Any:
            with environment.lock:
                return function(environment.env, *given)

        return await self._call(locked, verb)

    async def _call(self, function: Callable[[], Any], verb: str) -> Any:
        with naming(f"The environment, when it was {verb},"), span("environment"):
            return await self._blocking.run(function, seconds=self._timeouts.step)

    async def _respond(
        self,
        requests: Sequence[SampleRequest],
        turn: int,
        setting: ConversationSetting,
    ) -> tuple[Completion, int]:
        """Returns the response of one conversation, and the policy version before."""
        version = setting.policy_version()
        requests = [replace(request, priority=setting.priority) for request in requests]
        if setting.seed_of is not None:
            requests = [
                _with_seed(request, setting.seed_of(turn, request.input_ids))
                for request in requests
            ]
        self.generating.add(1)
        try:
            with span("turn", number=turn):
                (completion,) = await ask_async(
                    self.policy.model,
                    requests,
                    tokenizer=self.policy.tokenizer,
                    timeout=self._timeouts.turn,
                )
        finally:
            self.generating.add(-1)
        assert isinstance(completion, Completion)
        return completion, version

    def _reset(self, env: EnvBase, task: Mapping[str, Any]) -> _Observation:
        """Returns the first observation of an environment, with its requests."""
        td = TensorDict(to_values(task))
        first = env.reset(lazy_stack([td.clone() for _ in range(self._batch_size)]))
        try:
            return self._read(first, td)
        except ChatTemplateError as error:
            raise TaskError(str(error)) from error

    def _read(self, td: TensorDictBase, task: TensorDictBase) -> _Observation:
        prompts, requests = self.policy.begin(self._element(td))
        return _Observation(td=td, task=task, prompts=prompts, requests=requests)

    def _element(self, td: TensorDictBase) -> TensorDictBase:
        """Returns the element of a stack of one, which is read and written directly."""
        is_single = type(td) is LazyStackedTensorDict and len(td.tensordicts) == 1
        if is_single and self.policy.inplace is True:
            element: TensorDictBase = td.tensordicts[0]
            return element
        return td

    def _step(
        self,
        env: EnvBase,
        prompt: _Observation,
        answers: Sequence[tuple[Completion, int]],
    ) -> tuple[list[_EnvironmentStep], _Observation | None]:
        """Returns the steps, and the next observation unless all have ended."""
        td = prompt.td
        completions = [completion for completion, _ in answers]
        written = self.policy.finish(self._element(td), prompt.prompts, completions)
        output = step(env, td if written.ndim == 0 else written)
        following = output["next"]
        # A DataLoadingPrimer would put the task there.
        missing = prompt.task.exclude(*following.keys())
        following.update(lazy_stack([missing.clone() for _ in answers]))
        steps = [
            _EnvironmentStep(row=row, completion=completion, policy_version=version)
            for row, (completion, version) in zip(
                output.unbind(0), answers, strict=True
            )
        ]
        if following["done"].flatten(1).any(-1).all():
            return steps, None
        if self._batch_size > 1:
            raise ConfigurationError(
                f"conversations go on after their first turn in an environment of "
                f"batch size ({self._batch_size},), which is for a single turn: make "
                f"environments of batch size (1,), or end the conversations, as with "
                f"StepCounter(max_steps=1)"
            )
        return steps, self._read(env.step_mdp(output), prompt.task)

    def turns(self, group: Sequence[Episode]) -> Iterator[tuple[Completion, int]]:
        """Yields the responses of a group, and the policy version of each."""
        for episode in group:
            for turn in episode:
                yield turn.completion, turn.policy_version

    def write(self, group: Sequence[Episode]) -> list[TensorDictBase]:
        """Returns the steps of all conversations, one after the other."""
        rows = []
        for episode in group:
            for turn in episode:
                row = turn.row
                version = turn.policy_version
                oldest = torch.tensor(
                    self._versions.oldest([(turn.completion, version)])
                )
                row.set(
                    POLICY_VERSIONS, self._versions.of_tokens(turn.completion, version)
                )
                row.set("policy_version", oldest)
                row.set(("next", "policy_version"), oldest)
                rows.append(row)
        check_rewards(rows)
        return rows

    def record(self, group: Sequence[Episode]) -> list[ResponseRecord]:
        """Returns the responses of a group for :class:`.GroupEnded`."""
        return [
            record_episode(
                [(step.row, step.completion, step.policy_version) for step in steps],
                self._versions,
            )
            for steps in group
        ]

    def close(self) -> None:
        """Closes all environments, and ends the threads."""
        super().close()
        self._environments.close()


def _with_seed(request: SampleRequest, seed: int) -> SampleRequest:
    params = {**request.sampling_params, "sampling_seed": seed}
    return replace(request, sampling_params=params)


def _check(env: Any, group_size: int) -> EnvBase:
    shape = tuple(getattr(env, "batch_size", ()))
    fits = len(shape) == 1 and shape[0] > 0 and group_size % shape[0] == 0
    if not isinstance(env, EnvBase) or not fits:
        raise ConfigurationError(
            f"env must make TorchRL environments of batch size (1,), one for each "
            f"conversation, or (n,), for n conversations of a group of {group_size}, "
            f"got {type(env).__name__} of batch size {shape}."
        )
    return env
