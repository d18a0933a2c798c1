"""Stable prefix of a response before it is complete.

Streamed text is never retracted: a possible begin of a tool call, a stop string or the
end of reasoning is held until it is excluded. The parsers of SGLang's servers locate
reasoning, as they do for the complete response.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torchrl_sglang.chat.tool_calls import REASONING_MARKS

CALL_MARKS: Mapping[str, tuple[str, ...]] = {
    "qwen": ("<tool_call>",),
    "qwen25": ("<tool_call>",),
    "hermes": ("<tool_call>",),
    "qwen3_coder": ("<tool_call>", "<function="),
    "glm45": ("<tool_call>",),
    "glm47": ("<tool_call>",),
    "mimo": ("<tool_call>",),
    # A bare JSON object is a call as well.
    "llama3": ("<|python_tag|>", "{"),
    "mistral": ("[TOOL_CALLS]",),
    "deepseekv3": ("<\uff5ctool",),
    "deepseekv31": ("<\uff5ctool",),
}
"""SGLang's name of a parser of tool calls -> texts at the beginning of calls."""

UNREADABLE = "\ufffd"
"""Decoded form of an incomplete character."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """Stable part of a response's message."""

    reasoning: str = ""
    """Stable reasoning."""
    content: str = ""
    """Stable content; empty while more reasoning is possible."""

    @property
    def message(self) -> dict[str, Any]:
        """The draft as an assistant's message."""
        reply: dict[str, Any] = {"role": "assistant", "content": self.content}
        return reply | ({"reasoning_content": self.reasoning} if self.reasoning else {})


class Detokenizer:
    """Incremental decoder of growing token lists.

    A token can change the text of the token before it, so some are decoded twice. Text
    in which a character is incomplete waits for the next tokens, and so do byte tokens
    for the first other token behind them.

    Examples:
        >>> from torchrl_sglang.gateway.drafts import Detokenizer
        >>> letters = Detokenizer(lambda ids: "".join(map(chr, ids)))
        >>> letters([72, 105]), letters([72, 105, 33])
        ('Hi', 'Hi!')
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        byte_tokens: Set[int] = frozenset(),
    ) -> None:
        self._decode, self._byte_tokens = decode, byte_tokens
        self._text, self._from, self._to = "", 0, 0

    def __call__(self, token_ids: Sequence[int]) -> str:
        """Returns the stable text of all tokens."""
        count = len(token_ids)
        while count > self._to and token_ids[count - 1] in self._byte_tokens:
            count -= 1
        token_ids = token_ids[:count]
        shorter = self._decode(token_ids[self._from : self._to])
        longer = self._decode(token_ids[self._from :])
        if longer.startswith(shorter) and not longer.endswith(UNREADABLE):
            self._text += longer[len(shorter) :]
            self._from, self._to = self._to, len(token_ids)
        return self._text


Separate = Callable[[str], Awaitable[tuple[str, str]]]
"""Returns reasoning and content of a text, from the servers' parser."""


class DraftReader:
    """Finds the stable prefix of a growing text, without stop strings."""

    def __init__(
        self,
        separate: Separate | None,
        *,
        reasoning_parser: str | None = None,
        call_parser: str | None = None,
        stops: Iterable[str] = (),
    ) -> None:
        self._separate = separate
        self._marks = REASONING_MARKS.get(reasoning_parser or "")
        self._known = separate is None or self._marks is not None
        self._has_calls = call_parser is not None
        self._call_marks = CALL_MARKS.get(call_parser or "")
        self._stops = tuple(stops)
        # Positions of reasoning and content in the text, once they are known.
        self._reasoning_from: int | None = None
        self._reasoning: str | None = None
        self._content_from = 0 if separate is None else None

    async def read(self, text: str) -> Draft:
        """Returns the stable part of an extension of the last text."""
        text = without_ends(text, self._stops)
        if not self._known:
            return Draft()
        if self._content_from is None:
            await self._find(text)
        if self._content_from is not None:
            content = self._content(text[self._content_from :])
            return Draft(reasoning=self._reasoning or "", content=content)
        if self._reasoning_from is None:
            return Draft()
        return Draft(reasoning=self._open_reasoning(text))

    def _open_reasoning(self, text: str) -> str:
        """Returns incomplete reasoning."""
        assert self._marks is not None
        assert self._reasoning_from is not None
        shown = _before(text[self._reasoning_from :], self._marks[1:])
        shown = without_ends(shown, self._marks[1:])
        # The parser may strip its end.
        return shown.rstrip()

    async def _find(self, text: str) -> None:
        """Finds the position of reasoning or content, if the text determines it."""
        assert self._separate is not None
        assert self._marks is not None
        begin, end = self._marks
        held = without_ends(text, self._marks)
        if not held.strip():
            return
        if self._reasoning_from is None:
            reasoning, content = await self._separate(held)
            if not reasoning and begin in held:
                # Empty reasoning is resolved by the complete response.
                self._known = False
                return
            if not reasoning:
                # No reasoning, unless it begins in the middle.
                self._content_from = text.find(content) if content else None
                return
            after_mark = held.find(begin)
            after_mark = 0 if after_mark < 0 else after_mark + len(begin)
            self._reasoning_from = held.find(reasoning.rstrip(), after_mark)
            if self._reasoning_from < 0:
                self._known = False
                return
        place = text.find(end, self._reasoning_from)
        if place >= 0 and text[place + len(end) :].strip():
            reasoning, content = await self._separate(text)
            if not text.endswith(content) or not content:
                self._known = False
                return
            self._reasoning = reasoning
            self._content_from = len(text) - len(content.lstrip("\n"))

    def _content(self, text: str) -> str:
        """Returns the content before a possible call."""
        if self._separate is not None:
            assert self._marks is not None
            # Later reasoning is not content.
            text = without_ends(_before(text, self._marks[:1]), self._marks[:1])
        if not self._has_calls:
            return text
        if self._call_marks is None or text[:1].isspace():
            return ""
        text = without_ends(_before(text, self._call_marks), self._call_marks)
        # Spaces before a call are stripped.
        return text.rstrip()


def _before(text: str, marks: Iterable[str]) -> str:
    """Returns a text up to the first mark in it."""
    places = [place for mark in marks if (place := text.find(mark)) >= 0]
    return text[: min(places)] if places else text


def without_ends(text: str, marks: Iterable[str]) -> str:
    """Returns a text without a trailing mark or a possible prefix of a mark.

    Examples:
        >>> from torchrl_sglang.gateway.drafts import without_ends
        >>> without_ends("Now </th", ["</think>"])
        'Now '
    """
    held = 0
    for mark in marks:
        for size in range(min(len(mark), len(text)), held, -1):
            if text.endswith(mark[:size]):
                held = size
                break
    return text[: len(text) - held]
