from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pydantic
import pytest

from torchrl_sglang import SGLangWrapper
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies.sampling import translate
from torchrl_sglang.requests.sampling import SAMPLING_PARAMETERS

GREEDY = {"temperature": 0.0}


def test_what_can_be_read_of_it():
    """Under vLLM's names, with its defaults where nothing was given."""
    given = {
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        "stop": ["."],
        "stop_token_ids": [7],
        "ignore_eos": False,
        "min_tokens": 2,
        "seed": 1,
        "temperature": 0.7,
    }
    params = translate(given)
    assert {name: getattr(params, name) for name in given} == given
    assert translate({"max_new_tokens": 9}).max_tokens == 9
    defaults = translate({})
    assert (defaults.top_p, defaults.top_k, defaults.stop) == (1.0, -1, [])
    assert (defaults.repetition_penalty, defaults.seed) == (1.0, None)
    assert translate({"top_k": -1}).top_k == -1


@pytest.mark.parametrize(
    ("wrapper", "call", "temperature"),
    [
        ({"do_sample": False}, {"do_sample": True}, None),
        ({"do_sample": False}, {"do_sample": True, "temperature": 0.5}, 0.5),
        ({"do_sample": False, "temperature": 0.7}, {"do_sample": True}, 0.7),
        ({"do_sample": False, "temperature": 0.7}, {"top_p": 0.9}, 0.0),
        ({"do_sample": False}, {"temperature": 1.0}, 1.0),
        ({"temperature": 0.7}, {"do_sample": False}, 0.0),
        ({"do_sample": True}, {"do_sample": False}, 0.0),
        ({"do_sample": False}, {"do_sample": np.True_}, None),
    ],
)
def test_do_sample_of_a_call_overrides_that_of_the_wrapper(wrapper, call, temperature):
    defaults = translate(wrapper)
    found = translate(call, defaults)
    assert found.engine.get("temperature") == temperature
    # A later call of the same wrapper.
    assert translate({}, defaults).engine == defaults.engine


@pytest.mark.parametrize(
    ("wrapper", "call"),
    [
        ({}, {"do_sample": True, "temperature": 0.0}),
        ({"temperature": 0.0}, {"do_sample": True}),
        ({"temperature": 0, "do_sample": False}, {"do_sample": True}),
        ({"temperature": 1e-7}, {"do_sample": np.True_}),
    ],
)
def test_do_sample_with_a_temperature_that_draws_nothing_is_refused(wrapper, call):
    defaults = translate(wrapper)
    with pytest.raises(ConfigurationError, match="do_sample=True and temperature"):
        translate(call, defaults)


NUMPY = {
    "seed": np.int64(5),
    "max_new_tokens": np.uint32(7),
    "temperature": np.float32(0.5),
    "ignore_eos": np.False_,
    "stop_token_ids": [np.int64(3), np.int32(4)],
    "logit_bias": {np.int64(5): np.float64(1.5)},
    "num_return_sequences": np.int64(2),
    "logprobs": np.int64(1),
    "do_sample": np.True_,
}


def test_numpy_values_become_python_values():
    found = translate(NUMPY)
    assert json.loads(json.dumps(dict(found.engine))) == {
        "sampling_seed": 5,
        "max_new_tokens": 7,
        "temperature": 0.5,
        "ignore_eos": False,
        "stop_token_ids": [3, 4],
        "logit_bias": {"5": 1.5},
    }
    assert type(found.n) is type(found.top_logprobs) is int
    assert [found.for_sample(n)["sampling_seed"] for n in range(3)] == [5, 6, 7]


class Answer(pydantic.BaseModel):
    number: int


@pytest.mark.parametrize("name", ["guided_json", "json_schema"])
def test_a_pydantic_class_is_its_json_schema(name):
    text = translate({name: Answer}).engine["json_schema"]
    assert json.loads(text) == Answer.model_json_schema()
    grammar = translate({"structured_outputs": {"json": Answer}}).engine
    assert grammar["json_schema"] == text


@pytest.mark.parametrize("value", [Answer(number=1), 5, ["a"], {"a": {1}}, object])
def test_invalid_json_schemas_are_refused(value):
    with pytest.raises(ConfigurationError, match="A JSON schema must be .*pydantic"):
        translate({"guided_json": value})


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"max_new_tokens": 7}, "max_new_tokens", 7),
        ({}, "max_new_tokens", 16),
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"do_sample": False}, "temperature", 0.0),
        ({"do_sample": True, "temperature": 0.5}, "temperature", 0.5),
        ({"stop_sequences": ["a"]}, "stop", ["a"]),
        ({"stop": "a"}, "stop", "a"),
        ({"min_tokens": 3}, "min_new_tokens", 3),
        ({"seed": 4}, "sampling_seed", 4),
        ({"max_new_tokens": None}, "max_new_tokens", None),
        ({"structured_outputs": {"json": "{}", "regex": None}}, "json_schema", "{}"),
        (
            {"guided_decoding": SimpleNamespace(grammar="g", disable_fallback=True)},
            "ebnf",
            "g",
        ),
        ({"guided_grammar": "g", "guided_decoding": None}, "ebnf", "g"),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a.", "b"]}, "regex", r"(a\.|b)"),
        ({"guided_json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"logit_bias": {3: 1.0}}, "logit_bias", {3: 1.0}),
    ],
)
def test_every_name_is_mapped(given, name, value):
    assert translate(given).engine[name] == value


def test_what_pipelines_read():
    params = translate(
        {"max_new_tokens": 5, "temperature": 0.2, "num_return_sequences": 3}
    )
    assert (params.max_tokens, params.temperature, params.n) == (5, 0.2, 3)
    assert (translate({}).max_tokens, translate({}).temperature) == (16, 1.0)
    assert translate({"prompt_logprobs": True}).prompt_logprobs
    assert translate({"max_new_tokens": None}).max_tokens is None
    assert translate({"logprobs": 5}).top_logprobs == 5
    assert translate({"logprobs": True}).top_logprobs == 0
    plain, other = translate({}), translate({"no_stop_trim": False})
    assert plain.include_stop_str_in_output
    assert not other.include_stop_str_in_output
    assert not translate({"include_stop_str_in_output": False}).engine.keys() - {
        "max_new_tokens"
    }
    assert not plain.skip_special_tokens
    assert translate({"skip_special_tokens": True}).skip_special_tokens


def test_a_call_overrides_the_defaults():
    defaults = translate({"num_return_sequences": 2, "logprobs": 3} | GREEDY)
    merged = translate({"temperature": 1.0, "skip_special_tokens": True}, defaults)
    assert (merged.n, merged.top_logprobs, merged.temperature) == (2, 3, 1.0)
    assert merged.skip_special_tokens
    assert translate({"logprobs": 0}, defaults).top_logprobs == 0
    assert translate({}, defaults) == defaults


# Every field of vLLM's SamplingParams (0.11), with a value that is not its default.
VLLM_FIELDS = {
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "seed": 1,
    "stop": ["a"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "max_tokens": 3,
    "min_tokens": 2,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "flat_logprobs": True,
    "detokenize": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": False,
    "logits_processors": [print],
    "include_stop_str_in_output": False,
    "truncate_prompt_tokens": 5,
    "output_kind": 1,
    "structured_outputs": {"regex": "a"},
    "logit_bias": {5: 1.0},
    "allowed_token_ids": [5],
    "extra_args": {"a": 1},
    "bad_words": ["a"],
    "skip_reading_prefix_cache": True,
    "best_of": 3,
    "use_beam_search": True,
    "length_penalty": 0.5,
    "early_stopping": True,
}
REFUSED = {
    "spaces_between_special_tokens",
    "logits_processors",
    "truncate_prompt_tokens",
    "output_kind",
    "allowed_token_ids",
    "extra_args",
    "bad_words",
    "skip_reading_prefix_cache",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
}
WITHOUT_EFFECT = {"flat_logprobs", "detokenize"}  # They choose a form of vLLM's output.


def test_every_name_of_vllm_is_mapped_or_refused():
    without_effect = set()
    for name, value in VLLM_FIELDS.items():
        given = SGLangWrapper._standardize_generate_kwargs({name: value})
        if name in REFUSED:
            with pytest.raises(ConfigurationError, match=f"{name}=.*is not supported"):
                translate(given)
        elif translate(given) == translate({}):
            without_effect.add(name)
    assert without_effect == WITHOUT_EFFECT


def test_every_name_of_sglang_is_taken():
    values = {"no_stop_trim": False, "skip_special_tokens": True, "json_schema": "{}"}
    names = {*SAMPLING_PARAMETERS} - {"spaces_between_special_tokens"}
    translate({"spaces_between_special_tokens": True})
    without_effect = [
        name
        for name in sorted(names)
        if translate({name: values.get(name, 1)}) == translate({})
    ]
    assert without_effect == []


def test_samples_of_one_prompt_get_different_seeds():
    params = translate({"seed": 10})
    assert [params.for_sample(i)["sampling_seed"] for i in range(3)] == [10, 11, 12]
    assert "sampling_seed" not in translate({}).for_sample(1)
    last = translate({"seed": 2**63 - 1})
    assert last.for_sample(1)["sampling_seed"] == -(2**63)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temprature": 1.0}, ["temprature", "temperature"]),
        ({"num_beams": 4}, ["num_beams=4", "beam search"]),
        ({"best_of": 2}, ["best_of=2", "num_samples"]),
        ({"bad_words": ["x"]}, ["bad_words", "logit_bias"]),
        ({"stop": "a", "stop_sequences": ["b"]}, ["stop", "stop_sequences"]),
        ({"num_return_sequences": 0}, ["num_return_sequences", "got 0"]),
        ({"max_new_tokens": 0}, ["max_new_tokens=0", "generate=False"]),
        ({"logprobs": -1}, ["logprobs", "at least 0, got -1"]),
        ({"logprobs": 2.0}, ["logprobs", "integer", "got 2.0"]),
        ({"prompt_logprobs": 5}, ["prompt_logprobs=5", "True"]),
        ({"skip_special_tokens": 1}, ["skip_special_tokens", "bool, got 1"]),
        ({"guided_choice": "yes"}, ["list of texts", "['yes', 'no']", "got 'yes'"]),
        ({"choice": []}, ["list of texts", "got []"]),
        ({"structured_outputs": {"choice": ["a", None]}}, ["texts", "None"]),
        (
            {"no_stop_trim": False, "include_stop_str_in_output": True},
            ["no_stop_trim", "given twice"],
        ),
        ({"structured_outputs": {"regx": "a"}}, ["regx", "regex"]),
    ],
)
def test_unsupported_parameters_are_refused_by_name(given, words):
    with pytest.raises(ConfigurationError) as caught:
        translate(given)
    assert all(word in str(caught.value) for word in words)


def test_harmless_values_are_accepted():
    params = translate({"num_beams": 1, "detokenize": False, "logprobs": True})
    json.dumps(dict(params.engine))
    assert not {"num_beams", "detokenize", "logprobs"} & set(params.engine)
