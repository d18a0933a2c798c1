"""Masks of the tokens that the assistant wrote in a complete conversation.

A turn is what the template writes in the pass of its loop over the messages, less what
it writes of the generation prompt there. Its position is read off the template as it
runs: no text of a message is searched for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from torchrl_sglang.chat.messages import Message
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import ChatTemplateError, ConfigurationError

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
            **template.template_kwargs,
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
    headers = _Headers(chat, text, template)
    spans = []
    for index in turns:
        turn = _pass_of(index, passes, chat)
        if turn is None:
            continue
        begin = turn.begin + headers.size(index, turn)
        written = text[begin : turn.end].rstrip()
        if index == len(chat) - 1 and not written.endswith(tuple(template.special)):
            # The end of the turn may be behind the loop.
            written = text[begin:].rstrip()
        end = begin + len(written)
        # Results of calls can be written in the turn that has the calls.
        for inner in _passes_within(turn, passes):
            if inner.message is None or chat[inner.message]["role"] == "assistant":
                continue
            spans.append((begin, inner.begin))
            begin = max(begin, inner.end)
        spans.append((begin, end))
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
    if len(writing) > 1:
        # A result's pass can look for the name of its call in all messages.
        writing = [p for p in writing if not _is_nested(p, passes)]
    if len(writing) == 1:
        return writing[0]
    if writing or chat[index]["content"] or chat[index].get("tool_calls"):
        raise _not_found(f"message {index} is written in {len(writing)} passes of them")
    return None


def _is_nested(inner: _LoopPass, passes: Sequence[_LoopPass]) -> bool:
    """Returns whether a pass lies in a pass that another loop makes of a message."""
    return any(
        outer.loop != inner.loop
        and outer.message is not None
        and outer.end >= inner.end
        for outer in passes[: passes.index(inner)]
    )


def _passes_within(outer: _LoopPass, passes: Sequence[_LoopPass]) -> list[_LoopPass]:
    """Returns the passes that other loops make in a pass."""
    later = passes[passes.index(outer) + 1 :]
    return list(takewhile(lambda inner: inner.loop != outer.loop, later))


class _Headers:
    """Finds the part of the generation prompt that a template writes in a turn's pass.

    Args:
        chat: a complete conversation.
        text: the conversation as the template renders it.
        template: of the model.
    """

    def __init__(
        self, chat: Sequence[Message], text: str, template: ChatTemplate
    ) -> None:
        self._chat, self._text, self._template = chat, text, template

    def size(self, index: int, turn: _LoopPass) -> int:
        """Returns the number of characters of that part in the pass of a message."""
        before, written = self._chat[:index], self._text[turn.begin : turn.end]
        header = self._behind_loop(turn.loop, before, prompt=True)
        if written.startswith(header):
            return len(header)
        # What the template writes behind each conversation is no part of the header.
        always = self._behind_loop(turn.loop, before, prompt=False)
        headers = [header, header.removeprefix(always)]
        # A "<think>" in it is not written again of earlier turns. What the turn's own
        # text has in common with that is no header: other texts show where it ends.
        rendered, passes = self._probes
        other = _pass_of(index, passes, self._chat)
        of_probe = "" if other is None else rendered[other.begin : other.end]
        return max(_num_common(header, written, of_probe) for header in headers)

    @cached_property
    def _probes(self) -> tuple[str, list[_LoopPass]]:
        """The conversation with other texts in the assistant's turns."""
        probe = {"role": "assistant", "content": _MARKS[0]}
        probes = [probe if m["role"] == "assistant" else m for m in self._chat]
        return _render_passes(probes, self._template)

    def _behind_loop(self, loop: int, chat: Sequence[Message], *, prompt: bool) -> str:
        """Returns what a template writes behind its loop over the messages."""
        # Some templates refuse conversations without a user's message.
        for messages in (chat, [*chat, _QUESTION]):
            if not messages:
                continue
            try:
                rendered, passes = _render_passes(
                    messages, self._template, prompt=prompt
                )
            except ChatTemplateError:
                if messages is chat:
                    continue
                raise
            begins = [each.begin for each in passes if each.loop == loop]
            if begins:
                return rendered[begins[-1] :]
        raise _not_found("the loop is left out of a shorter conversation")


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
