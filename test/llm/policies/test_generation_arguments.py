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
from torchrl_sglang.errors import (
    ConfigurationError,
    GenerationAbortedError,
    UnsupportedByServerError,
)
from torchrl_sglang.support.event_loop import run_sync

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
    """A server with grammars, whose log-probs are those after the temperature."""
    with AsyncSGLang.from_pretrained(
        tiny_model_path,
        device="cpu",
        grammar_backend="xgrammar",
        environment={"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"},
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


def test_min_new_tokens(either_engine, tokenizer, hf_model, score):
    """The end comes as soon as it may and not before, with the right log-probs."""
    end, least = tokenizer.eos_token_id, 5

    def adjust(step, logits):
        logits[end] = -math.inf if step < least else logits[end] + 100.0
        return logits

    td = wrap(either_engine, min_tokens=least, logit_bias={end: 100.0})(make_input())
    for index, prompt in enumerate(PROMPTS):
        ids = tokenizer.encode(prompt)
        tokens, _, _ = continue_greedily(hf_model, ids, least + 1, adjust)
        assert tokens[-1] == end
        log_probs = score([*ids, *tokens])[len(ids) :].tolist()
        check(td, index, tokens, log_probs, tokenizer)
    assert td["generation_info"].finish_reason == ["stop"] * len(PROMPTS)


def test_min_new_tokens_up_to_the_context(either_engine, tokenizer):
    """The context has space for the minimum number of tokens only."""
    space = 8
    limits = either_engine.capabilities
    length = min(limits.max_prompt, limits.max_context - space)
    text = Text(prompt=["x" * length], batch_size=1)
    wrapper = wrap(either_engine, min_new_tokens=20, max_new_tokens=40)
    td = wrapper(TensorDict(text=text, batch_size=1))
    (response,) = td.get(("tokens", "response"), as_list=True)
    assert 0 < len(response) <= space
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
    """``logprobs=N`` writes the top N tokens at each position."""
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
    """``max_tokens=None`` allows what fits into the context, as in vLLM."""
    wrapper = wrap(either_engine, ignore_eos=True)
    limits = either_engine.capabilities
    length = limits.max_prompt - 4
    text = Text(prompt=["x" * length], batch_size=1)
    td = wrapper(TensorDict(text=text, batch_size=1), max_tokens=None)
    (response,) = td.get(("tokens", "response"), as_list=True)
    # SGLang keeps up to six tokens of the context for itself.
    assert LENGTH > len(response) >= limits.max_context - length - 6


def test_seeds(either_engine):
    """A seed that would be ignored is refused; greedy sampling needs none."""
    wrapper = SGLangWrapper(
        either_engine,
        input_mode="text",
        num_samples=3,
        generate_kwargs={"max_tokens": 12, "temperature": 1.5, "seed": 7},
    )
    assert [
        wrapper.sampling_params.for_sample(i)["sampling_seed"] for i in range(3)
    ] == [
        7,
        8,
        9,
    ]
    with pytest.raises(UnsupportedByServerError, match="enable_deterministic_inf"):
        wrapper(make_input())
    greedy = wrapper(make_input(), temperature=0.0)
    assert all(len(set(row["text"].response)) == 1 for row in greedy.unbind(0))


SAMPLING = {
    "temperature": {"temperature": 0.5},
    "top_p": {"temperature": 1.5, "top_p": 0.6},
    "top_k": {"temperature": 1.5, "top_k": 3},
    "min_p": {"temperature": 1.5, "min_p": 0.2},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": {9: 6.0}},
    "min_tokens": {"min_tokens": 6, "logit_bias": {2: 4.0}},
    "regex": {"regex": "[0-9]{3}x?"},
    "json": {"json": {"enum": ["some", "text"]}},
}
"""Everything that makes what is sampled from another distribution than the model's."""


def check_own_log_probs(td, hf_model, number) -> None:
    """Log-probs of response and top tokens are the model's own."""
    info = td["generation_info"]
    assert set(info.logprobs_mode) == {"model"}
    for index, (full, found) in enumerate(
        zip(
            td.get(("tokens", "full"), as_list=True),
            td.get(("log_probs", "response"), as_list=True),
            strict=True,
        )
    ):
        with torch.no_grad():
            logits = hf_model(full[None]).logits[0, -len(found) - 1 : -1]
        expected = logits.log_softmax(-1)
        own = expected.gather(-1, full[-len(found) :, None])[:, 0]
        torch.testing.assert_close(found, own, atol=TOLERANCE, rtol=0)
        tops = info.get("top_log_probs", as_list=True)[index]
        best = expected.topk(number).values
        torch.testing.assert_close(tops, best, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLING)
def test_log_probs_are_the_models_own(engine_with_grammar, hf_model, name):
    """Under every sampling parameter, on a server that does not give them by itself."""
    wrapper = wrap(
        engine_with_grammar,
        **{"temperature": 1.0, "max_new_tokens": 12, "logprobs": 2, **SAMPLING[name]},
    )
    check_own_log_probs(wrapper(make_input()), hf_model, 2)


@pytest.mark.parametrize("name", ["temperature", "frequency_penalty", "logit_bias"])
def test_log_probs_are_the_models_own_on_servers_started_here(
    either_engine, hf_model, name
):
    wrapper = wrap(
        either_engine,
        **{"temperature": 1.0, "max_new_tokens": 12, "logprobs": 2, **SAMPLING[name]},
    )
    check_own_log_probs(wrapper(make_input()), hf_model, 2)


def test_log_probs_of_sampling(engine_with_grammar, hf_model):
    """What the tokens were drawn from: after biases and temperature."""
    temperature, bias = 0.5, {9: 4.0}
    wrapper = wrap(
        engine_with_grammar,
        temperature=temperature,
        logit_bias=bias,
        max_new_tokens=12,
    ).get_new_version(logprobs_mode="sampling")
    td = wrapper(make_input())
    assert set(td["generation_info"].logprobs_mode) == {"sampling"}
    for full, found in zip(
        td.get(("tokens", "full"), as_list=True),
        td.get(("log_probs", "response"), as_list=True),
        strict=True,
    ):
        with torch.no_grad():
            logits = hf_model(full[None]).logits[0, -len(found) - 1 : -1]
        logits[:, 9] += bias[9]
        expected = (logits / temperature).log_softmax(-1)
        own = expected.gather(-1, full[-len(found) :, None])[:, 0]
        torch.testing.assert_close(found, own, atol=TOLERANCE, rtol=0)


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


@pytest.mark.parametrize("filters", [{}, {"top_k": 99, "top_p": 0.9}])
def test_behaviour_under_a_grammar(engine_with_grammar, tokenizer, hf_model, filters):
    """The log-prob is that among what grammar and filters leave."""
    prompt, temperature = [5, 6, 7], 0.7
    params = {"max_new_tokens": LENGTH, "temperature": temperature, "regex": "[0-9]+"}
    (answer,) = engine_with_grammar.generate(
        input_ids=prompt,
        sampling_params={**params, **filters},
        return_logprobs=True,
        logprobs_mode="behaviour",
    )
    ids = answer.token_ids
    digits = [n for n in range(len(tokenizer)) if tokenizer.decode([n]).isdigit()]
    supports = answer.columns["sampling_support"].tolist()
    with torch.no_grad():
        rows = hf_model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    for place, row in enumerate(rows.double() / temperature):
        # It may end behind the first digit.
        allowed = {*digits, *([tokenizer.eos_token_id] if place else [])}
        own = supports[place] if filters else sorted(allowed)
        assert set(own) <= allowed
        wanted = float(row[ids[place]] - row[own].logsumexp(0))
        assert abs(answer.log_probs[place] - wanted) < 1e-4


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
    assert "it is not finished" in str(outcome[0])
    assert len(wrapper(make_input(), max_new_tokens=2)["text"].response) == 3
