"""Reads reward functions as they are given: TorchRL-style ones, TRL's and verl's.

All become functions ``(conversations, task) -> list of numbers`` or ``(conversation,
task) -> number`` with a weight. Which kind a function is, its parameters say:

- ``completions`` or ``completion_ids``: TRL's, called with the columns of the group as
  lists. Source: ``_calculate_rewards`` in ``trl/trainer/grpo_trainer.py``;
- ``solution_str``: verl's ``compute_score``. Source:
  ``verl/workers/reward_manager/naive.py``;
- anything else is called with ``(conversation, task)``. Functions whose parameters have
  names of other libraries' are refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torchrl_sglang.collectors.groups.conversations import Conversation
from torchrl_sglang.collectors.groups.user_functions import (
    check_call,
    name_of,
    parameters_of,
)
from torchrl_sglang.errors import ConfigurationError

RewardFunctions: TypeAlias = (
    Callable[..., Any]
    | Sequence[Callable[..., Any]]
    | Mapping[str, Callable[..., Any] | tuple[Callable[..., Any], float]]
)
"""One function, several, or several with names, and weights if wanted."""


_COMPLETIONS = ("completions", "completion_ids")
_TRAINER_ARGUMENTS = ("trainer_state", "log_metric", "log_extra")
_FOREIGN_NAMES = frozenset(
    {
        *("completion", "completion_text", "response", "responses", "response_str"),
        *("prompt", "prompts", "question", "query", "solution", "solutions", "answer"),
        *("answers", "ground_truth", "ground_truths", "gold", "label", "labels"),
        *("target", "targets", "reference", "references", "output", "outputs", "text"),
        *("texts", "generation", "generations", "prediction", "predictions", "info"),
        *("model_output", "predict", "predict_str", "reward_input", "reward_inputs"),
    }
)
"""Parameters of verifiers', OpenRLHF's, EasyR1's and other reward functions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """A reward function as it is called."""

    role: str
    """Name of the function in messages."""
    call: Callable[..., Any]
    """The user's function, or a wrapper that passes the arguments that it expects."""
    of_group: bool
    """Whether the function is called with all conversations of a group."""
    weight: float = 1.0
    """Factor of its values in the sum."""

    def check_columns(self, names: Collection[str]) -> None:
        """Checks that tasks have the columns that the function needs."""
        if isinstance(self.call, _Adapted):
            self.call.check_columns(names)


def read_functions(
    argument: str,
    functions: RewardFunctions | None,
    *,
    of_group: bool,
    query_key: str = "query",
) -> dict[str, RewardFunction]:
    """Returns reward functions by name; those without a name have a number."""
    if functions is None:
        return {}
    if callable(functions):
        functions = [functions]
    if isinstance(functions, (list, tuple)):
        functions = {str(number): function for number, function in enumerate(functions)}
    if not isinstance(functions, Mapping):
        raise ConfigurationError(
            f"{argument} takes a function, a list of functions or a mapping of names "
            f"to functions, got {functions!r}."
        )
    return {
        name: _read(argument, name, function, of_group, query_key)
        for name, function in functions.items()
    }


def _read(
    argument: str, name: Any, given: Any, of_group: bool, query_key: str
) -> RewardFunction:
    function, weight = given, 1.0
    if isinstance(given, tuple) and len(given) == 2:
        function, weight = given
    if not callable(function) or not isinstance(name, str):
        raise ConfigurationError(
            f"{argument} takes a function, a list of functions or a mapping of names "
            f"to functions, or to (function, weight), got {name!r}: {given!r}."
        )
    if (
        not isinstance(weight, (int, float))
        or isinstance(weight, bool)
        or not math.isfinite(weight)
    ):
        raise ConfigurationError(
            f"{argument}: the weight of {name!r} must be a finite number, got "
            f"{weight!r}."
        )
    spelt = name_of(function) if name.isdigit() else name
    role = f"The reward function {spelt!r}"
    parameters = parameters_of(function)
    call: Callable[..., Any] = function
    if not parameters.keys().isdisjoint(_COMPLETIONS):
        _refuse_trainer(role, parameters)
        call, of_group = _TrlReward(function, role, query_key), True
    elif "solution_str" in parameters:
        call, of_group = _VerlReward(function, role), False
    else:
        names = "conversations" if of_group else "conversation"
        check_call(role, function, names, "task")
        _refuse_foreign(role, parameters, names)
    return RewardFunction(role=role, call=call, of_group=of_group, weight=float(weight))


def _refuse_trainer(role: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    """Refuses arguments of TRL's trainer that a function requires."""
    required = [
        name
        for name in _TRAINER_ARGUMENTS
        if name in parameters and parameters[name].default is inspect.Parameter.empty
    ]
    if required:
        raise ConfigurationError(
            f"{role} has TRL's signature and requires {', '.join(required)}, which "
            f"only TRL's trainer has; give it a default, such as {required[0]}=None. A "
            f"named reward is logged by its name."
        )


def _refuse_foreign(
    role: str, parameters: Mapping[str, inspect.Parameter], conversation: str
) -> None:
    """Refuses names that are a text, or a column of the task, in other libraries.

    A conversation or a task would be compared as if it were one, without an error.
    """
    positional = [
        name
        for name, parameter in parameters.items()
        if parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    foreign = [name for name in positional[:2] if name in _FOREIGN_NAMES]
    if foreign:
        raise ConfigurationError(
            f"{role} is called with ({conversation}, task), and its parameter "
            f"{foreign[0]!r} is a text or a value of the task in other libraries. "
            f"Write a function of ({conversation}, task): the text is "
            f"conversation.response, and a column of the prompts is task['answer']. Or "
            f"rename the parameter."
        )


class _Adapted:
    """Calls a function with other arguments."""

    def __init__(self, function: Callable[..., Any], role: str) -> None:
        self._function = function
        self._role = role
        self._parameters = parameters_of(function)
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        self._required = [
            name
            for name, parameter in self._parameters.items()
            if parameter.default is parameter.empty and parameter.kind not in kinds
        ]
        self.__name__ = name_of(function)

    def check_columns(self, names: Collection[str]) -> None:
        """Checks that tasks have the columns that the function needs."""
        raise NotImplementedError

    def _taken(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the arguments that the function takes."""
        parameters = self._parameters
        if any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        ):
            return arguments
        return {name: arguments[name] for name in parameters if name in arguments}


_OF_TRL = ("prompts", *_COMPLETIONS)
"""Arguments of TRL's functions that are not columns."""


class _TrlReward(_Adapted):
    """TRL's: ``(prompts, completions, completion_ids, **columns) -> list of float``."""

    def __init__(self, function: Callable[..., Any], role: str, query_key: str) -> None:
        super().__init__(function, role)
        self._query_key = query_key

    def check_columns(self, names: Collection[str]) -> None:
        """Checks that tasks have a column for each parameter without a default."""
        for name in self._required:
            if name not in names and name not in _OF_TRL:
                raise ConfigurationError(
                    f"{self._role} has TRL's signature and needs the column {name!r}, "
                    f"and the task has {', '.join(map(repr, names))}."
                )

    def __call__(self, conversations: Sequence[Conversation], task: Any) -> Any:
        self.check_columns(task)
        columns = {key: [value] * len(conversations) for key, value in task.items()}
        prompt = task[self._query_key]
        # For a text TRL has texts, and for messages it has messages.
        complete = _text if isinstance(prompt, str) else _messages
        arguments = columns | {
            "prompts": [prompt] * len(conversations),
            "completions": [complete(conversation) for conversation in conversations],
            "completion_ids": [
                conversation.turns[-1].token_ids for conversation in conversations
            ],
        }
        values = self._function(**self._taken(arguments))
        if inspect.isawaitable(values):
            return _await_numbers(values)
        return _without_none(values)


async def _await_numbers(values: Any) -> Any:
    return _without_none(await values)


def _without_none(values: Any) -> Any:
    """Returns rewards; None, which TRL leaves out of the sum, is 0."""
    if not isinstance(values, (list, tuple)):
        return values
    return [0.0 if value is None else value for value in values]


def _text(conversation: Conversation) -> Any:
    several = len(conversation.turns) > 1
    return _messages(conversation) if several else conversation.response


def _messages(conversation: Conversation) -> Any:
    return conversation.messages[conversation.turns[0].prompt.num_messages :]


class _VerlReward(_Adapted):
    """verl's: ``(data_source, solution_str, ground_truth, extra_info) -> score``."""

    def check_columns(self, names: Collection[str]) -> None:
        """Checks that tasks have a ground truth, if the function needs one."""
        if not {"ground_truth", "reward_model"}.intersection(names):
            self._check_truth(None, names)

    def _check_truth(self, truth: Any, names: Iterable[str]) -> None:
        if truth is None and "ground_truth" in self._required:
            raise ConfigurationError(
                f"{self._role} has verl's signature and needs 'ground_truth', or "
                f"'reward_model' with one, in the task, which has "
                f"{', '.join(map(repr, names))}."
            )

    def __call__(self, conversation: Conversation, task: Any) -> Any:
        model = task.get("reward_model")
        truth = task.get("ground_truth", (model or {}).get("ground_truth"))
        self._check_truth(truth, task)
        arguments = {
            "data_source": task.get("data_source"),
            "solution_str": conversation.response,
            "ground_truth": truth,
            "extra_info": task.get("extra_info"),
        }
        value = self._function(**self._taken(arguments))
        return _await_score(value) if inspect.isawaitable(value) else _score(value)


async def _await_score(value: Any) -> Any:
    return _score(await value)


def _score(value: Any) -> Any:
    """Returns a score, which verl's functions may give among others in a dict."""
    return value["score"] if isinstance(value, Mapping) and "score" in value else value
