"""What a user can say about generation, on real engines, against Hugging Face.

The same tests run on a server that has a tokenizer and on one that was started without
(``skip_tokenizer_init``), which matches no stop strings and keeps nothing from ending.
"""

from __future__ import annotations

import json
import math
import re
import threading

import pytest
import torch
from tensordict import TensorDict
from torchrl.modules.llm.policies import Text

from torchrl_sglang import AsyncSGLang, SGLangWrapper
from torchrl_sglang.backends.event_loop import run_sync
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    UnsupportedByServerError,
)

TOLERANCE = 1e-4
PROMPTS = ["hi", "what is 2+2?", "x"]
LENGTH = 24


@pytest.fixture(scope="module")
def engine_without_tokenizer(tiny_model_path):
    with AsyncSGLang.from_pretrained(
        tiny_model_path, device="cpu", skip_tokenizer_init=True
    ) as engine:
        assert not engine.capabilities.has_tokenizer
        yield engine


@pytest.fixture(scope="module")
def engine_with_grammar(tiny_model_path):
    with AsyncSGLang.from_pretrained(
        tiny_model_path, device="cpu", grammar_backend="xgrammar"
    ) as engine:
        yield engine


@pytest.fixture(params=["tokenizer", "no tokenizer"])
def either_engine(request, session_engine):
    if request.param == "tokenizer":
        return session_engine
    return request.getfixturevalue("engine_without_tokenizer")


def make_input() -> TensorDict:
    text = Text(prompt=list(PROMPTS), batch_size=len(PROMPTS))
    return TensorDict(text=text, batch_size=len(PROMPTS))


def wrap(engine, **kwargs) -> SGLangWrapper:
    sampling = {"max_new_tokens": LENGTH, "temperature": 0.0, **kwargs}
    return SGLangWrapper(
        engine,
        input_mode="text",
        generate_kwargs=sampling,
        return_generation_info=True,
    )


@torch.no_grad()
def continue_greedily(model, prompt, length, adjust=lambda step, logits: logits):
    """Hugging Face's continuation, with logits that can be adjusted at each step.

    Returns tokens, their log-probs, and the log-probs of the whole vocabulary.
    """
    ids, rows = list(prompt), []
    for step in range(length):
        logits = adjust(step, model(torch.tensor([ids])).logits[0, -1].clone())
        rows.append(logits.log_softmax(-1))
        ids.append(int(logits.argmax()))
    new = ids[len(prompt) :]
    picked = [float(row[token]) for row, token in zip(rows, new, strict=True)]
    return new, picked, rows


def check(td, index, tokens, log_probs, tokenizer) -> None:
    """Tokens, log-probs, text and masks of one response say the same."""
    found = td.get(("tokens", "response"), as_list=True)[index]
    assert found.tolist() == tokens
    scored = td.get(("log_probs", "response"), as_list=True)[index]
    torch.testing.assert_close(scored, torch.tensor(log_probs), atol=TOLERANCE, rtol=0)
    assert td["text"].response[index] == tokenizer.decode(tokens)
    assert td["text"].full[index] == PROMPTS[index] + tokenizer.decode(tokens)
    mask = td.get(("masks", "all_assistant_mask"), as_list=True)[index]
    assert int(mask.sum()) == len(tokens)
    versions = td.get(("generation_info", "weight_version"), as_list=True)[index]
    assert len(versions) == len(tokens)


@pytest.mark.parametrize("width", [1, 3], ids=["one token", "across tokens"])
@pytest.mark.parametrize("include", [True, False])
def test_stop_strings(either_engine, tokenizer, hf_model, width, include):
    """A response ends with the first stop string, however many tokens spell it."""
    plain = [
        continue_greedily(hf_model, tokenizer.encode(prompt), LENGTH)
        for prompt in PROMPTS
    ]
    # A text that stands somewhere in the middle of the first response.
    stop = tokenizer.decode(plain[0][0][8 : 8 + width])
    wrapper = wrap(
        either_engine,
        stop=[stop, "never comes"],
        ignore_eos=True,
        include_stop_str_in_output=include,
    )
    td = wrapper(make_input())
    for index, (tokens, log_probs, _) in enumerate(plain):
        position = tokenizer.decode(tokens).find(stop)
        # One token is one character in this vocabulary.
        size = len(tokens)
        if position >= 0:
            size = position + len(stop) if include else position
        check(td, index, tokens[:size], log_probs[:size], tokenizer)
        reason = "length" if position < 0 else "stop"
        assert td["generation_info"].finish_reason[index] == reason
        assert bool(td["generation_info"].truncated[index]) == (position < 0)
    assert td["generation_info"].finish_reason[0] == "stop"


def test_min_new_tokens(either_engine, tokenizer, hf_model):
    """The end comes as soon as it may and not before, with the right log-probs."""
    end, least = tokenizer.eos_token_id, 5

    def adjust(step, logits):
        logits[end] = -math.inf if step < least else logits[end] + 100.0
        return logits

    td = wrap(either_engine, min_tokens=least, logit_bias={end: 100.0})(make_input())
    for index, prompt in enumerate(PROMPTS):
        tokens, log_probs, _ = continue_greedily(
            hf_model, tokenizer.encode(prompt), least + 1, adjust
        )
        assert tokens[-1] == end
        check(td, index, tokens, log_probs, tokenizer)
    assert td["generation_info"].finish_reason == ["stop"] * len(PROMPTS)


def test_min_new_tokens_up_to_the_context(either_engine, tokenizer):
    """No room for more than the least number of tokens."""
    room = 8
    limits = either_engine.capabilities
    length = min(limits.max_prompt, limits.max_context - room)
    text = Text(prompt=["x" * length], batch_size=1)
    wrapper = wrap(either_engine, min_new_tokens=20, max_new_tokens=40)
    td = wrapper(TensorDict(text=text, batch_size=1))
    (response,) = td.get(("tokens", "response"), as_list=True)
    assert 0 < len(response) <= room
    assert td["generation_info"].finish_reason == ["length"]


def test_stop_token_ids(either_engine, tokenizer, hf_model):
    tokens, log_probs, _ = continue_greedily(
        hf_model, tokenizer.encode(PROMPTS[0]), LENGTH
    )
    size = next(i for i in range(4, LENGTH) if tokens[i] not in tokens[:i]) + 1
    td = wrap(either_engine, stop_token_ids=[tokens[size - 1]])(make_input())
    check(td, 0, tokens[:size], log_probs[:size], tokenizer)
    with pytest.raises(ConfigurationError, match="ignore_eos=True"):
        wrap(either_engine, stop_token_ids=[5], ignore_eos=True)(make_input())


@pytest.mark.parametrize("pad_output", [False, True], ids=["ragged", "padded"])
def test_top_log_probs(either_engine, tokenizer, hf_model, pad_output):
    """``logprobs=N`` names the N likeliest tokens in each place."""
    number = 4
    wrapper = SGLangWrapper(
        either_engine,
        input_mode="text",
        pad_output=pad_output,
        generate_kwargs={"max_new_tokens": LENGTH, "temperature": 0.0},
    )
    assert wrapper.out_keys == ["text", "masks", "tokens", "log_probs"]
    asking = wrapper.get_new_version(
        generate_kwargs={**wrapper.generate_kwargs, "logprobs": number}
    )
    assert asking.out_keys[-1] == "generation_info"
    for td in (asking(make_input()), wrapper(make_input(), logprobs=number)):
        info = td["generation_info"]
        lengths = [int(m.sum()) for m in _assistant_masks(td)]
        for index, prompt in enumerate(PROMPTS):
            tokens, _, rows = continue_greedily(
                hf_model, tokenizer.encode(prompt), lengths[index]
            )
            best = torch.stack(rows).topk(number)
            ids = info.get("top_token_ids", as_list=True)[index]
            values = info.get("top_log_probs", as_list=True)[index]
            assert ids.dtype is torch.int64
            assert values.dtype is torch.float32
            size = len(tokens)
            assert len(ids) == (max(lengths) if pad_output else size)
            torch.testing.assert_close(
                values[:size], best.values, atol=TOLERANCE, rtol=0
            )
            assert ids[:size].tolist() == best.indices.tolist()
            assert ids[size:].eq(-1).all()
            assert values[size:].eq(0).all()
    assert "generation_info" not in wrapper(make_input()).keys()
    with pytest.raises(ConfigurationError, match=r"top_logprobs=1000.*\[0, 99\]"):
        wrapper(make_input(), logprobs=1000)


def _assistant_masks(td):
    return td.get(("masks", "all_assistant_mask"), as_list=True)


def test_special_tokens_in_the_text(either_engine, tokenizer):
    """They are in the text unless told otherwise, and always among the tokens."""
    end = tokenizer.eos_token_id
    wrapper = wrap(either_engine, logit_bias={end: 100.0})
    assert wrapper(make_input())["text"].response == ["<|im_end|>"] * 3
    td = wrapper(make_input(), skip_special_tokens=True)
    assert td["text"].response == [""] * 3
    assert [r.tolist() for r in td.get(("tokens", "response"), as_list=True)] == [
        [end]
    ] * 3


def test_no_limit(either_engine):
    """``max_tokens=None`` is vLLM's way to say: what the context has room for."""
    wrapper = wrap(either_engine, ignore_eos=True)
    limits = either_engine.capabilities
    length = limits.max_prompt - 4
    text = Text(prompt=["x" * length], batch_size=1)
    td = wrapper(TensorDict(text=text, batch_size=1), max_tokens=None)
    (response,) = td.get(("tokens", "response"), as_list=True)
    # SGLang keeps up to six tokens of the context for itself.
    assert LENGTH > len(response) >= limits.max_context - length - 6


def test_seeds(either_engine):
    """A seed gives the same samples again, and different ones within a group."""

    def sample(seed):
        wrapper = SGLangWrapper(
            either_engine,
            input_mode="text",
            num_samples=3,
            generate_kwargs={"max_tokens": 12, "temperature": 1.5, "seed": seed},
        )
        return [row["text"].response for row in wrapper(make_input()).unbind(0)]

    first = sample(7)
    assert all(len(set(group)) == 3 for group in first)
    if not _ignores_seeds(either_engine):
        assert sample(7) == first


def _ignores_seeds(engine) -> bool:
    """A server uses seeds if it was started with ``enable_deterministic_inference``."""
    return not engine.capabilities.server_args.get("enable_deterministic_inference")


GRAMMARS = [
    ({"guided_regex": "[0-9]{3}"}, r"[0-9]{3}"),
    ({"regex": "ab+c"}, r"ab+c"),
    ({"guided_choice": ["yes", "n.o"]}, r"yes|n\.o"),
    ({"guided_grammar": 'root ::= "x" | "yz"'}, r"x|yz"),
    ({"structured_outputs": {"choice": ["p", "q"]}}, r"p|q"),
    ({"guided_decoding": {"regex": "z{2}"}}, r"zz"),
]


@pytest.mark.parametrize(("kwargs", "pattern"), GRAMMARS)
def test_structured_output(engine_with_grammar, kwargs, pattern):
    wrapper = SGLangWrapper(
        engine_with_grammar,
        input_mode="text",
        generate_kwargs={"max_new_tokens": 40, "temperature": 1.0, **kwargs},
    )
    for text in wrapper(make_input(), skip_special_tokens=True)["text"].response:
        assert re.fullmatch(pattern, text)


def test_json(engine_with_grammar, tokenizer):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wrapper = SGLangWrapper(
        engine_with_grammar,
        input_mode="text",
        generate_kwargs={
            "max_new_tokens": 200,
            "guided_json": schema,
            # JSON takes any white space, and this model would write it for ever.
            "logit_bias": dict.fromkeys(tokenizer.encode(" \n"), -1e9),
            "skip_special_tokens": True,
        },
    )
    for text in wrapper(make_input())["text"].response:
        assert json.loads(text) in ({"a": 1}, {"a": 2})


def test_a_grammar_needs_a_server_with_one(engine):
    with pytest.raises(UnsupportedByServerError, match=r"'regex'.*xgrammar"):
        wrap(engine, guided_regex="a")(make_input())


def test_an_aborted_response_is_an_error(engine):
    """What was cut off is never returned as a finished response."""
    wrapper = wrap(engine, max_new_tokens=1500, ignore_eos=True)
    outcome: list[object] = []

    def call() -> None:
        try:
            outcome.append(wrapper(make_input()))
        except GenerationAbortedError as error:
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    # Nothing tells when the requests have arrived, so the abort is repeated.
    while not outcome:
        run_sync(engine.control.pause("abort"))
        run_sync(engine.control.resume())
        thread.join(0.2)
    thread.join()
    assert isinstance(outcome[0], GenerationAbortedError)
    assert "not a finished one" in str(outcome[0])
    assert len(wrapper(make_input(), max_new_tokens=2)["text"].response) == 3
