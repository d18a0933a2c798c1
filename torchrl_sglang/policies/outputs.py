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
from torchrl_sglang.policies.padding import pad
from torchrl_sglang.types import Completion

__all__ = ["Sample", "assemble", "generated", "scored"]

_SCALAR = torch.Size([])


def int_row(values: Sequence[int]) -> torch.Tensor:
    """Returns the values as an int64 tensor that owns its memory."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def float_row(values: Sequence[float]) -> torch.Tensor:
    """Returns the values as a float32 tensor that owns its memory."""
    return torch.from_numpy(np.array(values, dtype=np.float32))


def unchecked(content: Mapping[str, Any]) -> TensorDict:
    """Returns a scalar TensorDict of values that are known to fit."""
    return TensorDict._new_unsafe(dict(content), batch_size=_SCALAR)


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
    return_prompt_log_probs: bool,
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
        # A batch with others' prompts may have been asked for more than this one.
        scored_prompt = completion.prompt_log_probs if return_prompt_log_probs else None
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


def info_rows(completion: Completion, ended: bool) -> Rows:
    """Returns how one generated sample came about.

    Args:
        completion: the sample.
        ended: whether it ends with a token that ends a turn. At the greatest length
            the server names the length as the reason all the same.
    """
    versions = [-1] * len(completion.token_ids)
    for span in completion.versions:
        if span.version.isdigit():
            versions[span.start : span.end] = [int(span.version)] * (
                span.end - span.start
            )
    return {
        "finish_reason": NonTensorData("stop" if ended else completion.finish_reason),
        "truncated": torch.tensor(completion.finish_reason == "length" and not ended),
        "cached_tokens": torch.tensor(completion.cached_tokens),
        "weight_version": int_row(versions),
    }


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
        "prompt": NonTensorData(prompt),
        "response": NonTensorData(response),
        "full": NonTensorData(prompt + response),
    }


def full_text_row(full: str) -> Rows:
    """Returns the text of one scored sequence."""
    return {"full": NonTensorData(full)}


def message(content: str, role: str = "assistant") -> TensorDict:
    """Returns the content of a one-message :class:`~torchrl.data.llm.History`."""
    return unchecked(
        {
            "role": NonTensorData(role),
            "content": NonTensorData(content),
            "is_complete": NonTensorData(True),
        }
    )


def history_rows(prompt: History, content: str) -> Rows:
    """Returns prompt, response and full conversation of one generated sample."""
    inner = prompt._tensordict
    lazy = isinstance(inner, LazyStackedTensorDict) and inner.stack_dim == 0
    turns = list(inner.tensordicts) if lazy else list(inner.unbind(0))
    answer = message(content)
    return {
        # A container of its own, so that appending to one sample's changes no other's.
        "prompt": History._from_tensordict(LazyStackedTensorDict(*turns)),
        "response": History._from_tensordict(LazyStackedTensorDict(answer)),
        "full": History._from_tensordict(LazyStackedTensorDict(*turns, answer)),
    }


def assemble(
    samples: Sequence[Sample],
    shape: Sequence[int],
    *,
    pad_output: bool,
    padding_value: int,
) -> dict[str, Any]:
    """Returns each container for the whole batch.

    Args:
        samples: one for each element, in row-major order.
        shape: batch shape; the number of samples is its product.
        pad_output: make every field rectangular.
        padding_value: the token that stands for nothing.

    Returns:
        ``"tokens"`` and so on -> a TensorClass of batch size ``shape``.
    """
    if pad_output:
        _pad_samples(samples, padding_value)
    padded = MetaData(pad_output)
    containers = {}
    for name in samples[0] if samples else ():
        common = {"padded": padded} if name in ("tokens", "masks", "log_probs") else {}
        rows = [unchecked({**sample[name], **common}) for sample in samples]
        containers[name] = _CONTAINERS[name]._from_tensordict(stack(rows, shape))
    return containers


_FILL: dict[str, float] = {"masks": False, "log_probs": 0.0, "generation_info": -1}
"""Container -> what its padding holds; tokens are padded with the padding token."""

_OF_THE_RESPONSE = ("response", "weight_version")
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
            padded = _pad_around(rows, _split_of(field, splits), fill[name])
            for sample, row in zip(samples, padded.unbind(0), strict=True):
                sample[name][field] = row


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
        dim=-1,
    )
