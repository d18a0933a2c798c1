"""Conversations to token ids: templates of many kinds, compared with transformers."""

from __future__ import annotations

import copy

import pytest
from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.data.llm.history import _CHAT_TEMPLATES
from torchrl.modules.llm.policies import ChatHistory
from transformers import PreTrainedTokenizerFast

from torchrl_sglang.chat.choose import choose_template
from torchrl_sglang.chat.masks import encode_full
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.chat.tokens import decode
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies.inputs import read_history, to_messages
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
    texts, token_ids, masks = encode_full(CHATS, ChatTemplate(tokenizer, UNMARKED))
    reference = tokenizer.apply_chat_template(
        CHATS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert token_ids == reference["input_ids"]
    assert masks == [[bool(bit) for bit in row] for row in reference["assistant_masks"]]
    assert encode_full(CHATS, ChatTemplate(tokenizer, CHAT_TEMPLATE)) == (
        texts,
        token_ids,
        masks,
    )


def test_a_template_that_rewrites_earlier_turns(tokenizer):
    _, token_ids, masks = encode_full(CHATS, ChatTemplate(tokenizer, FORGETFUL))
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

    fast = encode_full(CHATS, ChatTemplate(tokenizer, UNMARKED))
    assert encode_full(CHATS, ChatTemplate(Slow(), UNMARKED)) == fast


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
    assert choose_template(tokenizer, by_model=True) == chosen
    mine = "{{ messages }}"
    assert choose_template(tokenizer, by_model=True, template=mine) == mine
    with pytest.raises(ConfigurationError, match="the text of a file"):
        choose_template(tokenizer, template="chat.jinja")
    if own is not None:
        # As a gateway chooses.
        assert choose_template(tokenizer) == own
    chatml = choose_template(tokenizer, name="chatml_format")
    assert chatml == _CHAT_TEMPLATES["chatml_format"]


def test_no_template_is_an_error(tokenizer):
    tokenizer = named(tokenizer, "my/model", None)
    with pytest.raises(ConfigurationError, match=r"my/model.*no chat template.*Pass"):
        choose_template(tokenizer, by_model=True)
    with pytest.raises(ConfigurationError, match=r"'qwne' must be one of .*qwen"):
        choose_template(tokenizer, name="qwne")


def test_a_template_that_refuses(tokenizer):
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigurationError, match="roles must alternate"):
        ChatTemplate(tokenizer, strict).render(CHATS[0])


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


def said(text):
    return [{"role": "user", "content": text}]


def go_on(text, known, tokenizer):
    return ChatTemplate(tokenizer).go_on(text, said(text), known)


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
    fresh = tokenizer.encode(text)
    assert fresh[0] == twelve
    kept = go_on(text, [one, two], tokenizer)
    assert kept == [one, two, *fresh[1:]]
    assert tokenizer.decode(kept) == text


def test_known_tokens_of_something_else_are_not_used():
    tokenizer = make_tiny_tokenizer()
    assert go_on("abc", tokenizer.encode("abx"), tokenizer) is None
    assert go_on("abc", tokenizer.encode("ab"), tokenizer) == tokenizer.encode("abc")
    # Nothing that is known, and white space, are the beginning of anything.
    assert go_on("abc", [], tokenizer) is None
    assert go_on("abc", tokenizer.encode("\n"), tokenizer) is None


@pytest.mark.parametrize("padded", [False, True])
def test_known_tokens_stay(tokenizer, padded):
    """Padding behind them is not meant."""
    template = ChatTemplate(tokenizer)
    known = tokenizer.encode(template.render(CHATS[0][:1]) + "yes: hi<|im_end|>")
    td = TensorDict(
        history=ChatHistory(prompt=History.from_chats([CHATS[0][:3]])), batch_size=1
    )
    found = read_history(
        td,
        ("history", "prompt"),
        template=template,
        known_tokens=[[*known, *[tokenizer.pad_token_id] * padded]],
        padding_value=tokenizer.pad_token_id,
        generate=True,
    )
    assert found.token_ids == [tokenizer.encode(template.render(CHATS[0][:3]))]


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
