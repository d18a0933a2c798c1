"""Earlier responses that servers take drafts from, and when they get them. Pure.

Responses to one prompt resemble each other from one epoch to the next (DAS,
arXiv:2511.13841). A response helps from the next time on that its prompt is asked, so
nothing is sent before prompts come again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

RESPONSES = 8
"""Latest responses of each prompt that are remembered."""

CONTEXT = 17
"""Tokens of the prompt before each response: its first ones have drafts, too. Servers
compare the last 18 tokens."""

SHARE = 0.5
"""Of the remembered tokens, the share that servers must not have yet to be sent all."""


@dataclass(kw_only=True, eq=False, slots=True)
class _KnownPrompt:
    """What is remembered of one prompt."""

    texts: deque[array[int]] = field(default_factory=lambda: deque(maxlen=RESPONSES))
    """End of the prompt and the response, in token ids; the latest last."""
    new: int = 0
    """Tokens that servers do not have."""

    @property
    def tokens(self) -> int:
        """Number of all of them."""
        return sum(map(len, self.texts))


class DraftHistory:
    """The latest responses to each prompt.

    Args:
        most_tokens: that are remembered; prompts that were not answered for longest
            are forgotten beyond.

    Examples:
        >>> history = DraftHistory(most_tokens=1000)
        >>> history.end(b"key", [5, 6], [7, 8, 9])
        >>> history.is_due, history.begin(b"key"), history.is_due
        (False, None, True)
        >>> history.take()
        [[5, 6, 7, 8, 9]]
        >>> history.is_due
        False
    """

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._prompts: OrderedDict[bytes, _KnownPrompt] = OrderedDict()
        self._new = 0
        self._came_again = False
        self.tokens = 0
        """Tokens that are remembered."""

    def __len__(self) -> int:
        """Returns the number of prompts that are remembered."""
        return len(self._prompts)

    def begin(self, key: bytes) -> None:
        """A prompt is asked."""
        known = self._prompts.get(key)
        if known is not None and known.new:
            self._came_again = True

    def end(self, key: bytes, prompt: Sequence[int], response: Sequence[int]) -> None:
        """A prompt was answered."""
        if not response:
            return
        known = self._prompts.setdefault(key, _KnownPrompt())
        self._prompts.move_to_end(key)
        before, new = known.tokens, known.new
        known.texts.append(array("q", (*prompt[-CONTEXT:], *response)))
        known.new = min(new + len(known.texts[-1]), known.tokens)
        self.tokens += known.tokens - before
        self._new += known.new - new
        while self.tokens > self._most and len(self._prompts) > 1:
            _, oldest = self._prompts.popitem(last=False)
            self.tokens -= oldest.tokens
            self._new -= oldest.new

    @property
    def is_due(self) -> bool:
        """Whether servers shall get what is remembered now."""
        return self._came_again and self._new >= SHARE * self.tokens

    def take(self) -> list[list[int]]:
        """Returns all texts in token ids, which servers have from now on."""
        self._came_again, self._new = False, 0
        for each in self._prompts.values():
            each.new = 0
        return [list(text) for each in self._prompts.values() for text in each.texts]


class Acceptance:
    """How many tokens of a response servers have from one pass.

    Examples:
        >>> acceptance = Acceptance(least=1.5)
        >>> acceptance.add(tokens=12_000, passes=10_000)
        >>> acceptance.length, acceptance.is_too_short
        (1.2, True)
    """

    PASSES = 10_000
    """Passes that are judged together."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._tokens = self._passes = 0
        self.length: float | None = None
        """Mean of the last passes that were judged; ``None`` before."""

    def add(self, tokens: int, passes: int) -> None:
        """Counts a response."""
        self._tokens += tokens
        self._passes += passes
        if self._passes >= self.PASSES:
            self.length = self._tokens / self._passes
            self._tokens = self._passes = 0

    @property
    def is_too_short(self) -> bool:
        """Whether drafts cost more than they save."""
        return self.length is not None and self.length < self._least
