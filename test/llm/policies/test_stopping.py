"""Where a response ends, decided without a server."""

from __future__ import annotations

from torchrl_sglang.policies.engine_call import NEVER, without_tokenizer


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
