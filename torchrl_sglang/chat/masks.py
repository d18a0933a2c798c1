"""Masks of the tokens that the assistant wrote in a complete conversation.

A turn is what the template writes in the pass of its loop over the messages, less what
it writes of the generation prompt there. Its position is read off the template as it
runs: no text of a message is searched for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from torchrl_sglang.chat.messages import Message
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import ConfigurationError

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\b")

_MARKS = ("\uf8f0", "\uf8f1")
"""Characters for private use, which begin and end a mark."""
_MARK = re.compile(f"{_MARKS[0]}(\\d+):(\\d*){_MARKS[1]}")

_QUESTION = {"role": "user", "content": "?"}


def encode_full(
    chats: Sequence[Sequence[Message]], template: ChatTemplate
) -> tuple[list[str], list[list[int]], list[list[bool]]]:
    """Returns text, token ids and assistant masks of complete conversations.

    The mask covers the template's ``{% generation %}`` blocks. Without them it covers
    all that the template writes for each assistant turn, from the generation prompt to
    the end-of-turn token, inclusive; white space behind that is no part of the turn.

    Raises:
        ConfigurationError: if the template does not take a conversation, or it has no
            ``{% generation %}`` blocks and does not write each turn in one pass of a
            loop over the messages.
    """
    tokenizer = template.tokenizer
    texts = [template.render(chat, prompt=False) for chat in chats]
    if _GENERATION_MARKER.search(template.source):
        encoded = tokenizer.apply_chat_template(
            [template.in_form(chat) for chat in chats],
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
                mask[index] = mask[index] or begin <= start < end
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


class _LoopPass(NamedTuple):
    """A pass of a loop, or what is behind the loop."""

    loop: int
    message: int | None
    """Position of the message in the conversation; ``None`` behind the loop."""
    begin: int
    """Where it begins in the rendered text."""
    end: int
    """Where the next pass of this loop begins, or what is behind the loop."""


def _assistant_spans(
    chat: Sequence[Message], text: str, template: ChatTemplate
) -> list[tuple[int, int]]:
    """Returns the text spans of the assistant's turns in a templated conversation."""
    turns = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    if not turns:
        return []
    chat = template.in_form(chat)
    rendered, passes = _render_passes(chat, template)
    if rendered != text:
        raise _not_found("other texts are made of what the loop writes")
    spans = []
    for index in turns:
        turn = _pass_of(index, passes, chat)
        if turn is None:
            continue
        begin = turn.begin + _size_of_header(index, turn, text, chat, template)
        written = text[begin : turn.end].rstrip()
        if index == len(chat) - 1 and not written.endswith(tuple(template.special)):
            # The end of the turn may be behind the loop.
            written = text[begin:].rstrip()
        spans.append((begin, begin + len(written)))
    return spans


def _render_passes(
    chat: Sequence[Message], template: ChatTemplate, *, prompt: bool = False
) -> tuple[str, list[_LoopPass]]:
    """Returns a rendered conversation, and the passes of loops that wrote it."""

    def mark(loop: int, message: int | None) -> str:
        return f"{_MARKS[0]}{loop}:{'' if message is None else message}{_MARKS[1]}"

    marked = template.render_marked(chat, mark, prompt=prompt)
    parts = _MARK.split(marked)
    text, begins = parts[0], []
    for loop, message, part in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        begins.append((int(loop), int(message) if message else None, len(text)))
        text += part
    ends: dict[int, int] = {}
    passes = []
    for loop, index, begin in reversed(begins):
        passes.append(_LoopPass(loop, index, begin, ends.get(loop, len(text))))
        ends[loop] = begin
    return text, passes[::-1]


def _pass_of(
    index: int, passes: Sequence[_LoopPass], chat: Sequence[Message]
) -> _LoopPass | None:
    """Returns the pass that writes a message; ``None`` if nothing is written of it."""
    writing = [p for p in passes if p.message == index and p.begin < p.end]
    if len(writing) == 1:
        return writing[0]
    if writing or chat[index]["content"] or chat[index].get("tool_calls"):
        raise _not_found(f"message {index} is written in {len(writing)} passes of them")
    return None


def _size_of_header(
    index: int,
    turn: _LoopPass,
    text: str,
    chat: Sequence[Message],
    template: ChatTemplate,
) -> int:
    """Returns how much of the generation prompt the template writes before a turn."""
    before, written = chat[:index] or [_QUESTION], text[turn.begin : turn.end]
    header = _behind_loop(turn.loop, before, template, prompt=True)
    if written.startswith(header):
        return len(header)
    # What the template writes behind each conversation is no part of the header.
    always = _behind_loop(turn.loop, before, template, prompt=False)
    headers = [header, header.removeprefix(always)]
    # A "<think>" in it is not written again of earlier turns. What the turn's own text
    # has in common with that is no header: another text shows where the header ends.
    probe = {"role": "assistant", "content": _MARKS[0]}
    others = [*chat[:index], probe, *chat[index + 1 :]]
    rendered, passes = _render_passes(others, template)
    other = _pass_of(index, passes, others)
    assert other is not None
    of_probe = rendered[other.begin : other.end]
    return max(_num_common(header, written, of_probe) for header in headers)


def _behind_loop(
    loop: int, chat: Sequence[Message], template: ChatTemplate, *, prompt: bool
) -> str:
    """Returns what a template writes behind its loop over the messages."""
    rendered, passes = _render_passes(chat, template, prompt=prompt)
    begins = [each.begin for each in passes if each.loop == loop]
    if not begins:
        raise _not_found("the loop is left out of a shorter conversation")
    return rendered[begins[-1] :]


def _num_common(*texts: str) -> int:
    """Returns how many characters the texts have in common at their beginning."""
    letters = zip(*texts, strict=False)
    return len(list(takewhile(lambda same: len(set(same)) == 1, letters)))


def _not_found(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"The assistant's turns have no known positions in this conversation: the chat "
        f"template has no {{% generation %}} blocks, so each turn must be written in "
        f"one pass of a loop over the messages, but {reason}. Put what the template "
        f"writes for an assistant's turn between {{% generation %}} and "
        f"{{% endgeneration %}}, and pass the template as chat_template=..."
    )
