"""Wrong arguments are refused with a sentence; NumPy's scalars are accepted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import (
    check_count,
    check_flag,
    check_mapping,
    check_port,
    check_seconds,
)

NO_DURATIONS = ("3", None, True, np.True_, -1, math.nan, [3])
IDS = [5, 6, 7]


@pytest.mark.parametrize("value", NO_DURATIONS)
def test_no_duration(value):
    for options in ({}, {"zero": True}, {"endless": True}):
        with pytest.raises(ConfigurationError) as caught:
            check_seconds("timeout", value, **options)
        assert str(caught.value).startswith("timeout must be a ")
        assert repr(value) in str(caught.value)


def test_durations():
    assert check_seconds("t", 3) == check_seconds("t", np.int64(3)) == 3.0
    assert type(check_seconds("t", np.float32(0.5))) is float
    assert check_seconds("t", 0, zero=True) == 0.0
    assert check_seconds("t", math.inf, endless=True) == math.inf
    for value, options in ((0, {"endless": True}), (math.inf, {"zero": True})):
        with pytest.raises(ConfigurationError, match=f"got {value}"):
            check_seconds("t", value, **options)


@pytest.mark.parametrize("value", [0, -1, True, np.True_, 2.0, "2", None, math.inf])
def test_no_count(value):
    with pytest.raises(ConfigurationError, match="n must be an integer of at least 1"):
        check_count("n", value)


def test_counts():
    assert type(check_count("n", np.int32(2))) is int
    assert check_count("n", 0, least=0) == 0


def test_flags():
    for value in (True, np.True_):
        assert check_flag("f", value) is True
    for value in (1, 0.0, "yes", None, np.int64(1)):
        with pytest.raises(ConfigurationError, match="f must be a bool, got"):
            check_flag("f", value)


def test_ports_and_mappings():
    assert check_port("p", np.int64(80)) == 80
    for value in (0, 65536, True, "80", 80.0):
        with pytest.raises(ConfigurationError, match="p must be a port.*65535, got"):
            check_port("p", value)
    assert check_mapping("m", {"a": 1}) == {"a": 1}
    for value in (None, [("a", 1)], "a"):
        with pytest.raises(ConfigurationError, match="m must be a mapping"):
            check_mapping("m", value)


CALLS = {
    "timeout": lambda e: e.generate(input_ids=IDS, timeout="3"),
    "request_timeout": lambda e: e.generate(input_ids=IDS, request_timeout=True),
    "return_logprobs": lambda e: e.generate(input_ids=IDS, return_logprobs="yes"),
    "payload": lambda e: e.chat_completion(None),
    "timeout of a chat": lambda e: e.chat_completion({"messages": []}, timeout="3"),
    "timeout of revive": lambda e: e.revive(timeout="3"),
    "timeout of an adapter": lambda e: e.unload_adapter("a", timeout="3"),
    "start_timeout": lambda _: AsyncSGLang.from_pretrained("m", start_timeout="3"),
    "progress_timeout": lambda _: AsyncSGLang.from_pretrained(
        "m", progress_timeout="3"
    ),
    "num_replicas": lambda _: AsyncSGLang.from_pretrained("m", num_replicas=2.0),
    "max_in_flight": lambda _: AsyncSGLang.from_pretrained("m", max_in_flight="2"),
    "master_port": lambda _: SGLangWeightSyncScheme(master_port=80.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_takes_them_says_so(engine, name):
    before = engine.stats().completed
    with pytest.raises(ConfigurationError, match=rf"^{name.split()[0]} must be a"):
        CALLS[name](engine)
    assert engine.stats().completed == before


def test_scalars_of_numpy(engine):
    """As a comparison of arrays, or a configuration read with NumPy, gives them."""
    (answer,) = engine.generate(
        input_ids=np.array(IDS),
        sampling_params={
            "max_new_tokens": np.int64(4),
            "temperature": np.float32(0.5),
            "top_k": np.int64(-1),
            "ignore_eos": np.True_,
        },
        return_logprobs=np.array([True]),
        top_logprobs=np.int64(1),
        timeout=np.float64(60),
    )
    assert len(answer.token_ids) == len(answer.log_probs) == 4
    scheme = SGLangWeightSyncScheme(engine, flush_cache=np.False_, verify=np.True_)
    assert scheme.flush_cache is False
    assert scheme.options.verify is True
