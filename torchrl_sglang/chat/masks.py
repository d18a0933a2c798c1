"""Masks of the tokens that the assistant wrote in a complete conversation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torchrl_sglang.chat.messages import Message
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import ConfigurationError

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\b")


def encode_full(
    chats: Sequence[Sequence[Message]], template: ChatTemplate
) -> tuple[list[str], list[list[int]], list[list[bool]]]:
    """Returns text, token ids and assistant masks of complete conversations.

    The mask covers the template's ``{% generation %}`` blocks. Without them it covers
    each assistant turn from the generation prompt to its end-of-turn token, inclusive.
    """
    tokenizer = template.tokenizer
    texts = [template.render(chat, prompt=False) for chat in chats]
    if _GENERATION_MARKER.search(template.source):
        encoded = tokenizer.apply_chat_template(
            [list(chat) for chat in chats],
            chat_template=template.source,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        masks = [[bool(bit) for bit in row] for row in encoded["assistant_masks"]]
        return texts, encoded["input_ids"], masks
    token_ids, masks = [], []
    for chat, text in zip(chats, texts, strict=True):
        ids, starts = _encode_with_starts(text, tokenizer)
        mask = [False] * len(ids)
        for begin, end in _assistant_spans(chat, text, template):
            for index, start in enumerate(starts):
                if begin <= start < end:
                    mask[index] = True
                    if ids[index] == tokenizer.eos_token_id:
                        break
        token_ids.append(ids)
        masks.append(mask)
    return texts, token_ids, masks


def _encode_with_starts(text: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns token ids and the text position at which each one starts."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
    ids = tokenizer.encode(text, add_special_tokens=False)
    lengths = [
        len(
            tokenizer.decode(
                ids[:size],
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
        )
        for size in range(len(ids))
    ]
    return ids, lengths


def _assistant_spans(
    chat: Sequence[Message], text: str, template: ChatTemplate
) -> list[tuple[int, int]]:
    """Returns the text spans of the assistant's turns in a templated conversation."""
    spans = []
    cursor = 0
    for index, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before = _render_part(chat[:index], template, prompt=True)
        upto = _render_part(chat[: index + 1], template, prompt=False)
        if before and upto and text.startswith(before) and text.startswith(upto):
            begin, end = len(before), len(upto)
        else:
            # The template renders earlier turns differently from the last one.
            begin = text.find(message["content"], cursor)
            end = begin + len(message["content"])
            if begin < 0:
                continue
        # Trailing white space belongs to the template.
        end = begin + len(text[begin:end].rstrip())
        spans.append((begin, end))
        cursor = end
    return spans


def _render_part(
    chat: Sequence[Message], template: ChatTemplate, *, prompt: bool
) -> str | None:
    """Returns the beginning of a conversation as text, if the template accepts it."""
    try:
        return template.render(chat, prompt=prompt)
    except ConfigurationError:
        return None
