"""Conversations to text and token ids, and which of them the assistant wrote.

The template is the one that TorchRL would choose by the model's name, so that a trainer
and the engine read the same conversation alike; for other models it is the tokenizer's
own, where TorchRL would put ChatML in its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictBase
from torchrl.data.llm import History
from torchrl.data.llm.history import _CHAT_TEMPLATES

from torchrl_sglang.errors import ConfigurationError

__all__ = ["continue_tokens", "encode_full", "find_template", "render", "to_messages"]

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` and what else the history holds."""

_MARKER = re.compile(r"\{%[-+]?\s*generation\b")


class _NameOnly:
    """Stands in for a tokenizer while TorchRL chooses a template by its name."""

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
    """Returns the chat template to use.

    Args:
        tokenizer: of the model.
        name: one of TorchRL's templates.
        template: a template; wins over everything.

    Raises:
        ConfigurationError: if there is none, or TorchRL knows no template of that name.
    """
    if template is not None:
        return template
    if name is not None and name not in _CHAT_TEMPLATES:
        raise ConfigurationError(
            f"chat_template_name={name!r} is none of TorchRL's templates: "
            f"{', '.join(sorted(_CHAT_TEMPLATES))}."
        )
    probe = _NameOnly(tokenizer)
    message = History(role="user", content="", batch_size=()).unsqueeze(0)
    message.apply_chat_template(tokenizer=probe, chat_template_name=name)
    assert probe.chosen is not None
    if name is not None or probe.chosen is not _CHAT_TEMPLATES["chatml_format"]:
        return probe.chosen
    try:
        own: str = tokenizer.get_chat_template()
    except (AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"The tokenizer {probe.name_or_path!r} has no chat template, so there is "
            f"no telling how this model reads a conversation. Pass chat_template=..., "
            f"or the name of one of TorchRL's, like "
            f"chat_template_name='chatml_format'; or use input_mode='text'."
        ) from error
    return own


def to_messages(history: History) -> list[Message]:
    """Returns a conversation of shape ``(T,)`` as chat templates take it."""
    inner = history._tensordict
    if isinstance(inner, LazyStackedTensorDict):
        messages = [_plain_message(turn) for turn in inner.tensordicts]
        if None not in messages:
            return [m for m in messages if m is not None and m["role"] != "<none>"]
    turns = history.view(-1).tolist(tolist_first=True)
    return [turn for turn in turns if turn["role"] != "<none>"]


def _plain_message(turn: TensorDictBase) -> Message | None:
    """Returns a message of texts and numbers only, which needs no conversion.

    TorchRL's conversion gives the same in ten times the time.
    """
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
) -> list[str]:
    """Returns conversations as text, with the special tokens that the template writes.

    Raises:
        ConfigurationError: if the template does not take one of them.
    """
    try:
        texts: list[str] = tokenizer.apply_chat_template(
            [list(chat) for chat in chats],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:
        # Templates raise errors of their own on roles in an order they do not know.
        raise ConfigurationError(
            f"The chat template does not take a conversation of the batch: "
            f"{type(error).__name__}: {error}"
        ) from error
    return texts


def encode_full(
    chats: Sequence[Sequence[Message]], *, tokenizer: Any, template: str
) -> tuple[list[str], list[list[int]], list[list[bool]]]:
    """Returns text, token ids and assistant masks of complete conversations.

    The mask covers what the template marks with ``{% generation %}``. Without markers
    it covers what the model writes in its turns: behind the generation prompt, up to
    and including the token that ends the turn.
    """
    texts = render(
        chats, tokenizer=tokenizer, template=template, add_generation_prompt=False
    )
    if _MARKER.search(template):
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
    """Returns token ids and the position in the text at which each one starts."""
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
    """Returns where in a templated conversation the assistant's turns stand."""
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
            # The template writes earlier turns in another way than the last one.
            begin = text.find(message["content"], cursor)
            end = begin + len(message["content"])
            if begin < 0:
                continue
        # White space behind the turn's last word or token belongs to the template.
        end = begin + len(text[begin:end].rstrip())
        spans.append((begin, end))
        cursor = end
    return spans


def _render_part(
    chat: Sequence[Message], tokenizer: Any, template: str, *, prompt: bool
) -> str | None:
    """Returns the beginning of a conversation as text, if the template takes it."""
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
    """Returns the tokens of templated conversations, keeping those that are known.

    A model that generated ``["1", "2"]`` must not see ``["12"]`` in the next turn, so
    what was generated is never tokenized again: known tokens stay, and only the text
    behind them (the end of the turn, new messages, the generation prompt) is. Known
    tokens that are not the beginning of the conversation, because it was edited, are
    not used.

    Args:
        texts: conversations, with the special tokens that the template wrote.
        known: token ids of the beginning of each one, or nothing.
        tokenizer: adds no special tokens here.
        padding_value: token that ``known`` may end with without meaning it.
    """
    beginnings: list[list[int]] = [[] for _ in texts]
    rest = list(texts)
    for index, ids in enumerate(known or ()):
        for candidate in (ids, without_trailing(ids, padding_value)):
            begin = tokenizer.decode(
                candidate, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            if texts[index].startswith(begin):
                beginnings[index] = candidate
                rest[index] = texts[index][len(begin) :]
                break
    ends = tokenizer(rest, add_special_tokens=False)["input_ids"]
    return [[*begin, *end] for begin, end in zip(beginnings, ends, strict=True)]


def without_trailing(token_ids: list[int], padding_value: int | None) -> list[int]:
    """Returns ``token_ids`` without the padding tokens that they end with."""
    end = len(token_ids)
    while end and token_ids[end - 1] == padding_value:
        end -= 1
    return token_ids[:end]
