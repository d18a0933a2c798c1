"""Conversations to token ids: templates of many kinds, compared with transformers."""

from __future__ import annotations

import copy

import pytest
from torchrl.data.llm import History
from torchrl.data.llm.history import _CHAT_TEMPLATES
from transformers import PreTrainedTokenizerFast

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies.chat import (
    continue_tokens,
    decode,
    encode_full,
    find_template,
    render,
    to_messages,
)
from torchrl_sglang.testing.tiny_model import CHAT_TEMPLATE, make_tiny_tokenizer

CHATS = [
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes: hi"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hi"},
    ],
    [{"role": "system", "content": "yo"}, {"role": "user", "content": "2+2"}],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
]
UNMARKED = CHAT_TEMPLATE.replace("{% generation %}", "").replace(
    "{% endgeneration %}", ""
)
# Drops what was thought in earlier turns, as templates of reasoning models do.
FORGETFUL = (
    "{% for m in messages %}{{ m['role'] + ': ' }}"
    "{% if m['role'] == 'assistant' and not loop.last and ':' in m['content'] %}"
    "{{ m['content'].split(': ')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def marked(ids, mask, tokenizer) -> str:
    return tokenizer.decode([i for i, bit in zip(ids, mask, strict=True) if bit])


def test_markers_are_not_needed(tokenizer):
    """The mask without markers is the one that transformers makes with them."""
    assert "generation %}" not in UNMARKED
    texts, token_ids, masks = encode_full(CHATS, tokenizer=tokenizer, template=UNMARKED)
    reference = tokenizer.apply_chat_template(
        CHATS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert token_ids == reference["input_ids"]
    assert masks == [[bool(bit) for bit in row] for row in reference["assistant_masks"]]
    assert encode_full(CHATS, tokenizer=tokenizer, template=CHAT_TEMPLATE) == (
        texts,
        token_ids,
        masks,
    )


def test_a_template_that_rewrites_earlier_turns(tokenizer):
    _, token_ids, masks = encode_full(CHATS, tokenizer=tokenizer, template=FORGETFUL)
    found = [
        marked(ids, mask, tokenizer) for ids, mask in zip(token_ids, masks, strict=True)
    ]
    # Of the turn that was rewritten nothing is left that the model wrote as it stands.
    assert found == ["hi<|im_end|>", "", "<|im_end|>"]


def test_a_slow_tokenizer(tokenizer):
    """Without character offsets the pieces are measured."""

    class Slow:
        is_fast = False

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    fast = encode_full(CHATS, tokenizer=tokenizer, template=UNMARKED)
    assert encode_full(CHATS, tokenizer=Slow(), template=UNMARKED) == fast


def named(tokenizer, name, template):
    other = copy.deepcopy(tokenizer)
    other.name_or_path = name
    other.chat_template = template
    return other


@pytest.mark.parametrize(
    ("name", "own", "chosen"),
    [
        ("my/model", UNMARKED, UNMARKED),  # TorchRL would read it as ChatML.
        ("my/model", CHAT_TEMPLATE, CHAT_TEMPLATE),
        # The trainer uses TorchRL's template for models that it knows.
        ("Qwen/Qwen2.5-0.5B", UNMARKED, _CHAT_TEMPLATES["qwen"]),
        ("tiiuae/falcon-7b", None, _CHAT_TEMPLATES["falcon"]),
    ],
)
def test_which_template(tokenizer, name, own, chosen):
    tokenizer = named(tokenizer, name, own)
    assert find_template(tokenizer) == chosen
    assert find_template(tokenizer, template="x") == "x"
    chatml = find_template(tokenizer, name="chatml_format")
    assert chatml == _CHAT_TEMPLATES["chatml_format"]


def test_no_template_is_an_error(tokenizer):
    tokenizer = named(tokenizer, "my/model", None)
    with pytest.raises(ConfigurationError, match=r"my/model.*no chat template.*Pass"):
        find_template(tokenizer)
    with pytest.raises(ConfigurationError, match=r"'qwne' must be one of .*qwen"):
        find_template(tokenizer, name="qwne")


def test_a_template_that_refuses(tokenizer):
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigurationError, match="roles must alternate"):
        render(
            CHATS[:1], tokenizer=tokenizer, template=strict, add_generation_prompt=True
        )


@pytest.mark.parametrize(
    "extra", [{}, {"tool_calls": [{"name": "f", "arguments": {"x": 1}}]}]
)
def test_messages_are_those_of_torchrl(extra):
    message = {"role": "assistant", "content": "a", **extra}
    history = History.from_chats([[{"role": "user", "content": "hi"}, message]])[0]
    assert to_messages(history) == history.tolist(tolist_first=True)
    padded = history.append(
        History(role="<none>", content="", batch_size=()), inplace=False, dim=-1
    )
    assert to_messages(padded) == to_messages(history)


def test_known_tokens_stay(tokenizer):
    text = "abc<|im_end|>\nd"
    pad = tokenizer.pad_token_id
    known = tokenizer.encode("abc")
    assert continue_tokens([text], [known], tokenizer) == [tokenizer.encode(text)]
    # Padding behind them is not meant.
    assert continue_tokens([text], [[*known, pad]], tokenizer, pad) == [
        tokenizer.encode(text)
    ]


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


@pytest.mark.parametrize("skip", [False, True])
def test_text_is_that_of_the_tokenizer(tokenizer, skip):
    rows = [[*tokenizer.encode("a , b"), tokenizer.eos_token_id], [], [5]]
    texts = tokenizer.batch_decode(
        rows, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )
    assert decode(tokenizer, rows, skip_special_tokens=skip) == texts


def test_text_of_a_tokenizer_with_a_decoder_of_its_own():
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *arguments, **options):
            return super()._decode(*arguments, **options).upper()

    shouting = Shouting(tokenizer_object=make_tiny_tokenizer().backend_tokenizer)
    assert decode(shouting, [shouting.encode("abc")]) == ["ABC"]
