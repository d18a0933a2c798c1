"""Texts that are tokenized in pieces have the tokens of the whole."""

from __future__ import annotations

import pickle
import random
import string
import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers.chat_families import FAMILIES, family_tokenizer, plain_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizerFast

from torchrl_sglang.chat.pieces import LONG_PIECE, PieceEncoder, shared_ids
from torchrl_sglang.chat.tokens import Encoder

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|im_end|>x", "<s>", "</s>")
WORDS = ("The", "user's", "  tool", "über", "\u4f60\u597d", "\n", "\n\n", " ", "12345")


def trained(
    model: Any, normalizer: Any, pre_tokenizer: Any, decoder: Any, **options: Any
) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with merges, and special tokens of all kinds."""
    backend = Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoder
    corpus = [" ".join(WORDS), string.printable, "the tool of the user " * 4]
    backend.train_from_iterator(
        corpus * 5, trainers.BpeTrainer(vocab_size=600, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False
    )
    tokenizer.add_tokens([AddedToken(t, special=True, **options) for t in SPECIAL])
    return tokenizer


def byte_level(**options: Any) -> PreTrainedTokenizerFast:
    model, level = models.BPE(), pre.ByteLevel(add_prefix_space=False)
    return trained(model, None, level, decoders.ByteLevel(), **options)


def sentence_piece(scheme: str) -> PreTrainedTokenizerFast:
    space = pre.Metaspace(prepend_scheme=scheme)
    return trained(models.BPE(unk_token=None), None, space, decoders.Metaspace())


def legacy() -> PreTrainedTokenizerFast:
    """Returns a tokenizer as Llama 2's, which normalizes spaces."""
    rules = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    space = pre.Metaspace(prepend_scheme="never")
    own = normalizers.Sequence(rules)
    return trained(models.BPE(), own, space, decoders.Metaspace())


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bytes": byte_level,
    "bytes-nfc": lambda: trained(
        models.BPE(), normalizers.NFC(), pre.ByteLevel(), decoders.ByteLevel()
    ),
    "bytes-lstrip": lambda: byte_level(lstrip=True),
    "bytes-rstrip": lambda: byte_level(rstrip=True),
    "bytes-single-word": lambda: byte_level(single_word=True),
    "bytes-normalized": lambda: byte_level(normalized=True),
    "pieces-first": lambda: sentence_piece("first"),
    "pieces-always": lambda: sentence_piece("always"),
    "pieces-legacy": legacy,
    "llama2": lambda: plain_tokenizer("llama2"),
    **{name: lambda name=name: family_tokenizer(name) for name in FAMILIES},
}
CUT = {
    "bytes",
    "bytes-nfc",
    "bytes-rstrip",
    "llama2",
    "pieces-always",
    "pieces-first",
    "pieces-legacy",
}
"""Tokenizers that are cut before each special token here."""


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_have_the_tokens_of_the_whole(name: str) -> None:
    """Of any text: parts in any order, with special tokens and white space anywhere."""
    tokenizer, draw = TOKENIZERS[name](), random.Random(name)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    cut = PieceEncoder(tokenizer, encode, long=5)
    odd = ["\u0301", "\u2581", "<", "|", "<|im_", "end|>", "s>", "\U0001f600", "\t"]
    parts = [*Encoder(tokenizer).special, *SPECIAL, *WORDS, *odd]
    for _ in range(300):
        text = "".join(draw.choices(parts, k=draw.randrange(24)))
        # The second time, from what was kept.
        assert cut(text) == cut(text) == encode(text), text


class Counting:
    """Encodes, and counts the characters."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.characters = tokenizer, 0

    def __call__(self, text: str) -> list[int]:
        self.characters += len(text)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_piece_is_tokenized_once(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    encode = Counting(tokenizer)
    cut = PieceEncoder(tokenizer, encode)
    token = next(iter(Encoder(tokenizer).special))
    shared = f"{token}{'The tool. ' * (LONG_PIECE // 8)}"
    for number in range(3):
        text = f"{shared}{token}{number}"
        assert cut(text) == tokenizer.encode(text, add_special_tokens=False)
    # Those that find special tokens in other ways tokenize whole texts.
    once = name in CUT or name in FAMILIES
    assert (encode.characters < 2 * len(shared)) == once


def test_threads_tokenize_a_piece_once() -> None:
    tokenizer = byte_level()
    encode, entered, release = Counting(tokenizer), threading.Event(), threading.Event()

    def slow(text: str) -> list[int]:
        if len(text) > LONG_PIECE:
            entered.set()
            assert release.wait(60)
        return encode(text)

    cut = PieceEncoder(tokenizer, slow)
    text = "<|im_end|>" + "b" * LONG_PIECE + "<|im_end|>"
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.append(cut(text))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert entered.wait(60)
    release.set()
    for thread in threads:
        thread.join(60)
    assert found == [tokenizer.encode(text, add_special_tokens=False)] * 4
    assert encode.characters < 2 * len(text)


def test_a_piece_that_fails_is_tried_again() -> None:
    tokenizer, failures = byte_level(), [OSError("gone")]

    def encode(text: str) -> list[int]:
        if len(text) > LONG_PIECE and failures:
            raise failures.pop()
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    cut = PieceEncoder(tokenizer, encode)
    text = "<|im_end|>" + "b" * LONG_PIECE
    with pytest.raises(OSError, match="gone"):
        cut(text)
    assert cut(text) == tokenizer.encode(text, add_special_tokens=False)


def test_kept_pieces_are_bounded() -> None:
    tokenizer = byte_level()
    encode = Counting(tokenizer)
    cut = PieceEncoder(tokenizer, encode, kept=3 * LONG_PIECE)
    texts = [f"<|im_end|>{letter * LONG_PIECE}" for letter in "abcd"]
    for text in texts:
        cut(text)
    before = encode.characters
    cut(texts[-1])
    assert encode.characters == before
    cut(texts[0])
    assert encode.characters > before


def test_an_encoder_is_pickled_without_what_it_keeps() -> None:
    encoder = Encoder(family_tokenizer("qwen2.5"))
    text = "<|im_end|>" + "b" * LONG_PIECE
    ids = encoder.encode(text)
    copied = pickle.loads(pickle.dumps(encoder))
    assert copied.encode(text) == ids


def test_equal_ids_are_one_object() -> None:
    ids = shared_ids([5_000, 0, 5_000])
    assert ids == (5_000, 0, 5_000)
    assert ids[0] is ids[2] is shared_ids([int("5000")])[0]
    for odd in ([-1, 3], [1 << 40], []):
        assert shared_ids(odd) == tuple(odd)
