"""``Teacher``: an engine whose log-probs a policy learns from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_sglang.backends.async_sglang import AsyncSGLang
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.columns import ASSISTANT_MASK, TOKENS
from torchrl_sglang.objectives.distillation import TEACHER
from torchrl_sglang.objectives.divergences import Distillation
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.requests.token_columns import TokenColumn
from torchrl_sglang.support.checks import (
    check_keywords,
    check_mapping,
    check_seconds,
)
from torchrl_sglang.trainers.placement import check_engine, connect_arguments

SCORE_SECONDS = 1800.0
"""Timeout of a batch's scores."""

SHOWN_TOKENS = 3
"""Tokens of another vocabulary in an error."""


class Teacher:
    """Scores the tokens of a batch with an engine, in one request for each row.

    A request computes prompt and response as a prompt, whose beginning is in the
    prefix cache where rows share it. Log-probs are the model's own, at temperature 1.

    Args:
        engine (RLSGLangEngine): serves the teacher; it has the student's token ids.
        distillation: divergence and estimator, which decide what is asked for.

    Keyword Args:
        timeout (float): seconds for the scores of a batch. Defaults to 1800.

    Raises:
        ConfigurationError: if an argument is wrong.

    Examples:
        >>> teacher = Teacher(engine, Distillation(k=8))
        >>> scored = teacher(SGLangWrapper(engine)(prompts))  # doctest: +SKIP
        >>> scored["teacher", "top_ids"].shape  # doctest: +SKIP
        torch.Size([1, 20, 8])
    """

    def __init__(
        self,
        engine: RLSGLangEngine,
        distillation: Distillation,
        *,
        timeout: float = SCORE_SECONDS,
    ) -> None:
        if not isinstance(engine, RLSGLangEngine):
            raise ConfigurationError(
                f"engine must be an engine, such as AsyncSGLang, got {engine!r}."
            )
        if not isinstance(distillation, Distillation):
            raise ConfigurationError(
                f"distillation must be a Distillation, got {distillation!r}."
            )
        vocabulary = engine.capabilities.vocab_size
        if distillation.num_top > vocabulary:
            raise ConfigurationError(
                f"k={distillation.k} is more than the {vocabulary} tokens of "
                f"{engine.model_path!r}; give at most as many."
            )
        self.engine, self.distillation = engine, distillation
        self._timeout = check_seconds("timeout", timeout)
        self._columns = _columns(distillation.num_top)

    def check_tokens(self, tokenizer: Any) -> None:
        """Refuses a student with other token ids.

        Raises:
            ConfigurationError: if a token of the student has another id here, or none.
        """
        check_same_tokens(
            tokenizer, self.engine.get_tokenizer(), name=self.engine.model_path
        )

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns a batch with the teacher's columns, as a stack of its rows.

        ``("teacher", "log_probs")`` ``(T,)``, and for ``"top_k"`` ``("teacher",
        "top_ids")`` and ``("teacher", "top_log_probs")`` ``(T, k)``, where T is the
        length of ``("tokens", "full")``; 0 before the first token of the policy.

        Raises:
            ConfigurationError: if a row has no tokens, or too many for the teacher.
            ServerError: if servers fail, or do not answer in time.
        """
        rows = list(batch.unbind(0))
        answers = self.engine.generate_requests(
            [self._request(row) for row in rows], timeout=self._timeout
        )
        for row, answer in zip(rows, answers, strict=True):
            columns = {
                name.removeprefix("teacher_"): _padded(values.values, len(row[TOKENS]))
                for name, values in answer.prompt_columns.items()
            }
            row.set(TEACHER, row.empty().update(columns))
        return LazyStackedTensorDict(*rows)

    def _request(self, row: TensorDictBase) -> GenerateRequest:
        # The first position gets no log-prob: scoring begins a token before.
        return GenerateRequest(
            input_ids=row[TOKENS].tolist(),
            sampling_params={"max_new_tokens": 0},
            token_columns=self._columns,
            columns_from=max(_first_written(row) - 1, 0),
        )


def _first_written(row: TensorDictBase) -> int:
    """Returns the position of a row's first token of the policy."""
    mask = row.get(ASSISTANT_MASK, None)
    if mask is None or not mask.any():
        return 0
    return int(mask.int().argmax())


def _padded(values: np.ndarray[Any, Any], length: int) -> torch.Tensor:
    """Returns values of a row's last tokens as values of all of them."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    padding = tensor.new_zeros(length - len(tensor), *tensor.shape[1:])
    return torch.cat([padding, tensor])


def _columns(k: int) -> tuple[TokenColumn, ...]:
    """Returns the quantities that are asked of the teacher's servers."""

    def ask(start: int) -> dict[str, Any]:
        fields: dict[str, Any] = {"return_logprob": True, "logprob_start_len": start}
        return {**fields, "top_logprobs_num": k} if k else fields

    def tops(place: int, none: float) -> Any:
        def read(rows: Sequence[Any], num_tokens: int) -> list[list[Any]]:
            # The first position of a prompt has no entries.
            return [
                [none] * k if row is None else [entry[place] for entry in row]
                for row in rows
            ]

        return read

    sampled = TokenColumn(
        name="teacher_log_probs",
        dtype="float32",
        unknown=0.0,
        padding=0.0,
        request=ask,
        field="input_token_logprobs",
        read=lambda rows, num_tokens: [row[0] or 0.0 for row in rows],
        of_prompt=True,
        dropped_by_router=True,
    )
    if not k:
        return (sampled,)
    top = replace(sampled, field="input_top_logprobs", shape=(k,))
    return (
        sampled,
        replace(top, name="teacher_top_ids", dtype="int64", unknown=0, read=tops(1, 0)),
        replace(top, name="teacher_top_log_probs", read=tops(0, 0.0)),
    )


def check_same_tokens(student: Any, teacher: Any, *, name: str) -> None:
    """Refuses tokenizers in which a token of the student has another id."""
    ids, teacher_ids = student.get_vocab(), teacher.get_vocab()
    wrong = [token for token, number in ids.items() if teacher_ids.get(token) != number]
    if wrong:
        shown = ", ".join(
            f"{token!r} is {ids[token]} and {teacher_ids.get(token, 'missing')}"
            for token in wrong[:SHOWN_TOKENS]
        )
        raise ConfigurationError(
            f"The teacher {name!r} has other token ids than the student: {len(wrong)} "
            f"of {len(ids)} tokens differ ({shown}). Log-probs of one are no log-probs "
            f"of the other; give a teacher with the same tokenizer."
        )


def no_reward(conversation: Any, task: Any) -> float:
    """Returns the reward of a run that learns from its teacher alone."""
    return 0.0


def check_distillation(name: str, value: Any) -> Distillation:
    """Returns a distillation, from itself or its arguments."""
    if isinstance(value, Distillation):
        return value
    arguments = check_mapping(name, value)
    check_keywords(name, arguments, Distillation)
    return Distillation(**arguments)


def check_teacher(name: str, teacher: Any) -> Any:
    """Returns a teacher as it is given to a run."""
    if isinstance(teacher, Mapping):
        options = dict(teacher)
        model = options.pop("model", None)
        addresses = connect_arguments(options) is not None
        if (model is None) is not addresses:
            raise ConfigurationError(
                f"{name} must have either 'model' and arguments of its servers, or an "
                f"address of servers, got the keys {', '.join(map(str, teacher))}."
            )
        check_engine(name, options)
        return teacher
    return check_engine(name, teacher)


@contextmanager
def open_engine(teacher: Any) -> Iterator[RLSGLangEngine]:
    """Yields the engine of a teacher; servers that this starts end with the block."""
    if isinstance(teacher, RLSGLangEngine):
        yield teacher
        return
    is_address = not isinstance(teacher, str) or "://" in teacher
    running = connect_arguments(teacher) if is_address else None
    if running is not None:
        engine = AsyncSGLang.connect(**running)
    else:
        options = {"model": teacher} if isinstance(teacher, str) else dict(teacher)
        engine = AsyncSGLang.from_pretrained(options.pop("model"), **options)
    with engine:
        yield engine
