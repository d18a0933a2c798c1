"""Tokenization of long texts: repeated pieces are tokenized once.

Agents begin with the same system prompt and tools, which are most of their first
prompt. A tokenizer splits at special tokens first, and tokenizes the text between them
separately, so a text may be cut before each of them.
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
"""Smallest number of characters of a cached piece."""

KEPT_CHARACTERS = 16_000_000
"""Largest number of characters in all cached pieces."""

_SHARED = 1 << 20
"""Token ids below this number are shared between lists."""

_PROBES = (("", "x"), ("a", "b"), (" a ", " b "), ("a\n", "\nb"), ("é.", ".é"))
"""Texts before and after a special token, for tests of cuts."""

_ids: list[int] = []
_growing = threading.Lock()


def shared_ids(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Returns token ids of 8 bytes each: equal ids share an object."""
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
    """Encodes texts like a tokenizer, with a cache of long pieces.

    Texts are only cut before special tokens, and only after a test of equal tokens. A
    tokenizer in Python, or with special tokens in normalized text, encodes whole texts.
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
        # Other threads wait for the encoding of a piece.
        self._kept: OrderedDict[str, Future[Sequence[int]]] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        # Locks and encodings in progress are process-local.
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
        ids: list[int] = []
        for piece in self._pieces(text):
            ids += self._of_piece(piece)
        return ids

    @cached_property
    def _special(self) -> dict[str, int]:
        """Ids of the special tokens with cuts before them; none: no cuts."""
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
        """Pattern of all tokens found before normalization."""
        names = {str(token) for token in self._added.values() if not token.normalized}
        # The longest token at a position is found.
        longest_first = sorted(filter(None, names), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    def _pieces(self, text: str) -> Iterator[str]:
        """Yields long pieces of a text, and the text between them."""
        begin = cut = 0
        places = self._pattern.finditer(text)
        cuts = (match.start() for match in places if self._cut(match.group()))
        for end in (*cuts, len(text)):
            if end - cut >= self._long:
                if cut > begin:
                    yield text[begin:cut]
                yield text[cut:end]
                begin = end
            cut = end
        if cut > begin:
            yield text[begin:cut]

    def _cut(self, token: str) -> bool:
        """Returns whether texts may be cut before a token."""
        if (can_cut := self._can_cut.get(token)) is None:
            can_cut = self._can_cut[token] = token in self._special and all(
                self._is_cut(text, token, following) for text, following in _PROBES
            )
        return can_cut

    def _is_cut(self, before: str, token: str, behind: str) -> bool:
        first, second = self._encode(before), self._encode(token + behind)
        joined = self._encode(before + token + behind)
        return joined == first + second and second[0] == self._special[token]

    def _of_piece(self, piece: str) -> Sequence[int]:
        if len(piece) < self._long:
            return self._encode(piece)
        with self._lock:
            shared = self._kept.get(piece)
            if shared is None:
                future = self._kept[piece] = Future()
                self._characters += len(piece)
                self._forget()
            else:
                self._kept.move_to_end(piece)
        if shared is not None:
            return shared.result()
        try:
            future.set_result(shared_ids(self._encode(piece)))
        except BaseException as error:
            future.set_exception(error)
            with self._lock:
                if self._kept.pop(piece, None) is not None:
                    self._characters -= len(piece)
            raise
        return future.result()

    def _forget(self) -> None:
        """Drops the least recently used pieces, except the latest."""
        while self._characters > self._most and len(self._kept) > 1:
            piece, _ = self._kept.popitem(last=False)
            self._characters -= len(piece)
