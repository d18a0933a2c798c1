"""Completions to TorchRL's containers: the last step of the pipeline.

:func:`generated` and :func:`scored` return the rows of each sample; :func:`assemble`
stacks them to containers of the batch's shape. Containers hold lazily stacked
TensorDicts, so rows keep their lengths. The layout is the same as ``vLLMWrapper``'s:

================ ===================== ===================== ==========================
                 prompt                response              full
================ ===================== ===================== ==========================
tokens           ``(Lp,)`` int64       ``(Lr,)`` int64       ``(Lp + Lr,)`` int64
log-probs        ``(Lp,)`` or unset    ``(Lr,)`` float32     ``(Lp + Lr,)``, NaN where
                                                             the prompt was not scored
masks            attention: ones; assistant: zeros for the prompt, ones for the response
token columns                          ``(Lr, *shape)``      ``(Lp + Lr, *shape)``
================ ===================== ===================== ==========================

TensorDicts are built without their checks, which would take ten times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NestedKey,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)
from tensordict.tensorclass import TensorClass
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from torchrl_sglang.chat.tokens import decode
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies.inputs import PromptBatch
from torchrl_sglang.requests.token_values import (
    LOG_PROB,
    TOP_LOG_PROBS,
    TOP_TOKENS,
    WEIGHT_VERSION,
    concatenate,
    unknown_values,
    values_of,
)
from torchrl_sglang.types import Completion, TokenLayout, TokenValues


class GenerationInfo(TensorClass["nocast"]):  # type: ignore[name-defined]
    """Metadata of each response."""

    finish_reason: str
    truncated: torch.Tensor
    cached_tokens: torch.Tensor
    weight_version: torch.Tensor
    mixed_state: torch.Tensor
    logprobs_mode: str
    top_token_ids: torch.Tensor | None = None
    top_log_probs: torch.Tensor | None = None


# TensorClass replaces a class's own docstring with its signature.
GenerationInfo.__doc__ = """Metadata of each response beyond tokens and log-probs.

    Written with ``SGLangWrapper(..., return_generation_info=True)``, and also where
    ``generate_kwargs={"logprobs": N}`` asks for the top ``N`` tokens.

    Shapes are for one sample, after the batch dimensions, as in
    :class:`~torchrl.modules.llm.policies.Tokens`. ``Lr`` is the response length.

    Args:
        finish_reason (str): ``"stop"`` (a stop token or stop string) or ``"length"``.
        truncated (torch.Tensor): bool ``()``: whether the response ended only because
            of its length.
        cached_tokens (torch.Tensor): int64 ``()``: prompt tokens found in the prefix
            cache.
        weight_version (torch.Tensor): int64 ``(Lr,)``: weight version that generated
            each token, as counted by the weight-sync scheme; -1 if the server's version
            is not a number, as before the first update, or unknown: SGLang before
            0.5.20 does not report it for responses that span a weight update. Padded on
            the right with -1.
        mixed_state (torch.Tensor): bool ``()``: whether tokens were generated on a
            stale KV cache, computed by older weights, as with
            ``pause_mode="in_place"``; also True if the versions are unknown. Log-probs
            that the server computed for such tokens belong to no single weight
            version. An engine object that does not send the weights itself infers this
            from the server's recomputations, and can miss it for a response that the
            server retracted for lack of memory.
        logprobs_mode (str): origin of the written log-probs, of sampled and top tokens:
            ``"model"``, ``"sampling"`` or ``"behaviour"``; empty without log-probs.
        top_token_ids (torch.Tensor, optional): int64 ``(Lr, N)``: the top ``N`` tokens
            at each position, most likely first, if requested. Padded on the right with
            -1.
        top_log_probs (torch.Tensor, optional): float32 ``(Lr, N)``: their log-probs.
            Padded on the right with 0.0.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.modules.llm.policies import Text
        >>> policy = SGLangWrapper(
        ...     engine,
        ...     input_mode="text",
        ...     generate_kwargs={"max_new_tokens": 2, "ignore_eos": True},
        ...     return_generation_info=True,
        ... )
        >>> prompt = Text(prompt=["Hi"], batch_size=1)
        >>> info = policy(TensorDict(text=prompt, batch_size=1))["generation_info"]
        >>> list(info.finish_reason), info.truncated.tolist()
        (['length'], [True])
    """


Rows = dict[str, Any]
"""Field of a container -> value of one sample."""


Sample = dict[str, Rows]
"""Container (``"text"``, ``"tokens"``, ...) -> its rows for one sample."""

CONTAINERS = {
    "text": Text,
    "tokens": Tokens,
    "masks": Masks,
    "log_probs": LogProbs,
    "history": ChatHistory,
    "generation_info": GenerationInfo,
}

_NO_SHAPE = torch.Size([])
_NOTHING: Mapping[str, Any] = {}
_NO_TOOLS = {"tool_calls": None, "tool_responses": None}
"""Unset fields of a generated :class:`~torchrl.data.llm.History`."""

_FILL = {"masks": False, "log_probs": LOG_PROB.padding, "generation_info": -1}
"""Container -> padding value; tokens are padded with the padding token."""

_FILL_OF_FIELD = {
    layout.name: layout.padding
    for layout in (WEIGHT_VERSION, TOP_TOKENS, TOP_LOG_PROBS)
}
"""Field -> padding value, where it differs from its container's."""

_RESPONSE_FIELDS = (
    *("response", "response_counts"),
    *_FILL_OF_FIELD,
)
"""Fields with one value per response token and none for the prompt."""


def check_target(
    target: TensorDictBase | None,
    keys: Iterable[NestedKey],
    shape: Sequence[int],
    device: torch.device | None = None,
) -> None:
    """Checks that results of ``shape`` can be written there, and be on the device.

    TensorDict and torch would raise only afterwards, and the responses would be lost.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"device={str(device)!r} is not available in this process: {error}. Give "
            f"another one, or leave it out for the input's device."
        ) from error
    if target is None:
        return
    if not isinstance(target, TensorDictBase):
        raise ConfigurationError(
            f"The results are written to a TensorDict, got a {type(target).__name__}."
        )
    paths = [(key,) if isinstance(key, str) else key for key in keys]
    above = {path[:end] for path in paths for end in range(len(path))}
    for path in sorted(above, key=len):
        entry = target.get(path, None) if path else target
        place = "The TensorDict to write to" + (f" at {path}" if path else "")
        if entry is None:
            continue
        if not is_tensor_collection(entry):
            raise ConfigurationError(
                f"The results are written below {path}, and the TensorDict to write to "
                f"has a {type(entry).__name__} there; write under other keys."
            )
        if entry.is_locked:
            raise ConfigurationError(
                f"{place} is locked; unlock it with unlock_(), or have a new one made "
                f"with inplace=False."
            )
        batch = tuple(entry.batch_size)
        if batch != tuple(shape)[: len(batch)]:
            raise ConfigurationError(
                f"{place} has the batch size {batch}, and the results have "
                f"{tuple(shape)}; give one of this size, or none."
            )


def generated(
    prompts: PromptBatch,
    completions: Sequence[Completion],
    *,
    log_probs: bool,
    layouts: Sequence[TokenLayout],
    texts: Sequence[tuple[str, str]] | None,
    ended: Sequence[bool] | None,
    top_logprobs: int,
) -> list[Sample]:
    """Returns all containers of each generated sample.

    ``texts`` come from :func:`read_texts`; ``ended`` is True for responses that end
    with a token that ends a turn. Without them there are no texts and conversations, or
    no :class:`.GenerationInfo`.
    """
    repeats = len(completions) // len(prompts.token_ids)
    samples = []
    for index, completion in enumerate(completions):
        number = index // repeats
        prompt = prompts.token_ids[number]
        sample = _generated(prompt, completion, log_probs)
        if ended is not None:
            sample["generation_info"] = _info(completion, ended[index], top_logprobs)
        for layout in layouts:
            sample[layout.name] = _column(completion, layout, len(prompt))
        if texts is not None and prompts.texts is not None:
            response, message = texts[index]
            text = prompts.texts[number]
            fields = {"prompt": text, "response": response, "full": text + response}
            sample["text"] = {name: non_tensor(text) for name, text in fields.items()}
            if prompts.histories is not None:
                sample["history"] = _history_rows(prompts.histories[number], message)
        samples.append(sample)
    return samples


def _generated(
    prompt: Sequence[int], completion: Completion, log_probs: bool
) -> Sample:
    length, total = len(prompt), len(prompt) + len(completion.token_ids)
    prompt_row, tokens = _row(prompt, np.int64), _row(completion.token_ids, np.int64)
    sample: Sample = {
        "tokens": {
            "prompt": prompt_row,
            "response": tokens,
            "full": torch.cat([prompt_row, tokens]),
        },
        "masks": {
            "all_attention_mask": torch.ones(total, dtype=torch.bool),
            "all_assistant_mask": torch.arange(total) >= length,
        },
    }
    if log_probs:
        response = _tensor(values_of(completion, LOG_PROB))
        prompt_log_probs = completion.prompt_log_probs
        # NaN means not computed; 0.0 would mean certain.
        prompt_row = (
            torch.full((length,), math.nan)
            if prompt_log_probs is None
            else _row(prompt_log_probs, np.float32)
        )
        rows = {"response": response, "full": torch.cat([prompt_row, response])}
        if prompt_log_probs is not None:
            rows["full"][0] = 0.0
            rows["prompt"] = rows["full"][:length].clone()
        sample["log_probs"] = rows
    return sample


def _column(completion: Completion, layout: TokenLayout, prompt_length: int) -> Rows:
    response = values_of(completion, layout)
    prompt_values = completion.prompt_columns.get(layout.name)
    if prompt_values is None:
        prompt_values = unknown_values(layout, prompt_length)
    return column_rows(response, concatenate([prompt_values, response]))


def column_rows(response: TokenValues, full: TokenValues) -> Rows:
    """Returns the fields of the container of a token column.

    Those of lists are the lists of all tokens one after the other, and the length of
    each.
    """
    rows: Rows = {}
    for field, values in (("response", response), ("full", full)):
        rows[field] = _tensor(values)
        if values.counts is not None:
            rows[f"{field}_counts"] = torch.from_numpy(values.counts.copy())
    return rows


def _tensor(values: TokenValues) -> torch.Tensor:
    """Returns values as a tensor that owns its memory."""
    return torch.from_numpy(values.values.copy())


def scored(
    prompts: PromptBatch, completions: Sequence[Completion], padding_value: int
) -> list[Sample]:
    """Returns all containers of each scored sequence.

    The first token's log-prob, which has no context, is 0.0 as in TorchRL's wrappers.
    """
    samples = []
    for index, completion in enumerate(completions):
        ids = prompts.token_ids[index]
        assert completion.prompt_log_probs is not None
        log_probs = _row(completion.prompt_log_probs, np.float32)
        log_probs[0] = 0.0
        masks: Rows = {"all_attention_mask": torch.ones(len(ids), dtype=torch.bool)}
        if prompts.assistant_masks is not None:
            masks["all_assistant_mask"] = torch.tensor(
                prompts.assistant_masks[index], dtype=torch.bool
            )
        sample: Sample = {
            "tokens": {"full": _row(ids, np.int64)},
            "masks": masks,
            "log_probs": {"full": log_probs},
        }
        if prompts.masks is not None:
            restore_padding(sample, prompts.masks[index], padding_value)
        if prompts.texts is not None:
            sample["text"] = {"full": non_tensor(prompts.texts[index])}
        if prompts.histories is not None:
            sample["history"] = {"full": prompts.histories[index]}
        samples.append(sample)
    return samples


def _info(completion: Completion, ended: bool, top_logprobs: int) -> Rows:
    # At the maximum length the server reports the length even if the turn ended.
    truncated = completion.finish_reason == "length" and not ended
    rows: Rows = {
        "finish_reason": non_tensor("stop" if ended else completion.finish_reason),
        "truncated": torch.full((), truncated),
        "cached_tokens": torch.full((), completion.cached_tokens),
        "weight_version": _tensor(values_of(completion, WEIGHT_VERSION)),
        "mixed_state": torch.full((), completion.mixed_state),
        "logprobs_mode": non_tensor(completion.logprobs_mode or ""),
    }
    if completion.top_token_ids is not None:
        for top_layout in (TOP_TOKENS, TOP_LOG_PROBS):
            layout = replace(top_layout, shape=(top_logprobs,))
            rows[top_layout.name] = _tensor(values_of(completion, layout))
    return rows


def read_texts(
    completions: Sequence[Completion],
    drops_last: Sequence[bool],
    *,
    tokenizer: Any,
    skip_special_tokens: bool,
) -> list[tuple[str, str]]:
    """Returns each response as text, and as the content of a message.

    ``drops_last``: messages that lack the last token, because the chat template writes
    an end of the turn itself, and the next prompt would hold it twice.
    """
    rows = [completion.token_ids for completion in completions]
    exact = responses = decode(tokenizer, rows)
    if skip_special_tokens:
        responses = decode(tokenizer, rows, skip_special_tokens=True)
    last_tokens = [
        row[-1] if drops else None for row, drops in zip(rows, drops_last, strict=True)
    ]
    ends = sorted({token for token in last_tokens if token is not None})
    texts = decode(tokenizer, [[end] for end in ends]) if ends else []
    text_of: dict[int | None, str] = {None: "", **dict(zip(ends, texts, strict=True))}
    return [
        (response, text.removesuffix(text_of[end]))
        for response, text, end in zip(responses, exact, last_tokens, strict=True)
    ]


def to_history(messages: Sequence[TensorDict]) -> History:
    """Returns messages of :func:`to_message` as a conversation of shape ``(T,)``."""
    return wrap(History, LazyStackedTensorDict(*messages), _NO_TOOLS)


def to_prompt(history: History) -> ChatHistory:
    """Returns a conversation that waits for a response."""
    unset = {"response": None, "full": None}
    return wrap(ChatHistory, unchecked({"prompt": history}), unset)


def to_message(
    fields: Mapping[str, Any], device: torch.device | None = None
) -> TensorDict:
    """Returns one message of a conversation."""
    message_fields = {"is_complete": True, **fields}
    return unchecked(
        {
            name: non_tensor(value, device)
            for name, value in message_fields.items()
            if value is not None
        },
        device,
    )


def _history_rows(prompt: History, content: str) -> Rows:
    """Returns prompt, response and full conversation of one generated sample."""
    inner = prompt._tensordict
    lazy = isinstance(inner, LazyStackedTensorDict) and inner.stack_dim == 0
    turns = list(inner.tensordicts) if lazy else list(inner.unbind(0))
    # All turns of a stack must be on one device.
    answer = to_message({"role": "assistant", "content": content}, prompt.device)
    return {
        # A container for each sample, so that appending to one changes no other.
        "prompt": wrap(History, LazyStackedTensorDict(*turns), prompt._non_tensordict),
        "response": wrap(History, LazyStackedTensorDict(answer), _NO_TOOLS),
        # A lazy stack has the keys that all of its elements have.
        "full": wrap(History, LazyStackedTensorDict(*turns, answer), _NO_TOOLS),
    }


def assemble(
    samples: Sequence[Sample],
    shape: Sequence[int],
    *,
    pad_output: bool,
    padding_value: int,
    device: torch.device | None,
    layouts: Sequence[TokenLayout] = (),
) -> dict[str, Any]:
    """Returns each container of the batch, of batch size ``shape``, on ``device``.

    ``samples`` are in row-major order; conversations are on ``device`` already.
    ``layouts`` describe the samples' token columns.
    """
    if pad_output:
        pad_samples(samples, padding_value, layouts)
    containers = {}
    for name in samples[0]:
        rows = [unchecked(_on(sample[name], device), device) for sample in samples]
        if name in ("tokens", "masks", "log_probs"):
            for row in rows:
                row._tensordict["padded"] = _constant(MetaData, pad_output, device)
        cls = CONTAINERS.get(name)
        containers[name] = stack(rows, shape)
        if cls is not None:
            unset = cls.__expected_keys__ - set(rows[0].keys())
            containers[name] = wrap(cls, containers[name], dict.fromkeys(unset))
    return containers


def _on(rows: Rows, device: torch.device | None) -> Rows:
    """Returns the rows on a device; conversations are there already."""
    if device is None:
        return rows
    return {
        field: value.to(device)
        if isinstance(value, torch.Tensor)
        else non_tensor(value.data, device)
        if isinstance(value, NonTensorData)
        else value
        for field, value in rows.items()
    }


def stack(items: Sequence[TensorDictBase], shape: Sequence[int]) -> TensorDictBase:
    """Returns the items, in row-major order, as a lazy stack of the given shape."""
    if not shape:
        return items[0]
    if len(shape) > 1:
        size = math.prod(shape[1:])
        items = [
            stack(items[start : start + size], shape[1:])
            for start in range(0, len(items), size)
        ]
    return LazyStackedTensorDict(*items, stack_dim=0)


def _row(values: Any, dtype: Any) -> torch.Tensor:
    """Returns the values as a tensor that owns its memory."""
    return torch.from_numpy(np.array(values, dtype=dtype))


def unchecked(
    content: Mapping[str, Any], device: torch.device | None = None
) -> TensorDict:
    """Returns a scalar TensorDict whose values are known to be valid."""
    return filled(content, _NO_SHAPE, device)


def filled(
    content: Mapping[str, Any],
    batch_size: torch.Size,
    device: torch.device | None,
    names: list[str] | None = None,
) -> TensorDict:
    """Returns ``TensorDict._new_unsafe(content, ...)`` in half of its time."""
    new = TensorDict.__new__(TensorDict)
    new._tensordict = dict(content)
    new._batch_size = batch_size
    new._device = device
    new._td_dim_names = names
    return new


def ends(*, terminated: bool = False, truncated: bool = False) -> dict[str, Any]:
    """Returns the columns of a row for the end of its conversation."""
    return {
        "done": torch.full((1,), terminated or truncated),
        "terminated": torch.full((1,), terminated),
        "truncated": torch.full((1,), truncated),
    }


def non_tensor(value: Any, device: torch.device | None = None) -> NonTensorData:
    """Returns a non-tensor value as TensorDicts of a device hold it."""
    return _constant(NonTensorData, value, device)


def _constant(cls: Any, value: Any, device: torch.device | None) -> Any:
    content = {"data": value, "_is_non_tensor": True, "_metadata": None}
    return wrap(cls, unchecked(_NOTHING, device), content)


def wrap(cls: Any, content: TensorDictBase, others: Mapping[str, Any]) -> Any:
    """Returns ``cls._from_tensordict(content, others)`` without its checks."""
    wrapped = cls.__new__(cls)
    # Through __dict__, each would have one more object for the garbage collector.
    object.__setattr__(wrapped, "_tensordict", content)
    object.__setattr__(wrapped, "_non_tensordict", dict(others))
    return wrapped


def pad_samples(
    samples: Sequence[dict[str, dict[str, Any]]],
    padding_value: int,
    layouts: Sequence[TokenLayout] = (),
) -> None:
    """Pads prompts on the left and responses on the right, in place."""
    fill = {"tokens": padding_value, **_FILL}
    fill |= {layout.name: layout.padding for layout in layouts}
    lists = {layout.name for layout in layouts if layout.is_ragged}
    # A scored sequence has no response and is padded like a prompt.
    splits = [
        len(sample["tokens"]["prompt" if "prompt" in sample["tokens"] else "full"])
        for sample in samples
    ]
    for name in fill.keys() & samples[0].keys():
        for field, first in list(samples[0][name].items()):
            if not isinstance(first, torch.Tensor) or not first.ndim:
                continue
            rows = [sample[name][field] for sample in samples]
            value = _FILL_OF_FIELD.get(field, fill[name])
            starts = [0] * len(rows) if field in _RESPONSE_FIELDS else splits
            if field.endswith("_counts"):
                value = 0
            elif name in lists:
                starts = [0] * len(rows)
            placed = list(zip(samples, rows, starts, strict=True))
            shift = max(starts)
            width = shift + max(len(row) - start for _, row, start in placed)
            for sample, row, start in placed:
                padded = row.new_full((width, *row.shape[1:]), value)
                padded[shift - start : shift - start + len(row)] = row
                sample[name][field] = padded


def restore_padding(
    sample: dict[str, dict[str, Any]], mask: torch.Tensor, padding_value: int
) -> None:
    """Moves a scored sample's values to the places that its tokens had, in place."""
    fill = {"tokens": padding_value, **_FILL}
    for name in fill.keys() & sample.keys():
        for field, row in sample[name].items():
            padded = row.new_full(mask.shape, fill[name])
            sample[name][field] = padded.masked_scatter_(mask, row)
