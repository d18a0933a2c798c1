"""Texts to tokens and back, with what tokenizers do at the begin of a text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

from torchrl_sglang.chat.pieces import PieceEncoder


class Encoder:
    """Encodes and decodes texts whose special tokens are written out.

    Args:
        tokenizer: of a model; it is not modified.

    Attributes:
        tokenizer: the same.
        special (dict of str to int): ids of the special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = _special_tokens(tokenizer)
        self._encode_pieces = PieceEncoder(tokenizer, self._encode_whole)
        self._anchors = (
            getattr(tokenizer, "bos_token", None),
            getattr(tokenizer, "eos_token", None),
        )

    @cached_property
    def byte_tokens(self) -> frozenset[int]:
        """Tokens that stand for one byte of a character that has no token.

        A tokenizer of pieces decodes such tokens beside each other as one text, and as
        nothing readable if one of its characters is incomplete.
        """
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = self.tokenizer.convert_tokens_to_ids(names)
        known = [each for each in ids if each is not None]
        found = self.tokenizer.convert_ids_to_tokens(known)
        return frozenset(
            each for each, name in zip(known, found, strict=True) if name in names
        )

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text; long pieces that come again are kept."""
        return self._encode_pieces(text)

    def _encode_whole(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each text; faster than one by one.

        Samples of a prompt have the same text, which is encoded once.
        """
        if not texts:
            return []
        different = list(dict.fromkeys(texts))
        encoded = self.tokenizer(different, add_special_tokens=False)
        known = dict(zip(different, encoded["input_ids"], strict=True))
        return [list(known[text]) for text in texts]

    def encode_start(self, text: str) -> list[int]:
        """Returns the tokens of a text without a template, as the server finds them.

        A token that begins texts is put before it unless it is written out.
        """
        ids = self.encode(text)
        first = self.tokenizer.encode("")[:1]
        begins = first == [getattr(self.tokenizer, "bos_token_id", None)]
        return [*first, *ids] if begins and ids[:1] != first else ids

    def encode_behind(self, text: str, end: str | None = None) -> list[int]:
        """Returns the tokens of a text that is not the first of its sequence.

        Args:
            text: to encode.
            end: the token before it, if it is known.
        """
        # Some tokenizers put a space before a first text, and some drop white space
        # behind a special token: here they see one before it.
        for name in (end, *self._anchors):
            if name in self.special:
                first, *ids = self.encode(name + text)
                if first == self.special[name]:
                    return ids
        return self.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens."""
        return decode(self.tokenizer, [list(token_ids)])[0]


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the ids of a tokenizer's special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return {str(t): i for i, t in added.items() if t.special} | dict(named)


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
