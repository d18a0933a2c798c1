"""GSM8K: problems, rewards for both forms of an answer, and a model to try them with.

Rewards are shares of a whole: that a response has an answer in the right form, and that
it is right.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torchrl.envs.llm import GSM8KRewardParser

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.testing.tiny_model import save_tiny_model

TINY_MODEL = Path("runs/tiny-model")

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def to_task(row: Any) -> dict[str, str]:
    r"""Returns the problem of a row, with the number alone as its answer.

    Raises:
        ConfigurationError: if the row has another format.

    Examples:
        >>> to_task({"question": "6*7?", "answer": "6*7=<<6*7=42>>42\n#### 42"})
        {'query': '6*7?', 'answer': '42'}
    """
    try:
        question, (_, answer) = row["question"], row["answer"].split("#### ")
    except (KeyError, TypeError, ValueError):
        raise ConfigurationError(
            f"{row!r} is no problem: it needs a 'question', and an 'answer' that ends "
            f"with '#### ' and a number."
        ) from None
    return {"query": question, "answer": GSM8KRewardParser.normalize_answer(answer)}


def tagged_answer(text: str) -> str:
    """Returns the answer between tags, or ``""``.

    Examples:
        >>> tagged_answer("<think>6*7</think> <answer>$1,042.0</answer>")
        '1042'
    """
    return GSM8KRewardParser.normalize_answer(GSM8KRewardParser.extract_tags(text)[1])


def last_number(text: str) -> str:
    """Returns the last number of a text, or ``""``.

    Examples:
        >>> last_number("6*7 is $1,042.00.")
        '1042'
    """
    return GSM8KRewardParser.normalize_answer((_NUMBER.findall(text) or [""])[-1])


def right(conversation: Any, task: dict[str, str]) -> float:
    """Rewards the right answer between tags."""
    return float(tagged_answer(conversation.response) == task["answer"])


def tagged(conversation: Any, task: dict[str, str]) -> float:
    """Rewards any answer between tags."""
    return float(bool(tagged_answer(conversation.response)))


def right_number(conversation: Any, task: dict[str, str]) -> float:
    """Rewards the right answer as the last number."""
    return float(last_number(conversation.response) == task["answer"])


def any_number(conversation: Any, task: dict[str, str]) -> float:
    """Rewards any number."""
    return float(bool(last_number(conversation.response)))


def tiny_model() -> Path:
    """Returns the folder of a tiny model with random weights, which this writes.

    Ranks of a trainer write the same at the same time: the first one's stays, whole.
    """
    if not TINY_MODEL.exists():
        TINY_MODEL.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=TINY_MODEL.parent) as folder:
            made = save_tiny_model(Path(folder) / "model", initializer_range=0.05)
            # It cannot take the place of a folder that is not empty.
            with suppress(OSError):
                made.rename(TINY_MODEL)
    return TINY_MODEL
