"""``Teacher``: engines whose log-probs a policy learns from."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import nan
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.chat.messages import check_last_message, read_messages
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.collectors.groups.user_functions import check_call, naming
from torchrl_sglang.collectors.scheduling.failures import BACKOFF_SECONDS, is_engines
from torchrl_sglang.errors import (
    ConfigurationError,
    SGLangError,
    UnsupportedByServerError,
)
from torchrl_sglang.objectives.distillation import TEACHER
from torchrl_sglang.objectives.divergences import Distillation, least_k
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.requests.token_columns import (
    ASSISTANT_MASK,
    ATTENTION_MASK,
    PROMPT,
    TOKENS,
    TokenColumn,
)
from torchrl_sglang.support.blocking import DaemonExecutor
from torchrl_sglang.support.checks import check_seconds
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import Completion

LOG_PROBS = ("log_probs", "full")

SCORE_SECONDS = 1800.0
"""Timeout of a batch's scores."""

OUTAGE_SECONDS = 600.0
"""After this long without any score, a teacher's servers are given up."""

RESERVED_TOKENS = 8
"""SGLang's scheduler keeps up to as many places of a context free of prompts."""

SHOWN_TOKENS = 3
"""Tokens of another vocabulary in an error."""


class Teacher:
    """Scores the tokens of a batch with an engine, or several.

    A request computes prompt and response as a prompt, whose beginning is in the
    prefix cache where rows share it. A row whose tokens another row begins with, as an
    earlier turn of its conversation, has no request of its own. Log-probs are the
    model's own, at temperature 1.

    The longest prompt of a server is a few tokens shorter than its context. A row that
    is longer than that prompt by at most 8 tokens has no scores of its last tokens, and
    these leave the loss.

    Args:
        engine (RLSGLangEngine): serves the teacher; it has the student's token ids. Or
            a mapping of the values of ``key`` to engines.
        distillation: divergence and estimator, which decide what is asked for.

    Keyword Args:
        key (str, optional): column of the task that has the name of a row's teacher.
        prompt (optional): function of a task, a mapping of a row's columns, that
            returns the teacher's prompt: a text of the user, or messages. They replace
            the first prompt of a row. By default the teacher has the student's.
        chat_template (str, optional): template of these messages. By default the
            tokenizer's.
        chat_template_kwargs (optional): its variables.
        sleeps (collection): names of the engines that sleep but for a batch; None is
            the name of a single one. Defaults to none of them.
        timeout (float): seconds for the scores of a batch. Defaults to 1800.

    Raises:
        ConfigurationError: if an argument is wrong.
        UnsupportedByServerError: if servers are too old to send top tokens.

    Examples:
        >>> teacher = Teacher(engine, Distillation(k=8))
        >>> scored = teacher(SGLangWrapper(engine)(prompts))  # doctest: +SKIP
        >>> scored["teacher", "top_ids"].shape  # doctest: +SKIP
        torch.Size([1, 20, 8])
    """

    def __init__(
        self,
        engine: RLSGLangEngine | Mapping[Any, RLSGLangEngine],
        distillation: Distillation,
        *,
        key: str | None = None,
        prompt: Callable[[Mapping[str, Any]], Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        sleeps: Collection[Any] = (),
        timeout: float = SCORE_SECONDS,
    ) -> None:
        self.engines = _check_engines(engine, key)
        if not isinstance(distillation, Distillation):
            raise ConfigurationError(
                f"distillation must be a Distillation, got {distillation!r}."
            )
        sizes = {served.capabilities.vocab_size for served in self.engines.values()}
        counts = {distillation.num_top(size) for size in sizes}
        if len(counts) > 1:
            raise ConfigurationError(
                f"The teachers have vocabularies of {sorted(sizes)} tokens, of which "
                f"{distillation.estimator!r} needs one size; give a k to all of them."
            )
        self.distillation, self.key = distillation, key
        self._sleeping = [self.engines[name] for name in sleeps]
        self._asked = self._most = counts.pop()
        for served in self.engines.values() if self._asked else ():
            if not served.capabilities.encodes_top_logprobs:
                raise UnsupportedByServerError(
                    f"The servers of {served.model_path!r} run SGLang "
                    f"{served.capabilities.version}, which sends the top tokens of a "
                    f"prompt as lists alone, ten times as slowly; update them, or give "
                    f"estimator='sampled'."
                )
        self._prompt, self._template = prompt, None
        if prompt is not None:
            check_call("teacher_prompt", prompt, "task")
            tokenizer = next(iter(self.engines.values())).get_tokenizer()
            self._template = ChatTemplate(
                tokenizer, chat_template, template_kwargs=chat_template_kwargs
            )
        self._timeout = check_seconds("timeout", timeout)
        self._has_left_out = False

    def check_tokens(self, tokenizer: Any) -> None:
        """Refuses a student with other token ids.

        Raises:
            ConfigurationError: if a token of the student has another id here, or none.
        """
        for engine in self.engines.values():
            check_same_tokens(tokenizer, engine.get_tokenizer(), name=engine.model_path)

    def wake_up(self) -> None:
        """Wakes up engines that sleep between batches."""
        for engine in self._sleeping:
            engine.wake_up()

    def sleep(self) -> None:
        """Releases the memory of engines that sleep between batches."""
        for engine in self._sleeping:
            if not engine.asleep:
                engine.sleep()

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns a batch with the teacher's columns, as a stack of its rows.

        ``("teacher", "log_probs")`` ``(T,)``, and where several tokens are compared
        ``("teacher", "top_ids")`` and ``("teacher", "top_log_probs")`` ``(T, k)``,
        where T is the length of ``("tokens", "full")``; NaN and 0 before the first
        token of the policy, and for padding.

        Raises:
            ConfigurationError: if a row has no tokens, or too many for the teacher, or
                names no teacher.
            ServerError: if servers fail for 600 seconds, or do not answer in time.
            UserFunctionError: if ``prompt`` raises an error.
        """
        rows = [row.copy() for row in batch.unbind(0)]
        sequences = [self._read(row) for row in rows]
        columns = self._score(sequences)
        if self.distillation.mass is not None:
            columns = self._reach(self.distillation.mass, sequences, columns)
        for row, values in zip(rows, columns, strict=True):
            row.set(TEACHER, row.empty().update(values))
        return LazyStackedTensorDict(*rows)

    def _read(self, row: TensorDictBase) -> _Sequence:
        """Returns the tokens of a row as its teacher reads them."""
        name = None if self.key is None else _value_of(row, self.key)
        check_name(self.key, name, self.engines)
        tokens, places = row[TOKENS].cpu(), _places(row)
        token_ids: list[int] = tokens[places].tolist()
        begin = int((places < _first_written(row)).sum())
        end = len(token_ids)
        if self._prompt is not None:
            prompt, length = self._encode_prompt(row), len(row[PROMPT])
            length = int((places < length).sum())
            token_ids = [*prompt, *token_ids[length:]]
            begin = max(begin, length) + len(prompt) - length
        places = places[end - (len(token_ids) - begin) :]
        excess = len(token_ids) - self.engines[name].capabilities.longest_prompt
        if 0 < excess <= min(RESERVED_TOKENS, len(places)):
            self._leave_out(row, places[-excess:])
            token_ids, places = token_ids[:-excess], places[:-excess]
        return _Sequence(
            teacher=name,
            token_ids=token_ids,
            begin=begin,
            places=places,
            num_tokens=len(tokens),
        )

    def _leave_out(self, row: TensorDictBase, places: Tensor) -> None:
        """Takes tokens that the servers cannot score out of a row's loss."""
        # Losses skip tokens without log-probs, with any masking strategy.
        for key, nothing in ((ASSISTANT_MASK, False), (LOG_PROBS, nan)):
            column = row.get(key, None)
            if column is not None:
                row.set(key, column.index_fill(0, places.to(column.device), nothing))
        if not self._has_left_out:
            self._has_left_out = True
            torchrl_logger.warning(
                f"A row fills the teacher's context: its last {len(places)} token(s) "
                f"have no scores, and leave the loss. Such rows are cut in the same "
                f"way from here on; a larger context_length of the teacher's servers, "
                f"or a smaller max_new_tokens, avoids it."
            )

    def _encode_prompt(self, row: TensorDictBase) -> list[int]:
        """Returns the tokens of the teacher's own prompt."""
        assert self._prompt is not None
        assert self._template is not None
        if int(row.get("step_count", torch.zeros(1))):
            raise ConfigurationError(
                "A prompt of the teacher's own replaces the first prompt, and a row of "
                "a later turn does not say where that ends; give max_turns=1, or an "
                "agent, each of whose rows is a whole conversation."
            )
        with naming("teacher_prompt"):
            prompt = self._prompt({name: _value_of(row, name) for name in row.keys()})
        messages = read_messages(prompt, "teacher_prompt")
        check_last_message(messages, "teacher_prompt")
        return self._template.encode(self._template.render(messages))

    def _score(self, sequences: Sequence[_Sequence]) -> list[dict[str, Tensor]]:
        """Returns the columns of each sequence."""
        places = {name: place for place, name in enumerate(self.engines)}
        covers = covering([[places[s.teacher], *s.token_ids] for s in sequences])
        starts: dict[int, int] = {}
        for sequence, longest in zip(sequences, covers, strict=True):
            # The first position gets no log-prob: scoring begins a token before.
            start = max(sequence.begin - 1, 0)
            starts[longest] = min(start, starts.get(longest, start))
        columns = _columns(self._asked)
        requests = {
            longest: GenerateRequest(
                input_ids=sequences[longest].token_ids,
                sampling_params={"max_new_tokens": 0},
                token_columns=columns,
                columns_from=start,
            )
            for longest, start in starts.items()
        }
        answers = self._ask(requests, {n: sequences[n].teacher for n in requests})
        return [
            sequence.columns(answers[longest], starts[longest])
            for sequence, longest in zip(sequences, covers, strict=True)
        ]

    def _ask(
        self, requests: Mapping[int, GenerateRequest], teachers: Mapping[int, Any]
    ) -> dict[int, Completion]:
        """Returns the answers to requests; all teachers compute at the same time."""

        def ask(name: Any) -> dict[int, Completion]:
            chosen = {n: r for n, r in requests.items() if teachers[n] == name}
            return ask_patiently(self.engines[name], chosen, self._timeout)

        names = set(teachers.values())
        # One teacher's error does not wait for the others.
        with DaemonExecutor("torchrl_sglang-teachers", len(names)) as pool:
            return {n: a for of in pool.map(ask, names) for n, a in of.items()}

    def _reach(
        self,
        mass: float,
        sequences: Sequence[_Sequence],
        columns: list[dict[str, Tensor]],
    ) -> list[dict[str, Tensor]]:
        """Returns as many top tokens as a batch needs for a mass, at most 256."""
        while True:
            tops = torch.cat([values["top_log_probs"] for values in columns])
            tops = tops[tops.isfinite().all(-1)]
            if not len(tops):
                return columns
            k = least_k(tops, mass)
            if k <= self._asked or self._asked == self._most:
                break
            self._asked = min(2 * self._asked, self._most)
            columns = self._score(sequences)
        for values in columns:
            for name in ("top_ids", "top_log_probs"):
                values[name] = values[name][:, :k].contiguous()
        # The next batch may need more.
        self._asked = min(2 * k, self._most)
        return columns


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sequence:
    """Tokens of a row as its teacher reads them."""

    teacher: Any
    """Name of the teacher."""
    token_ids: list[int]
    """Prompt, which may be the teacher's own, and other tokens, without padding."""
    begin: int
    """Position of the first token to score."""
    places: Tensor
    """Positions in the row of the tokens to score."""
    num_tokens: int
    """Number of the row's tokens, with padding."""

    def columns(self, answer: Completion, start: int) -> dict[str, Tensor]:
        """Returns the columns of the row from an answer that begins at ``start``."""
        end = len(self.token_ids)
        return {
            name.removeprefix("teacher_"): _placed(
                values.values[self.begin - start : end - start],
                self.places,
                self.num_tokens,
                values.layout.unknown,
            )
            for name, values in answer.prompt_columns.items()
        }


def ask_patiently(
    engine: RLSGLangEngine, requests: Mapping[int, GenerateRequest], timeout: float
) -> dict[int, Completion]:
    """Returns the answers to requests, from servers that may be started again.

    Raises the first error of an engine that fails for longer than ``OUTAGE_SECONDS``.
    """
    answers: dict[int, Completion] = {}
    deadline, failing_since = time.monotonic() + timeout, math.inf
    while missing := requests.keys() - answers.keys():
        outcomes: list[Any] = engine.generate_requests(
            [requests[n] for n in missing],
            timeout=max(deadline - time.monotonic(), 1.0),
            return_exceptions=True,
        )
        now = time.monotonic()
        pairs = list(zip(missing, outcomes, strict=True))
        answers |= {n: a for n, a in pairs if isinstance(a, Completion)}
        errors = [error for _, error in pairs if isinstance(error, SGLangError)]
        failing_since = min(failing_since, now) if len(errors) == len(pairs) else now
        for error in errors:
            lasting = now > min(failing_since + OUTAGE_SECONDS, deadline)
            if lasting or not is_engines(error):
                note = f"It is a request to the teacher {engine.model_path!r}."
                raise error.replace(note=note)
        if errors:
            # Once in an outage, which can have hundreds of attempts.
            if failing_since == now:
                torchrl_logger.warning(
                    f"The teacher {engine.model_path!r} failed and is asked again: "
                    f"{errors[0]}"
                )
            time.sleep(BACKOFF_SECONDS)
    return answers


def covering(sequences: Sequence[list[int]]) -> list[int]:
    """Returns, for each sequence, the place of a longest one that begins with it.

    Examples:
        >>> covering([[1], [2, 5], [1, 3, 4], [1, 3], [2, 5]])
        [2, 1, 2, 2, 1]
    """
    # In this order, a sequence comes right after one that begins with it, if any does.
    order = sorted(range(len(sequences)), key=lambda n: sequences[n], reverse=True)
    covers = list(range(len(sequences)))
    for longer, place in pairwise(order):
        if sequences[longer][: len(sequences[place])] == sequences[place]:
            covers[place] = covers[longer]
    return covers


def check_name(key: str | None, name: Any, teachers: Mapping[Any, Any]) -> None:
    """Refuses the name of a task's teacher, if there is no such teacher."""
    try:
        exists = name in teachers
    except TypeError:
        # A list, for example, is no key of a mapping.
        exists = False
    if not exists:
        raise ConfigurationError(
            f"A task has {key}={name!r:.200}, and there are teachers for "
            f"{', '.join(map(repr, teachers))}."
        )


def _check_engines(engine: Any, key: str | None) -> dict[Any, RLSGLangEngine]:
    engines = engine if isinstance(engine, Mapping) else {None: engine}
    if isinstance(engine, Mapping) is (key is None):
        raise ConfigurationError(
            f"Several teachers are a mapping of the values of a task's column, and key "
            f"is its name; got key={key!r} and engine={engine!r:.200}."
        )
    wrong = [
        other for other in engines.values() if not isinstance(other, RLSGLangEngine)
    ]
    if wrong or not engines:
        raise ConfigurationError(
            f"engine must be an engine, such as AsyncSGLang, got "
            f"{wrong[0] if wrong else engine!r}."
        )
    return dict(engines)


def _value_of(row: TensorDictBase, name: Any) -> Any:
    """Returns a column of a row as Python has it; None if there is none."""
    value = row[name] if name in row.keys() else None
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _places(row: TensorDictBase) -> Tensor:
    """Returns the positions of a row's tokens, without padding."""
    real = row.get(ATTENTION_MASK, None)
    if real is None:
        return torch.arange(len(row[TOKENS]))
    places: Tensor = real.cpu().nonzero().squeeze(-1)
    return places


def _first_written(row: TensorDictBase) -> int:
    """Returns the position of a row's first token of the policy, or its end."""
    mask = row.get(ASSISTANT_MASK, None)
    if mask is None:
        return 0
    return int(mask.int().argmax()) if mask.any() else len(mask)


def _placed(
    values: np.ndarray[Any, Any], places: Tensor, length: int, unknown: float
) -> Tensor:
    """Returns values of some tokens of a row as values of all of them."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    row = tensor.new_full((length, *tensor.shape[1:]), unknown)
    row[places] = tensor
    return row


def _columns(k: int) -> tuple[TokenColumn, ...]:
    """Returns the quantities that are asked of the teacher's servers.

    Arrays of the top tokens take a tenth of the time of lists, with ``k`` of 64.
    """

    def ask(start: int) -> dict[str, Any]:
        fields: dict[str, Any] = {"return_logprob": True, "logprob_start_len": start}
        flat = "return_flat_raw_top_logprobs"
        tops = {"top_logprobs_num": k, flat: True, f"{flat}_b64": True}
        return fields | tops if k else fields

    def top(name: str, part: str, dtype: str, unknown: float) -> TokenColumn:
        return replace(
            sampled,
            name=name,
            dtype=dtype,
            unknown=unknown,
            shape=(k,),
            field=f"input_top_logprobs_{part}_flat_b64",
            field_type=str,
            read=partial(_decode, k, dtype, unknown),
        )

    sampled = TokenColumn(
        name="teacher_log_probs",
        dtype="float32",
        unknown=nan,
        padding=0.0,
        request=ask,
        field="input_token_logprobs",
        # Null is NaN, and the value of the first token.
        read=lambda rows, num_tokens: [
            nan if row[0] is None else row[0] for row in rows
        ],
        of_prompt=True,
        dropped_by_router=True,
    )
    if not k:
        return (sampled,)
    ids = top("teacher_top_ids", "idx", "int32", 0)
    return (sampled, ids, top("teacher_top_log_probs", "val", "float32", nan))


def _decode(
    k: int, dtype: str, unknown: float, encoded: str, num_tokens: int
) -> np.ndarray[Any, Any]:
    """Returns ids or log-probs of an array, which lacks the first position."""
    values = np.frombuffer(base64.b64decode(encoded), np.dtype(dtype).newbyteorder("<"))
    missing = np.full(num_tokens * k - len(values), unknown, dtype)
    return np.concatenate([missing, values])


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
