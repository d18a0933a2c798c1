"""Encoding and decoding of texts, with the tokenizer's handling of a first text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

from torchrl_sglang.chat.pieces import PieceEncoder


class Encoder:
    """Encodes and decodes texts whose special tokens are written out.

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
        """Tokens for single bytes of characters without their own token.

        A tokenizer of pieces decodes adjacent byte tokens as a text, and an incomplete
        character as nothing readable.
        """
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = self.tokenizer.convert_tokens_to_ids(names)
        present = [i for i in ids if i is not None]
        names_of_ids = self.tokenizer.convert_ids_to_tokens(present)
        return frozenset(
            i for i, name in zip(present, names_of_ids, strict=True) if name in names
        )

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, with a cache of long repeated pieces."""
        return self._encode_pieces(text)

    def _encode_whole(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each text; faster than single calls.

        Samples of a prompt have the same text, which is encoded once.
        """
        if not texts:
            return []
        different = list(dict.fromkeys(texts))
        encoded = self.tokenizer(different, add_special_tokens=False)
        by_text = dict(zip(different, encoded["input_ids"], strict=True))
        return [list(by_text[text]) for text in texts]

    def encode_start(self, text: str) -> list[int]:
        """Returns the tokens of a text without a template, like the server's.

        The tokenizer's first token is added unless the text has it.
        """
        ids = self.encode(text)
        first = self.tokenizer.encode("")[:1]
        begins = first == [getattr(self.tokenizer, "bos_token_id", None)]
        return [*first, *ids] if begins and ids[:1] != first else ids

    def encode_behind(self, text: str, end: str | None = None) -> list[int]:
        """Returns the tokens of a later text of a sequence.

        Args:
            text: the text.
            end: the token before it, if it is known.
        """
        # Some tokenizers put a space before a first text, and some drop white space
        # after a special token: here they see a special token before it.
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
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return {str(t): i for i, t in added.items() if t.special} | dict(named)


def decode(
    tokenizer: Any, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = False
) -> list[str]:
    """Returns the exact text of each row of token ids."""
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
    """Returns whether a class of tokenizers decodes only with its Rust tokenizer."""
    from transformers import PreTrainedTokenizerFast

    return issubclass(cls, PreTrainedTokenizerFast) and all(
        getattr(cls, name) is getattr(PreTrainedTokenizerFast, name)
        for name in ("batch_decode", "decode", "_decode", "backend_tokenizer")
    )
