from __future__ import annotations

import json

import pytest

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies.sampling import translate


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
        ({"include_stop_str_in_output": False}, "no_stop_trim", False),
        ({}, "no_stop_trim", True),
        ({}, "skip_special_tokens", False),
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


def test_samples_of_one_prompt_get_different_seeds():
    params = translate({"seed": 10})
    assert [params.for_sample(i)["sampling_seed"] for i in range(3)] == [10, 11, 12]
    assert "sampling_seed" not in translate({}).for_sample(1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temprature": 1.0}, ["temprature", "temperature"]),
        ({"num_beams": 4}, ["num_beams=4", "beam search"]),
        ({"best_of": 2}, ["best_of=2", "num_samples"]),
        ({"bad_words": ["x"]}, ["bad_words", "logit_bias"]),
        ({"stop": "a", "stop_sequences": ["b"]}, ["stop", "stop_sequences"]),
        ({"num_return_sequences": 0}, ["num_return_sequences=0"]),
        ({"logprobs": 5}, ["logprobs=5"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given, words):
    with pytest.raises(ConfigurationError) as caught:
        translate(given)
    assert all(word in str(caught.value) for word in words)


def test_harmless_values_are_accepted():
    params = translate({"num_beams": 1, "detokenize": False, "logprobs": True})
    json.dumps(dict(params.engine))
    assert not {"num_beams", "detokenize", "logprobs"} & set(params.engine)
