"""Where a response ends, decided without a server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies.engine_call import (
    NEVER,
    SampleRequest,
    _steps,
    without_tokenizer,
)
from torchrl_sglang.types import Completion


def test_what_a_server_without_a_tokenizer_is_asked(tokenizer):
    end, letter = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("x")

    def ask(**params):
        return without_tokenizer(params, tokenizer=tokenizer, eos_token_ids=[7])

    stage = ask(stop=["x", "yz"], stop_token_ids=[9], max_new_tokens=5)
    assert stage.rest is None
    assert "stop" not in stage.first
    # Only "x" is decided by one token.
    assert stage.first["stop_token_ids"] == sorted([9, letter, end, 7])
    # Beside ignore_eos a server ignores stop token ids, so nothing is said with them.
    assert "stop_token_ids" not in ask(stop="x", ignore_eos=True).first

    stage = ask(min_new_tokens=3, max_new_tokens=10, logit_bias={"5": 1.0})
    assert stage.first["max_new_tokens"] == 3
    assert stage.first["logit_bias"] == {"5": 1.0, end: NEVER, 7: NEVER}
    assert stage.rest["max_new_tokens"] == 10
    assert stage.rest["logit_bias"] == {"5": 1.0}
    assert "min_new_tokens" not in {**stage.first, **stage.rest}
    assert ask(min_new_tokens=3, max_new_tokens=3).rest is None
    assert "max_new_tokens" not in ask(min_new_tokens=3).rest


@pytest.mark.parametrize(
    "params", [{"stop": "STOP"}, {"stop_regex": "ST.P"}, {"stop_regex": ["x+", "ST.P"]}]
)
@pytest.mark.parametrize("include", [True, False])
def test_the_stop_text_is_kept_or_cut(fake_engine, tokenizer, params, include):
    """A server with a tokenizer returns the tokens up to the end of the match."""
    request = SampleRequest(input_ids=[5], sampling_params=params, include_stop=include)
    steps = _steps(fake_engine.capabilities, [request], tokenizer, False)
    next(steps)
    ids = tokenizer.encode("answer STOP", add_special_tokens=False)
    with pytest.raises(StopIteration) as end:
        steps.send([Completion(token_ids=ids, finish_reason="stop")])
    (found,) = end.value.value
    text = "answer STOP" if include else "answer "
    assert tokenizer.decode(found.token_ids) == text
    with pytest.raises(ConfigurationError, match="needs a tokenizer"):
        next(
            _steps(
                fake_engine.capabilities,
                [replace(request, include_stop=False)],
                None,
                False,
            )
        )
