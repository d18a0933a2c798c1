"""Chat templates: conversations to text, token ids and assistant masks.

The template is the one that TorchRL chooses by the model's name, so that trainer and
engine see the same prompt. For other models it is the tokenizer's own; TorchRL would
fall back to ChatML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictBase
from torchrl.data.llm import History
from torchrl.data.llm.history import _CHAT_TEMPLATES

from torchrl_sglang.errors import ConfigurationError

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` and the history's other fields."""

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\b")


class _TemplateProbe:
    """Passed to TorchRL as a tokenizer to record the template that it chooses."""

    chat_template = None

    def __init__(self, tokenizer: Any) -> None:
        self.name_or_path = str(getattr(tokenizer, "name_or_path", ""))
        self.chosen: str | None = None

    def apply_chat_template(self, *, chat_template: str, **kwargs: Any) -> str:
        self.chosen = chat_template
        return ""


def find_template(
    tokenizer: Any, *, name: str | None = None, template: str | None = None
) -> str:
    """Returns ``template``, TorchRL's template ``name``, or the model's template."""
    if template is not None:
        return template
    if name is not None and name not in _CHAT_TEMPLATES:
        raise ConfigurationError(
            f"chat_template_name={name!r} must be one of TorchRL's templates: "
            f"{', '.join(sorted(_CHAT_TEMPLATES))}."
        )
    probe = _TemplateProbe(tokenizer)
    message = History(role="user", content="", batch_size=()).unsqueeze(0)
    message.apply_chat_template(tokenizer=probe, chat_template_name=name)
    assert probe.chosen is not None
    if name is not None or probe.chosen is not _CHAT_TEMPLATES["chatml_format"]:
        return probe.chosen
    try:
        own: str = tokenizer.get_chat_template()
    except (AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"The tokenizer {probe.name_or_path!r} has no chat template. Pass "
            f"chat_template=..., or the name of one of TorchRL's, such as "
            f"chat_template_name='chatml_format'; or use input_mode='text'."
        ) from error
    return own


def to_messages(history: History) -> list[Message]:
    """Returns a conversation of shape ``(T,)`` as messages for a chat template."""
    inner = history._tensordict
    if isinstance(inner, LazyStackedTensorDict):
        messages = [_plain_message(turn) for turn in inner.tensordicts]
        if None not in messages:
            return [m for m in messages if m is not None and m["role"] != "<none>"]
    turns = history.view(-1).tolist(tolist_first=True)
    return [turn for turn in turns if turn["role"] != "<none>"]


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
    return message if "role" in message and "content" in message else None


def render(
    chats: Sequence[Sequence[Message]],
    *,
    tokenizer: Any,
    template: str,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """Returns templated conversations, special tokens included.

    Args:
        chats: messages of each conversation.
        tokenizer: that applies the template.
        template: the chat template.
        add_generation_prompt: begin the assistant's turn at the end.
        tools: JSON schemas of the tools that the template tells the model of.

    Raises:
        ConfigurationError: if the template does not take a conversation.
    """
    try:
        texts: list[str] = tokenizer.apply_chat_template(
            [list(chat) for chat in chats],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            tools=list(tools) or None,
        )
    except Exception as error:
        # Templates raise arbitrary errors, for example on an unexpected role order.
        raise ConfigurationError(
            f"The chat template rejected a conversation of the batch: "
            f"{type(error).__name__}: {error}"
        ) from error
    return texts


def encode_full(
    chats: Sequence[Sequence[Message]], *, tokenizer: Any, template: str
) -> tuple[list[str], list[list[int]], list[list[bool]]]:
    """Returns text, token ids and assistant masks of complete conversations.

    The mask covers the template's ``{% generation %}`` blocks. Without them it covers
    each assistant turn from the generation prompt to its end-of-turn token, inclusive.
    """
    texts = render(
        chats, tokenizer=tokenizer, template=template, add_generation_prompt=False
    )
    if _GENERATION_MARKER.search(template):
        encoded = tokenizer.apply_chat_template(
            [list(chat) for chat in chats],
            chat_template=template,
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
        for begin, end in _assistant_spans(chat, text, tokenizer, template):
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
    chat: Sequence[Message], text: str, tokenizer: Any, template: str
) -> list[tuple[int, int]]:
    """Returns the text spans of the assistant's turns in a templated conversation."""
    spans = []
    cursor = 0
    for index, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before = _render_part(chat[:index], tokenizer, template, prompt=True)
        upto = _render_part(chat[: index + 1], tokenizer, template, prompt=False)
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
    chat: Sequence[Message], tokenizer: Any, template: str, *, prompt: bool
) -> str | None:
    """Returns the beginning of a conversation as text, if the template accepts it."""
    try:
        return render(
            [chat], tokenizer=tokenizer, template=template, add_generation_prompt=prompt
        )[0]
    except ConfigurationError:
        return None


def continue_tokens(
    texts: Sequence[str],
    known: Sequence[list[int]] | None,
    tokenizer: Any,
    padding_value: int | None = None,
) -> list[list[int]]:
    """Returns the tokens of templated conversations, reusing known leading tokens.

    Generated tokens are never tokenized again: a model that generated ``["1", "2"]``
    must not see ``["12"]`` in the next turn. Only the text after the known tokens is
    tokenized; they may end with padding. Known tokens that do not match the beginning
    of the conversation, because it was edited, are ignored.
    """
    beginnings: list[list[int]] = [[] for _ in texts]
    rest = list(texts)
    for index, ids in enumerate(known or ()):
        for candidate in (ids, _strip_trailing(ids, padding_value)):
            begin = tokenizer.decode(
                candidate, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            if texts[index].startswith(begin):
                beginnings[index] = candidate
                rest[index] = texts[index][len(begin) :]
                break
    ends = tokenizer(rest, add_special_tokens=False)["input_ids"]
    return [[*begin, *end] for begin, end in zip(beginnings, ends, strict=True)]


def _strip_trailing(token_ids: list[int], padding_value: int | None) -> list[int]:
    """Returns ``token_ids`` without trailing padding tokens."""
    end = len(token_ids)
    while end and token_ids[end - 1] == padding_value:
        end -= 1
    return token_ids[:end]


def decode(
    tokenizer: Any, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = False
) -> list[str]:
    """Returns the text of each row of token ids, exactly as the tokens spell it."""
    kind: Any = type(tokenizer)
    if _decodes_plainly(kind):
        # Without checks of every token in Python, which take longer than decoding.
        backend = tokenizer.backend_tokenizer
        return [
            backend.decode(row, skip_special_tokens=skip_special_tokens) for row in rows
        ]
    texts: list[str] = tokenizer.batch_decode(
        rows,
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    return texts


@cache
def _decodes_plainly(cls: type) -> bool:
    """Returns whether a class of tokenizers decodes with its Rust tokenizer alone."""
    from transformers import PreTrainedTokenizerFast

    return issubclass(cls, PreTrainedTokenizerFast) and all(
        getattr(cls, name) is getattr(PreTrainedTokenizerFast, name)
        for name in ("batch_decode", "decode", "_decode", "backend_tokenizer")
    )
