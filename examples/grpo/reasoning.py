"""Tasks of reasoning-gym, its 100 generators with their scoring functions, as prompts.

    task: reasoning_gym/chain_sum

    task:
      data:
        chain_sum: {max_terms: 2, weight: 2}   # its own arguments, and a weight
        gcd: {level: 1}                        # of its curriculum
      answer: whole

Problems for training and held-out ones come from different seeds, and no question is
among both.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from types import ModuleType
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_count, nearest

PREFIX = "reasoning_gym/"

WITHOUT_WHEELS = ("cellpylib", "pycosat", "zss")
"""Needs of a few data sets, which a machine without a compiler may lack."""

HELD_OUT_SEED = 1_000_003
"""Added to the seed of the problems for training."""

BATCH = 256
"""Problems that are generated at a time."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What ``task`` of a YAML file holds."""

    data: Mapping[str, Mapping[str, Any] | None]
    """Data set -> its arguments; ``weight`` is its share of the mixture, ``level`` that
    of all attributes of its curriculum."""
    size: int = 2000
    """Problems for training; fewer if there are not so many different ones."""
    held_out: int = 128
    """Held-out problems; likewise, at most a fifth of all."""
    seed: int = 0
    """Of the problems."""
    answer: str = "tags"
    """What is scored: ``"tags"``: what stands between answer tags, as reasoning-gym
    does; ``"whole"``: the response; ``"number"``: its last number."""
    system_prompt: str | None = None
    """One of reasoning-gym's (``"default"``, ``"direct"``, ...). By default
    ``"default"`` for tags, and none otherwise."""
    suffix: str = ""
    """Added to each question."""


@cache
def gym() -> ModuleType:
    """Returns the package, without the needs of a few data sets if these lack.

    Raises:
        ConfigurationError: if it is not installed.
    """
    for name in WITHOUT_WHEELS:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = ModuleType(name)
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigurationError(
            f"task=... needs reasoning-gym: {error}. Install it with pip install "
            f"torchrl_sglang[tasks]."
        ) from error


def read_task(given: Any) -> TaskConfig:
    """Returns the configuration of a task.

    Raises:
        ConfigurationError: if it is none.
    """
    if isinstance(given, str):
        given = {"data": {given.removeprefix(PREFIX): {}}}
    known = [each.name for each in fields(TaskConfig)]
    if not isinstance(given, Mapping) or not given.get("data"):
        raise ConfigurationError(
            f"task={given!r} names no data set; write reasoning_gym/NAME, or a mapping "
            f"with 'data' (names with their arguments) and any of {', '.join(known)}."
        )
    for name in given:
        if name not in known:
            hint = nearest(name, known) or ", ".join(known)
            raise ConfigurationError(f"task has no {name!r}; there is {hint}.")
    config = TaskConfig(**{**given, "data": _read_data(given["data"])})
    for name, least in (("size", 1), ("held_out", 1), ("seed", 0)):
        check_count(f"task.{name}", getattr(config, name), least=least)
    if config.answer not in [*ANSWERS]:
        raise ConfigurationError(
            f"task.answer={config.answer!r} is not one of {', '.join(ANSWERS)}."
        )
    return config


def _read_data(data: Any) -> dict[str, Any]:
    """Returns the data sets of a task with their arguments."""
    if isinstance(data, str):
        data = [data]
    if isinstance(data, list):
        data = dict.fromkeys(map(str, data))
    if not isinstance(data, Mapping):
        raise ConfigurationError(
            f"task.data={data!r} must be a data set, a list of these, or a mapping of "
            f"these to their arguments."
        )
    for name, options in data.items():
        if options is not None and not isinstance(options, Mapping):
            raise ConfigurationError(
                f"task.data.{name}={options!r} must be a mapping of arguments, such as "
                f"{{level: 1}}."
            )
    return {str(name).removeprefix(PREFIX): each for name, each in data.items()}


def arguments_of(given: Any) -> dict[str, Any]:
    """Returns the arguments of ``GRPO`` that a task is: prompts and rewards.

    ``score`` is reasoning-gym's, which may give a part of 1; ``right`` is logged alone.
    """
    config = read_task(given)
    training, held_out = split_problems(config)
    read = ANSWERS[config.answer]

    def score(conversation: Any, task: Mapping[str, Any]) -> float:
        return score_answer(read(conversation.response), task)

    def right(conversation: Any, task: Mapping[str, Any]) -> float:
        return float(score(conversation, task) == 1.0)

    prompt = config.system_prompt
    if prompt is None and config.answer == "tags":
        prompt = "default"
    prompts = importlib.import_module("reasoning_gym.utils").SYSTEM_PROMPTS
    return {
        "prompts": training,
        "eval_prompts": held_out,
        "rewards": {"score": (score, 1.0), "right": (right, 0.0)},
        "system_prompt": None if prompt is None else prompts.get(prompt, prompt),
    }


def split_problems(config: TaskConfig) -> tuple[list[Any], list[Any]]:
    """Returns problems for training and held-out ones, with no question in common.

    Raises:
        ConfigurationError: if there are too few different ones.
    """
    held_out = _problems(config, config.seed + HELD_OUT_SEED, config.held_out)

    def others() -> list[Any]:
        without = {each["query"] for each in held_out}
        return _problems(config, config.seed, config.size, without)

    training = others()
    if len(training) < min(4 * len(held_out), config.size):
        # There are few problems in all.
        held_out = held_out[: (len(training) + len(held_out)) // 5]
        training = others()
    if not held_out or not training:
        raise ConfigurationError(
            f"task.data={dict(config.data)!r} has too few different problems."
        )
    return training, held_out


def _problems(
    config: TaskConfig, seed: int, size: int, without: set[str] | None = None
) -> list[dict[str, Any]]:
    """Returns up to so many problems with different questions."""
    seen, found = set(without or ()), []
    # A seed's problems may be drawn again: a few times as many are looked at.
    source = _mixture(config, seed, 8 * size + BATCH)
    for index in range(8 * size + BATCH):
        entry = source[index]
        query = f"{entry['question']}{config.suffix}"
        if query not in seen:
            seen.add(query)
            found.append({**entry, "query": query})
        if len(found) == size:
            break
    return found


def _mixture(config: TaskConfig, seed: int, size: int) -> Any:
    """Returns a mixed data set of reasoning-gym."""
    gym()
    composite = importlib.import_module("reasoning_gym.composite")
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    specs = []
    for name, given in config.data.items():
        if name not in known:
            hint = nearest(name, known)
            near = f"; did you mean {hint!r}?" if hint else "."
            raise ConfigurationError(f"reasoning-gym has no data set {name!r}{near}")
        options = dict(given or {})
        weight, level = options.pop("weight", 1.0), options.pop("level", None)
        if level is not None:
            options = {**at_level(name, level), **options}
        specs.append(composite.DatasetSpec(name=name, weight=weight, config=options))
    try:
        return gym().create_dataset("composite", seed=seed, size=size, datasets=specs)
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"reasoning-gym refuses task.data={dict(config.data)!r}: {error}"
        ) from error


def at_level(name: str, level: int) -> dict[str, Any]:
    """Returns the arguments of a data set at a level of its curriculum.

    Raises:
        ConfigurationError: if it has no such level.
    """
    gym()
    factory = importlib.import_module("reasoning_gym.factory")
    if not factory.has_curriculum(name):
        raise ConfigurationError(f"{name} has no levels; give its own arguments.")
    curriculum = factory.create_curriculum(name)
    highest = max(len(each.levels) for each in curriculum.attributes.values()) - 1
    if not isinstance(level, int) or not 0 <= level <= highest:
        raise ConfigurationError(
            f"task.data.{name}.level={level!r} is no level of 0 to {highest}."
        )
    curriculum.set_global_level(level)
    found = asdict(curriculum.generate_configuration())
    return {key: value for key, value in found.items() if key not in ("seed", "size")}


@cache
def _scorer(name: str) -> Callable[..., float]:
    """Returns the scoring function of a data set, which takes a while to make."""
    function: Callable[..., float] = gym().get_score_answer_fn(name)
    return function


def score_answer(answer: str | None, task: Mapping[str, Any]) -> float:
    """Returns what reasoning-gym gives for an answer, from 0 to 1."""
    name = task["metadata"]["source_dataset"]
    return float(_scorer(name)(answer, entry=dict(task)))


def greedy_answers(
    engine: Any,
    tasks: Sequence[Mapping[str, Any]],
    system_prompt: str | None,
    sampling: Mapping[str, Any],
) -> list[dict[str, str]]:
    """Returns what a model says to problems, with the right answers."""
    tokenizer = engine.get_tokenizer()
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    prompts = [
        tokenizer.apply_chat_template(
            [*system, {"role": "user", "content": task["query"]}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for task in tasks
    ]
    tokens = [tokenizer(each, add_special_tokens=False) for each in prompts]
    done = engine.generate(
        input_ids=[each["input_ids"] for each in tokens],
        sampling_params={**sampling, "temperature": 0.0},
    )
    return [
        {
            "question": task["query"],
            "right": str(task["answer"]),
            "said": tokenizer.decode(each.token_ids, skip_special_tokens=True),
        }
        for task, each in zip(tasks, done, strict=True)
    ]


def _tags(response: str) -> str | None:
    utils = importlib.import_module("reasoning_gym.utils")
    answer: str | None = utils.extract_answer(response)
    return answer


def _number(response: str) -> str | None:
    from gsm8k import last_number

    return last_number(response) or None


ANSWERS: dict[str, Callable[[str], str | None]] = {
    "tags": _tags,
    "whole": str.strip,
    "number": _number,
}
"""How the answer is found in a response."""
