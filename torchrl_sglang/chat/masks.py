"""Masks of the assistant's tokens in a complete conversation.

A turn is the template's output in the pass of its message loop, from the generation
prompt to the end-of-turn token. Its position is recorded while the template runs: texts
of messages are not searched. A pass with other messages, too, is refused unless loops
over messages write them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from torchrl_sglang.chat.messages import Message
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import ChatTemplateError, ConfigurationError

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\b")

_MARKS = ("\uf8f0", "\uf8f1")
"""Private-use characters at the begin and end of a mark."""
_MARK = re.compile(f"{_MARKS[0]}(\\d+):(\\d*){_MARKS[1]}")

_QUESTION = {"role": "user", "content": "?"}
_PROBE = {"role": "assistant", "content": _MARKS[0]}


def encode_full(
    chats: Sequence[Sequence[Message]], template: ChatTemplate
) -> tuple[list[str], list[list[int]], list[list[bool]]]:
    """Returns text, token ids and assistant masks of complete conversations.

    The mask covers the template's ``{% generation %}`` blocks. Without them it covers
    the output for each assistant turn, from the generation prompt to the end-of-turn
    token, inclusive; trailing white space is excluded.
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
    """Returns token ids and the start position of each token in the text."""
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
    """A pass of a loop, or the text after the loop."""

    loop: int
    message: int | None
    """Position of the message in the conversation; ``None`` after the loop."""
    begin: int
    """Its begin in the rendered text."""
    end: int
    """Begin of the next pass of this loop, or of the text after the loop."""


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
        raise _not_found("other texts are made of the loop's output")
    edges = _TurnEdges(chat, text, template)
    spans = []
    for index in turns:
        turn = _pass_of(index, passes, chat)
        if turn is not None:
            edges.check_texts(index)
            begin = edges.begin(index, turn)
            end = edges.end(index, turn, begin)
            spans += _assistant_parts(begin, end, turn, passes, chat)
    return spans


def _render_passes(
    chat: Sequence[Message], template: ChatTemplate, *, prompt: bool = False
) -> tuple[str, list[_LoopPass]]:
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
    """Returns the pass of a message; ``None`` if its output is empty."""
    writing = [p for p in passes if p.message == index and p.begin < p.end]
    if len(writing) > 1:
        # A result's pass can search all messages for the name of its call.
        writing = [p for p in writing if not _is_nested(p, passes)]
    if len(writing) == 1:
        return writing[0]
    if writing or chat[index]["content"] or chat[index].get("tool_calls"):
        raise _not_found(f"message {index} is written in {len(writing)} passes of them")
    return None


def _is_nested(inner: _LoopPass, passes: Sequence[_LoopPass]) -> bool:
    """Returns whether a pass lies in a message's pass of another loop."""
    return any(
        outer.loop != inner.loop
        and outer.message is not None
        and outer.end >= inner.end
        for outer in passes[: passes.index(inner)]
    )


def _assistant_parts(
    begin: int,
    end: int,
    turn: _LoopPass,
    passes: Sequence[_LoopPass],
    chat: Sequence[Message],
) -> list[tuple[int, int]]:
    """Returns the parts of a span outside other messages' passes in the turn's pass.

    Results of calls can be written in the turn with the calls.
    """
    parts = []
    later = passes[passes.index(turn) + 1 :]
    for inner in takewhile(lambda inner: inner.loop != turn.loop, later):
        if inner.message is None or chat[inner.message]["role"] == "assistant":
            continue
        parts.append((begin, min(inner.begin, end)))
        begin = max(begin, inner.end)
    return [*parts, (begin, end)]


class _TurnEdges:
    """Finds the bounds of turns in their passes.

    Renderings with other texts separate the template's text from the messages'.
    """

    def __init__(
        self, chat: Sequence[Message], text: str, template: ChatTemplate
    ) -> None:
        self._chat, self._text, self._template = chat, text, template

    def begin(self, index: int, turn: _LoopPass) -> int:
        """Returns the position after the generation prompt of a turn."""
        chat, written = (self._chat[:index], self._text[turn.begin : turn.end])
        earlier, final, header = self._last_pass(turn.loop, chat, prompt=True)
        prompt = earlier + final + header
        if self._text.startswith(prompt) and turn.begin <= len(prompt) <= turn.end:
            return len(prompt)
        if header and written.startswith(header):
            return turn.begin + len(header)
        _, unprompted, always = self._last_pass(turn.loop, chat, prompt=False)
        if final.startswith(unprompted):
            # Some templates write the generation prompt in the last pass.
            header = final.removeprefix(unprompted) + header
        template_text = written[: _num_common(written, self._of_probe(index))]
        # The template's text after each conversation is not part of the header.
        headers = [header, header.removeprefix(always)]
        for candidate in filter(None, headers):
            # The template can write the end of an earlier block before it.
            if candidate in template_text:
                return turn.begin + template_text.rindex(candidate) + len(candidate)
        # A "<think>" in it is missing in earlier turns. A common prefix with the turn's
        # own text is not a header.
        size = max(_num_common(candidate, template_text) for candidate in headers)
        if template_text and not size and "" not in headers:
            raise _not_found(f"message {index} begins without the generation prompt")
        return turn.begin + size

    def end(self, index: int, turn: _LoopPass, begin: int) -> int:
        """Returns the position after the end of a turn."""
        written, of_probe = self._text[turn.begin : turn.end], self._of_probe(index)
        size = _num_common(written[::-1], of_probe[::-1])
        after_text = max(begin, turn.end - size)
        # The header of the next message can follow the end.
        place = self._text.find(self._end_text, after_text, turn.end)
        if self._end_text and place >= 0:
            return place + len(self._end_text)
        written = self._text[begin : turn.end].rstrip()
        if index == len(self._chat) - 1 and not written.endswith(
            tuple(self._template.special)
        ):
            # The end of the turn may be after the loop.
            written = self._text[begin:].rstrip()
        return begin + len(written)

    @cached_property
    def _end_text(self) -> str:
        """The template's text after the last turn in its pass."""
        chat = [_QUESTION, _PROBE]
        try:
            rendered, passes = _render_passes(chat, self._template)
        except ChatTemplateError:
            return ""
        turn = _pass_of(1, passes, chat)
        written = "" if turn is None else rendered[turn.begin : turn.end]
        return written.rpartition(_PROBE["content"])[2].strip()

    def check_texts(self, index: int) -> None:
        """Raises an error if a turn's pass writes other messages' texts unmarked."""
        rendered, passes = self._others
        turn = _pass_of(index, passes, self._chat)
        if turn is None:
            return
        parts = _assistant_parts(turn.begin, turn.end, turn, passes, self._chat)
        if any(_MARKS[0] in rendered[begin:end] for begin, end in parts):
            raise _not_found(f"the pass of message {index} writes other messages, too")

    def _of_probe(self, index: int) -> str:
        """Returns the text of a turn's pass in the rendering with other turns."""
        rendered, passes = self._probes
        turn = _pass_of(index, passes, self._chat)
        return "" if turn is None else rendered[turn.begin : turn.end]

    @cached_property
    def _probes(self) -> tuple[str, list[_LoopPass]]:
        """The conversation with other texts in the assistant's turns."""
        try:
            return self._render_other({"assistant": lambda _: _PROBE})
        except ConfigurationError:
            # Some templates do not take results without calls.
            return self._render_other({"assistant": _probe_of})

    @cached_property
    def _others(self) -> tuple[str, list[_LoopPass]]:
        """The conversation with marks in the texts of users and results."""
        return self._render_other({"user": _with_mark, "tool": _with_mark})

    def _render_other(
        self, change: Mapping[str, Callable[[Message], Message]]
    ) -> tuple[str, list[_LoopPass]]:
        """Renders the conversation with the messages of some roles changed."""
        chat = [change[m["role"]](m) if m["role"] in change else m for m in self._chat]
        try:
            return _render_passes(chat, self._template)
        except ChatTemplateError as error:
            raise _not_found("it is refused with other texts") from error

    def _last_pass(
        self, loop: int, chat: Sequence[Message], *, prompt: bool
    ) -> tuple[str, str, str]:
        """Returns the texts before a loop's last pass, in it, and after the loop."""
        # Some templates refuse conversations without a user's message.
        for messages in (chat, [*chat, _QUESTION]):
            try:
                rendered, passes = _render_passes(
                    messages, self._template, prompt=prompt
                )
            except ChatTemplateError:
                continue
            begins = [loop_pass.begin for loop_pass in passes if loop_pass.loop == loop]
            if begins:
                begin, end = begins[-2:]
                return rendered[:begin], rendered[begin:end], rendered[end:]
        raise _not_found("a shorter conversation is refused, or has no such loop")


def _probe_of(message: Message) -> Message:
    """Returns a turn of the assistant with other texts, but with its calls."""
    probe = {**message}
    if message.get("content") or not message.get("tool_calls"):
        probe["content"] = _MARKS[0]
    if message.get("reasoning_content"):
        probe["reasoning_content"] = _MARKS[0]
    return probe


def _with_mark(message: Message) -> Message:
    """Returns a message with a mark in its text."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    # Templates look at the begin and the end of results.
    half = len(content) // 2
    return {**message, "content": content[:half] + _MARKS[0] + content[half:]}


def _num_common(*texts: str) -> int:
    """Returns the length of the texts' common prefix."""
    letters = zip(*texts, strict=False)
    return len(list(takewhile(lambda same: len(set(same)) == 1, letters)))


def _not_found(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"The assistant's turns have no known positions in this conversation: the chat "
        f"template has no {{% generation %}} blocks, so each turn must be written in "
        f"one pass of a loop over the messages, but {reason}. Put the "
        f"template's output for an assistant's turn between {{% generation %}} and "
        f"{{% endgeneration %}}, and pass the template as chat_template=..."
    )
