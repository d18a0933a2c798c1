"""History, text or tokens to prompt token ids: the first step of the pipeline.

Whatever the mode, what leaves this file is a list of token-id lists, one for each
element of the flattened batch, with the text and the history that they came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.llm import History

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies.chat import (
    continue_tokens,
    encode_full,
    render,
    to_messages,
)
from torchrl_sglang.policies.padding import strip_padding

__all__ = ["Prompts", "read_history", "read_text", "read_tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """A batch of prompts (when generating) or of full sequences (when scoring)."""

    token_ids: list[list[int]]
    """Token ids of each element, without padding."""
    texts: list[str] | None = None
    """Text of each element, where there is a tokenizer."""
    histories: list[History] | None = None
    """Conversation of each element, of shape ``(T,)``, in history mode."""
    assistant_masks: list[list[bool]] | None = None
    """For each token whether the assistant wrote it; scoring a history only."""
    masks: list[torch.Tensor] | None = None
    """Where the tokens of each element stood in its row of the input, if asked for;
    on the CPU."""


def get_required(
    td: TensorDictBase, key: NestedKey, mode: str, **get_kwargs: Any
) -> Any:
    """Returns the value under ``key`` of a flat batch.

    Raises:
        ConfigurationError: if there is none; the text is TorchRL's own.
    """
    if key not in td:
        raise ConfigurationError(
            f"Expected '{key}' key for {mode} input mode, but found keys: "
            f"{list(td.keys())}"
        )
    return td.get(key, **get_kwargs)


def read_history(
    td: TensorDictBase,
    key: NestedKey,
    *,
    tokenizer: Any,
    template: str,
    tokens: list[list[int]] | None,
    padding_value: int | None,
    generate: bool,
) -> Prompts:
    """Reads conversations and templates them.

    Args:
        td: flat batch.
        key: where the :class:`~torchrl.data.llm.History` is.
        tokenizer: of the model.
        template: chat template; see :func:`.chat.find_template`.
        tokens: when generating, token ids of the conversation's beginning that are
            known already; see :func:`.chat.continue_tokens`.
        padding_value: the padding token.
        generate: whether the conversation shall be continued, or is complete.

    Raises:
        TypeError: if the value is not a ``History``.
        ConfigurationError: if it is missing, or the template does not take it.
    """
    history = get_required(td, key, "history")
    if not isinstance(history, History):
        raise TypeError(f"Expected History object for '{key}', got {type(history)}")
    histories = list(history.unbind(0))
    chats = [to_messages(one) for one in histories]
    if generate:
        texts = render(
            chats, tokenizer=tokenizer, template=template, add_generation_prompt=True
        )
        ids = continue_tokens(texts, tokens, tokenizer, padding_value)
        return Prompts(token_ids=ids, texts=texts, histories=histories)
    texts, token_ids, masks = encode_full(chats, tokenizer=tokenizer, template=template)
    return Prompts(
        token_ids=token_ids, texts=texts, histories=histories, assistant_masks=masks
    )


def read_text(
    td: TensorDictBase,
    key: NestedKey,
    *,
    tokenizer: Any,
    tokenizer_kwargs: Mapping[str, Any],
) -> Prompts:
    """Reads texts and tokenizes them, special tokens included.

    Raises:
        TypeError: if the value does not hold strings.
        ConfigurationError: if it is missing, or there is no tokenizer.
    """
    value = get_required(td, key, "text")
    texts = value if isinstance(value, list) else getattr(value, "tolist", list)()
    if isinstance(texts, str):
        texts = [texts] * td.batch_size[0]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"Expected strings for '{key}', got {type(value)}")
    if tokenizer is None:
        raise ConfigurationError(
            "Text input needs a tokenizer, and the engine has none; pass tokenizer=..."
        )
    ids = tokenizer(texts, **tokenizer_kwargs)["input_ids"] if texts else []
    return Prompts(token_ids=ids, texts=texts)


def read_tokens(
    td: TensorDictBase,
    key: NestedKey,
    *,
    attention_mask_keys: Sequence[NestedKey],
    padding_value: int | None,
    keep_layout: bool = False,
) -> Prompts:
    """Reads token ids, ragged or padded, and leaves the padding out.

    An attention mask decides what is padding, if one of the right shape is there.
    Otherwise leading padding tokens are left out and nothing else: a padding token in
    the middle or at the end may be a real one (often the padding token is also the
    one that ends a sequence).

    Raises:
        TypeError: if the value is not made of integer tensors.
        ConfigurationError: if it is missing.
    """
    rows = get_required(td, key, "tokens", as_list=True)
    if not all(isinstance(row, torch.Tensor) for row in rows):
        raise TypeError(f"Expected tensors for '{key}', got {type(rows[0])}")
    masks: list[torch.Tensor] | None = None
    for mask_key in attention_mask_keys:
        if masks is None and mask_key in td:
            found = td.get(mask_key, as_list=True)
            if [mask.shape for mask in found] == [row.shape for row in rows]:
                masks = found
    for row in rows:
        if row.is_floating_point() or row.dtype is torch.bool or row.ndim != 1:
            raise TypeError(
                f"Expected one-dimensional integer tensors for '{key}', got shape "
                f"{tuple(row.shape)} and {row.dtype}"
            )
    if masks is not None:
        # What is scored is put together on the CPU, wherever the tokens were.
        masks = [mask.to(device="cpu", dtype=torch.bool) for mask in masks]
        kept = [row.cpu()[mask].tolist() for row, mask in zip(rows, masks, strict=True)]
    else:
        kept = [strip_padding(row.tolist(), padding_value) for row in rows]
        masks = [
            torch.arange(len(row)) >= len(row) - len(ids)
            for row, ids in zip(rows, kept, strict=True)
            if keep_layout
        ]
    return Prompts(token_ids=kept, masks=masks if keep_layout else None)
