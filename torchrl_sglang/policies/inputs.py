"""History, text or tokens to prompt token ids: the first step of the pipeline.

Each reader takes a flat batch and returns :class:`PromptBatch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorData,
    TensorDict,
    TensorDictBase,
)
from torchrl.data.llm import History

from torchrl_sglang.chat.masks import encode_full
from torchrl_sglang.chat.messages import (
    Message,
    check_last_message,
    read_messages,
    without_none,
)
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.texts import check_text

_CONTAINERS = {
    "history": "ChatHistory(prompt=...)",
    "text": "Text(prompt=...)",
    "tokens": "Tokens(prompt=...)",
}
"""Input mode -> TorchRL's container of prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptBatch:
    """A batch of prompts (when generating) or of full sequences (when scoring)."""

    token_ids: list[list[int]]
    """Token ids of each element, without padding."""
    texts: list[str] | None = None
    """Text of each element; ``None`` in tokens mode."""
    histories: list[History] | None = None
    """Conversation of each element, of shape ``(T,)``, in history mode."""
    assistant_masks: list[list[bool]] | None = None
    """Masks of the tokens that the assistant wrote, when scoring histories."""
    masks: list[torch.Tensor] | None = None
    """Masks of the tokens in each padded input row, on the CPU, if asked for."""


def read_history(
    td: TensorDictBase,
    key: NestedKey,
    *,
    template: ChatTemplate,
    known_tokens: list[list[int]] | None,
    padding_value: int | None,
    generate: bool,
) -> PromptBatch:
    """Reads conversations, open or complete, and applies the chat template."""
    history = _get(td, key, "history")
    if not isinstance(history, History):
        raise TypeError(f"Expected History object for '{key}', got {type(history)}")
    histories = list(history.unbind(0)) if td.ndim else [history]
    if generate:
        histories = list(map(_by_message, histories))
    names = [f"Conversation {index} of the batch" for index in range(len(histories))]
    chats = list(map(to_messages, histories, names))
    if not generate:
        texts, ids, masks = encode_full(chats, template)
        return PromptBatch(
            token_ids=ids, texts=texts, histories=histories, assistant_masks=masks
        )
    for name, messages in zip(names, chats, strict=True):
        _check_end(messages, name)
    texts = [template.render(chat) for chat in chats]
    rows: list[list[int] | None] = [None] * len(chats)
    for index, tokens in enumerate(known_tokens or ()):
        chat = texts[index], chats[index]
        # Padding behind known tokens is not meant, but it can be an end.
        rows[index] = template.go_on(*chat, tokens) or template.go_on(
            *chat, strip_padding(tokens[::-1], padding_value)[::-1]
        )
    fresh_texts = [text for text, row in zip(texts, rows, strict=True) if row is None]
    fresh = iter(template.encode_all(fresh_texts))
    return PromptBatch(
        token_ids=[next(fresh) if row is None else row for row in rows],
        texts=texts,
        histories=histories,
    )


def _by_message(history: History) -> History:
    """Returns the same conversation of shape ``(T,)`` as a stack of its messages."""
    inner = history._tensordict
    if type(inner) is not TensorDict or not inner.batch_size.numel():
        return history
    stack = LazyStackedTensorDict(*inner.unbind(0))
    by_message: History = History._from_tensordict(stack, history._non_tensordict)
    return by_message


def _check_end(messages: Sequence[Message], name: str) -> None:
    """Raises :class:`.ConfigurationError` for the beginning of a response.

    ``ChatEnv`` without a transform that adds messages returns the whole conversation as
    the next prompt. TorchRL's wrappers let the model write another message then.
    """
    if not messages[-1].get("is_complete", True):
        check_last_message(messages, name)
    elif messages[-1]["role"] == "assistant":
        _log_closed()


@cache
def _log_closed() -> None:
    torchrl_logger.warning(
        "A prompt ends in a complete message of the assistant: it is closed, and the "
        "model writes another one, as with TorchRL's vLLMWrapper. To avoid this, end "
        "prompts with a message of the user or of a tool; a ChatEnv needs a transform "
        "that adds it or ends the episode."
    )


def to_messages(history: History, name: str = "The conversation") -> list[Message]:
    """Returns a conversation of shape ``(T,)`` as messages for a chat template.

    A ``History`` has no trace of a table's keys, so None among the arguments of a call
    is left out; arguments that are a JSON text keep their null.
    """
    inner = history._tensordict
    turns: list[Any] = []
    if isinstance(inner, LazyStackedTensorDict):
        turns = [_plain_message(turn) for turn in inner.tensordicts]
    if not turns or None in turns:
        turns = list(map(_to_lists, history.view(-1).tolist(tolist_first=True)))
    messages = [
        # TorchRL drops a content that is None.
        {"content": None, **without_none(turn)}
        for turn in turns
        if turn["role"] != "<none>"
    ]
    return read_messages(messages, name)


def _to_lists(turn: Mapping[str, Any]) -> Message:
    """Returns a message without tensors; TorchRL stores empty lists as such."""
    return {
        key: value.tolist() if isinstance(value, torch.Tensor) else value
        for key, value in turn.items()
    }


def _plain_message(turn: TensorDictBase) -> Message | None:
    """Returns a message of strings and booleans ten times faster than TorchRL does."""
    message = {}
    for name, value in turn.items():
        if type(value) is not NonTensorData:
            return None
        data = value._non_tensordict["data"]
        if not isinstance(data, (str, bool)):
            return None
        message[name] = data
    return message if "role" in message else None


def read_text(
    td: TensorDictBase,
    key: NestedKey,
    *,
    tokenizer: Any,
    tokenizer_kwargs: Mapping[str, Any],
) -> PromptBatch:
    """Reads texts and tokenizes them, special tokens included."""
    value = _get(td, key, "text")
    texts = value if isinstance(value, list) else getattr(value, "tolist", list)()
    if isinstance(texts, str):
        texts = [texts] * td.batch_size[0]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"Expected strings for '{key}', got {type(value)}")
    if tokenizer is None:
        raise ConfigurationError(
            "Text input needs a tokenizer, and the engine has none; pass tokenizer=..."
        )
    for index, text in enumerate(texts):
        check_text(f"Prompt {index} of the batch", text)
    ids = tokenizer(texts, **tokenizer_kwargs)["input_ids"] if texts else []
    return PromptBatch(token_ids=ids, texts=texts)


def read_tokens(
    td: TensorDictBase,
    key: NestedKey,
    *,
    attention_mask_key: NestedKey | None,
    written_mask_key: NestedKey,
    padding_value: int | None,
    keep_layout: bool = False,
) -> PromptBatch:
    """Reads token ids, ragged or padded, and removes the padding.

    The caller's attention mask decides, or else the one that a wrapper has written with
    these tokens. Without one, only leading padding tokens are removed: a later one may
    be a real end-of-sequence token.
    """
    rows = _get(td, key, "tokens", as_list=True)
    if not all(isinstance(row, torch.Tensor) for row in rows):
        raise TypeError(f"Expected tensors for '{key}', got {type(rows[0])}")
    for row in rows:
        if row.is_floating_point() or row.dtype is torch.bool or row.ndim != 1:
            raise TypeError(
                f"Expected one-dimensional integer tensors for '{key}', got shape "
                f"{tuple(row.shape)} and {row.dtype}"
            )
    masks = _given_masks(td, attention_mask_key, rows)
    if masks is None:
        masks = _written_masks(td, written_mask_key, rows, padding_value)
    if masks is None and attention_mask_key is not None and attention_mask_key in td:
        mask = td.get(attention_mask_key, as_list=True)
        raise ConfigurationError(
            f"The attention mask in {attention_mask_key!r} has rows of shapes "
            f"{_shapes(mask)}, and the tokens in {key!r} of {_shapes(rows)}; give a "
            f"mask of the tokens' shape, or none."
        )
    if masks is not None:
        ids = [row.cpu()[mask].tolist() for row, mask in zip(rows, masks, strict=True)]
    else:
        ids = [strip_padding(row.tolist(), padding_value) for row in rows]
        masks = [
            torch.arange(len(row)) >= len(row) - len(tokens)
            for row, tokens in zip(rows, ids, strict=True)
            if keep_layout
        ]
    return PromptBatch(token_ids=ids, masks=masks if keep_layout else None)


def strip_padding(token_ids: list[int], padding_value: int | None) -> list[int]:
    """Returns ``token_ids`` without leading padding tokens, but never empty."""
    start = 0
    while start < len(token_ids) - 1 and token_ids[start] == padding_value:
        start += 1
    return token_ids[start:] if start else token_ids


def _given_masks(
    td: TensorDictBase, key: NestedKey | None, rows: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Returns the caller's masks on the CPU; ``None`` unless they fit the tokens."""
    masks = _masks_of_shape(td, key, rows)
    for mask in masks or ():
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ConfigurationError(
                f"The attention mask in {key!r} holds other values than 0 and 1 "
                f"({mask.dtype}); give True or 1 for each token that counts."
            )
    return None if masks is None else [mask.bool() for mask in masks]


def _written_masks(
    td: TensorDictBase,
    key: NestedKey,
    rows: Sequence[torch.Tensor],
    padding_value: int | None,
) -> list[torch.Tensor] | None:
    """Returns masks that a wrapper wrote with these tokens, on the CPU.

    ``None`` for masks of other tokens, which an earlier call left behind: they leave
    out several token ids, and padding is one.
    """
    masks = [mask.bool() for mask in _masks_of_shape(td, key, rows) or ()]
    left_out = {
        token_id
        for row, mask in zip(rows, masks, strict=False)
        for token_id in row.cpu()[~mask].tolist()
    }
    if len(left_out) > 1:
        return None
    if left_out and padding_value is not None and left_out != {padding_value}:
        raise ConfigurationError(
            f"The mask in {key!r} leaves out the token {left_out.pop()}, and this "
            f"wrapper pads with {padding_value}: another tokenizer padded the tokens, "
            f"or the mask belongs to the tokens of an earlier call. Remove the mask if "
            f"it does, and else pad with {padding_value} or give the mask under "
            f"attention_mask_key."
        )
    return masks or None


def _masks_of_shape(
    td: TensorDictBase, key: NestedKey | None, rows: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    masks = td.get(key, as_list=True) if key is not None and key in td else None
    if masks is None or _shapes(masks) != _shapes(rows):
        return None
    return [mask.cpu() for mask in masks]


def _shapes(rows: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(row.shape) for row in rows]


def _get(td: TensorDictBase, key: NestedKey, mode: str, **get_kwargs: Any) -> Any:
    """Returns the value under ``key``; an error begins with TorchRL's message."""
    if key not in td:
        raise ConfigurationError(
            f"Expected '{key}' key for {mode} input mode, but found keys: "
            f"{list(td.keys())}. Give that key, as {_CONTAINERS[mode]} of "
            f"torchrl.modules.llm.policies has it, or another input_mode."
        )
    return td.get(key, **get_kwargs)
