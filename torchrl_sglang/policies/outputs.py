"""Completions to TorchRL's containers: the last step of the pipeline.

:func:`generated` and :func:`scored` turn one sample into rows; :func:`assemble` pads
the rows if asked to, wraps them and gives them the batch's shape. Containers hold
lazily stacked TensorDicts, so values of different lengths lie beside one another. The
layout is the one of ``vLLMWrapper``:

================ ===================== ===================== ==========================
                 prompt                response              full
================ ===================== ===================== ==========================
tokens           ``(Lp,)`` int64       ``(Lr,)`` int64       ``(Lp + Lr,)`` int64
log-probs        ``(Lp,)`` or unset    ``(Lr,)`` float32     ``(Lp + Lr,)``, NaN where
                                                             the prompt was not scored
masks            attention: ones; assistant: zeros for the prompt, ones for the response
================ ===================== ===================== ==========================

Containers are put together from dictionaries whose contents are known to fit, which
takes a tenth of the time of a checked construction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    TensorDict,
    TensorDictBase,
)
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, LogProbs, Masks, Text, Tokens

from torchrl_sglang.policies.info import GenerationInfo
from torchrl_sglang.policies.inputs import Prompts
from torchrl_sglang.policies.padding import pad
from torchrl_sglang.types import Completion

__all__ = ["Sample", "assemble", "generated", "scored", "write_text"]

_SCALAR = torch.Size([])


def int_row(values: Sequence[int]) -> torch.Tensor:
    """Returns the values as an int64 tensor that owns its memory."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def matrix(rows: Sequence[Sequence[float]], width: int, dtype: Any) -> torch.Tensor:
    """Returns equally long rows as a tensor of shape ``(len(rows), width)``."""
    return torch.from_numpy(np.array(rows, dtype=dtype).reshape(len(rows), width))


def float_row(values: Sequence[float]) -> torch.Tensor:
    """Returns the values as a float32 tensor that owns its memory."""
    return torch.from_numpy(np.array(values, dtype=np.float32))


def unchecked(
    content: Mapping[str, Any], device: torch.device | None = None
) -> TensorDict:
    """Returns a scalar TensorDict of values that are known to fit, and to be there."""
    return TensorDict._new_unsafe(dict(content), batch_size=_SCALAR, device=device)


def non_tensor(value: Any, device: torch.device | None = None) -> NonTensorData:
    """Returns a value that is not a tensor as TensorDicts of a device hold it."""
    content = {"data": value, "_is_non_tensor": True, "_metadata": None}
    return wrap(NonTensorData, unchecked({}, device), content)


def wrap(cls: Any, content: TensorDictBase, others: Mapping[str, Any]) -> Any:
    """Returns a TensorClass over ``content``, whose fields are known to fit.

    It is what ``cls._from_tensordict`` returns, which looks at every key of every
    element of a lazy stack to check them.

    Args:
        cls: the TensorClass.
        content: the fields that are set.
        others: the fields that are not in ``content``, usually ``None``.
    """
    wrapped = cls.__new__(cls)
    wrapped.__dict__["_tensordict"] = content
    wrapped.__dict__["_non_tensordict"] = dict(others)
    return wrapped


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


Rows = dict[str, Any]
"""Field of a container -> value of one sample."""

Sample = dict[str, Rows]
"""Container (``"text"``, ``"tokens"``, ...) -> its rows for one sample."""

_NO_TOOLS = {"tool_calls": None, "tool_responses": None}
"""Fields of a :class:`~torchrl.data.llm.History` that a generated message has not."""

_CONTAINERS = {
    "text": Text,
    "tokens": Tokens,
    "masks": Masks,
    "log_probs": LogProbs,
    "history": ChatHistory,
    "generation_info": GenerationInfo,
}


def generated(
    prompt: Sequence[int],
    completion: Completion,
    *,
    return_log_probs: bool,
) -> Sample:
    """Returns the rows of one generated sample: tokens, masks and log-probs."""
    length, new = len(prompt), len(completion.token_ids)
    sample: Sample = {
        "tokens": {
            "prompt": int_row(prompt),
            "response": int_row(completion.token_ids),
            "full": int_row([*prompt, *completion.token_ids]),
        },
        "masks": {
            "all_attention_mask": torch.ones(length + new, dtype=torch.bool),
            "all_assistant_mask": _assistant_mask(length, new),
        },
    }
    if return_log_probs:
        response = completion.log_probs or []
        scored_prompt = completion.prompt_log_probs
        # NaN marks what was not asked for; 0.0 would mean that it was certain.
        before = [math.nan] * length if scored_prompt is None else scored_prompt
        rows = {
            "response": float_row(response),
            "full": float_row([*before, *response]),
        }
        if scored_prompt is not None:
            rows["full"][0] = 0.0
            rows["prompt"] = rows["full"][:length].clone()
        sample["log_probs"] = rows
    return sample


def info_rows(completion: Completion, ended: bool, number: int = 0) -> Rows:
    """Returns how one generated sample came about.

    Args:
        completion: the sample.
        ended: whether it ends with a token that ends a turn. At the greatest length
            the server names the length as the reason all the same.
        number: how many of the likeliest tokens there are for each token.
    """
    versions = [-1] * len(completion.token_ids)
    for span in completion.versions:
        if span.version.isdigit():
            versions[span.start : span.end] = [int(span.version)] * (
                span.end - span.start
            )
    rows: Rows = {
        "finish_reason": non_tensor("stop" if ended else completion.finish_reason),
        "truncated": torch.tensor(completion.finish_reason == "length" and not ended),
        "cached_tokens": torch.tensor(completion.cached_tokens),
        "weight_version": int_row(versions),
        "mixed_state": torch.tensor(completion.mixed_state),
        "logprobs_mode": non_tensor(completion.logprobs_mode or ""),
    }
    if completion.top_token_ids is not None and completion.top_log_probs is not None:
        rows["top_token_ids"] = matrix(completion.top_token_ids, number, np.int64)
        rows["top_log_probs"] = matrix(completion.top_log_probs, number, np.float32)
    return rows


def scored(
    full: Sequence[int], completion: Completion, assistant: Sequence[bool] | None
) -> Sample:
    """Returns the rows of one scored sequence.

    The first token follows nothing, so it has no log-probability; it is written as
    0.0, as all wrappers of TorchRL do.
    """
    assert completion.prompt_log_probs is not None
    log_probs = float_row(completion.prompt_log_probs)
    log_probs[0] = 0.0
    masks: Rows = {"all_attention_mask": torch.ones(len(full), dtype=torch.bool)}
    if assistant is not None:
        masks["all_assistant_mask"] = torch.tensor(assistant, dtype=torch.bool)
    return {
        "tokens": {"full": int_row(full)},
        "masks": masks,
        "log_probs": {"full": log_probs},
    }


def _assistant_mask(length: int, new: int) -> torch.Tensor:
    mask = torch.zeros(length + new, dtype=torch.bool)
    mask[length:] = True
    return mask


def text_rows(prompt: str, response: str) -> Rows:
    """Returns prompt, response and full text of one generated sample."""
    return {
        "prompt": non_tensor(prompt),
        "response": non_tensor(response),
        "full": non_tensor(prompt + response),
    }


def full_text_row(full: str) -> Rows:
    """Returns the text of one scored sequence."""
    return {"full": non_tensor(full)}


def message(
    content: str, role: str = "assistant", device: torch.device | None = None
) -> TensorDict:
    """Returns the content of a one-message :class:`~torchrl.data.llm.History`."""
    fields = {"role": role, "content": content, "is_complete": True}
    return unchecked(
        {name: non_tensor(value, device) for name, value in fields.items()}, device
    )


def write_text(
    samples: Sequence[Sample],
    prompts: Prompts,
    responses: Sequence[str],
    turns: Sequence[str],
) -> None:
    """Adds text, and the conversation in history mode, to generated samples.

    Args:
        samples: one or several for each prompt, side by side.
        prompts: what they answer.
        responses: text of each sample.
        turns: the same without the token that ends a turn. The template writes it
            itself: in the content it would stand there twice in the next prompt.
    """
    assert prompts.texts is not None
    repeats = len(samples) // len(prompts.texts)
    for index, sample in enumerate(samples):
        prompt = index // repeats
        sample["text"] = text_rows(prompts.texts[prompt], responses[index])
        if prompts.histories is not None:
            sample["history"] = history_rows(prompts.histories[prompt], turns[index])


def history_rows(prompt: History, content: str) -> Rows:
    """Returns prompt, response and full conversation of one generated sample."""
    inner = prompt._tensordict
    lazy = isinstance(inner, LazyStackedTensorDict) and inner.stack_dim == 0
    turns = list(inner.tensordicts) if lazy else list(inner.unbind(0))
    # Turns can be put together where they are all on one device.
    answer = message(content, device=prompt.device)
    return {
        # A container of its own, so that appending to one sample's changes no other's.
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
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Returns each container for the whole batch.

    Args:
        samples: one for each element, in row-major order.
        shape: batch shape; the number of samples is its product.
        pad_output: make every field rectangular.
        padding_value: the token that stands for nothing.
        device: the batch's, which its conversations are on already.

    Returns:
        ``"tokens"`` and so on -> a TensorClass of batch size ``shape``.
    """
    if pad_output:
        _pad_samples(samples, padding_value)
    padded = MetaData(pad_output, device=device)
    containers = {}
    for name in samples[0] if samples else ():
        common = {"padded": padded} if name in ("tokens", "masks", "log_probs") else {}
        rows = [
            unchecked({**_on(sample[name], device), **common}, device)
            for sample in samples
        ]
        cls = _CONTAINERS[name]
        unset = cls.__expected_keys__ - set(rows[0].keys())
        containers[name] = wrap(cls, stack(rows, shape), dict.fromkeys(unset))
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


_FILL: dict[str, float] = {"masks": False, "log_probs": 0.0, "generation_info": -1}
"""Container -> what its padding holds; tokens are padded with the padding token."""

_FILL_OF_FIELD: dict[str, float] = {"top_log_probs": 0.0}
"""Field -> what its padding holds, where it differs from its container's."""

_OF_THE_RESPONSE = ("response", "weight_version", "top_token_ids", "top_log_probs")
"""Fields with a value for each token of the response, and none for the prompt's."""


def _pad_samples(samples: Sequence[Sample], padding_value: int) -> None:
    """Makes every tensor of the samples as long as the longest, in place."""
    fill = {"tokens": padding_value, **_FILL}
    # A scored sequence has no response: it is padded as a prompt is.
    splits = [
        len(sample["tokens"]["prompt" if "prompt" in sample["tokens"] else "full"])
        for sample in samples
    ]
    for name in samples[0]:
        for field, first in list(samples[0][name].items()):
            if (
                name not in fill
                or not isinstance(first, torch.Tensor)
                or not first.ndim
            ):
                continue
            rows = [sample[name][field] for sample in samples]
            value = _FILL_OF_FIELD.get(field, fill[name])
            padded = _pad_around(rows, _split_of(field, splits), value)
            for sample, row in zip(samples, padded.unbind(0), strict=True):
                sample[name][field] = row


def spread(sample: Sample, mask: torch.Tensor, padding_value: int) -> None:
    """Puts what was scored back where its tokens stood in a padded row, in place."""
    fill = {"tokens": padding_value, **_FILL}
    for name in fill.keys() & sample.keys():
        for field, row in sample[name].items():
            padded = row.new_full(mask.shape, fill[name])
            sample[name][field] = padded.masked_scatter_(mask, row)


def _split_of(field: str, splits: Sequence[int]) -> Sequence[int]:
    """Returns where the prompt ends in a row of this field."""
    return [0] * len(splits) if field in _OF_THE_RESPONSE else splits


def _pad_around(
    rows: Sequence[torch.Tensor], splits: Sequence[int], value: float
) -> torch.Tensor:
    """Pads on the left what lies before each split, and on the right what follows."""
    before = [row[:split] for row, split in zip(rows, splits, strict=True)]
    after = [row[split:] for row, split in zip(rows, splits, strict=True)]
    return torch.cat(
        [pad(before, side="left", value=value), pad(after, side="right", value=value)],
        dim=1,
    )
