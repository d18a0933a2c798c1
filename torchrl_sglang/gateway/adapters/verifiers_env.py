"""``VerifiersAgent``: an environment of `verifiers` as an agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torchrl_sglang.errors import ConfigurationError, UserFunctionError

Split = Literal["train", "eval"]

EXAMPLE, SPLIT = "example", "split"
"""Columns of a task."""


class VerifiersAgent:
    """An environment of `verifiers` as an agent, with its dataset and its rewards.

    A task is a row of the environment's dataset. The environment holds the conversation
    with the gateway, with its own tools and turns, and scores it by its rubric. It
    supports the class ``verifiers.Environment`` of versions 0.2 and 0.3.0; extra
    ``verifiers``.

    Args:
        environment: an environment, such as from ``verifiers.load_environment``.

    Keyword Args:
        sampling_args: override the environment's own, such as ``{"max_tokens": 512}``.
        reward: returns the reward of a rollout's output, a mapping with ``"reward"``,
            ``"metrics"`` and others. Defaults to ``output["reward"]``.
        model: name in the requests. Defaults to ``"policy"``.

    Raises:
        ConfigurationError: if the environment has another class, or its rubric scores
            groups as a whole: here each rollout is scored by itself.

    Examples:
        >>> import verifiers  # doctest: +SKIP
        >>> agent = VerifiersAgent(
        ...     verifiers.load_environment("gsm8k")
        ... )  # doctest: +SKIP
        >>> run = GRPO(  # doctest: +SKIP
        ...     "Qwen/Qwen3-4B", prompts=agent.prompts(), agent=agent
        ... )
    """

    def __init__(
        self,
        environment: Any,
        *,
        sampling_args: Mapping[str, Any] | None = None,
        reward: Callable[[Mapping[str, Any]], float] | None = None,
        model: str = "policy",
    ) -> None:
        _check(environment)
        self.environment = environment
        self._sampling_args = dict(sampling_args or {})
        self._reward = reward
        self._model = model

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.environment).__name__})"

    def prompts(self, split: Split = "train") -> list[dict[str, Any]]:
        """Returns the tasks of the training or of the evaluation dataset.

        Args:
            split: ``"train"`` or ``"eval"``.

        Returns:
            list: a mapping for each row: its number and its split.
        """
        return [
            {EXAMPLE: number, SPLIT: split} for number in range(len(self._rows(split)))
        ]

    async def __call__(
        self, task: Mapping[str, Any], *, base_url: str, api_key: str
    ) -> float:
        """Holds the conversation of a task, and returns its reward.

        Raises:
            ConfigurationError: if the task does not exist.
            UserFunctionError: if the environment reports an error.
        """
        from openai import AsyncOpenAI
        from verifiers import OpenAIChatCompletionsClient

        row = self._row(task)
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            output = await self.environment.run_rollout(
                row,
                OpenAIChatCompletionsClient(client),
                self._model,
                {**(self.environment.sampling_args or {}), **self._sampling_args},
            )
        if output.get("error") is not None:
            raise UserFunctionError(
                f"The environment {type(self.environment).__name__} has failed in "
                f"{dict(task)}: {output['error']}."
            )
        reward = output["reward"] if self._reward is None else self._reward(output)
        return float(reward)

    def _rows(self, split: Split) -> Any:
        if split == "train":
            return self.environment.get_dataset()
        if split == "eval":
            return self.environment.get_eval_dataset()
        raise ConfigurationError(f"split={split!r} is not one of 'train', 'eval'.")

    def _row(self, task: Mapping[str, Any]) -> dict[str, Any]:
        try:
            row: dict[str, Any] = self._rows(task[SPLIT])[task[EXAMPLE]]
        except (KeyError, TypeError, IndexError) as error:
            raise ConfigurationError(
                f"{task!r} is no task of this environment; give "
                f"prompts=agent.prompts()."
            ) from error
        return row


def _check(environment: Any) -> None:
    try:
        from verifiers import Environment
    except ImportError as error:
        raise ConfigurationError(
            "VerifiersAgent needs verifiers with environments of its class "
            "Environment: pip install 'verifiers>=0.2,<0.3.1'."
        ) from error
    if not isinstance(environment, Environment):
        raise ConfigurationError(
            f"environment must be a verifiers.Environment, got {environment!r}; "
            f"verifiers.load_environment(...) makes one."
        )
    if environment.requires_group_rollouts:
        raise ConfigurationError(
            f"The rubric of {type(environment).__name__} scores groups of rollouts as "
            f"a whole; here each rollout is scored by itself."
        )
