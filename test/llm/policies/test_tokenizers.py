"""Tokenizers of other habits than the tiny model's own, on the real engine."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tokenizers.processors import TemplateProcessing
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens

from torchrl_sglang import SGLangWrapper
from torchrl_sglang.errors import ConfigurationError

TOLERANCE = 1e-4
TEXTS = ["hi", "what is 2+2?", "x"]
SIZE = len(TEXTS)
START = "<|im_start|>"


def add_bos(tokenizer) -> None:
    """Begins every text with a token, as the tokenizers of many models do."""
    start = tokenizer.convert_tokens_to_ids(START)
    tokenizer.bos_token = START
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, start)]
    )


def pad_is_eos(tokenizer) -> None:
    tokenizer.pad_token = tokenizer.eos_token


def no_pad(tokenizer) -> None:
    tokenizer.pad_token = None


def as_it_is(tokenizer) -> None:
    pass


@pytest.fixture(params=[as_it_is, add_bos, pad_is_eos, no_pad])
def any_tokenizer(request, tokenizer):
    other = copy.deepcopy(tokenizer)
    request.param(other)
    return other


def fingerprint(tokenizer) -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps([backend, str(tokenizer.special_tokens_map), repr(tokenizer)])


def expected_prompts(mode, tokenizer) -> list[list[int]]:
    if mode == "text":
        return tokenizer(TEXTS)["input_ids"]
    if mode == "tokens":
        # An end-of-sequence token inside a prompt is a token like any other.
        end = tokenizer.eos_token_id
        return [[end, *tokenizer(text)["input_ids"], end] for text in TEXTS]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for text in TEXTS
    ]


def make_input(mode, tokenizer) -> TensorDict:
    if mode == "text":
        value = Text(prompt=list(TEXTS), batch_size=SIZE)
        return TensorDict(text=value, batch_size=SIZE)
    if mode == "history":
        chats = History.from_chats([[{"role": "user", "content": t}] for t in TEXTS])
        value = ChatHistory(prompt=chats, batch_size=SIZE)
        return TensorDict(history=value, batch_size=SIZE)
    return lazy_stack(
        [
            # Without a mask, a first token that is also the padding would be taken
            # for padding.
            TensorDict(
                tokens=Tokens(prompt=torch.tensor(prompt)),
                attention_mask=torch.ones(len(prompt), dtype=torch.bool),
            )
            for prompt in expected_prompts(mode, tokenizer)
        ]
    )


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_generate_then_score(engine, any_tokenizer, score, mode):
    """Every real token is kept, every pad is masked, and both agree with HF."""
    before = fingerprint(any_tokenizer)
    pad = any_tokenizer.pad_token_id
    pad = any_tokenizer.eos_token_id if pad is None else pad
    wrapper = SGLangWrapper(
        engine,
        tokenizer=any_tokenizer,
        input_mode=mode,
        pad_output=mode != "tokens",
        generate_kwargs={"max_new_tokens": 8, "temperature": 0.0},
    )
    assert wrapper.padding_value == pad
    out = wrapper(make_input(mode, any_tokenizer))
    masks = out.get(("masks", "all_attention_mask"), as_list=True)
    full = out.get(("tokens", "full"), as_list=True)
    for index, prompt in enumerate(expected_prompts(mode, any_tokenizer)):
        real = full[index][masks[index]].tolist()
        assert real[: len(prompt)] == prompt
        assert full[index][~masks[index]].eq(pad).all()
        log_probs = out.get(("log_probs", "full"), as_list=True)[index][masks[index]]
        torch.testing.assert_close(
            log_probs[len(prompt) :],
            score(real)[len(prompt) :],
            atol=TOLERANCE,
            rtol=0,
        )
    # What was generated is what is scored, whatever its padding.
    scorer = SGLangWrapper(
        engine, tokenizer=any_tokenizer, input_mode="tokens", generate=False
    )
    scored = scorer(out.select("tokens", "masks"))
    for index, log_probs in enumerate(scored.get(("log_probs", "full"), as_list=True)):
        real = full[index][masks[index]]
        torch.testing.assert_close(log_probs, score(real), atol=TOLERANCE, rtol=0)
    assert fingerprint(any_tokenizer) == before


def test_no_chat_template(engine, tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    bare.name_or_path = "my/model"
    with pytest.raises(ConfigurationError, match="no chat template"):
        SGLangWrapper(engine, tokenizer=bare)
    SGLangWrapper(engine, tokenizer=bare, chat_template_name="chatml_format")
    SGLangWrapper(engine, tokenizer=bare, input_mode="text")


def test_a_template_without_markers(engine, tokenizer, score):
    """What the wrapper generates under such a template it also scores and masks."""
    plain = copy.deepcopy(tokenizer)
    for marker in ("{% generation %}", "{% endgeneration %}"):
        plain.chat_template = plain.chat_template.replace(marker, "")
    policy = SGLangWrapper(
        engine, tokenizer=plain, generate_kwargs={"max_new_tokens": 30}
    )
    end = tokenizer.eos_token_id
    out = policy(make_input("history", plain), min_tokens=4, logit_bias={end: 1e3})
    history = ChatHistory(full=out["history"].full, batch_size=SIZE)
    scored = policy.get_new_version(generate=False)(
        TensorDict(history=history, batch_size=SIZE)
    )
    for index in range(SIZE):
        generated = {
            name: out.get(key, as_list=True)[index]
            for name, key in [
                ("tokens", ("tokens", "full")),
                ("mask", ("masks", "all_assistant_mask")),
            ]
        }
        length = len(generated["tokens"])
        # Behind the turn the template adds a line break.
        tokens = scored.get(("tokens", "full"), as_list=True)[index]
        assert tokens[:length].tolist() == generated["tokens"].tolist()
        mask = scored.get(("masks", "all_assistant_mask"), as_list=True)[index]
        assert mask[:length].tolist() == generated["mask"].tolist()
        assert not mask[length:].any()
        log_probs = scored.get(("log_probs", "full"), as_list=True)[index]
        torch.testing.assert_close(log_probs, score(tokens), atol=TOLERANCE, rtol=0)
