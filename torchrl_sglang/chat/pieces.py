"""Long texts to tokens: pieces that come again are tokenized once.

Agents begin with the same system prompt and tools, which are most of their first
prompt. A tokenizer finds special tokens before anything else, and tokenizes what is
between them apart, so that a text may be cut before each of them.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

LONG_PIECE = 4_000
"""Characters of a piece from which its tokens are kept."""

KEPT_CHARACTERS = 16_000_000
"""Most characters of all pieces that are kept."""

_SHARED = 1 << 20
"""Token ids below this are shared between lists."""

_PROBES = (("", "x"), ("a", "b"), (" a ", " b "), ("a\n", "\nb"), ("é.", ".é"))
"""Texts before and behind a special token for which cuts are tried out."""

_ids: list[int] = []
_growing = threading.Lock()


def shared_ids(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Returns token ids that take 8 bytes each: equal ones are one object.

    Examples:
        >>> from torchrl_sglang.chat.pieces import shared_ids
        >>> shared_ids([1000, 7])
        (1000, 7)
    """
    if isinstance(token_ids, tuple):
        return token_ids
    if not token_ids:
        return ()
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= _SHARED:
        return tuple(token_ids)
    if len(_ids) <= high:
        with _growing:
            _ids.extend(range(len(_ids), high + 1))
    return tuple(map(_ids.__getitem__, token_ids))


class PieceEncoder:
    """Encodes texts as a tokenizer does, and keeps the tokens of long pieces.

    Texts are cut before special tokens only, and only before those of which it was
    tried out that the tokens stay the same. A tokenizer that Python implements, or one
    that finds special tokens in normalized text, encodes whole texts.

    Args:
        tokenizer: of a model.
        encode: returns the tokens of a text, without tokens around it.
        long: characters of a piece from which its tokens are kept.
        kept: most characters of all pieces that are kept.
    """

    def __init__(
        self,
        tokenizer: Any,
        encode: Callable[[str], list[int]],
        *,
        long: int = LONG_PIECE,
        kept: int = KEPT_CHARACTERS,
    ) -> None:
        self._tokenizer, self._encode = tokenizer, encode
        self._long, self._most = long, kept
        self._can_cut: dict[str, bool] = {}
        # A piece that another thread encodes right now is waited for.
        self._kept: OrderedDict[str, Future[Sequence[int]]] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        # Locks and what others encode now stay here.
        return {
            "tokenizer": self._tokenizer,
            "encode": self._encode,
            "long": self._long,
            "kept": self._most,
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        PieceEncoder.__init__(self, **state)

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        if (
            len(text) < self._long
            or not self._special
            or getattr(self._tokenizer, "split_special_tokens", False)
        ):
            return self._encode(text)
        found: list[int] = []
        for piece in self._pieces(text):
            found += self._of_piece(piece)
        return found

    @cached_property
    def _special(self) -> dict[str, int]:
        """Ids of the special tokens that texts may be cut before; none: never cut."""
        added = self._added
        if not getattr(self._tokenizer, "is_fast", False) or any(
            token.single_word for token in added.values()
        ):
            # Whether a text is such a token depends on the text around it.
            return {}
        return {
            str(token): number
            for number, token in added.items()
            if token.special and not token.normalized and not token.lstrip
        }

    @property
    def _added(self) -> Mapping[int, Any]:
        return getattr(self._tokenizer, "added_tokens_decoder", {})

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Pattern of all tokens that are found before a text is normalized."""
        names = {str(each) for each in self._added.values() if not each.normalized}
        # The longest of those that begin at one place is found.
        longest_first = sorted(filter(None, names), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    def _pieces(self, text: str) -> Iterator[str]:
        """Yields long pieces of a text, and what is between them."""
        begin = last = 0
        places = self._pattern.finditer(text)
        cuts = (each.start() for each in places if self._cut(each.group()))
        for end in (*cuts, len(text)):
            if end - last >= self._long:
                if last > begin:
                    yield text[begin:last]
                yield text[last:end]
                begin = end
            last = end
        if last > begin:
            yield text[begin:last]

    def _cut(self, token: str) -> bool:
        """Returns whether texts may be cut before a token."""
        if (known := self._can_cut.get(token)) is None:
            known = self._can_cut[token] = token in self._special and all(
                self._is_cut(before, token, behind) for before, behind in _PROBES
            )
        return known

    def _is_cut(self, before: str, token: str, behind: str) -> bool:
        first, second = self._encode(before), self._encode(token + behind)
        whole = self._encode(before + token + behind)
        return whole == first + second and second[0] == self._special[token]

    def _of_piece(self, piece: str) -> Sequence[int]:
        if len(piece) < self._long:
            return self._encode(piece)
        with self._lock:
            known = self._kept.get(piece)
            if known is None:
                own = self._kept[piece] = Future()
                self._characters += len(piece)
                self._forget()
            else:
                self._kept.move_to_end(piece)
        if known is not None:
            return known.result()
        try:
            own.set_result(shared_ids(self._encode(piece)))
        except BaseException as error:
            own.set_exception(error)
            with self._lock:
                if self._kept.pop(piece, None) is not None:
                    self._characters -= len(piece)
            raise
        return own.result()

    def _forget(self) -> None:
        """Forgets the pieces that were used longest ago, but the latest."""
        while self._characters > self._most and len(self._kept) > 1:
            piece, _ = self._kept.popitem(last=False)
            self._characters -= len(piece)
