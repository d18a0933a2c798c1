from __future__ import annotations

from torchrl_sglang.policies.inputs import continue_tokens
from torchrl_sglang.testing.tiny_model import make_tiny_tokenizer


def merging_tokenizer():
    """The tiny tokenizer, to which ``12`` is one token, as to most tokenizers."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["12"])
    return tokenizer


def test_generated_tokens_are_not_tokenized_again():
    tokenizer = merging_tokenizer()
    one, two, twelve = (
        tokenizer.convert_tokens_to_ids(token) for token in ("1", "2", "12")
    )
    text = "12<|im_end|>\n"
    fresh = continue_tokens([text], None, tokenizer)
    assert fresh[0][0] == twelve
    kept = continue_tokens([text], [[one, two]], tokenizer)
    assert kept[0][:2] == [one, two]
    assert kept[0][2:] == fresh[0][1:]
    assert tokenizer.decode(kept[0]) == text


def test_known_tokens_of_something_else_are_not_used():
    tokenizer = make_tiny_tokenizer()
    known = [tokenizer.encode("abx"), tokenizer.encode("ab")]
    found = continue_tokens(["abc", "abc"], known, tokenizer)
    assert found == [tokenizer.encode("abc")] * 2
