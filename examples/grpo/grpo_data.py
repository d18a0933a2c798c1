"""Problems, rewards, and the greedy evaluation."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.envs.llm import GSM8KEnv, GSM8KRewardParser
from torchrl.modules.llm.policies import ChatHistory

from grpo_config import FOLDER
from torchrl_sglang import SGLangWrapper
from torchrl_sglang.errors import ConfigurationError

EVALUATION_BATCH = 256
"""Problems of one call of the policy."""

Problem = dict[str, Any]
"""``query``, ``answer`` (the number alone) and ``index``."""

RIGHT = 1.0
"""Reward of a right answer."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def load_problems(cfg: DictConfig, split: str) -> list[Problem]:
    """Reads the problems to train on, or to evaluate.

    Args:
        cfg: the configuration.
        split: ``"train"`` or ``"test"``.

    Raises:
        ConfigurationError: if there is no such file, or a line has another format.
    """
    name = cfg.env.dataset if split == "train" else cfg.env.eval_dataset
    if split == "test" and name is None:
        if cfg.env.dataset != "gsm8k":
            return []
        name = "gsm8k"
    if name == "gsm8k":
        from datasets import load_dataset

        rows = load_dataset("openai/gsm8k", "main", split=split)
    else:
        # Unlike str.splitlines(), JSON has other line ends in its texts.
        lines = _find(name).read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
    return [_to_problem(index, row, name) for index, row in enumerate(rows)]


def _find(name: str) -> Path:
    for path in (Path(name), FOLDER / name):
        if path.is_file():
            return path
    raise ConfigurationError(
        f"{name!r} is neither 'gsm8k' nor a file here or in {FOLDER}; give a file "
        f"with a JSON object in each line."
    )


def _to_problem(index: int, row: Any, name: str) -> Problem:
    try:
        question, (_, answer) = row["question"], row["answer"].split("#### ")
    except (KeyError, TypeError, ValueError):
        raise ConfigurationError(
            f"Problem {index} of {name!r} is {row!r}; it needs a 'question', and an "
            f"'answer' that ends with '#### ' and a number."
        ) from None
    return {
        "query": question,
        "answer": GSM8KRewardParser.normalize_answer(answer),
        "index": index,
    }


def system_prompt(cfg: DictConfig) -> str | None:
    """Returns the message before each question, if there is one."""
    given = cfg.env.system_prompt
    return GSM8KEnv.SYSTEM_PROMPT if given is None else given or None


def extract_answer(text: str, form: str) -> str:
    """Returns the answer in a response, or ``""``.

    Examples:
        >>> extract_answer("<think>6*7</think> <answer>42</answer>", "tags")
        '42'
        >>> extract_answer("6*7 is $1,042.00", "last_number")
        '1042'
    """
    if form == "tags":
        found = GSM8KRewardParser.extract_tags(text)[1]
    else:
        found = (_NUMBER.findall(text) or [""])[-1]
    return GSM8KRewardParser.normalize_answer(found)


def grade(text: str, answer: str, *, form: str, format_reward: float) -> float:
    """Returns the reward of a response: right, in the right format, or nothing.

    Examples:
        >>> grade("about 42", "42", form="last_number", format_reward=0.1)
        1.0
    """
    given = extract_answer(text, form)
    if not given:
        return 0.0
    return RIGHT if given == answer else format_reward


def make_reward(cfg: DictConfig) -> Callable[[Any, Problem], Awaitable[float]]:
    """Returns the reward function of a collector."""
    options = {"form": cfg.env.answer, "format_reward": cfg.env.format_reward}

    async def reward(conversation: Any, task: Problem) -> float:
        return grade(conversation.response, task["answer"], **options)

    return reward


def evaluate(
    cfg: DictConfig, policy: SGLangWrapper, problems: Sequence[Problem]
) -> dict[str, float]:
    """Solves held-out problems greedily, with the weights that the servers have.

    Args:
        cfg: the configuration.
        policy: one that decodes greedily.
        problems: the problems.

    Returns:
        Share of right answers, and mean length of the responses in tokens.
    """
    right, tokens = 0, 0
    for start in range(0, len(problems), EVALUATION_BATCH):
        part = problems[start : start + EVALUATION_BATCH]
        chats = [_to_chat(cfg, problem) for problem in part]
        prompts = ChatHistory(prompt=History.from_chats(chats))
        result = policy(TensorDict(history=prompts, batch_size=len(part)))
        for text, problem in zip(result["text"].response, part, strict=True):
            right += (
                grade(text, problem["answer"], form=cfg.env.answer, format_reward=0.0)
                == RIGHT
            )
        tokens += sum(map(len, result["tokens"].get("response", as_list=True)))
    return {
        "eval/accuracy": right / len(problems),
        "eval/response_tokens": tokens / len(problems),
    }


def _to_chat(cfg: DictConfig, problem: Problem) -> list[dict[str, str]]:
    chat = [{"role": "user", "content": problem["query"]}]
    said = system_prompt(cfg)
    return chat if said is None else [{"role": "system", "content": said}, *chat]
